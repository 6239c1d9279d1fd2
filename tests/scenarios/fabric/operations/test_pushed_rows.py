"""Blocks that the agent moves over NIXL from and to rows of a region, in a whole fabric."""

from __future__ import annotations

import gc
import mmap
import signal
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.scenarios.fabric.operations.test_memory_reads import DEADLINE_S, fabric_process
from tests.support.fabric.fabric_host import BLOCK_BYTES, SMALL, FabricThread, content, hashes, volume_of
from tests.support.fabric.worker_host import blocks_read, drives_beside
from tests.support.simulated.wrong_way import Harm, WrongWayTransport

import ostraca
from ostraca import Ack, BlockState, PutState
from ostraca._connection.session import AgentSession
from ostraca._memory.host_blocks import HostBlocks
from ostraca._memory.nixl_arena import NixlArenaEnd
from ostraca._memory.regions import RegionRows
from ostraca_cli.testing import small_plan
from ostraca_dpu_agent.adapters.transports.nixl_transport import NixlTransport
from ostraca_fabric.errors import UsageError
from ostraca_fabric.nixl import runtime
from ostraca_fabric.ports.transport import Transport
from ostraca_fabric.wire.messages import Message, RegionsOffer

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(runtime.package() is None, reason="NIXL is not installed"),
]

OVER_NIXL = replace(SMALL, transports=("nixl",))
BLOCKS = 80
"""More than a wave has."""

ROWS = BLOCKS + 4
NUMBERS = list(np.random.default_rng(1).permutation(ROWS)[:BLOCKS])
UNTOUCHED = 0xEE
SHORT_S = 0.3


@contextmanager
def fabric(
    directory: Path, *, dram_bytes: int = 64 << 20, harms: tuple[Harm, ...] = (), tenant: str = ""
) -> Iterator[tuple[FabricThread, list[WrongWayTransport]]]:
    plan = replace(small_plan(directory / "fabric"), dram_bytes=dram_bytes, transports=("nixl",))
    plan = replace(plan, direct_reads_tenant=tenant)
    ways: list[WrongWayTransport] = []

    def wrap(inner: Transport) -> Transport:
        ways.append(WrongWayTransport(inner, harms, seed=1, share=0.0))
        return ways[-1]

    with FabricThread(plan, wrap=wrap if harms else None) as host:
        yield host, ways
        for way in ways:
            host.call_soon(way.relent)


def pool(offset: int = 0, row_bytes: int = BLOCK_BYTES) -> NDArray[np.uint8]:
    memory = np.frombuffer(mmap.mmap(-1, offset + ROWS * row_bytes), np.uint8)[offset:]
    memory[:] = UNTOUCHED
    return memory.reshape(ROWS, row_bytes)


def chain_of(client: ostraca.Client, seed: int) -> ostraca.Chain:
    return volume_of(client).chain(hashes(BLOCKS, seed), is_chained=False)


def put(client: ostraca.Client, seed: int, rows: RegionRows | None = None) -> None:
    source = content(BLOCKS, seed) if rows is None else rows
    found = volume_of(client).put(
        chain_of(client, seed), source=source, deadline_s=DEADLINE_S, ack=Ack.COMMITTED
    )
    assert set(found.states) == {PutState.COMMITTED}, found


def get(
    client: ostraca.Client, region: ostraca.Region, seed: int, deadline_s: float = DEADLINE_S
) -> ostraca.GetResult:
    rows = region.rows(NUMBERS, lengths=BLOCK_BYTES)
    return volume_of(client).get(chain_of(client, seed), into=rows, deadline_s=deadline_s)


def await_offer(client: ostraca.Client, region: ostraca.Region) -> None:
    """Wait until the agent knows a region."""
    until_s, offered = time.monotonic() + 20, list[bool]()
    session = client._runtime.connections.session
    assert session is not None
    while not any(offered):
        assert time.monotonic() < until_s
        client._runner.do(lambda: offered.append(session.offers(region._memory)))


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a job that copies blocks between arena and caller."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a copy")

    monkeypatch.setattr(HostBlocks, "scatter", refuse)
    monkeypatch.setattr(HostBlocks, "gather", refuse)


@pytest.mark.parametrize(
    ("offset", "row_bytes"), [(0, BLOCK_BYTES), (5, BLOCK_BYTES + 7)], ids=["pages", "odd"]
)
@pytest.mark.parametrize("dram_bytes", [0, 64 << 20], ids=["flash", "DRAM"])
def test_blocks_go_from_rows_to_the_agent_and_land_in_rows_without_the_arena(
    tmp_path: Path, dram_bytes: int, offset: int, row_bytes: int, request: pytest.FixtureRequest
) -> None:
    memory = pool(offset, row_bytes)
    with (
        fabric(tmp_path, dram_bytes=dram_bytes) as (host, _),
        host.connect(OVER_NIXL) as client,
        client.register(memory, may_withhold=True) as region,
    ):
        await_offer(client, region)
        request.getfixturevalue("no_copies")
        rows = region.rows(NUMBERS, lengths=BLOCK_BYTES)
        memory[NUMBERS, :BLOCK_BYTES] = content(BLOCKS, 1)
        put(client, 1, rows)
        memory[:] = UNTOUCHED
        found = get(client, region, 1)
        assert set(found.states) == {BlockState.HIT}
        assert len(found.withheld) == 0
        right = np.full_like(memory, UNTOUCHED)
        right[NUMBERS, :BLOCK_BYTES] = content(BLOCKS, 1)
        assert np.array_equal(memory, right)
        assert not client._runtime.arena.array.any(), "the arena never saw a block"
        assert client.quarantined_bytes == 0


