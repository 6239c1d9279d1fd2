"""Small gets whose callers copy the blocks out of the agent's memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, SOON_S, hashes
from tests.sdk.connection.caller_host import CallerHost, failing
from tests.sdk.direct.test_agent_memory import (
    BLOCKS,
    MEMORY_BYTES,
    UNTOUCHED,
    MemoryHost,
    length_of,
    memory_host,
)
from tests.sdk.operations.test_faults import FAR_S, silent, somewhere
from tests.sdk.operations.test_runner import Raised, handled, raise_it
from tests.sdk.scripted_agent import AgentConnection, ScriptedAgent
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import BlockState, Reason
from ostraca._connection.caller_connections import (
    SCRATCH_BYTES,
)
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import (
    DirectDrives,
    Get,
    GetDone,
    Lookup,
)

HIT, MISS, LATE, DECLINED = BlockState.HIT, BlockState.MISS, BlockState.LATE, BlockState.DECLINED


class MemoryCallers(CallerHost):
    """The same with an agent that shows its memory."""

    def __init__(self, host: MemoryHost, client: ostraca.Client) -> None:
        host.agent.connections.get(timeout=FAR_S)  # of ``store``
        super().__init__(host.agent, client)
        self.host = host
        self.chain = self.volume.chain(hashes(BLOCKS))

    def into(self) -> list[NDArray[np.uint8]]:
        return [np.full_like(block, UNTOUCHED) for block in self.host.source]

    def offers(self, places: dict[int, int] | None = None) -> list[AgentConnection]:
        """Have callers' gets answered with these places, and the driver's as usual."""
        self.host.offer(*range(BLOCKS), places=places)
        return self.answer(Get, self.agent.script[Get])

    @property
    def of_memory(self) -> list[bool]:
        return [get.in_memory for get in self.agent.seen_of(Get)]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MemoryCallers]:
    with memory_host(tmp_path) as host, host.client() as client:
        yield MemoryCallers(host, client)


def test_small_gets_are_copied_by_their_callers(memory: MemoryCallers) -> None:
    asked = memory.offers()
    memory.open()
    for _ in range(3):
        assert set(memory.host.get(memory.client).states) == {HIT}
    assert asked == memory.of_callers * 3
    assert memory.of_memory == [True] * 3
    assert not any(any(get.slots) for get in memory.agent.seen_of(Get))
    assert memory.agent.seen_of(DirectDrives)[-1] == DirectDrives((), reads_memory=True)
    assert not memory.client._runtime.arena.array.any()
    metrics = memory.client.metrics()
    tally = metrics.operation("get")
    assert (tally.requests, tally.bytes) == (3, 3 * sum(map(length_of, range(BLOCKS))))
    assert metrics.hit_tokens == 3 * BLOCKS * LAYOUT.page_tokens
    assert metrics.direct is not None
    assert (metrics.direct.blocks_read, metrics.direct.blocks_failed) == (3 * BLOCKS, 0)
    assert metrics.direct.bytes_read == tally.bytes


def test_gets_open_connections_where_memory_can_be_read(memory: MemoryCallers) -> None:
    memory.offers()
    for _ in range(4):
        memory.host.get(memory.client)
    assert memory.agent.connections.get(timeout=FAR_S).features


def test_wrong_bytes_never_reach_the_callers_memory(memory: MemoryCallers) -> None:
    memory.host.memory[:BLOCK_BYTES] = 0xAB
    places = {**memory.host.places, 1: 0, 4: MEMORY_BYTES - BLOCK_BYTES}
    asked = memory.offers(places)
    usual, seen, into = memory.agent.script[Get], [], memory.into()

    def look(connection: AgentConnection, message: Get) -> None:
        if connection is memory.session:
            seen.append([bool((block == UNTOUCHED).all()) for block in into])
        usual(connection, message)

    memory.agent.script[Get] = look
    memory.open()
    found = memory.volume.get(memory.chain, into=into, deadline_s=FAR_S)
    assert set(found.states) == {HIT}
    assert seen == [[position in (1, 4) for position in range(BLOCKS)]]
    for block, right in zip(into, memory.host.source, strict=True):
        assert np.array_equal(block, right)
    assert asked == [*memory.of_callers, memory.session]
    assert memory.of_memory == [True, False]
    metrics = memory.client.metrics()
    assert metrics.operation("get").requests == 1
    assert metrics.direct is not None
    assert (metrics.direct.blocks_read, metrics.direct.blocks_failed) == (BLOCKS - 2, 2)


def without_places(connection: AgentConnection, message: Get) -> None:
    connection.send(GetDone(message.request, bytes([HIT] * BLOCKS), bytes(BLOCKS)))


def of_slots(connection: AgentConnection, message: Get) -> None:
    ids = connection.block_ids(message)
    tags = b"".join(connection.agent.blocks[each][0] for each in ids)
    positions = np.arange(BLOCKS, dtype=codec.U32).tobytes()
    connection.send(GetDone(message.request, bytes([HIT] * BLOCKS), bytes(BLOCKS), b"", positions, tags))


def test_blocks_beyond_the_agents_memory_end_the_connection(memory: MemoryCallers) -> None:
    asked = memory.offers({**memory.host.places, 3: MEMORY_BYTES})
    memory.open()
    assert set(memory.host.get(memory.client).states) == {HIT}
    assert asked == [*memory.of_callers, memory.session]
    assert memory.of_callers[0].is_gone.wait(FAR_S)


def test_blocks_in_slots_that_there_are_not_end_the_connection(memory: MemoryCallers) -> None:
    asked = memory.answer(Get, of_slots)
    memory.open()
    assert set(memory.host.get(memory.client).states) == {HIT}
    assert asked == [*memory.of_callers, memory.session]
    assert memory.of_callers[0].is_gone.wait(FAR_S)


def test_claimed_hits_without_places_are_misses(memory: MemoryCallers) -> None:
    memory.answer(Get, without_places)
    memory.open()
    found = memory.host.get(memory.client)
    assert set(found.states) == {MISS}
    assert set(found.reasons) == {Reason.TRANSFER_FAILED}


@pytest.mark.parametrize("code", ["not_in_memory", "no_arena"])
def test_blocks_that_are_not_in_memory_are_the_drivers_and_later_gets_too(
    memory: MemoryCallers, code: str
) -> None:
    memory.answer(Get, failing(code))
    memory.open()
    for _ in range(20):
        assert set(memory.host.get(memory.client).states) == {HIT}
    tried = [at for at, is_tried in enumerate(self_tried(memory.of_memory)) if is_tried]
    assert tried == [0, 2, 5, 10, 19]
    assert len(memory.idle) == 1
    assert memory.client.metrics().operation("get").requests == 20
    memory.offers()
    memory.callers._passes = 0
    memory.agent.seen.clear()
    for _ in range(3):
        memory.host.get(memory.client)
    assert memory.of_memory == [True] * 3, "as it found them"


def self_tried(of_memory: list[bool]) -> list[bool]:
    """Return for each get whether its caller tried first: such a get asks twice."""
    found: list[bool] = []
    for number, is_tried in enumerate(of_memory):
        if is_tried:
            found.append(True)
        elif not number or not of_memory[number - 1]:
            found.append(False)
    return found


def test_lookups_need_no_memory_and_go_on(memory: MemoryCallers) -> None:
    memory.answer(Get, failing("not_in_memory"))
    memory.open()
    memory.host.get(memory.client)
    asked = memory.answer(Lookup, ScriptedAgent.usual)
    assert memory.volume.lookup(memory.chain, deadline_s=FAR_S).hits == BLOCKS
    assert asked == memory.of_callers


def test_an_agent_that_declines_a_get_is_believed(memory: MemoryCallers) -> None:
    states, reasons = bytes([DECLINED] * BLOCKS), bytes([Reason.QUOTA] * BLOCKS)
    asked = memory.answer(Get, lambda at, message: at.send(GetDone(message.request, states, reasons)))
    memory.open()
    found = memory.host.get(memory.client)
    assert set(found.reasons) == {Reason.QUOTA}
    assert asked == memory.of_callers


def test_memory_that_can_not_be_read_any_more_is_the_drivers(memory: MemoryCallers) -> None:
    memory.offers()
    memory.open()
    session = memory.client._runtime.connections.session
    assert session is not None
    assert session.memory is not None
    session.memory._address = (1 << 46) + 1
    usual = memory.agent.script[Get]
    memory.host.offer(*range(BLOCKS))
    assert set(memory.host.get(memory.client).states) == {HIT}
    assert not session.memory.is_usable
    memory.agent.seen.clear()
    memory.callers._passes = 0
    memory.agent.script[Get] = usual
    assert set(memory.host.get(memory.client).states) == {HIT}
    assert memory.of_memory == [False]


def test_a_get_is_late_at_its_deadline_and_nothing_lands_later(memory: MemoryCallers) -> None:
    asked = memory.answer(Get, silent)
    memory.open()
    into, watch = memory.into(), Stopwatch()
    found = memory.volume.get(memory.chain, into=into, deadline_s=SOON_S)
    assert watch.took_s < SOON_S + 0.9
    assert set(found.states) == {LATE}
    assert all((block == UNTOUCHED).all() for block in into)
    assert memory.of_callers[0].is_gone.wait(FAR_S)
    assert asked == memory.of_callers


def test_a_get_that_is_interrupted_costs_its_connection_alone(memory: MemoryCallers) -> None:
    into = memory.into()
    with handled(raise_it) as send:
        memory.answer(Get, lambda *_: send())
        memory.open()
        with pytest.raises(Raised):
            memory.volume.get(memory.chain, into=into, deadline_s=FAR_S)
    assert memory.of_callers[0].is_gone.wait(FAR_S)
    assert all((block == UNTOUCHED).all() for block in into)
    memory.offers()
    assert set(memory.host.get(memory.client).states) == {HIT}
    gc.collect()


def test_a_get_keeps_no_memory_of_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostraca._operations.driver._IDLE_S", 10 * FAR_S)
    with memory_host(tmp_path) as host, host.client() as client:
        memory = MemoryCallers(host, client)
        memory.offers()
        memory.open()
        into = [bytearray(len(block)) for block in host.source]
        assert memory.volume.get(memory.chain, into=into, deadline_s=FAR_S).hits == BLOCKS
        for block, right in zip(into, host.source, strict=True):
            assert block == right.tobytes()
            block.append(1)  # raises BufferError while anything holds it
        assert memory.of_memory == [True]


def test_large_gets_take_the_drivers_way(memory: MemoryCallers) -> None:
    memory.open()
    blocks = SCRATCH_BYTES // BLOCK_BYTES
    chain = memory.volume.chain(hashes(blocks + 1, "large"))
    for some, of_memory in ((chain, [False, False]), (chain[:blocks], [True])):
        memory.agent.seen.clear()
        memory.answer(Get, failing("overloaded"))
        memory.volume.get(some, into=somewhere(len(some)), deadline_s=FAR_S)
        assert memory.of_memory[: len(of_memory)] == of_memory


def test_gets_into_regions_take_the_drivers_way(memory: MemoryCallers) -> None:
    memory.open()
    assert set(memory.host.get_rows(memory.client).states) == {HIT}
    assert memory.of_memory == [False]


def test_gets_of_a_client_that_reads_no_memory_take_the_drivers_way(tmp_path: Path) -> None:
    with memory_host(tmp_path) as host:
        settings = replace(SETTINGS, direct_memory=False)
        with ostraca.connect(host.agent.address, settings=settings) as client:
            memory = MemoryCallers(host, client)
            memory.open()
            assert set(host.get(client).states) == {HIT}
            assert memory.of_memory == [False]
            assert not memory.of_callers[0].features
            assert not host.agent.seen_of(DirectDrives)
