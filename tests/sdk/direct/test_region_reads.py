"""Gets into rows of a region by a client that reads drives itself: in place, where the caller consents."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.fabric.connection.bulk import bulk_frame
from tests.sdk.conftest import BLOCK_BYTES, SETTINGS, SOON_S, hashes
from tests.sdk.direct.test_direct_gets import (
    BLOCKS,
    FAR_S,
    HIT,
    LATE,
    MISS,
    RIGHT,
    UNTOUCHED,
    Host,
    Places,
    answer,
    counters,
    end,
    extents,
    hanging,
    length_of,
    volume_of,
    wait_free,
)
from tests.sdk.scripted_agent import AgentConnection, ScriptedAgent, agent_at
from tests.support.simulated.stuck_memory import StuckMemory
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import Reason, aio
from ostraca._connection.session import AgentSession
from ostraca._memory.host_blocks import HostBlocks
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.handshake import DIRECT, LEAVING
from ostraca_fabric.wire.messages import ExtentsRead, Get

ROWS = 16
NUMBERS = [9, 2, 5, 12, 0, 7]
"""Rows of the blocks."""

SPARE = [1, 3, 4, 6, 8, 10]
LENGTHS = [length_of(position) for position in range(BLOCKS)]
OTHER = 0x55
"""What a caller writes into rows that are its own again."""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with agent_at(tmp_path / "agent.sock", features=(LEAVING, DIRECT)) as agent:
        made = Host(tmp_path, agent)
        made.store()
        yield made


@dataclass
class Pool:
    """Rows that begin at pages. Rows under a read that hangs must not be looked at."""

    mapped: mmap.mmap = field(
        default_factory=lambda: mmap.mmap(
            -1, (ROWS + 1) * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
    )

    def rows(self, *, at: int = 0, row_bytes: int = BLOCK_BYTES) -> NDArray[np.uint8]:
        memory = np.frombuffer(self.mapped, np.uint8)[at : at + ROWS * row_bytes].reshape(ROWS, row_bytes)
        memory[:] = UNTOUCHED
        return memory


def rows_of(region: ostraca.Region, numbers: Sequence[int] = NUMBERS) -> Any:
    return region.rows(numbers, lengths=LENGTHS[: len(numbers)])


def get(
    client: ostraca.Client,
    region: ostraca.Region,
    numbers: Sequence[int] = NUMBERS,
    deadline_s: float = FAR_S,
) -> ostraca.GetResult:
    volume = volume_of(client)
    chain = volume.chain(hashes(BLOCKS))[: len(numbers)]
    return volume.get(chain, into=rows_of(region, numbers), deadline_s=deadline_s)


def expected(host: Host, hits: Sequence[int], *, padded: Sequence[int]) -> NDArray[np.uint8]:
    """Return the pool after a get with these hits, some of them with zeros behind, and the others wiped."""
    pool = np.full((ROWS, BLOCK_BYTES), UNTOUCHED, np.uint8)
    for position, row in enumerate(NUMBERS):
        length = length_of(position)
        if position in padded or position not in hits:
            pool[row, : -(-length // PAGE_BYTES) * PAGE_BYTES] = 0
        if position in hits:
            pool[row, :length] = host.source[position]
    return pool


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a job that copies blocks between arena and caller."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a copy")

    monkeypatch.setattr(HostBlocks, "scatter", refuse)


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("mine", [range(BLOCKS), (1, 2, 5)], ids=["all", "some"])
def test_blocks_of_a_drive_land_in_their_rows_with_zeros_up_to_the_next_page(
    host: Host, mine: Sequence[int]
) -> None:
    host.offer({position: RIGHT[position] for position in mine})
    pool = Pool().rows()
    with host.client() as client, client.register(pool, may_withhold=True) as region:
        found = get(client, region)
        assert set(found.states) == {HIT}
        assert (found.withheld.positions, region.withheld) == ((), ())
        assert found.withheld.wait(0)
        assert np.array_equal(pool, expected(host, range(BLOCKS), padded=mine))
        assert not client._runtime.arena.array.any(), "the arena never saw a block"
        assert counters(client).blocks_read == len(mine)
        wait_free(client)
        put = volume_of(client)
        again = put.put(put.chain(hashes(BLOCKS, "again")), source=rows_of(region), deadline_s=FAR_S)
        assert again.accepted == BLOCKS, "from rows, in place"
    assert host.report() == ([*mine], [])


@pytest.mark.usefixtures("no_copies")
def test_blocks_that_fail_their_tags_are_delivered_into_their_wiped_rows(host: Host) -> None:
    host.offer({**RIGHT, 1: RIGHT[2], 4: RIGHT[0]})
    pool = Pool().rows()
    with host.client() as client, client.register(pool, may_withhold=True) as region:
        assert set(get(client, region).states) == {HIT}
        assert np.array_equal(pool, expected(host, range(BLOCKS), padded=range(BLOCKS)))
        assert counters(client).blocks_failed == 2
    assert host.asked_again() == [1, 4]


def test_over_another_transport_blocks_of_the_agent_are_copied_into_their_rows(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over NIXL, where the agent's blocks land in the arena."""
    monkeypatch.setattr(AgentSession, "takes_rows", False)
    host.offer({1: RIGHT[1], 2: RIGHT[0], 5: RIGHT[5]})
    pool = Pool().rows()
    with host.client() as client, client.register(pool, may_withhold=True) as region:
        assert set(get(client, region).states) == {HIT}
        assert np.array_equal(pool, expected(host, range(BLOCKS), padded=[1, 2, 5]))
        landed = client._runtime.arena.array.tobytes()
        is_there = [block.tobytes() in landed for block in host.source]
        assert is_there == [True, False, True, True, True, False]
    assert host.asked_again() == [2]


