"""Puts of a client whose agent reads its memory: the places it names, and what it does if that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, hashes
from tests.sdk.operations.test_faults import FAR_S, is_whole, some_bytes, somewhere
from tests.sdk.scripted_agent import AgentConnection, ScriptedAgent, agent_at

import ostraca
from ostraca import PutState, Reason
from ostraca._connection.credentials import Credentials
from ostraca._connection.dial import ClientIdentity, say_hello
from ostraca_fabric.runtime.process_memory import MemoryProof
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.address import parse_address
from ostraca_fabric.wire.messages import Fetch, Put, PutDone

BLOCKS = 40
"""Of several windows."""


@pytest.fixture
def reading(tmp_path: Path) -> Iterator[ScriptedAgent]:
    with agent_at(tmp_path / "agent.sock", reads_workers=True) as agent:
        yield agent


@contextmanager
def connected(agent: ScriptedAgent, **changed: Any) -> Iterator[tuple[ostraca.Client, ostraca.Volume]]:
    with ostraca.connect(agent.address, settings=replace(SETTINGS, prefault=False, **changed)) as client:
        yield client, client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)


def arena_of(client: ostraca.Client) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = client._runtime.arena.array
    return array


def named(agent: ScriptedAgent) -> list[int]:
    """Return the addresses that all puts name, in order."""
    return [int(each) for put in agent.seen_of(Put) for each in np.frombuffer(put.addresses, codec.U64)]


def slots_of(agent: ScriptedAgent) -> list[int]:
    return [int(each) for put in agent.seen_of(Put) for each in np.frombuffer(put.slots, codec.U64)]


def assert_there(volume: ostraca.Volume, right: NDArray[np.uint8]) -> None:
    """Get all blocks, whose tags come from their put."""
    into = somewhere(len(right))
    found = volume.get(
        volume.chain(hashes(len(right))), into=list(into[:, : right.shape[1]]), deadline_s=FAR_S
    )
    assert found.hits == len(right)
    assert np.array_equal(into[:, : right.shape[1]], right)


def read_only(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    rows.flags.writeable = False
    return rows


CONTIGUOUS: dict[str, Callable[[NDArray[np.uint8]], Any]] = {
    "array": lambda rows: rows,
    "read-only array": read_only,
    "rows with gaps between them": lambda rows: rows[:, 1:-7],
    "tensor": torch.from_numpy,
    "list": list,
    "lists of one part": lambda rows: [[row] for row in rows],
}


def starts_of(source: Any) -> list[int]:
    """Return the addresses of blocks."""
    found = [each[0] if isinstance(each, list) else each for each in source]
    return [each.data_ptr() if isinstance(each, torch.Tensor) else each.ctypes.data for each in found]


@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_blocks_in_one_piece_are_read_where_they_are(reading: ScriptedAgent, kind: str) -> None:
    memory = some_bytes(BLOCKS)
    source = CONTIGUOUS[kind](memory)
    with connected(reading) as (client, volume):
        put = volume.put(volume.chain(hashes(BLOCKS)), source=source, deadline_s=FAR_S)
        assert set(put.states) == {PutState.COMMITTED}
        assert not arena_of(client).any(), "the arena never saw one"
        assert len(reading.seen_of(Put)) > 1
        assert named(reading) == starts_of(source)
        assert_there(volume, memory[:, 1:-7] if "gaps" in kind else memory)
        assert is_whole(client)
    assert not reading.seen_of(Fetch)


def test_rows_of_a_region_are_read_where_they_are(reading: ScriptedAgent) -> None:
    pool, numbers = somewhere(2 * BLOCKS), [*range(0, 2 * BLOCKS, 2)][::-1]
    pool[numbers] = some_bytes(BLOCKS)
    with connected(reading) as (client, volume), client.register(pool) as region:
        rows = region.rows(numbers)
        put = volume.put(volume.chain(hashes(BLOCKS)), source=rows, deadline_s=FAR_S)
        assert set(put.states) == {PutState.COMMITTED}
        assert not arena_of(client).any()
        assert named(reading) == [pool.ctypes.data + number * BLOCK_BYTES for number in numbers]
        assert_there(volume, pool[numbers])


def test_leased_slots_are_read_in_the_arena(reading: ScriptedAgent) -> None:
    source = some_bytes(BLOCKS)
    with connected(reading) as (client, volume):
        lease = volume.slots(BLOCKS, lengths=BLOCK_BYTES)
        for view, block in zip(lease, source, strict=True):
            view[:] = block.data
        put = volume.put_slots(volume.chain(hashes(BLOCKS)), lease, deadline_s=FAR_S)
        assert set(put.states) == {PutState.COMMITTED}
        base = arena_of(client).ctypes.data
        assert named(reading) == [base + slot for slot in slots_of(reading)]
        assert_there(volume, source)
        assert is_whole(client)


@pytest.mark.parametrize("kind", ["strided", "parts", "one of many"])
def test_blocks_with_gaps_or_parts_are_read_in_the_arena(reading: ScriptedAgent, kind: str) -> None:
    memory = np.random.default_rng(3).integers(0, 255, (BLOCKS, 2, BLOCK_BYTES // 2), np.uint8)
    source: Any = memory[:, :, ::2]
    if kind == "parts":
        source = [[block[1], block[0]] for block in memory]
    elif kind == "one of many":
        source = [*memory[:-1], memory[-1, :, ::2]]
    lengths = [block.nbytes if kind != "parts" else BLOCK_BYTES for block in source]
    with connected(reading) as (client, volume):
        put = volume.put(volume.chain(hashes(BLOCKS)), source=source, deadline_s=FAR_S)
        assert set(put.states) == {PutState.COMMITTED}
        base = arena_of(client).ctypes.data
        assert named(reading) == [base + slot for slot in slots_of(reading)]
        into = [np.zeros(length, np.uint8) for length in lengths]
        assert volume.get(volume.chain(hashes(BLOCKS)), into=into, deadline_s=FAR_S).hits == BLOCKS
        for found, block in zip(into, source, strict=True):
            parts = block if kind == "parts" else [block]
            assert found.tobytes() == b"".join(part.tobytes() for part in parts)
        assert is_whole(client)


def test_no_blocks_are_no_addresses(reading: ScriptedAgent) -> None:
    with connected(reading) as (_, volume):
        put = volume.put(volume.chain([]), source=[], deadline_s=FAR_S)
        assert put.states == ()
    assert not named(reading)


def test_an_agent_that_does_not_read_gets_no_address(tmp_path: Path) -> None:
    with agent_at(tmp_path / "agent.sock") as agent, connected(agent) as (client, volume):
        source = some_bytes(BLOCKS)
        volume.put(volume.chain(hashes(BLOCKS)), source=source, deadline_s=FAR_S)
        assert arena_of(client).any()
        assert not named(agent)
        assert_there(volume, source)
        assert agent.hellos[0].memory is not None, "it was offered"


def failing(connection: AgentConnection, message: Put) -> None:
    """Answer as an agent that can't read one of the blocks."""
    if not message.addresses:
        ScriptedAgent.usual(connection, message)
        return
    count = len(message.lengths) // 4
    states, reasons = bytearray([PutState.DECLINED]) * count, bytearray([Reason.BUSY]) * count
    reasons[-1] = Reason.TRANSFER_FAILED
    connection.send(PutDone(message.request, bytes(states), bytes(reasons)))