def test_without_consent_blocks_are_copied_and_no_region_is_offered(tmp_path: Path) -> None:
    memory = pool()
    with (
        fabric(tmp_path) as (host, _),
        host.connect(OVER_NIXL) as client,
        client.register(memory) as region,
    ):
        put(client, 1)
        assert set(get(client, region, 1).states) == {BlockState.HIT}
        assert np.array_equal(memory[NUMBERS], content(BLOCKS, 1))
        assert client._runtime.arena.array.any()
        session = client._runtime.connections.session
        assert session is not None
        assert not session._told_regions


def test_an_agent_is_told_of_a_region_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, send = list[Message](), AgentSession.send

    def telling(session: AgentSession, message: Message) -> None:
        told.append(message)
        send(session, message)

    monkeypatch.setattr(AgentSession, "send", telling)
    with (
        fabric(tmp_path) as (host, _),
        host.connect(OVER_NIXL) as client,
        client.register(pool(), may_withhold=True) as region,
    ):
        put(client, 1)
        await_offer(client, region)
        for _ in range(3):
            assert get(client, region, 1).hits == BLOCKS
    assert [type(message) for message in told] == [RegionsOffer]


def test_puts_of_a_worker_whose_memory_could_not_be_read_go_through_the_arena(tmp_path: Path) -> None:
    """The agent would read addresses out of the memory again."""
    memory = pool()
    with (
        fabric(tmp_path) as (host, _),
        host.connect(replace(OVER_NIXL, direct_memory=True)) as client,
        client.register(memory, may_withhold=True) as region,
    ):
        put(client, 1)
        await_offer(client, region)
        assert not client._runtime.arena.array.any()
        client._runtime.is_readable = False
        memory[NUMBERS] = content(BLOCKS, 2)
        put(client, 2, region.rows(NUMBERS, lengths=BLOCK_BYTES))
        assert client._runtime.arena.array.any()


def test_an_agent_that_starts_anew_is_told_of_the_regions_again(tmp_path: Path) -> None:
    memory = pool()
    with (
        fabric_process(tmp_path, "nixl") as process,
        ostraca.connect(process.address, settings=OVER_NIXL) as client,
        client.register(memory, may_withhold=True) as region,
    ):
        put(client, 1)
        for _ in range(2):
            until_s = time.monotonic() + 20
            while (found := get(client, region, 1, 2.0)).hits < BLOCKS:
                assert time.monotonic() < until_s, found
            await_offer(client, region)
            client._runtime.arena.array[:] = 0
            assert get(client, region, 1).hits == BLOCKS
            assert not client._runtime.arena.array.any()
            assert np.array_equal(memory[NUMBERS], content(BLOCKS, 1))
            process.kill()
            process.start()


def test_blocks_that_the_worker_reads_from_drives_and_blocks_of_the_agent_come_in_one_get(
    tmp_path: Path,
) -> None:
    """Rows that are no whole pages take blocks of the agent alone."""
    for name, row_bytes in (("pages", BLOCK_BYTES), ("odd", BLOCK_BYTES + 7)):
        memory = pool(row_bytes=row_bytes)
        directory = tmp_path / name
        with (
            fabric(directory, dram_bytes=0, tenant="default") as (host, _),
            host.connect(OVER_NIXL) as writer,
        ):
            put(writer, 1)
            host.await_writes()
            settings = replace(OVER_NIXL, direct_drives=(drives_beside(host.addresses),))
            with (
                host.connect(settings) as client,
                client.register(memory, may_withhold=True) as region,
            ):
                await_offer(client, region)
                assert get(client, region, 1).hits == BLOCKS
                assert blocks_read(client) == BLOCKS
                assert np.array_equal(memory[NUMBERS, :BLOCK_BYTES], content(BLOCKS, 1))
                assert client._runtime.arena.array.any() == (name == "odd")