@pytest.mark.parametrize("second", ["none", "silence"])
def test_bytes_that_fail_their_tag_do_not_stay_in_their_row(host: Host, second: str) -> None:
    """Whether the get ends before a second request, or with it."""

    def offer(connection: AgentConnection, message: Get) -> None:
        if not message.is_again:
            connection.send(extents(connection, message, {**RIGHT, 4: RIGHT[0]}))
            if second == "silence":
                end(connection, message)

    host.agent.script[Get] = offer
    pool = Pool().rows()
    with host.client() as client, client.register(pool, may_withhold=True) as region:
        found = get(client, region, deadline_s=3 * SOON_S)
        assert found.holes == (4,)
        assert found.withheld.wait(FAR_S)
        assert np.array_equal(pool, expected(host, [0, 1, 2, 3, 5], padded=range(BLOCKS)))
        region.unregister()
    assert len(host.agent.seen_of(Get)) == (2 if second == "silence" else 1)


class StuckRows:
    """Rows of a pool: whoever writes to them waits until the release."""

    def __init__(self, pool: NDArray[np.uint8], numbers: Sequence[int]) -> None:
        self._memory = [StuckMemory(BLOCK_BYTES, within=pool[row]) for row in numbers]

    def release(self) -> None:
        while self._memory:
            self._memory.pop().release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


OUTCOMES = {
    "silence": (MISS, Reason.DRIVE_SUSPECT),
    "deadline": (LATE, Reason.DEADLINE),
    "cancel": (LATE, Reason.CANCELLED),
    "loss": (MISS, Reason.DISCONNECTED),
}


@pytest.mark.parametrize("end_by", OUTCOMES)
def test_rows_under_a_read_that_hangs_are_withheld_until_it_ends(host: Host, end_by: str) -> None:
    pool = Pool()

    def offer(connection: AgentConnection, message: Get) -> None:
        del host.agent.script[Get]
        connection.send(extents(connection, message, RIGHT))
        end(connection, message)
        if end_by == "loss":
            connection.hang_up()

    host.agent.script[Get] = offer
    rows = pool.rows()
    deadline_s = SOON_S if end_by == "deadline" else FAR_S
    with (
        host.client(direct_silent_s=0.05 if end_by == "silence" else FAR_S, direct_retry_s=0.05) as client,
        StuckRows(rows, NUMBERS) as hang,
    ):
        region, volume = client.register(rows, may_withhold=True), volume_of(client)
        del rows
        chain = volume.chain(hashes(BLOCKS))
        ticket = volume.submit_get(chain, into=rows_of(region), deadline_s=deadline_s)
        wait_reading(client)
        if end_by == "cancel":
            client.cancel(ticket)
        found = taken(client)
        assert set(zip(found.states, found.reasons, strict=True)) == {OUTCOMES[end_by]}
        assert found.withheld.positions == tuple(range(BLOCKS))
        assert region.withheld == tuple(sorted(NUMBERS))
        with pytest.raises(UsageError, match="row 9 of the region is in use by a late write"):
            get(client, region)
        with pytest.raises(UsageError, match="row 7 of the region is in use by a late write"):
            volume.put(chain[:2], source=region.rows([1, 7]), deadline_s=FAR_S)
        with pytest.raises(UsageError, match="late bytes may still land in 6 rows of the region"):
            region.unregister()
        assert get(client, region, SPARE).hits == BLOCKS, "other rows are of use"
        assert not found.withheld.wait(0.05)
        hang.release()
        assert found.withheld.wait(FAR_S)
        assert (found.withheld.positions, len(found.withheld), region.withheld) == ((), 0, ())
        left = np.frombuffer(pool.mapped, np.uint8)[: ROWS * BLOCK_BYTES].reshape(ROWS, BLOCK_BYTES)[NUMBERS]
        assert not left.any(), "late bytes do not stay"
        del left
        assert get(client, region).hits == BLOCKS, "the rows are free"
        wait_free(client)
        region.unregister()
        pool.mapped.close()  # raises BufferError if anything still refers to it


