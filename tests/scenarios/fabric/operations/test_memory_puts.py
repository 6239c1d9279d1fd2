"""Puts that the agent reads out of a worker's memory, in a whole fabric."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.scenarios.fabric.operations.test_memory_reads import BLOCKS, DEADLINE_S, OWN, fabric_process, get
from tests.support.fabric.fabric_host import (
    BLOCK_BYTES,
    SMALL,
    FabricProcess,
    content,
    empty,
    hashes,
    volume_of,
)

import ostraca
from ostraca import Ack, BlockState, PutState

HIT = BlockState.HIT


def until_at_rest(client: ostraca.Client) -> None:
    """Wait until no block is on its way through the agent."""
    until_s = time.monotonic() + 20
    while (status := client.status()).staging_used_bytes or status.quarantined_bytes:
        assert time.monotonic() < until_s, status


@pytest.mark.parametrize("transport", ["inline", "nixl"])
@pytest.mark.parametrize("kind", ["array", "region", "slots"])
def test_blocks_go_from_a_workers_memory_to_flash_and_other_workers_get_them(
    tmp_path: Path, transport: str, kind: str
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    settings = replace(OWN, transports=(transport,))
    with (
        fabric_process(tmp_path, transport) as fabric,
        ostraca.connect(fabric.address, settings=settings) as client,
    ):
        assert client.transport == transport
        volume, source = volume_of(client), content(BLOCKS, 1)
        chain = volume.chain(hashes(BLOCKS, 1), is_chained=False)
        arena = client._runtime.arena.array
        if kind == "array":
            put = volume.put(chain, source=source, deadline_s=DEADLINE_S, ack=Ack.COMMITTED)
        elif kind == "region":
            with client.register(source) as region:
                rows = region.rows(range(BLOCKS))
                put = volume.put(chain, source=rows, deadline_s=DEADLINE_S, ack=Ack.COMMITTED)
        else:
            lease = volume.slots(BLOCKS, lengths=BLOCK_BYTES)
            for view, block in zip(lease, source, strict=True):
                view[:] = block.data
            put = volume.put_slots(chain, lease, deadline_s=DEADLINE_S, ack=Ack.COMMITTED)
        assert set(put.states) == {PutState.COMMITTED}
        assert client._runtime.is_readable
        assert arena.any() == (kind == "slots"), "the arena never saw one"
        source[:] = 0
        brought = replace(SMALL, transports=(transport,))
        with ostraca.connect(fabric.address, settings=brought) as other:
            assert set(get(other, 1).states) == {HIT}
        assert client.quarantined_bytes == 0


def test_an_agent_that_starts_anew_reads_the_same_worker_again(tmp_path: Path) -> None:
    with (
        fabric_process(tmp_path, "inline") as fabric,
        ostraca.connect(fabric.address, settings=OWN) as client,
    ):
        volume, until_s = volume_of(client), time.monotonic() + 20
        for seed in (1, 2):
            chain = volume.chain(hashes(BLOCKS, seed), is_chained=False)
            while True:  # until its connection is made anew
                put = volume.put(chain, source=content(BLOCKS, seed), deadline_s=2.0, ack=Ack.COMMITTED)
                if {*put.states} <= {PutState.COMMITTED, PutState.EXISTS}:
                    break
                assert time.monotonic() < until_s, put
            assert not client._runtime.arena.array.any()
            if seed == 1:
                fabric.kill()
                fabric.start()
        with ostraca.connect(fabric.address, settings=SMALL) as other:
            assert set(get(other, 2).states) == {HIT}


def test_many_threads_put_and_get_small_chains_on_connections_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads, rounds = 6, 12
    with (
        fabric_process(tmp_path, "inline") as fabric,
        ostraca.connect(fabric.address, settings=OWN) as client,
    ):
        volume, callers = volume_of(client), client._runtime.connections.callers
        until_s, warm = time.monotonic() + 20, volume.chain(hashes(1, 1))
        while not callers._idle:
            volume.put(warm, source=content(1, 1), deadline_s=DEADLINE_S)
            assert time.monotonic() < until_s

        def put_and_get(thread: int) -> None:
            memory, into = np.zeros((4, BLOCK_BYTES), np.uint8), empty(4)
            for number in range(rounds):
                seed, blocks = 100 * (thread + 1) + number, 1 + number % 4
                chain, right = volume.chain(hashes(blocks, seed), is_chained=False), content(blocks, seed)
                memory[:blocks] = right
                put = volume.put(chain, source=memory[:blocks], deadline_s=DEADLINE_S)
                assert set(put.states) <= {PutState.STAGED, PutState.COMMITTED}, put
                memory[:] = into[:] = 0xEE
                assert volume.get(chain, into=into[:blocks], deadline_s=DEADLINE_S).hits == blocks
                assert np.array_equal(into[:blocks], right)
                assert (into[blocks:] == 0xEE).all()

        with caplog.at_level(logging.DEBUG, "ostraca"), ThreadPoolExecutor(threads) as pool:
            list(pool.map(put_and_get, range(threads)))
        for operation in ("put", "get"):
            assert f"sent by its caller: {operation} of" in caplog.text
        assert 1 <= len(callers._still_open()) <= 4
        assert {connection.reads_worker for connection in callers._idle} == {True}
        tally = client.metrics().operation("get")
        assert tally.requests == threads * rounds
        assert client._runtime.is_readable
        with ostraca.connect(fabric.address, settings=SMALL) as other:
            seed, into = 100 * threads + rounds - 1, empty(4)
            chain = volume_of(other).chain(hashes(4, seed), is_chained=False)
            assert volume_of(other).get(chain, into=into, deadline_s=DEADLINE_S).hits == 4
            assert np.array_equal(into, content(4, seed))
        until_at_rest(client)


def put_without_end(address: str, first: int, begun: Any) -> None:
    """Put batch after batch out of the same memory, each as soon as the agent has the one before."""
    with ostraca.connect(address, settings=replace(OWN, put_window_bytes=4 * BLOCK_BYTES)) as client:
        volume, memory = volume_of(client), np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        for seed in itertools.count(first):
            memory[:] = content(BLOCKS, seed)
            begun.value = seed
            chain = volume.chain(hashes(BLOCKS, seed), is_chained=False)
            volume.put(chain, source=memory, deadline_s=DEADLINE_S, ack=Ack.STAGED)
            assert not client._runtime.arena.array.any()


def kill_in_mid_put(fabric: FabricProcess, first: int) -> int:
    """Kill a worker that has begun a few puts; return the last one that it has begun."""
    spawn = multiprocessing.get_context("spawn")
    begun = spawn.Value("Q", 0)
    process = spawn.Process(target=put_without_end, args=(fabric.address, first, begun), daemon=True)
    process.start()
    try:
        until_s = time.monotonic() + 30
        while begun.value < first + 4:
            assert time.monotonic() < until_s
            assert process.is_alive()
        time.sleep(0.0005 * (first % 7))  # anywhere in the put
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    return int(begun.value)


@pytest.mark.slow
def test_workers_killed_in_mid_put_leave_no_wrong_block_and_nothing_held(tmp_path: Path) -> None:
    with (
        fabric_process(tmp_path, "inline") as fabric,
        ostraca.connect(fabric.address, settings=SMALL) as client,
    ):
        for first in (101, 202, 303, 404):
            last = kill_in_mid_put(fabric, first)
            until_at_rest(client)
            hits = [get(client, seed).hits for seed in range(first, last + 1)]
            assert hits[:2] == [BLOCKS] * 2, "those before are stored"


def test_memory_that_changes_right_after_a_late_put_never_makes_a_wrong_hit(tmp_path: Path) -> None:
    seen, hits = set[PutState](), list[int]()
    with (
        fabric_process(tmp_path, "inline") as fabric,
        ostraca.connect(fabric.address, settings=OWN) as client,
        ostraca.connect(fabric.address, settings=SMALL) as other,
    ):
        volume, memory = volume_of(client), np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        late_s = [0.0005 * 1.3**step for step in range(16)]
        for seed, deadline_s in enumerate([*late_s, DEADLINE_S], start=1):
            memory[:] = content(BLOCKS, seed)
            chain = volume.chain(hashes(BLOCKS, seed), is_chained=False)
            put = volume.put(chain, source=memory, deadline_s=deadline_s, ack=Ack.COMMITTED)
            memory[:] = 0x55
            seen |= {*put.states}
            until_at_rest(other)
            found = get(other, seed)
            hits.append(found.hits)
            for state, is_hit in zip(put.states, found.states, strict=True):
                assert state != PutState.COMMITTED or is_hit == HIT
        assert hits[-1] == BLOCKS
    assert PutState.LATE in seen
