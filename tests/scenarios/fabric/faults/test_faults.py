"""Invariants 3 and 4.

Every operation ends by its deadline, and nothing lands after its end, whatever dies.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.fabric.fabric_host import (
    BLOCK_BYTES,
    MIB,
    FabricProcess,
    content,
    empty,
    hashes,
    volume_of,
)
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import Ack, BlockState, PutState, Reason
from ostraca.results import GetResult
from ostraca.settings import ClientSettings
from ostraca_fabric.nixl import runtime

pytestmark = pytest.mark.slow

BLOCKS = 64
LATE_S = 0.1
"""How far beyond its deadline an operation may end."""

SOON_S = 0.5
"""A deadline that comes, but not before the agent was asked."""

SHAPE = (
    *("--drives", "2", "--capacity", "520MiB", "--dram", "0"),
    *("--set", "memory.staging_bytes=128MiB"),
)


@pytest.fixture(params=["inline", "nixl"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl":
        pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    return str(request.param)


@pytest.fixture
def host(tmp_path: Path, transport: str) -> Iterator[FabricProcess]:
    with FabricProcess(tmp_path / "fabric", *SHAPE, "--transport", transport) as started:
        yield started


def settings(transport: str) -> ClientSettings:
    return ClientSettings(
        arena_bytes=64 * MIB, chunk_bytes=4 * MIB, transports=(transport,), direct_memory=False
    )


def connect(host: FabricProcess, transport: str) -> ostraca.Client:
    return ostraca.connect(host.address, settings=settings(transport))


def test_an_agent_killed_in_mid_get_leaves_no_wrong_byte_and_no_hang(
    host: FabricProcess, transport: str
) -> None:
    with connect(host, transport) as client:
        volume = volume_of(client)
        chain = volume.chain(hashes(BLOCKS))
        assert volume.put(chain, source=content(BLOCKS), deadline_s=20, ack=Ack.COMMITTED).accepted == BLOCKS
        killer = threading.Timer(0.02, host.kill)
        killer.start()
        results: list[GetResult] = []
        while killer.is_alive() or not results or not results[-1].holes:
            into = empty(BLOCKS)
            watch = Stopwatch()
            results.append(volume.get(chain, into=into, deadline_s=2.0))
            assert watch.took_s < 2.0 + LATE_S
            for block, state in enumerate(results[-1].states):
                wanted = content(BLOCKS)[block] if state == BlockState.HIT else empty(1)[0]
                assert np.array_equal(into[block], wanted)
        killer.join()
        assert set(results[-1].states) <= {
            BlockState.HIT,
            BlockState.MISS,
            BlockState.DECLINED,
            BlockState.LATE,
        }


def test_an_agent_killed_in_mid_put_loses_no_committed_block(host: FabricProcess, transport: str) -> None:
    committed: dict[int, set[int]] = {}
    with connect(host, transport) as client:
        volume = volume_of(client)
        killer = threading.Timer(0.05, host.kill)
        turn = 0
        while turn == 0 or killer.is_alive():
            watch = Stopwatch()
            result = volume.put(
                volume.chain(hashes(8, turn)), source=content(8, turn), deadline_s=2.0, ack=Ack.COMMITTED
            )
            assert watch.took_s < 2.0 + LATE_S
            committed[turn] = {n for n, state in enumerate(result.states) if state == PutState.COMMITTED}
            turn += 1
            if turn == 1:
                killer.start()
        killer.join()
    assert any(committed.values()), "some puts ended before the kill"
    host.start()
    with connect(host, transport) as client:
        volume = volume_of(client)
        for turn, blocks in committed.items():
            into = empty(8)
            got = volume.get(volume.chain(hashes(8, turn)), into=into, deadline_s=10)
            for block, state in enumerate(got.states):
                assert state == BlockState.HIT or block not in blocks, (turn, got)
                if state == BlockState.HIT:
                    assert np.array_equal(into[block], content(8, turn)[block])


def put_for_ever(address: str, transport: str) -> None:
    client = ostraca.connect(address, settings=settings(transport))
    volume = volume_of(client)
    for turn in range(10_000):
        volume.put(volume.chain(hashes(16, turn)), source=content(16, turn), deadline_s=10)


def test_a_worker_killed_in_mid_put_harms_nobody_else(host: FabricProcess, transport: str) -> None:
    worker = multiprocessing.get_context("spawn").Process(target=put_for_ever, args=(host.address, transport))
    worker.start()
    with connect(host, transport) as client:
        volume = volume_of(client)
        while not volume.lookup(volume.chain(hashes(16, 2)), deadline_s=5).hits:
            assert worker.is_alive()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        worker.join(10)
        chain = volume.chain(hashes(BLOCKS, 77_777))
        result = volume.put(chain, source=content(BLOCKS), deadline_s=20, ack=Ack.COMMITTED)
        assert set(result.states) == {PutState.COMMITTED}, result
        into = empty(BLOCKS)
        assert volume.get(chain, into=into, deadline_s=20).hits == BLOCKS
        assert np.array_equal(into, content(BLOCKS))
        for turn in range(6):
            into = empty(16)
            got = volume.get(volume.chain(hashes(16, turn)), into=into, deadline_s=20)
            for block, state in enumerate(got.states):
                if state == BlockState.HIT:
                    assert np.array_equal(into[block], content(16, turn)[block])


def test_a_stopped_agent_makes_blocks_late_and_nothing_lands_when_it_resumes(
    host: FabricProcess, transport: str
) -> None:
    with connect(host, transport) as client:
        volume = volume_of(client)
        chain = volume.chain(hashes(BLOCKS))
        assert volume.put(chain, source=content(BLOCKS), deadline_s=20, ack=Ack.COMMITTED).accepted == BLOCKS
        host.signal(signal.SIGSTOP)
        into = empty(BLOCKS)
        watch = Stopwatch()
        result = volume.get(chain, into=into, deadline_s=SOON_S)
        assert watch.took_s < SOON_S + LATE_S
        assert set(result.states) == {BlockState.LATE}
        assert client.quarantined_bytes >= BLOCKS * BLOCK_BYTES, "slots of an unanswered get are not reused"
        host.signal(signal.SIGCONT)
        again = empty(BLOCKS)
        assert volume.get(chain, into=again, deadline_s=20).hits == BLOCKS
        assert np.array_equal(again, content(BLOCKS))
        assert np.array_equal(into, empty(BLOCKS)), "nothing of the late get reached the caller"
        until_s = time.monotonic() + 10
        while client.quarantined_bytes and time.monotonic() < until_s:
            volume.lookup(chain, deadline_s=1)
        assert client.quarantined_bytes == 0, "the agent said that its transfers have ended"


def test_a_put_whose_agent_is_stopped_leaves_the_callers_memory_free(
    host: FabricProcess, transport: str
) -> None:
    with connect(host, transport) as client:
        volume = volume_of(client)
        chain = volume.chain(hashes(BLOCKS))
        host.signal(signal.SIGSTOP)
        source = content(BLOCKS)
        result = volume.put(chain, source=source, deadline_s=SOON_S, ack=Ack.COMMITTED)
        assert set(result.states) == {PutState.LATE}
        source[:] = 0
        host.signal(signal.SIGCONT)
        until_s = time.monotonic() + 10
        while client.quarantined_bytes and time.monotonic() < until_s:
            volume.lookup(chain, deadline_s=1)
        into = empty(BLOCKS)
        got = volume.get(chain, into=into, deadline_s=20)
        for block, state in enumerate(got.states):
            wanted = content(BLOCKS)[block] if state == BlockState.HIT else empty(1)[0]
            assert np.array_equal(into[block], wanted), "a late put stores what was put, or nothing"


def test_a_client_finds_its_restarted_agent_again(host: FabricProcess, transport: str) -> None:
    with connect(host, transport) as client:
        volume = volume_of(client)
        chain = volume.chain(hashes(BLOCKS))
        assert volume.put(chain, source=content(BLOCKS), deadline_s=20, ack=Ack.COMMITTED).accepted == BLOCKS
        host.kill()
        gone = volume.get(chain, into=empty(BLOCKS), deadline_s=1.0)
        assert set(gone.reasons) <= {Reason.DISCONNECTED, Reason.DEADLINE}
        host.start()
        until_s = time.monotonic() + 15
        into = empty(BLOCKS)
        while volume.get(chain, into=into, deadline_s=2.0).hits < BLOCKS:
            assert time.monotonic() < until_s
        assert np.array_equal(into, content(BLOCKS))


def test_slots_of_a_killed_agent_stay_in_quarantine_until_its_successor_proves_it_gone(
    host: FabricProcess, transport: str
) -> None:
    with connect(host, transport) as client:
        volume = volume_of(client)
        chain = volume.chain(hashes(BLOCKS))
        host.signal(signal.SIGSTOP)
        assert set(volume.get(chain, into=empty(BLOCKS), deadline_s=SOON_S).states) == {BlockState.LATE}
        host.kill()
        until_s = time.monotonic() + 10
        while set(volume.lookup(chain, deadline_s=1).reasons) != {Reason.DISCONNECTED}:
            assert time.monotonic() < until_s
        # What crosses on the connection itself ends with it; over NIXL nobody has said that it has ended.
        assert client.quarantined_bytes == (0 if transport == "inline" else BLOCKS * BLOCK_BYTES)
        host.start()
        while client.quarantined_bytes or not client.is_connected:
            assert time.monotonic() < until_s + 15
            volume.lookup(chain, deadline_s=1)


def test_a_worker_that_knows_two_addresses_has_ready_what_it_comes_back_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    soon = replace(settings("nixl"), spare_after_s=0.001)
    with (
        FabricProcess(tmp_path / "fabric", *SHAPE, "--transport", "nixl") as host,
        ostraca.connect([host.address, f"unix://{tmp_path}/nobody"], settings=soon) as client,
    ):
        volume = volume_of(client)
        chain = volume.chain(hashes(BLOCKS))
        for thread in preparing():
            thread.join()
        host.signal(signal.SIGSTOP)
        assert set(volume.get(chain, into=empty(BLOCKS), deadline_s=SOON_S).states) == {BlockState.LATE}
        host.kill()
        with monkeypatch.context() as without_nixl:  # for the worker: no other end could be made for it
            without_nixl.setattr(runtime, "PACKAGES", ("no_nixl",))
            host.start()
            until_s = time.monotonic() + 15
            while client.quarantined_bytes or not client.is_connected:
                assert time.monotonic() < until_s
                volume.lookup(chain, deadline_s=1)
        assert client.transport == "nixl"
        assert volume.put(chain, source=content(BLOCKS), deadline_s=20).accepted == BLOCKS


def test_nothing_is_prepared_for_another_agent_where_there_is_none_and_no_longer_than_a_client_is_open(
    host: FabricProcess, transport: str, tmp_path: Path
) -> None:
    late = replace(settings(transport), spare_after_s=60.0)
    with ostraca.connect(host.address, settings=late):
        assert preparing() == []
    with ostraca.connect([host.address, f"unix://{tmp_path}/nobody"], settings=late):
        assert len(preparing()) == (transport == "nixl")
    assert preparing() == []


def preparing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ostraca-spare"]


def test_an_idle_fabric_and_client_do_not_spin(host: FabricProcess, transport: str) -> None:
    with connect(host, transport) as client:
        volume = volume_of(client)
        chain = volume.chain(hashes(BLOCKS))
        volume.put(chain, source=content(BLOCKS), deadline_s=20, ack=Ack.COMMITTED)
        assert host.process is not None
        mine, theirs = time.process_time(), cpu_s(host.process.pid)
        threading.Event().wait(2.0)
        assert time.process_time() - mine < 0.2
        assert cpu_s(host.process.pid) - theirs < 0.2


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_default_settings_work_too(host: FabricProcess, transport: str) -> None:
    with ostraca.connect(host.address) as client:
        volume = volume_of(client)
        chain = volume.chain(hashes(BLOCKS))
        volume.put(chain, source=content(BLOCKS), deadline_s=20, ack=Ack.COMMITTED)
        into = empty(BLOCKS)
        assert volume.get(chain, into=into, deadline_s=20).hits == BLOCKS
        assert np.array_equal(into, content(BLOCKS))