def test_memory_that_can_not_be_read_goes_through_the_arena_from_the_next_put_on(
    reading: ScriptedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    reading.script[Put] = failing
    source, pool = some_bytes(BLOCKS), some_bytes(BLOCKS)
    with ExitStack() as stack:
        client, volume = stack.enter_context(connected(reading))
        region = stack.enter_context(client.register(pool))
        chain = volume.chain(hashes(BLOCKS))
        with caplog.at_level(logging.WARNING, "ostraca"):
            put = volume.put(chain, source=source, deadline_s=FAR_S)
            assert set(put.states) == {PutState.DECLINED}
            assert put.reasons[-1] == Reason.TRANSFER_FAILED
            assert len(reading.seen_of(Put)) > 1
            assert not client._runtime.is_readable
            reading.seen.clear()
            assert set(volume.put(chain, source=source, deadline_s=FAR_S).states) == {PutState.COMMITTED}
            assert arena_of(client).any()
            again = volume.put(chain, source=region.rows(range(BLOCKS)), deadline_s=FAR_S)
            assert set(again.states) == {PutState.EXISTS}
        assert not named(reading)
        assert_there(volume, source)
    assert caplog.text.count("could not read this process's memory") == 1


@pytest.mark.parametrize("reason", [Reason.DAMAGED, Reason.BUSY, Reason.NO_SPACE])
def test_other_reasons_change_nothing(reading: ScriptedAgent, reason: Reason) -> None:
    def decline(connection: AgentConnection, message: Put) -> None:
        count = len(message.lengths) // 4
        connection.send(PutDone(message.request, bytes([PutState.DECLINED]) * count, bytes([reason]) * count))

    reading.script[Put] = decline
    with connected(reading) as (client, volume):
        for seed in ("a", "b"):
            volume.put(volume.chain(hashes(2, seed)), source=some_bytes(2), deadline_s=FAR_S)
        assert client._runtime.is_readable
    assert len(named(reading)) == 4


def test_a_failed_transfer_of_an_agent_that_does_not_read_is_no_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def decline(connection: AgentConnection, message: Put) -> None:
        count, failed = len(message.lengths) // 4, bytes([Reason.TRANSFER_FAILED])
        connection.send(PutDone(message.request, bytes([PutState.DECLINED]) * count, failed * count))

    with agent_at(tmp_path / "agent.sock") as agent, connected(agent) as (client, volume):
        agent.script[Put] = decline
        volume.put(volume.chain(hashes(2)), source=some_bytes(2), deadline_s=FAR_S)
        assert client._runtime.is_readable
    assert "could not read" not in caplog.text


def test_a_client_that_was_told_not_to_offers_no_memory(reading: ScriptedAgent) -> None:
    with connected(reading, direct_memory=False) as (client, volume):
        source = some_bytes(BLOCKS)
        volume.put(volume.chain(hashes(BLOCKS)), source=source, deadline_s=FAR_S)
        assert arena_of(client).any()
        assert_there(volume, source)
    assert [hello.memory for hello in reading.hellos] == [None]
    assert not named(reading)


@pytest.mark.parametrize(
    ("address", "is_offered"),
    [("unix:///run/agent.sock", True), ("tcp://localhost:1", False), ("tls://localhost:1", False)],
)
def test_memory_is_offered_over_unix_sockets_alone(address: str, *, is_offered: bool) -> None:
    proof = MemoryProof()
    memory = ClientIdentity("t", Credentials(), {}, proof=proof).hello("", parse_address(address)).memory
    assert (memory is not None) == is_offered
    if memory is not None:
        assert (memory.proof_address, memory.proof) == (proof.address, proof.content)
    assert ClientIdentity("t", Credentials(), {}).hello("", parse_address(address)).memory is None


def test_a_welcome_without_an_arena_takes_no_offer(reading: ScriptedAgent) -> None:
    identity = ClientIdentity("t", Credentials(), {}, proof=MemoryProof())
    assert not say_hello(parse_address(reading.address), identity, within_s=FAR_S).reads_worker
    assert reading.hellos[-1].memory is None
