"""What every drive must do. An adapter's test inherits this and gives the drive."""

from __future__ import annotations

import asyncio
import mmap
import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from ostraca_fabric.model.extent import PAGE_BYTES, Pieces
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.tables.digests import TagCheck, tags_of

DRIVE_BYTES = 8 << 20
PIECES_QUEUED_MAX = 2048


def pages(count: int, filled: bytes = b"") -> NDArray[np.uint8]:
    """Return page-aligned memory, all zeroes or filled with noise that *filled* seeds."""
    memory = np.frombuffer(mmap.mmap(-1, count * PAGE_BYTES), np.uint8)
    if filled:
        memory[:] = np.frombuffer(random.Random(filled).randbytes(len(memory)), np.uint8)
    return memory


def pieces(
    memory: NDArray[np.uint8], at: Sequence[int], on: Sequence[int], counts: Sequence[int] | int = 1
) -> Pieces:
    """Make pieces of *counts* pages, at these pages of memory and on these of the drive."""
    lengths = np.full(len(at), counts, np.uint32) * np.uint32(PAGE_BYTES)
    return Pieces(memory, np.array(at, np.int64) * PAGE_BYTES, np.array(on, np.int64) * PAGE_BYTES, lengths)


def at_page(memory: NDArray[np.uint8], page: int) -> Pieces:
    """All of some memory, in one piece."""
    return Pieces.one(memory, drive_offset=page * PAGE_BYTES)


def tag_check(wanted: Pieces, expected: NDArray[np.uint8]) -> TagCheck:
    """Make a check of blocks a little shorter than their pieces, with the bytes of *expected*."""
    lengths = wanted.lengths - np.uint32(17)
    seeds = np.arange(len(wanted), dtype=np.uint64)
    return TagCheck(wanted, lengths, seeds, tags_of(expected, wanted.memory_offsets, lengths, seeds))


async def written(drive: Drive, wanted: Pieces) -> list[bool]:
    """Write, and say what became of each piece."""
    return list(map(bool, await drive.submit_write(wanted)))


async def read(drive: Drive, wanted: Pieces) -> list[bool]:
    """Read, and say what became of each piece."""
    return list(map(bool, await drive.submit_read(wanted)))


