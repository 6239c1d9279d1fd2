"""Puts that the agent reads out of the memory of a process that connects: when it may, and when not."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.dpu_agent.server.test_sessions import GET, PUT, Wire, hello, u64, wired
from tests.support.agent import assembly
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    SLOT_BYTES,
    TENANT,
    Assembly,
    assembled,
    content_of,
    until,
)

from ostraca_dpu_agent.adapters.transports.worker_memory import WorkerMemoryReader
from ostraca_fabric.connection import ClientConnection, connect, server
from ostraca_fabric.model.outcome import Ack, PutState, Reason
from ostraca_fabric.runtime.process_memory import MemoryProof
from ostraca_fabric.tables.digests import tag_seeds, tags_of
from ostraca_fabric.wire.handshake import Access
from ostraca_fabric.wire.messages import Failure, Hello, OpenVolume, Put, PutDone, WorkerMemory

PROOF = MemoryProof()
OFFER = WorkerMemory(PROOF.address, PROOF.content)


def offering(memory: WorkerMemory | None = OFFER, *, with_arena: bool = True) -> Hello:
    return msgspec.structs.replace(hello(with_arena=with_arena), memory=memory)


async def opened(wire: Wire, said: Hello) -> ClientConnection:
    connection = await connect(wire.address, said)
    opens = OpenVolume(
        connection.next_request_id(), "v", wire.fabric.volume.record.layout, BLOCK_BYTES, create=False
    )
    await connection.ask(opens, 5.0)
    return connection


def put_from(source: np.ndarray[tuple[int], np.dtype[np.uint8]], wire: Wire) -> Put:
    """Put two blocks that lie in *source*, one behind the other."""
    lengths, places = np.full(2, BLOCK_BYTES, np.uint32), np.array([0, BLOCK_BYTES], np.int64)
    seeds = tag_seeds(wire.fabric.volume.identity, PUT.spans, lengths)
    address = source.ctypes.data
    return msgspec.structs.replace(
        PUT,
        tags=tags_of(source, places, lengths, seeds).tobytes(),
        addresses=u64(address, address + BLOCK_BYTES),
        deadline_s=30.0,
    )


def copying_threads() -> set[str]:
    """Return the ids of threads of I/O engines, which no drive here has."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread may end before its name is read
            found |= {task.name} if (task / "comm").read_text().strip() == "drive" else set()
    return found


def readers_of(fabric: Assembly) -> set[WorkerMemoryReader]:
    return fabric.agent._worker_memories._readers


@pytest.mark.parametrize("with_arena", [True, False])
async def test_a_process_that_shows_its_proof_is_read_while_it_is_connected(
    tmp_path: Path, *, with_arena: bool
) -> None:
    source, before = np.frombuffer(content_of(1) + content_of(2), np.uint8), copying_threads()
    async with wired(tmp_path) as wire:
        assert copying_threads() <= before, "no worker offers memory"
        connection = await opened(wire, offering(with_arena=with_arena))
        assert connection.welcome.reads_worker
        assert connection.welcome.transport == ("inline" if with_arena else "")
        assert len(readers_of(wire.fabric)) == 1
        message = msgspec.structs.replace(put_from(source, wire), request=connection.next_request_id())
        done = await connection.ask(message, 30.0)
        assert isinstance(done, PutDone)
        assert list(done.states) == [PutState.COMMITTED] * 2
        connection.close()
        await connection.wait_closed()
        assert copying_threads() - before
        await until(lambda: not readers_of(wire.fabric))
        reader = wire.fabric.worker()
        assert (await wire.fabric.get(reader, [1, 2])).states == b"\1\1"
        assert reader.arena.bytes[SLOT_BYTES : SLOT_BYTES + BLOCK_BYTES] == content_of(2)
        await wire.fabric.at_rest()
    await until(lambda: copying_threads() <= before)


