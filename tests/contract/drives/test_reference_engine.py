"""Scheduling by the reference engine, I/O by I/O, over devices that a test holds up.

The C engine follows the same rules. Its I/Os begin in a thread, so that tests see only results and ends.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace

import numpy as np
import pytest
from tests.contract.drives.drive_contract import DRIVE_BYTES, at_page, pages, pieces, tag_check
from tests.support.simulated.drives.device_drive import DeviceDrive
from tests.support.simulated.drives.reference_engine import Done, ReferenceEngine, ReferenceIo, cut

from ostraca_fabric.drives.io_engine import FlashIoSettings, IoEnd, IoOperation
from ostraca_fabric.model.extent import PAGE_BYTES, Pieces
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.tables.digests import CheckState

LONG_PAGES = 128
LONG_BYTES = LONG_PAGES * PAGE_BYTES
SHORT_PAGES = 64
"""Of the longest short batch."""


class Held:
    """Engine of drives whose I/Os end when the test says so."""

    def __init__(self, limits: FlashIoSettings | None = None) -> None:
        self.engine = ReferenceEngine(limits)
        self.begun: list[str] = []
        """Drive and place, in pages, of each I/O begun."""

        self.under_way: dict[str, tuple[ReferenceIo, Done]] = {}

    def end(self, *names: str, failure: int | None = None, moved: int = 0) -> None:
        for name in names:
            io, done = self.under_way.pop(name)
            io.moved = moved
            done(failure)

    def take_begun(self) -> list[str]:
        begun, self.begun = self.begun, []
        return begun


class HeldUpDrive(DeviceDrive):
    """Drive of a ``Held`` engine."""

    def __init__(self, name: str, held: Held) -> None:
        super().__init__(
            DriveId(name), DRIVE_BYTES, pieces_queued_max=4096, has_volatile_cache=False, engine=held.engine
        )
        self._held = held

    def begin(self, io: ReferenceIo, done: Done) -> None:
        name = f"{self.id}{io.offset // PAGE_BYTES}"
        self._held.begun.append(name)
        self._held.under_way[name] = io, done


def submit(
    drive: DeviceDrive, *places: int, count: int = LONG_PAGES
) -> list[asyncio.Future[np.ndarray[tuple[int], np.dtype[np.bool_]]]]:
    """Read *count* pages at each of these places, a batch each."""
    return [drive.submit_read(at_page(pages(count), place)) for place in places]


def rows(*ends: int) -> list[slice]:
    return [slice(first, last) for first, last in zip((0, *ends), ends, strict=False)]


MIB_PAGES = 256


@pytest.mark.parametrize(
    ("on", "counts", "expected"),
    [
        ([], [], rows()),
        ([4, 5, 7], [1, 1, 1], rows(2, 3)),
        ([5, 4], [1, 1], rows(1, 2)),
        (range(513), [1] * 513, rows(256, 512, 513)),
        ([0] * 300, [0] * 300, rows(256, 300)),
        ([0, MIB_PAGES - 1, MIB_PAGES], [MIB_PAGES - 1, 1, 1], rows(2, 3)),
        ([0, MIB_PAGES - 1], [MIB_PAGES - 1, 2], rows(1, 2)),
        ([0, 1, MIB_PAGES + 2], [1, MIB_PAGES + 1, 1], rows(1, 2, 3)),
    ],
    ids=["nothing", "gap", "backwards", "pages", "pieces", "full", "too full", "long piece"],
)
def test_a_batch_is_cut_into_runs_of_adjacent_pieces(
    on: list[int], counts: list[int], expected: list[slice]
) -> None:
    assert cut(pieces(pages(1), [0] * len(on), on, counts)) == expected


async def test_the_bytes_under_way_on_one_drive_are_limited() -> None:
    held = Held(FlashIoSettings(drive_bytes_max=2 * LONG_BYTES))
    a, b = HeldUpDrive("a", held), HeldUpDrive("b", held)
    submit(a, 0, 1, 2, 3)
    submit(b, 0)
    assert held.take_begun() == ["a0", "a1", "b0"]
    held.end("b0")
    assert held.take_begun() == []
    held.end("a1")
    assert held.take_begun() == ["a2"]


async def test_the_bytes_under_way_in_total_are_limited_except_for_idle_drives() -> None:
    held = Held(FlashIoSettings(bytes_max=2 * LONG_BYTES))
    a, b = HeldUpDrive("a", held), HeldUpDrive("b", held)
    submit(a, 0, 1, 2)
    submit(b, 0, 1)
    assert held.take_begun() == ["a0", "a1", "b0"]
    held.end("a0")
    assert held.take_begun() == []
    held.end("b0")
    assert held.take_begun() == ["b1"]


async def test_drives_take_turns() -> None:
    held = Held()
    a, b = HeldUpDrive("a", held), HeldUpDrive("b", held)

    class Meanwhile(HeldUpDrive):
        def begin(self, io: ReferenceIo, done: Done) -> None:
            for drive in (a, b):
                drive.submit_read(pieces(pages(3), range(3), [0, 2, 4]))
            super().begin(io, done)

    submit(Meanwhile("c", held), 0)
    assert held.take_begun() == ["c0", "a0", "b0", "a2", "b2", "a4", "b4"]


async def test_short_batches_overtake_long_ones_with_a_limit() -> None:
    held = Held(FlashIoSettings(drive_bytes_max=PAGE_BYTES))
    a = HeldUpDrive("a", held)
    shorts = [f"a{place}" for place in range(10, 26)]
    submit(a, 0, 1)
    submit(a, *range(10, 26), count=1)
    assert held.take_begun() == ["a0"]
    held.end("a0")
    assert held.take_begun() == shorts[:8]
    held.end(*shorts[:8])
    assert held.take_begun() == ["a1"]
    held.end("a1")
    assert held.take_begun() == shorts[8:]


async def test_short_batches_have_room_on_top_of_the_limits() -> None:
    held = Held(FlashIoSettings(drive_bytes_max=LONG_BYTES, bytes_max=LONG_BYTES))
    a = HeldUpDrive("a", held)
    submit(a, 0, 1)
    submit(a, 2, 3, count=SHORT_PAGES)
    assert held.take_begun() == ["a0", "a2"]
    held.end("a2")
    assert held.take_begun() == ["a3"]
    submit(a, 4, count=SHORT_PAGES + 1)  # not short
    held.end("a3", "a0")
    assert held.take_begun() == ["a1"]


async def test_a_failed_io_fails_its_pieces_alone() -> None:
    held, ends = Held(), list[IoEnd]()
    a = HeldUpDrive("a", held)
    source = pages(5, b"e")
    on = [0, 1, 4, 5, DRIVE_BYTES // PAGE_BYTES]
    wanted = pieces(source, range(5), on)  # the memory of failed pieces has the right bytes
    check = tag_check(wanted, source)
    handle = held.engine.add(a, DRIVE_BYTES)
    assert held.engine.submit(handle, IoOperation.READ, wanted, check, ends.append, states=check.states)
    assert held.take_begun() == ["a0", "a4"]
    held.end("a4")
    held.end("a0", failure=errno.EIO, moved=PAGE_BYTES)
    assert ends == []
    await asyncio.sleep(0)
    assert ends == [IoEnd(failed=2, offset=PAGE_BYTES, error=errno.EIO)]
    assert check.states.tolist() == [0, 0, CheckState.GOOD, CheckState.GOOD, 0]


async def test_tags_are_checked_once_behind_the_read_of_their_piece() -> None:
    held = Held()
    a, target = HeldUpDrive("a", held), pages(4)
    source = pages(4, b"o")
    check = tag_check(pieces(target, range(4), [0, 1, 4, 5]), source)
    reading = a.submit_read(check.pieces, check)
    target[:] = source
    held.end("a0")
    target[:] = 0  # a second check of the first pieces would find damage
    held.end("a4")
    assert (await reading).tolist() == [True, True, False, False]
    assert check.states.tolist() == [1, 1, 2, 2]


async def test_progress_is_told_once_a_turn_and_not_behind_the_end() -> None:
    held, told = Held(), list[int]()
    a = HeldUpDrive("a", held)
    wanted = pieces(pages(6), range(6), range(0, 12, 2))
    check = replace(
        tag_check(wanted, pages(6)),
        progress_bytes=2 * PAGE_BYTES,
        listeners=[lambda: told.append(int(np.count_nonzero(check.states)))],
    )
    reading = a.submit_read(wanted, check)
    held.end("a0")
    await asyncio.sleep(0)
    assert told == [], "too few bytes"
    held.end("a2", "a4", "a6")
    assert told == [], "in a later turn"
    await asyncio.sleep(0)
    assert told == [4]
    held.end("a8", "a10")
    assert (await reading).all()
    assert told == [4]


async def test_the_end_of_an_io_that_is_done_at_once_is_told_in_a_later_turn() -> None:
    class Ready(DeviceDrive):
        def begin(self, io: ReferenceIo, done: Done) -> None:
            done(None)

    drive = Ready(DriveId("a"), DRIVE_BYTES, pieces_queued_max=1 << 14, has_volatile_cache=False)
    count = 5000  # deeper than a stack of calls
    reading = drive.submit_read(pieces(pages(1), [0] * count, [0] * count))
    assert (reading.done(), drive.queued) == (False, count)
    assert (await reading).all()
    assert drive.queued == 0


async def test_a_cancelled_batch_is_performed_all_the_same() -> None:
    held = Held(FlashIoSettings(drive_bytes_max=PAGE_BYTES))
    a = HeldUpDrive("a", held)
    first, second = submit(a, 0, 1)
    second.cancel()
    held.end("a0")
    assert (await first).all()
    held.end("a1")
    await asyncio.sleep(0)
    assert a.queued == 0


async def test_a_piece_outside_of_memory_begins_nothing() -> None:
    held, ends = Held(), list[IoEnd]()
    handle = held.engine.add(HeldUpDrive("a", held), DRIVE_BYTES)
    outside: Pieces = pieces(pages(2), [0, 1], [0, 4], 2)
    assert not held.engine.submit(handle, IoOperation.READ, outside, None, ends.append)
    await asyncio.sleep(0)
    assert (held.begun, ends) == ([], [])