class DriveContract:
    """Drives given by the fixture have ``DRIVE_BYTES`` and take ``PIECES_QUEUED_MAX`` pieces at once."""

    always_tells_progress = False
    """Whether each I/O tells its progress before the read ends."""

    @pytest.fixture
    def drive(self) -> Drive:
        raise NotImplementedError

    async def test_what_is_written_is_read_back(self, drive: Drive) -> None:
        source, target = pages(16, b"a"), pages(16)
        assert await written(drive, at_page(source, 5)) == [True]
        assert await read(drive, at_page(target, 5)) == [True]
        assert np.array_equal(target, source)

    async def test_adjacent_pieces_are_gathered_from_and_scattered_to_their_own_memory(
        self, drive: Drive
    ) -> None:
        source, target = pages(6, b"b"), pages(6)
        assert await written(drive, pieces(source, [4, 0, 3], [0, 2, 5], [2, 3, 1])) == [True] * 3
        assert await read(drive, pieces(target, [1, 0], [0, 5], [5, 1])) == [True] * 2
        rows = target.reshape(6, -1)
        assert np.array_equal(rows[[1, 2, 3, 4, 5, 0]], source.reshape(6, -1)[[4, 5, 0, 1, 2, 3]])

    async def test_what_lies_between_pieces_is_left_alone(self, drive: Drive) -> None:
        source, other, target = pages(8, b"i"), pages(8, b"j"), pages(8)
        assert await written(drive, at_page(other, 0)) == [True]
        assert await written(drive, pieces(source, [0, 1, 5], [0, 1, 5])) == [True] * 3
        assert await read(drive, pieces(target, [7, 6, 5, 3, 1, 0], [7, 6, 5, 3, 1, 0])) == [True] * 6
        expected = other.copy().reshape(8, -1)
        expected[[0, 1, 5]] = source.reshape(8, -1)[[0, 1, 5]]
        expected[[2, 4]] = 0
        assert np.array_equal(target.reshape(8, -1), expected)

    @pytest.mark.parametrize("step", [1, 2], ids=["adjacent", "apart"])
    async def test_there_may_be_more_pieces_than_one_call_takes(self, drive: Drive, step: int) -> None:
        count = 1000 if step == 2 else 1500
        source, target = pages(count, b"c"), pages(count)
        at, on = range(count), range(1, 1 + step * count, step)
        assert await written(drive, pieces(source, at, on)) == [True] * count
        assert await read(drive, pieces(target, at, on)) == [True] * count
        assert np.array_equal(target, source)

    async def test_each_piece_of_a_batch_has_its_own_end(self, drive: Drive) -> None:
        source, target = pages(3, b"d"), pages(3)
        on = [0, DRIVE_BYTES // PAGE_BYTES, 2]
        assert await written(drive, pieces(source, [0, 1, 2], on)) == [True, False, True]
        assert await read(drive, pieces(target, [0, 1, 2], on)) == [True, False, True]
        assert np.array_equal(target.reshape(3, -1)[[0, 2]], source.reshape(3, -1)[[0, 2]])

    async def test_the_drive_never_grows(self, drive: Drive) -> None:
        half_beyond = at_page(pages(2, b"e"), DRIVE_BYTES // PAGE_BYTES - 1)
        assert await written(drive, half_beyond) == [False]
        assert await read(drive, half_beyond) == [False]
        assert await read(drive, at_page(pages(1), 1 << 50)) == [False]
        assert drive.size_bytes == DRIVE_BYTES

    async def test_the_tag_of_each_piece_is_checked(self, drive: Drive) -> None:
        count = 40
        source, target = pages(count, b"f"), pages(count)
        assert await written(drive, at_page(source, 0)) == [True]
        on = np.array([number for number in range(count) if number % 7])
        wanted = pieces(target, on.tolist(), on.tolist())
        check = tag_check(wanted, source)
        check.tags[on % 3 == 0] ^= 1
        ends = await drive.submit_read(wanted, check)
        assert ends.tolist() == (on % 3 != 0).tolist()
        assert check.was_read.all()

    async def test_progress_of_a_read_is_told_on_the_loop(self, drive: Drive) -> None:
        count, told = 300, list[tuple[int, int]]()
        source = pages(count, b"t")
        assert await written(drive, at_page(source, 0)) == [True]
        wanted = pieces(pages(count), range(count), range(count))

        def tell() -> None:
            told.append((threading.get_ident(), int(np.count_nonzero(check.states))))

        check = replace(tag_check(wanted, source), progress_bytes=PAGE_BYTES, listeners=[tell])
        assert (await drive.submit_read(wanted, check)).all()
        assert {thread for thread, _ in told} <= {threading.get_ident()}
        assert sorted(told) == told
        if self.always_tells_progress:
            assert told

    async def test_the_tag_of_a_piece_that_was_not_read_is_not_checked(self, drive: Drive) -> None:
        beyond, source = DRIVE_BYTES // PAGE_BYTES, pages(5, b"k")
        on = [0, beyond, 2, beyond + 4, 6]
        assert await written(drive, pieces(source, range(5), on)) == [True, False, True, False, True]
        wanted = pieces(source, range(5), on)  # the memory of failed pieces has the right bytes all the time
        check = tag_check(wanted, source)
        assert (await drive.submit_read(wanted, check)).tolist() == [True, False, True, False, True]
        assert check.was_read.tolist() == [True, False, True, False, True]

    async def test_many_batches_at_once_all_end(self, drive: Drive) -> None:
        memories = [pages(4, bytes([number])) for number in range(64)]
        batches = [at_page(memory, 4 * number) for number, memory in enumerate(memories)]
        assert await asyncio.gather(*(written(drive, batch) for batch in batches)) == [[True]] * 64
        target = pages(4 * 64)
        assert await read(drive, at_page(target, 0)) == [True]
        assert np.array_equal(target, np.concatenate(memories))

    async def test_more_pieces_than_may_wait_fail_at_once_and_disturb_no_others(self, drive: Drive) -> None:
        many = pieces(pages(1), [0] * PIECES_QUEUED_MAX, [0] * PIECES_QUEUED_MAX)
        under_way = drive.submit_write(at_page(pages(1, b"g"), 0))
        assert drive.queued == 1
        refused = drive.submit_read(many)
        assert refused.done()
        assert not refused.result().any()
        assert len(refused.result()) == PIECES_QUEUED_MAX
        assert (await under_way).tolist() == [True]
        assert drive.queued == 0
        assert await read(drive, many) == [True] * PIECES_QUEUED_MAX

    async def test_an_empty_batch_ends(self, drive: Drive) -> None:
        assert await read(drive, pieces(pages(1), [], [])) == []
        assert await written(drive, pieces(pages(1), [], [])) == []

    async def test_a_flush_ends(self, drive: Drive) -> None:
        await drive.submit_write(at_page(pages(1, b"h"), 0))
        assert await drive.submit_flush()
        assert drive.queued == 0

    @pytest.mark.parametrize("column", ["memory_offsets", "drive_offsets", "lengths"])
    async def test_a_piece_that_is_not_in_whole_pages_is_a_broken_invariant(
        self, drive: Drive, column: str
    ) -> None:
        crooked = pieces(pages(2), [0], [0])
        getattr(crooked, column)[0] += 512
        with pytest.raises(AssertionError, match="page"):
            drive.submit_write(crooked)
        with pytest.raises(AssertionError, match="page"):
            drive.submit_read(crooked)
        assert drive.queued == 0

    async def test_a_drive_that_nobody_touches_lies_at_its_place(self, drive: Drive) -> None:
        assert await drive.submit_look() == ""

    async def test_futures_resolve_on_the_loop_s_thread(self, drive: Drive) -> None:
        resolved_on: list[threading.Thread] = []
        future = drive.submit_read(at_page(pages(1), 0))
        future.add_done_callback(lambda _: resolved_on.append(threading.current_thread()))
        await future
        await asyncio.sleep(0)
        assert resolved_on == [threading.current_thread()]