async def test_without_an_arena_puts_name_addresses_or_are_refused(tmp_path: Path) -> None:
    source = np.frombuffer(content_of(1) + content_of(2), np.uint8)
    async with wired(tmp_path) as wire:
        connection = await opened(wire, offering(with_arena=False))
        put = put_from(source, wire)
        for refused in (msgspec.structs.replace(put, addresses=b""), GET):
            numbered = msgspec.structs.replace(refused, request=connection.next_request_id())
            answer = await connection.ask(numbered, 30.0)
            assert isinstance(answer, Failure)
            assert answer.code == "no_arena"
        await wire.fabric.at_rest()
        done = await connection.ask(
            msgspec.structs.replace(put, request=connection.next_request_id(), ack=Ack.STAGED), 30.0
        )
        assert isinstance(done, PutDone)
        assert list(done.states) == [PutState.STAGED] * 2
        connection.close()
        await connection.wait_closed()
        await wire.fabric.at_rest()


async def test_without_an_arena_addresses_are_refused_where_the_agent_does_not_read(tmp_path: Path) -> None:
    async with wired(tmp_path) as wire:
        connection = await opened(wire, offering(None, with_arena=False))
        put = put_from(np.zeros(2 * BLOCK_BYTES, np.uint8), wire)
        answer = await connection.ask(
            msgspec.structs.replace(put, request=connection.next_request_id()), 30.0
        )
        assert isinstance(answer, Failure)
        assert answer.code == "no_arena"
        connection.close()
        await connection.wait_closed()
        await wire.fabric.at_rest()


@pytest.mark.parametrize("with_arena", [True, False])
@pytest.mark.parametrize(
    "memory",
    [
        None,
        WorkerMemory(PROOF.address, bytes(16)),
        WorkerMemory(8, PROOF.content),
        WorkerMemory(-1, PROOF.content),
    ],
    ids=["no offer", "wrong proof", "no such place", "no place"],
)
async def test_another_is_not_read_and_told_so(
    tmp_path: Path, memory: WorkerMemory | None, *, with_arena: bool
) -> None:
    await assert_not_read(tmp_path, offering(memory, with_arena=with_arena))


async def test_an_agent_is_not_read(tmp_path: Path) -> None:
    said = msgspec.structs.replace(offering(with_arena=False), role="agent", tenant="")
    await assert_not_read(tmp_path, said)


async def assert_not_read(directory: Path, said: Hello) -> None:
    async with wired(directory) as wire:
        connection = await connect(wire.address, said)
        assert not connection.welcome.reads_worker
        assert not readers_of(wire.fabric)
        connection.close()
        await connection.wait_closed()


async def test_an_agent_that_trusts_no_user_reads_none_also_with_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = Access(os.getuid(), {TENANT: ("secret",)}, own_user_is_trusted=False)
    monkeypatch.setattr(assembly, "Access", lambda **_: strict)
    address = f"unix://{tmp_path}/agent.sock"
    async with assembled(addresses=(address,)) as fabric:
        connection = await connect(address, msgspec.structs.replace(offering(), token="secret"))
        assert not connection.welcome.reads_worker
        assert not readers_of(fabric)
        connection.close()
        await connection.wait_closed()


async def test_addresses_are_refused_where_the_welcome_did_not_allow_them(tmp_path: Path) -> None:
    async with wired(tmp_path) as wire:
        source = np.zeros(2 * BLOCK_BYTES, np.uint8)
        assert await wire.refused(put_from(source, wire)) == "usage"
        await wire.fabric.at_rest()


async def test_a_process_that_the_kernel_does_not_name_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a worker in a process namespace that the agent does not see."""
    monkeypatch.setattr(server, "peer_process", lambda _: 0)
    async with wired(tmp_path) as wire:
        connection = await opened(wire, offering())
        assert not connection.welcome.reads_worker
        connection.close()
        await connection.wait_closed()


async def test_addresses_that_no_process_has_are_declined(tmp_path: Path) -> None:
    async with wired(tmp_path) as wire:
        connection = await opened(wire, offering())
        message = msgspec.structs.replace(
            put_from(np.zeros(2 * BLOCK_BYTES, np.uint8), wire),
            request=connection.next_request_id(),
            addresses=u64((1 << 64) - 1, 1 << 63),
        )
        done = await connection.ask(message, 30.0)
        assert isinstance(done, PutDone)
        assert list(done.reasons) == [Reason.TRANSFER_FAILED] * 2
        connection.close()
        await connection.wait_closed()
        await wire.fabric.at_rest()