def test_rows_of_a_late_agent_are_withheld_until_its_transfers_have_ended(tmp_path: Path) -> None:
    memory = pool()
    with (
        fabric(tmp_path, harms=(Harm.STUCK,)) as (host, (way,)),
        host.connect(OVER_NIXL) as client,
        client.register(memory, may_withhold=True) as region,
    ):
        put(client, 1)
        await_offer(client, region)
        way.share = 0.5
        found = get(client, region, 1, SHORT_S)
        while not 0 < found.hits < BLOCKS or not len(found.withheld):
            host.call_soon(way.relent)
            assert found.withheld.wait(DEADLINE_S)
            host.call_soon(way._relented.clear)
            found = get(client, region, 1, SHORT_S)
        late, right = list(found.withheld.positions), content(BLOCKS, 1)
        numbers, others = np.array(NUMBERS), np.delete(np.arange(BLOCKS), late)
        is_hit = np.array(found.states) == BlockState.HIT
        assert not is_hit[late].any()
        assert set(region.withheld) == set(numbers[late].tolist())
        assert np.array_equal(memory[numbers[is_hit]], right[is_hit])
        with pytest.raises(UsageError, match="late write"):
            get(client, region, 1)
        with pytest.raises(UsageError, match="late bytes may still land in"):
            region.unregister()
        memory[:] = UNTOUCHED
        assert not found.withheld.wait(0.05)
        host.call_soon(way.relent)
        assert found.withheld.wait(DEADLINE_S)
        landed = (memory[numbers[late]] == right[late]).all(axis=1)
        is_untouched = (memory[numbers[late]] == UNTOUCHED).all(axis=1)
        assert (landed | is_untouched).all(), "of an agent whose answer was late, all rows may be written yet"
        assert (memory[numbers[others]] == UNTOUCHED).all(), "nothing lands in other rows"
        assert region.withheld == ()
        assert get(client, region, 1).hits == BLOCKS
        assert client.quarantined_bytes == 0


def test_rows_that_are_withheld_at_the_end_of_a_client_stay_so_with_their_memory(tmp_path: Path) -> None:
    memory = pool()
    with fabric_process(tmp_path, "nixl") as process:
        with ostraca.connect(process.address, settings=OVER_NIXL) as client:
            region = client.register(memory, may_withhold=True)
            put(client, 1)
            await_offer(client, region)
            process.signal(signal.SIGSTOP)
            found = get(client, region, 1, SHORT_S)
            assert found.withheld.positions == tuple(range(BLOCKS))
        kept = weakref.ref(region._memory)
        del region, client
        gc.collect()
        process.signal(signal.SIGCONT)
        assert not found.withheld.wait(0.1), "no agent reports to a closed client"
        held = kept()
        assert held is not None
        assert not held.is_ended


def test_rows_of_an_agent_that_died_become_free_without_another_operation(tmp_path: Path) -> None:
    with (
        fabric_process(tmp_path, "nixl") as process,
        ostraca.connect(process.address, settings=OVER_NIXL) as client,
        client.register(pool(), may_withhold=True) as region,
    ):
        put(client, 1)
        await_offer(client, region)
        process.signal(signal.SIGSTOP)
        found = get(client, region, 1, SHORT_S)
        assert len(found.withheld) == BLOCKS
        process.kill()
        assert not found.withheld.wait(0.1), "no agent has told that the transfers have ended"
        process.start()
        assert found.withheld.wait(DEADLINE_S)
        assert region.withheld == ()


def test_a_region_stays_as_long_as_an_agent_may_read_its_rows(tmp_path: Path) -> None:
    memory = pool()
    with (
        fabric_process(tmp_path, "nixl") as process,
        ostraca.connect(process.address, settings=OVER_NIXL) as client,
    ):
        region = client.register(memory, may_withhold=True)
        put(client, 1)
        await_offer(client, region)
        memory[NUMBERS] = content(BLOCKS, 2)
        process.signal(signal.SIGSTOP)
        rows = region.rows(NUMBERS, lengths=BLOCK_BYTES)
        found = volume_of(client).put(chain_of(client, 2), source=rows, deadline_s=SHORT_S)
        assert set(found.states) == {PutState.LATE}
        assert region.withheld == (), "rows of puts are free"
        with pytest.raises(UsageError, match="or agents read them"):
            region.unregister()
        process.signal(signal.SIGCONT)
        until_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                region.unregister()
            except UsageError:
                assert time.monotonic() < until_s
            else:
                break
        (end,) = client._runtime.arena.ends.values()
        assert isinstance(end, NixlArenaEnd)
        assert not end._used._extensions, "deregistered at once"


def test_a_client_whose_regions_an_agent_can_not_use_connects_anew_and_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(NixlTransport, "_reload", lambda *_: False)
    memory = pool()
    with (
        fabric(tmp_path) as (host, _),
        host.connect(OVER_NIXL) as client,
        client.register(memory, may_withhold=True) as region,
    ):
        put(client, 1)
        until_s = time.monotonic() + DEADLINE_S
        while (found := get(client, region, 1, 2.0)).hits < BLOCKS or not caplog.messages:
            assert found.withheld.wait(DEADLINE_S), "rows of a lost connection, until the next one"
            assert time.monotonic() < until_s
        assert np.array_equal(memory[NUMBERS], content(BLOCKS, 1))
        told = [message for message in caplog.messages if message.startswith("Blocks of regions are copied")]
        assert len(told) == 1
        assert client.transport == "nixl"