def wait_reading(client: ostraca.Client) -> None:
    """Wait until reads are under way."""
    reader, watch = client._runtime.direct, Stopwatch()
    while reader is None or not reader._requests:
        assert watch.passed_s < FAR_S


def taken(client: ostraca.Client) -> ostraca.GetResult:
    """Wait for the end of the only ticket."""
    watch = Stopwatch()
    while not (done := client.take_completions()):
        assert watch.passed_s < FAR_S
    assert isinstance(done[0].result, ostraca.GetResult)
    return done[0].result


def test_only_rows_that_a_drive_may_write_are_withheld_and_no_frame_lands_in_others(host: Host) -> None:
    """The agent is in the middle of a frame when the get ends."""
    goes_on = threading.Event()

    def offer(connection: AgentConnection, message: Get) -> None:
        del host.agent.script[Get]
        connection.send(extents(connection, message, {3: RIGHT[3], 5: RIGHT[5]}))
        connection.land(message, [0])
        slots, ids = codec.u64(message.slots, BLOCKS), connection.block_ids(message)
        payloads = [connection.agent.blocks[each][1] for each in ids]
        frame = bulk_frame(message.request, *((int(slots[at]), payloads[at]) for at in (1, 2, 4)))
        connection.socket.sendall(frame[: len(frame) // 2])
        assert goes_on.wait(FAR_S)
        connection.socket.sendall(frame[len(frame) // 2 :])
        end(connection, message)

    host.agent.script[Get] = offer
    rows = Pool().rows()
    with (
        host.client(direct_silent_s=FAR_S) as client,
        StuckRows(rows, [NUMBERS[3], NUMBERS[5]]) as hang,
        client.register(rows, may_withhold=True) as region,
    ):
        found = get(client, region, deadline_s=3 * SOON_S)
        assert found.states == (HIT, LATE, LATE, LATE, LATE, LATE)
        assert found.withheld.positions == (3, 5)
        assert np.array_equal(rows[NUMBERS[0], : LENGTHS[0]], host.source[0])
        own = [NUMBERS[at] for at in (0, 1, 2, 4)]
        rows[own] = OTHER
        goes_on.set()
        assert get(client, region, SPARE).hits == BLOCKS, "behind the rest of the frame"
        assert (rows[own] == OTHER).all()
        hang.release()
        assert found.withheld.wait(FAR_S)
        assert (rows[own] == OTHER).all()
        assert get(client, region).hits == BLOCKS


def test_rows_of_a_closed_client_are_withheld_until_the_read_ends(host: Host) -> None:
    host.offer(RIGHT)
    pool = Pool()
    rows = pool.rows()
    settings = replace(SETTINGS, direct_drives=(str(host.drive),), prefault=False)
    client = ostraca.connect(host.agent.address, settings=settings)
    with StuckRows(rows, NUMBERS) as hang:
        region = client.register(rows, may_withhold=True)
        del rows
        found = get(client, region, deadline_s=SOON_S)
        assert set(found.states) == {LATE}
        client.close()
        assert found.withheld.positions == tuple(range(BLOCKS))
        assert "unregistered" not in repr(region)
        with pytest.raises(UsageError, match="late bytes may still land in 6 rows"):
            region.unregister()
        with pytest.raises(BufferError):
            pool.mapped.close()
        hang.release()
        assert found.withheld.wait(FAR_S)
        assert "unregistered" in repr(region)
        assert not np.frombuffer(pool.mapped, np.uint8).reshape(ROWS + 1, -1)[NUMBERS].any()
        pool.mapped.close()


def test_a_forked_child_lets_go_of_withheld_rows_and_its_parent_keeps_them(host: Host) -> None:
    host.offer(RIGHT)
    rows = Pool().rows()
    with host.client(direct_silent_s=FAR_S) as client, StuckRows(rows, NUMBERS) as hang:
        region = client.register(rows, may_withhold=True)
        found = get(client, region, deadline_s=SOON_S)
        child = os.fork()
        if not child:
            region.unregister()
            os._exit(0 if "unregistered" in repr(region) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert region.withheld == tuple(sorted(NUMBERS))
        hang.release()
        assert found.withheld.wait(FAR_S)
        region.unregister()


def test_a_cancelled_task_leaves_rows_withheld_that_their_region_names(host: Host) -> None:
    host.offer(RIGHT)
    rows = Pool().rows()

    async def cancel_a_get(client: aio.AsyncClient, region: ostraca.Region) -> None:
        volume = aio.AsyncVolume(volume_of(client.blocking))
        chain = volume.chain(hashes(BLOCKS))
        task = asyncio.create_task(volume.get(chain, into=rows_of(region), deadline_s=FAR_S))
        await asyncio.to_thread(wait_reading, client.blocking)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with host.client(direct_silent_s=FAR_S) as client, StuckRows(rows, NUMBERS) as hang:
        region = asyncio.run(aio.AsyncClient(client).register(rows, may_withhold=True))
        asyncio.run(cancel_a_get(aio.AsyncClient(client), region))
        assert region.withheld == tuple(sorted(NUMBERS))
        hang.release()
        watch = Stopwatch()
        while region.withheld:
            assert watch.passed_s < FAR_S
        region.unregister()


COPIED: Mapping[str, dict[str, Any]] = {
    "no consent": {"may_withhold": False},
    "a row between pages": {"at": 16},
    "rows of no whole pages": {"row_bytes": BLOCK_BYTES + 16},
}


@pytest.mark.parametrize("how", COPIED)
def test_other_regions_are_copied_and_never_withheld(host: Host, how: str) -> None:
    chosen = {"may_withhold": True, **COPIED[how]}
    may_withhold = chosen.pop("may_withhold")
    rows = Pool().rows(**chosen)

    def offer(places: Places) -> None:
        host.agent.script[Get] = lambda connection, message: answer(connection, message, places)

    offer({**RIGHT, 4: RIGHT[0]})
    with (
        host.client(direct_silent_s=0.05, direct_retry_s=FAR_S) as client,
        client.register(rows, may_withhold=may_withhold) as region,
    ):
        assert get(client, region).hits == BLOCKS
        assert (counters(client).blocks_read, counters(client).blocks_failed) == (BLOCKS - 1, 1)
        for position, row in enumerate(NUMBERS):
            assert np.array_equal(rows[row, : LENGTHS[position]], host.source[position])
            rows[row, : LENGTHS[position]] = UNTOUCHED
        assert (rows == UNTOUCHED).all(), "without zeros behind"
    with (
        host.client(direct_silent_s=0.05, direct_retry_s=FAR_S) as client,
        hanging(host, client) as hang,
        client.register(rows, may_withhold=may_withhold) as region,
    ):
        found = get(client, region)
        assert set(found.reasons) == {Reason.DRIVE_SUSPECT}
        assert (found.withheld.positions, region.withheld) == ((), ())
        region.unregister()
        rows[:] = OTHER
        hang.release()
        wait_free(client)
        assert (rows == OTHER).all()
    assert len(host.agent.seen_of(ExtentsRead)) == 2


def test_consent_is_a_flag(host: Host) -> None:
    with host.client() as client, pytest.raises(UsageError, match="may_withhold"):
        client.register(Pool().rows(), may_withhold="yes")  # type: ignore[arg-type]  # that is the point


def test_the_agent_delivers_into_consenting_rows_of_a_client_without_drives(host: Host) -> None:
    rows = Pool().rows()
    host.agent.script[Get] = ScriptedAgent.usual
    with (
        ostraca.connect(host.agent.address, settings=SETTINGS) as client,
        client.register(rows, may_withhold=True) as region,
    ):
        assert get(client, region).hits == BLOCKS
        assert np.array_equal(rows, expected(host, range(BLOCKS), padded=[]))
