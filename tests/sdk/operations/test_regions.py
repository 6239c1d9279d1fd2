"""Gets into rows of a region and puts from them: in place, and with an end behind which nothing happens."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.fabric.connection.bulk import bulk_frame
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, SOON_S, hashes
from tests.sdk.operations.test_faults import FAR_S, UNTOUCHED, is_whole, silent, some_bytes, somewhere, stored
from tests.sdk.scripted_agent import AgentConnection, Incoming, ScriptedAgent
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import BlockState, PutState, Reason
from ostraca._memory.arena import Arena
from ostraca._memory.host_blocks import HostBlocks
from ostraca_fabric.errors import ClosedError, UsageError
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import Fetch, Get, GetDone, GetProgress, Put, PutDone

ROWS = 16
OTHER = 0x55
"""What a caller writes into rows that are its own again."""


@pytest.fixture
def pool() -> NDArray[np.uint8]:
    return somewhere(ROWS)


@pytest.fixture
def region(client: ostraca.Client, pool: NDArray[np.uint8]) -> Iterator[ostraca.Region]:
    with client.register(pool) as registered:
        yield registered


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a job that copies blocks between arena and caller."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a copy")

    for name in ("gather", "scatter"):
        monkeypatch.setattr(HostBlocks, name, refuse)


@pytest.mark.usefixtures("no_copies")
def test_blocks_land_in_their_rows_and_leave_from_there_without_a_copy(
    client: ostraca.Client, volume: ostraca.Volume, region: ostraca.Region, pool: NDArray[np.uint8]
) -> None:
    source = some_bytes(4)
    pool[[9, 2, 3, 12]] = source
    chain, numbers = volume.chain(hashes(4)), [5, 1, 7, 0]
    assert (
        volume.put(chain, source=region.rows([9, 2, 3, 12]), deadline_s=FAR_S).states
        == (PutState.COMMITTED,) * 4
    )
    before = pool.copy()
    assert volume.get(chain, into=region.rows(numbers), deadline_s=FAR_S).hits == 4
    before[numbers] = source
    assert np.array_equal(pool, before), "the rows have the blocks, and no other byte changed"
    assert not client._runtime.arena.array.any(), "and the arena never saw one"
    assert is_whole(client)


def test_a_region_and_other_memory_hold_the_same_blocks(
    volume: ostraca.Volume, region: ostraca.Region, pool: NDArray[np.uint8]
) -> None:
    """What is put from a region is got elsewhere, and the other way round; one row may be several blocks."""
    chain, source = stored(volume, 3)
    assert volume.get(chain, into=region.rows([1, 2, 3]), deadline_s=FAR_S).hits == 3
    twice = volume.chain(hashes(4, "twice"))
    assert (
        volume.put(twice, source=region.rows([3, 1, 3, 2]), deadline_s=FAR_S).states
        == (PutState.COMMITTED,) * 4
    )
    target = somewhere(4)
    assert volume.get(twice, into=target, deadline_s=FAR_S).hits == 4
    assert np.array_equal(target, source[[2, 0, 2, 1]])
    assert volume.get(chain, into=region.rows([3, 2, 1]), deadline_s=FAR_S).hits == 3, "the rows are free"


def test_a_short_block_lies_at_the_begin_of_its_row(
    volume: ostraca.Volume, region: ostraca.Region, pool: NDArray[np.uint8]
) -> None:
    lengths, chain, source = [1, 5000, BLOCK_BYTES], volume.chain(hashes(3)), some_bytes(3)
    pool[[9, 8, 7]] = source
    put = volume.put(chain, source=region.rows([9, 8, 7], lengths=lengths), deadline_s=FAR_S)
    assert put.states == (PutState.COMMITTED,) * 3
    pool[:] = UNTOUCHED
    assert volume.get(chain, into=region.rows([2, 3, 4], lengths=lengths), deadline_s=FAR_S).hits == 3
    for row, length, block in zip((2, 3, 4), lengths, source, strict=True):
        assert np.array_equal(pool[row, :length], block[:length])
        pool[row, :length] = UNTOUCHED
    assert (pool == UNTOUCHED).all()


def test_a_batch_beyond_the_arena_moves_in_parts(client: ostraca.Client, volume: ostraca.Volume) -> None:
    blocks = 3 * SETTINGS.arena_bytes // BLOCK_BYTES
    pool, source = np.zeros((2 * blocks, BLOCK_BYTES), np.uint8), some_bytes(blocks)
    pool[:blocks] = source
    with client.register(pool) as region:
        chain = volume.chain(hashes(blocks))
        put = volume.put(chain, source=region.rows(range(blocks)), deadline_s=FAR_S)
        assert put.states == (PutState.COMMITTED,) * blocks
        got = volume.get(chain, into=region.rows(range(blocks, 2 * blocks)), deadline_s=FAR_S)
        assert got.hits == blocks
    assert np.array_equal(pool[blocks:], source)


def test_memory_of_every_kind_can_be_registered(client: ostraca.Client, volume: ostraca.Volume) -> None:
    chain, source = stored(volume, 4)
    plain = bytearray(4 * BLOCK_BYTES)
    mapped = mmap.mmap(-1, 4 * BLOCK_BYTES)
    wide = np.zeros((2, 2, BLOCK_BYTES // 8), np.float64).reshape(4, -1)
    for memory, row_bytes in ((plain, BLOCK_BYTES), (mapped, BLOCK_BYTES), (wide, None)):
        with client.register(memory, row_bytes=row_bytes) as region:
            assert (len(region), region.row_bytes) == (4, BLOCK_BYTES)
            assert volume.get(chain, into=region.rows(np.arange(4)), deadline_s=FAR_S).hits == 4
        assert np.frombuffer(memory, np.uint8).tobytes() == source.tobytes()
    mapped.close()  # raises BufferError if anything still refers to it
    plain.clear()


def test_tensors_of_the_host_can_be_registered(client: ostraca.Client, volume: ostraca.Volume) -> None:
    torch = pytest.importorskip("torch")
    chain, source = stored(volume, 4)
    tensor = torch.zeros(4, BLOCK_BYTES // 2, dtype=torch.bfloat16)
    with client.register(tensor) as region:
        assert volume.get(chain, into=region.rows([3, 2, 1, 0]), deadline_s=FAR_S).hits == 4
        assert np.array_equal(tensor.view(torch.uint8).numpy(), source[::-1])
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.untyped_storage().resize_(0)


def test_damaged_blocks_are_misses_and_only_rows_of_hits_are_defined(
    agent: ScriptedAgent, volume: ostraca.Volume, region: ostraca.Region, pool: NDArray[np.uint8]
) -> None:
    chain, source = stored(volume, 3)

    def spoil_one(connection: AgentConnection, message: Get) -> None:
        connection.land(message, [0, 2])
        connection.land(message, [1], spoil=lambda payload: payload[:-1] + bytes([payload[-1] ^ 1]))
        connection.send(GetDone(message.request, bytes([BlockState.HIT] * 3), bytes(3)))

    agent.script[Get] = spoil_one
    result = volume.get(chain, into=region.rows([4, 5, 6]), deadline_s=FAR_S)
    assert result.states == (BlockState.HIT, BlockState.MISS, BlockState.HIT)
    assert result.reasons[1] == Reason.DAMAGED
    assert np.array_equal(pool[[4, 6]], source[[0, 2]])
    assert (np.delete(pool, [4, 5, 6], axis=0) == UNTOUCHED).all()


def begin_to_land(connection: AgentConnection, message: Get, then: threading.Event) -> None:
    """Send half of a frame with all blocks, and the rest *then*, with an answer that all have landed."""
    ids, slots = connection.block_ids(message), codec.u64(message.slots, len(message.slots) // 8)
    found = [connection.agent.blocks[each] for each in ids]
    frame = bulk_frame(
        message.request,
        *((int(slot), payload) for slot, (_, payload) in zip(slots, found, strict=True)),
    )
    connection.socket.sendall(frame[: len(frame) // 2])
    assert then.wait(FAR_S)
    connection.socket.sendall(frame[len(frame) // 2 :])
    every = np.arange(len(ids), dtype=codec.U32).tobytes()
    connection.send(GetProgress(message.request, every, b"".join(tag for tag, _ in found)))
    connection.send(GetDone(message.request, bytes([BlockState.HIT] * len(ids)), bytes(len(ids))))


@pytest.mark.parametrize("end", ["deadline", "cancel", "close"])
def test_a_frame_under_way_at_the_end_of_a_get_writes_nothing_afterwards(
    agent: ScriptedAgent, client: ostraca.Client, pool: NDArray[np.uint8], end: str
) -> None:
    volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
    chain, source = stored(volume, 4)
    goes_on = threading.Event()
    agent.script[Get] = lambda connection, message: begin_to_land(connection, message, goes_on)
    region = client.register(pool)
    ticket = volume.submit_get(
        chain, into=region.rows([0, 1, 2, 3]), deadline_s=SOON_S if end == "deadline" else FAR_S
    )
    watch = Stopwatch()
    while not np.array_equal(pool[0], source[0]):
        assert watch.passed_s < FAR_S, "the first block lands in its row"
    if end == "cancel":
        client.cancel(ticket)
    elif end == "close":
        client.close()
    while not (done := client.take_completions()):
        assert watch.passed_s < FAR_S
    assert isinstance(done[0].result, ostraca.GetResult)
    assert done[0].result.hits == 0
    if end == "close":
        assert repr(region) == f"<Region: {ROWS} rows of {BLOCK_BYTES} bytes, unregistered>"
    pool[:] = OTHER
    goes_on.set()
    if end != "close":
        # The rest of the frame is discarded, and later frames land.
        del agent.script[Get]
        assert volume.get(chain, into=region.rows([8, 9, 10, 11]), deadline_s=FAR_S).hits == 4
        assert np.array_equal(pool[8:12], source)
        region.unregister()
        assert is_whole(client)
    assert (pool[:8] == OTHER).all(), "nothing landed in rows of the ended get"


def test_bytes_that_come_after_the_deadline_are_discarded(
    agent: ScriptedAgent, volume: ostraca.Volume, region: ostraca.Region, pool: NDArray[np.uint8]
) -> None:
    chain, source = stored(volume, 4)
    goes_on = threading.Event()

    def land_late(connection: AgentConnection, message: Get) -> None:
        assert goes_on.wait(FAR_S)
        connection.land(message, [0, 1, 2, 3])
        connection.send(GetDone(message.request, bytes([BlockState.HIT] * 4), bytes(4)))

    agent.script[Get] = land_late
    result = volume.get(chain, into=region.rows([0, 1, 2, 3]), deadline_s=SOON_S)
    assert result.states == (BlockState.LATE,) * 4
    assert (pool == UNTOUCHED).all()
    goes_on.set()
    del agent.script[Get]
    assert volume.get(chain, into=region.rows([9, 8, 7, 6]), deadline_s=FAR_S).hits == 4
    assert (pool[:4] == UNTOUCHED).all()
    assert np.array_equal(pool[9:5:-1], source)


def test_a_block_longer_than_its_row_lands_nowhere(
    agent: ScriptedAgent, volume: ostraca.Volume, client: ostraca.Client
) -> None:
    """The slot, the row's name, has room for more; the next row has not."""
    pool = somewhere(8).reshape(16, BLOCK_BYTES // 2)
    chain = volume.chain(hashes(1))

    def overrun(connection: AgentConnection, message: Get) -> None:
        connection.send_bulk(message.request, (int(codec.u64(message.slots, 1)[0]), bytes(BLOCK_BYTES)))
        every = np.arange(1, dtype=codec.U32).tobytes()
        connection.send(GetProgress(message.request, every, bytes(16)))
        connection.send(GetDone(message.request, bytes([BlockState.HIT]), bytes(1)))

    agent.script[Get] = overrun
    with client.register(pool) as region:
        result = volume.get(chain, into=region.rows([2]), deadline_s=FAR_S)
    assert result.reasons == (Reason.DAMAGED,)
    assert (pool == UNTOUCHED).all()


def test_a_put_reads_no_row_after_its_end(agent: ScriptedAgent, client: ostraca.Client) -> None:
    """Blocks wait for a socket that takes no more. At the deadline, zeros wait in their place."""
    volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
    blocks = SETTINGS.put_window_bytes // BLOCK_BYTES
    mapped, source = mmap.mmap(-1, blocks * BLOCK_BYTES), 1 + some_bytes(blocks)  # without a zero
    mapped[:] = source.tobytes()
    incoming: list[Incoming] = []

    def fetch_often(connection: AgentConnection, message: Put) -> None:
        """Ask for all blocks again and again, and read on from the second time at the earliest later."""
        agent.goes_on.clear()
        for transfer in range(8):
            incoming.append(Incoming.of(codec.u32(message.lengths, blocks)))
            connection.incoming[transfer] = incoming[-1]
            connection.send(Fetch(transfer, message.slots, message.lengths))
        come = 0
        while come < 8 * blocks and (bulk := connection.ended.get()) is not None:
            come += len(bulk.places)
        connection.send(PutDone(message.request, bytes([PutState.LATE]) * blocks, bytes(blocks)))

    agent.script[Put] = fetch_often
    region = client.register(mapped, row_bytes=BLOCK_BYTES)
    result = volume.put(volume.chain(hashes(blocks)), source=region.rows(range(blocks)), deadline_s=SOON_S)
    assert result.states == (PutState.LATE,) * blocks
    region.unregister()
    mapped.close()
    agent.goes_on.set()
    del agent.script[Put]
    other = volume.put(volume.chain(hashes(1, "other")), source=some_bytes(1), deadline_s=FAR_S)
    assert other.states == (PutState.COMMITTED,), "the stream goes on behind the zeros"
    sent = []
    for each in incoming:
        for block, row in zip(each.blocks(), source, strict=True):
            sent.append(len(block.rstrip(bytes(1))))
            assert block[: sent[-1]] == row[: sent[-1]].tobytes()
    assert sent[0] == BLOCK_BYTES
    assert sent[-1] == 0, "some blocks were not sent by the deadline"
    assert is_whole(client)


def hang_up_in_mid_frame(connection: AgentConnection, message: Get) -> None:
    """Send half of a frame, and end the connection."""
    gone = threading.Event()

    def hang_up() -> None:
        connection.hang_up()
        gone.set()

    threading.Timer(0.05, hang_up).start()
    begin_to_land(connection, message, gone)


def test_a_connection_that_ends_in_mid_frame_leaves_misses_and_rows_to_use_again(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume, region: ostraca.Region
) -> None:
    chain, _ = stored(volume, 4)
    agent.script[Get] = hang_up_in_mid_frame
    result = volume.get(chain, into=region.rows([0, 1, 2, 3]), deadline_s=FAR_S)
    assert result.reasons == (Reason.DISCONNECTED,) * 4
    del agent.script[Get]
    target = region.rows([0, 1, 2, 3])
    watch = Stopwatch()
    while (again := volume.get(chain, into=target, deadline_s=FAR_S)).hits < 4:
        assert watch.passed_s < FAR_S, again
    assert is_whole(client)


def test_a_row_belongs_to_one_get_at_a_time_or_to_puts(
    agent: ScriptedAgent, client: ostraca.Client, region: ostraca.Region
) -> None:
    volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
    chain, others = volume.chain(hashes(2)), volume.chain(hashes(2, "others"))
    agent.script |= {Get: silent, Put: silent}
    volume.submit_get(chain, into=region.rows([3, 4]), deadline_s=FAR_S)
    volume.submit_put(others, source=region.rows([5, 6]), deadline_s=FAR_S)
    volume.submit_put(others, source=region.rows([6, 7]), deadline_s=FAR_S)  # reading harms no reader
    for numbers in ([2, 3], [7, 8]):
        with pytest.raises(UsageError, match="in use by another operation"):
            volume.get(chain, into=region.rows(numbers), deadline_s=FAR_S)
    with pytest.raises(UsageError, match="row 4 of the region is in use"):
        volume.put(chain, source=region.rows([4, 6]), deadline_s=FAR_S)
    with pytest.raises(UsageError, match="3 operations use rows"):
        region.unregister()
    for ticket in (1, 2, 3):
        client.cancel(ostraca.Ticket(ticket))
    watch, ended = Stopwatch(), 0
    while ended < 3:
        ended += len(client.take_completions())
        assert watch.passed_s < FAR_S
    agent.script.clear()
    assert volume.put(chain, source=region.rows([3, 6]), deadline_s=FAR_S).states == (PutState.COMMITTED,) * 2
    assert volume.get(chain, into=region.rows([7, 8]), deadline_s=FAR_S).hits == 2


def test_a_declined_operation_lets_go_of_its_rows(
    agent: ScriptedAgent, client: ostraca.Client, volume: ostraca.Volume, region: ostraca.Region
) -> None:
    chain, rows = volume.chain(hashes(2)), region.rows([0, 1])
    for deadline_s in (0.0, -1.0):
        assert volume.get(chain, into=rows, deadline_s=deadline_s).states == (BlockState.LATE,) * 2
    agent.stop()
    while (put := volume.put(chain, source=rows, deadline_s=SOON_S)).reasons[0] != Reason.DISCONNECTED:
        assert put.states == (PutState.LATE,) * 2
    region.unregister()


def test_wrong_memory_and_wrong_rows_are_refused_with_advice(
    client: ostraca.Client, volume: ostraca.Volume, region: ostraca.Region, pool: NDArray[np.uint8]
) -> None:
    def refused(memory: object, words: str, row_bytes: int | None = None) -> None:
        with pytest.raises(UsageError, match=words):
            client.register(memory, row_bytes=row_bytes)

    refused(bytearray(64), "single axis: pass row_bytes")
    refused(bytearray(64), "not whole rows of 48", 48)
    refused(bytearray(64), "row_bytes", 65)
    refused(bytearray(64), "row_bytes", 0)
    refused(np.zeros((4, 8), np.uint8)[:, ::2], "has gaps: register contiguous")
    refused(np.zeros((4, 8), np.uint8)[::-1], "strides must be positive")
    refused(np.zeros((0, 8), np.uint8), "no bytes")
    refused(np.full((2, 2), None), "Python objects")
    refused(3, "is a int: pass an array")
    refused(pool[ROWS - 1 :], "overlaps a registered region of 16 rows")
    refused(pool, "register memory once")

    chain = volume.chain(hashes(2))
    for numbers, words in (
        ([0], "into has 1 blocks and the chain 2"),
        ([3, 3], "into names a row twice"),
    ):
        with pytest.raises(UsageError, match=words):
            volume.get(chain, into=region.rows(numbers), deadline_s=FAR_S)
    wrong: list[tuple[Any, str]] = [
        ([0, ROWS], "outside of 0 to 15"),
        ([-1], "outside of 0 to 15"),
        ([0.5], "no list of whole numbers"),
        (["a"], "no list of whole numbers"),
        ([True], "no list of whole numbers"),
        (3, "no list of whole numbers"),
        ([[1], [2, 3]], "can't be read as numbers"),
    ]
    for indices, words in wrong:
        with pytest.raises(UsageError, match=words):
            region.rows(indices)
    for lengths, words in (
        (0, "outside of 1 to 65536"),
        ([1, BLOCK_BYTES + 1], "outside of 1 to 65536"),
        ([1], "1 lengths for 2 rows"),
        ([1, 1.5], "lengths is no list of whole numbers"),
    ):
        with pytest.raises(UsageError, match=words):
            region.rows([0, 1], lengths=lengths)  # type: ignore[arg-type]  # that is the point
    fixed = np.zeros((2, BLOCK_BYTES), np.uint8)
    fixed.flags.writeable = False
    with client.register(fixed) as readable:
        assert (
            volume.put(chain, source=readable.rows([0, 1]), deadline_s=FAR_S).states
            == (PutState.COMMITTED,) * 2
        )
        with pytest.raises(UsageError, match="into is read-only"):
            volume.get(chain, into=readable.rows([0, 1]), deadline_s=FAR_S)
    long = client.register(np.zeros((2, 2 * BLOCK_BYTES), np.uint8)).rows([0, 1])
    with pytest.raises(UsageError, match=r"source\[0\] has 131072 bytes, and blocks of this volume at most"):
        volume.put(chain, source=long, deadline_s=FAR_S)


def test_an_unregistered_region_is_of_no_use_and_its_memory_can_be_registered_again(
    client: ostraca.Client, volume: ostraca.Volume, pool: NDArray[np.uint8]
) -> None:
    chain, source = stored(volume, 1)
    region = client.register(pool)
    rows = region.rows([0])
    region.unregister()
    region.unregister()
    with pytest.raises(UsageError, match="unregistered: register the memory again"):
        volume.get(chain, into=rows, deadline_s=FAR_S)
    assert (pool == UNTOUCHED).all()
    with client.register(pool) as again:
        assert volume.get(chain, into=again.rows([0]), deadline_s=FAR_S).hits == 1
    assert np.array_equal(pool[0], source[0])


def test_an_operation_that_begins_after_the_end_of_its_region_is_refused(region: ostraca.Region) -> None:
    blocks = region.rows([0]).blocks(argument="into", count=1, block_bytes=BLOCK_BYTES, is_written=True)
    region.unregister()
    with pytest.raises(UsageError, match="unregistered"):
        blocks.claim()


def test_a_dropped_region_keeps_no_memory(client: ostraca.Client) -> None:
    pool = somewhere(2)
    freed = weakref.ref(pool)
    client.register(pool)
    gc.collect()
    client.register(pool)  # not overlapping: the first is gone
    del pool
    gc.collect()
    assert freed() is None


def test_the_end_of_a_client_is_the_end_of_its_regions(agent: ScriptedAgent) -> None:
    mapped = mmap.mmap(-1, BLOCK_BYTES)
    with ostraca.connect(agent.address, settings=SETTINGS) as client:
        region = client.register(mapped, row_bytes=BLOCK_BYTES)
    mapped.close()
    region.unregister()
    with pytest.raises(ClosedError):
        client.register(bytearray(BLOCK_BYTES), row_bytes=BLOCK_BYTES)


def test_a_block_that_raises_leaves_a_region_in_use_to_its_operations(
    agent: ScriptedAgent, client: ostraca.Client, pool: NDArray[np.uint8]
) -> None:
    volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
    agent.script[Get] = silent
    with contextlib.suppress(ZeroDivisionError), client.register(pool) as region:
        volume.submit_get(volume.chain(hashes(1)), into=region.rows([0]), deadline_s=FAR_S)
        raise ZeroDivisionError
    with (
        pytest.raises(UsageError, match="1 operations use rows"),
        client.register(somewhere(1)) as other,
    ):
        volume.submit_get(volume.chain(hashes(1)), into=other.rows([0]), deadline_s=FAR_S)


def test_a_forked_child_has_no_use_of_a_region_and_harms_none(
    client: ostraca.Client, volume: ostraca.Volume, region: ostraca.Region, pool: NDArray[np.uint8]
) -> None:
    chain, source = stored(volume, 2)
    rows = region.rows([0, 1])
    child = os.fork()
    if not child:
        code = 1
        try:
            try:
                client.register(bytearray(64), row_bytes=64)
            except ClosedError:
                region.unregister()
                code = 0
        finally:
            os._exit(code)
    assert volume.get(chain, into=rows, deadline_s=FAR_S).hits == 2
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(pool[:2], source)


def test_rows_of_a_client_that_reads_drives_are_copied(
    agent: ScriptedAgent, tmp_path: Path, pool: NDArray[np.uint8]
) -> None:
    """A silent drive may write long after the end of a get, so only the arena is lent to it."""
    (tmp_path / "drives").mkdir()
    settings = replace(SETTINGS, direct_drives=(str(tmp_path / "drives"),))
    with ostraca.connect(agent.address, settings=settings) as client:
        assert client._runtime.direct is not None
        volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        chain, source = stored(volume, 4)
        client._runtime.arena.array[:] = 0
        with client.register(pool) as region:
            assert volume.get(chain, into=region.rows([3, 1, 2, 0]), deadline_s=FAR_S).hits == 4
        assert np.array_equal(pool[[3, 1, 2, 0]], source)
        assert arena_has(client._runtime.arena, source[0])


def arena_has(arena: Arena, block: NDArray[np.uint8]) -> bool:
    return any(
        np.array_equal(arena.array[at : at + BLOCK_BYTES], block)
        for at in range(0, arena.size_bytes, BLOCK_BYTES)
    )


def test_rows_of_another_clients_region_are_refused(
    agent: ScriptedAgent, volume: ostraca.Volume, region: ostraca.Region
) -> None:
    chain = volume.chain(hashes(1))
    with ostraca.connect(agent.address, settings=SETTINGS) as other:
        theirs = other.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        for move in (
            lambda: theirs.get(chain, into=region.rows([0]), deadline_s=FAR_S),
            lambda: theirs.put(chain, source=region.rows([0]), deadline_s=FAR_S),
        ):
            with pytest.raises(UsageError, match="another client's region: register memory with this client"):
                move()


def test_memory_behind_an_array_of_a_buffer_stays_while_registered(client: ostraca.Client) -> None:
    held = bytearray(ROWS * BLOCK_BYTES)
    array = np.ndarray((ROWS - 1, BLOCK_BYTES), np.uint8, held, offset=BLOCK_BYTES)
    with client.register(array):
        del array
        with pytest.raises(BufferError):
            held.clear()
    held.clear()
