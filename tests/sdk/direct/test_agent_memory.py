"""Gets of a client that copies blocks out of its agent's memory, as an agent by script tells it to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, hashes
from tests.sdk.scripted_agent import AgentConnection, ScriptedAgent, agent_at

import ostraca
from ostraca import BlockState, PutState
from ostraca_fabric.runtime.process_memory import MemoryProof
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.handshake import LEAVING, MEMORY
from ostraca_fabric.wire.messages import AgentMemory, DirectDrives, Get, GetDone, GetProgress

FAR_S = 30.0
BLOCKS = 6
UNTOUCHED = 0xEE
HIT, MISS = BlockState.HIT, BlockState.MISS
MEMORY_BYTES = 2 * BLOCKS * BLOCK_BYTES
ELSEWHERE = (1 << 46) + 1
"""An address that no process here uses."""


def length_of(position: int) -> int:
    return BLOCK_BYTES - 1000 * position


def volume_of(client: ostraca.Client) -> ostraca.Volume:
    return client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)


@dataclass
class MemoryHost:
    """An agent of this process, with blocks in memory that it shows."""

    folder: Path
    memory: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(MEMORY_BYTES, np.uint8))
    source: list[NDArray[np.uint8]] = field(default_factory=list)
    agent: ScriptedAgent = field(init=False)

    def shown(self, proof: MemoryProof) -> AgentMemory:
        address = self.memory.ctypes.data
        return AgentMemory(address, self.memory.nbytes, proof.address, proof.content)

    @property
    def places(self) -> dict[int, int]:
        """Offsets of the blocks in memory, by position: any, not those of pages."""
        return {position: 3 + (BLOCKS - position) * BLOCK_BYTES for position in range(BLOCKS)}

    def store(self) -> None:
        """Give the blocks to the agent, and write them to its memory."""
        rng = np.random.default_rng(5)
        self.source = [rng.integers(0, 255, length_of(position), np.uint8) for position in range(BLOCKS)]
        with ostraca.connect(self.agent.address, settings=SETTINGS) as client:
            volume = volume_of(client)
            put = volume.put(volume.chain(hashes(BLOCKS)), source=self.source, deadline_s=FAR_S)
            assert set(put.states) == {PutState.COMMITTED}
        for position, offset in self.places.items():
            self.memory[offset : offset + length_of(position)] = self.source[position]
        self.agent.seen.clear()

    def offer(self, *positions: int, places: dict[int, int] | None = None, is_early: bool = False) -> None:
        """Have gets answered with these blocks left in memory, and the others delivered.

        The answer tells the places, or with *is_early* a message before.
        """
        wanted = {position: (places or self.places)[position] for position in positions}

        def answer(connection: AgentConnection, message: Get) -> None:
            if message.is_again:
                ScriptedAgent.usual(connection, message)
                return
            ids = connection.block_ids(message)
            told = GetProgress(
                message.request,
                np.array([*wanted], codec.U32).tobytes(),
                b"".join(self.agent.blocks[ids[position]][0] for position in wanted),
                np.array([*wanted.values()], codec.U64).tobytes(),
            )
            if is_early:
                connection.send(told)
            others = [position for position in range(BLOCKS) if position not in wanted]
            if others:
                connection.land(message, others)
            last = (b"", b"", b"") if is_early else (told.positions, told.tags, told.places)
            connection.send(GetDone(message.request, bytes([HIT] * BLOCKS), bytes(BLOCKS), b"", *last))

        self.agent.script[Get] = answer

    def asked_again(self) -> list[int]:
        """Return how many blocks each get names that asks again."""
        return [len(get.lengths) // 4 for get in self.agent.seen_of(Get) if get.is_again]

    @contextmanager
    def client(self) -> Iterator[ostraca.Client]:
        chosen = replace(SETTINGS, copy_threads=2, prefault=False)
        with ostraca.connect(self.agent.address, settings=chosen) as client:
            yield client

    def get(self, client: ostraca.Client) -> ostraca.GetResult:
        """Get all blocks, and check that hits are right and nothing else was touched."""
        volume = volume_of(client)
        into = [np.full_like(block, UNTOUCHED) for block in self.source]
        found = volume.get(volume.chain(hashes(BLOCKS)), into=into, deadline_s=FAR_S)
        for state, block, right in zip(found.states, into, self.source, strict=True):
            assert np.array_equal(block, right) if state == HIT else (block == UNTOUCHED).all()
        return found

    def get_views(self, client: ostraca.Client) -> ostraca.GetResult:
        volume = volume_of(client)
        lengths = [len(block) for block in self.source]
        with volume.get_views(volume.chain(hashes(BLOCKS)), lengths=lengths, deadline_s=FAR_S) as views:
            for state, view, right in zip(views.result.states, views, self.source, strict=True):
                assert view == right.data if state == HIT else view is None
            return views.result

    def get_rows(self, client: ostraca.Client) -> ostraca.GetResult:
        """Get all blocks into every other row of a region, and check that the rest was not touched."""
        volume, pool = volume_of(client), np.full((2 * BLOCKS, BLOCK_BYTES), UNTOUCHED, np.uint8)
        lengths = [len(block) for block in self.source]
        with client.register(pool) as region:
            rows = region.rows(range(0, 2 * BLOCKS, 2), lengths=lengths)
            found = volume.get(volume.chain(hashes(BLOCKS)), into=rows, deadline_s=FAR_S)
        for state, row, right in zip(found.states, pool[::2], self.source, strict=True):
            assert state != HIT or np.array_equal(row[: len(right)], right)
            assert (row[len(right) :] == UNTOUCHED).all()
        assert (pool[1::2] == UNTOUCHED).all()
        return found


@contextmanager
def memory_host(
    folder: Path,
    shown: Callable[[AgentMemory], AgentMemory] = lambda memory: memory,
    features: Sequence[str] = (LEAVING, MEMORY),
) -> Iterator[MemoryHost]:
    """Run an agent that tells workers of its memory what *shown* returns."""
    host, proof = MemoryHost(folder), MemoryProof()
    memory = shown(host.shown(proof))
    with agent_at(folder / "agent.sock", features=tuple(features), memory=memory) as host.agent:
        host.store()
        yield host


@pytest.fixture
def host(tmp_path: Path) -> Iterator[MemoryHost]:
    with memory_host(tmp_path) as made:
        yield made


Get_ = Callable[[MemoryHost, ostraca.Client], ostraca.GetResult]
ways = pytest.mark.parametrize(
    "get",
    [MemoryHost.get, MemoryHost.get_views, MemoryHost.get_rows],
    ids=["copied", "views", "region"],
)


def arena_of(client: ostraca.Client) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = client._runtime.arena.array
    return array


@ways
@pytest.mark.parametrize("is_early", [True, False])
def test_blocks_in_the_agents_memory_are_copied_from_there(
    host: MemoryHost, get: Get_, *, is_early: bool
) -> None:
    host.offer(*range(BLOCKS), is_early=is_early)
    with host.client() as client:
        assert set(get(host, client).states) == {HIT}
        assert arena_of(client).any() == (get is not MemoryHost.get_rows), "rows need no arena"
        counters = client._runtime.direct_counters
        assert counters is not None
        assert (counters.blocks_read, counters.blocks_failed) == (BLOCKS, 0)
        assert counters.bytes_read == sum(map(length_of, range(BLOCKS)))
    assert not host.asked_again()
    assert host.agent.seen_of(DirectDrives) == [DirectDrives((), reads_memory=True)]


@ways
def test_the_agent_delivers_the_blocks_that_are_not_in_its_memory(host: MemoryHost, get: Get_) -> None:
    host.offer(5, 1, 2)
    with host.client() as client:
        assert set(get(host, client).states) == {HIT}
    assert not host.asked_again()


@ways
@pytest.mark.parametrize("is_early", [True, False])
def test_blocks_that_gave_way_to_others_are_asked_for_again(
    host: MemoryHost, get: Get_, *, is_early: bool
) -> None:
    places = {**host.places, 1: 0, 4: MEMORY_BYTES - BLOCK_BYTES}
    host.offer(*range(BLOCKS), places=places, is_early=is_early)
    with host.client() as client:
        assert set(get(host, client).states) == {HIT}
        counters = client._runtime.direct_counters
        assert counters is not None
        assert (counters.blocks_read, counters.blocks_failed) == (BLOCKS - 2, 2)
    first, second = host.agent.seen_of(Get)
    assert [first.is_again, second.is_again] == [False, True]
    slots = codec.u64(first.slots, BLOCKS)
    assert codec.u64(second.slots, 2).tolist() == slots[[1, 4]].tolist()


def test_bytes_of_other_blocks_do_not_stay_in_rows(host: MemoryHost) -> None:
    host.memory[:BLOCK_BYTES] = 0xAB  # another one's, where block 1 was
    host.offer(*range(BLOCKS), places={**host.places, 1: 0})
    offer = host.agent.script[Get]

    def answer(connection: AgentConnection, message: Get) -> None:
        if message.is_again:
            connection.send(GetDone(message.request, bytes([MISS]), bytes(1)))
        else:
            offer(connection, message)

    host.agent.script[Get] = answer
    pool = np.full((BLOCKS, BLOCK_BYTES), UNTOUCHED, np.uint8)
    with host.client() as client, client.register(pool) as region:
        rows = region.rows(range(BLOCKS), lengths=[len(block) for block in host.source])
        volume = volume_of(client)
        found = volume.get(volume.chain(hashes(BLOCKS)), into=rows, deadline_s=FAR_S)
    assert [state == HIT for state in found.states] == [position != 1 for position in range(BLOCKS)]
    assert not pool[1, : length_of(1)].any()


def test_blocks_beyond_the_agents_memory_break_the_connection(host: MemoryHost) -> None:
    for offset in (MEMORY_BYTES - length_of(3) + 1, MEMORY_BYTES, (1 << 64) - 1, 1 << 63):
        host.offer(*range(BLOCKS), places={**host.places, 3: offset})
        with host.client() as client:
            assert set(host.get(client).states) == {MISS}


def test_a_client_asks_for_nothing_if_told_not_to(host: MemoryHost) -> None:
    settings = replace(SETTINGS, direct_memory=False)
    with ostraca.connect(host.agent.address, settings=settings) as client:
        assert set(host.get(client).states) == {HIT}
        host.offer(*range(BLOCKS))
        assert set(host.get(client).states) == {MISS}, "such an agent breaks the rules"
    assert not host.agent.seen_of(DirectDrives)


UNREADABLE: dict[str, Callable[[AgentMemory], AgentMemory]] = {
    "another proof": lambda memory: msgspec.structs.replace(memory, proof=bytes(16)),
    "no proof": lambda memory: msgspec.structs.replace(memory, proof=b""),
    "nothing there": lambda memory: msgspec.structs.replace(memory, proof_address=ELSEWHERE),
}


@pytest.mark.parametrize("why", UNREADABLE)
def test_an_agent_whose_memory_can_not_be_read_delivers_all(tmp_path: Path, why: str) -> None:
    with memory_host(tmp_path, UNREADABLE[why]) as host, host.client() as client:
        assert set(host.get(client).states) == {HIT}
        assert not host.agent.seen_of(DirectDrives)


def test_an_agent_without_the_feature_shows_no_memory(tmp_path: Path) -> None:
    with memory_host(tmp_path, features=(LEAVING,)) as host, host.client() as client:
        assert set(host.get(client).states) == {HIT}
        assert not host.agent.seen_of(DirectDrives)


@ways
def test_memory_that_can_not_be_read_any_more_is_given_up(tmp_path: Path, get: Get_) -> None:
    def moved(memory: AgentMemory) -> AgentMemory:
        return msgspec.structs.replace(memory, address=ELSEWHERE)

    with memory_host(tmp_path, moved) as host, host.client() as client:
        host.offer(*range(BLOCKS))
        assert set(get(host, client).states) == {HIT}
        assert host.asked_again() == [BLOCKS]
        assert set(get(host, client).states) == {HIT}
    assert [each.reads_memory for each in host.agent.seen_of(DirectDrives)] == [True, False]
