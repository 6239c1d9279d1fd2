"""What every drive must do. An adapter's test inherits this and gives the drive."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import random
import threading

import pytest

from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.ports.drive import Drive, Run

DRIVE_BYTES = 8 << 20
RUNS_QUEUED_MAX = 64


def pages(count: int, filled: bytes = b"") -> memoryview:
    """Return page-aligned memory, all zeroes or filled with noise that *filled* seeds."""
    memory = memoryview(mmap.mmap(-1, count * PAGE_BYTES))
    if filled:
        memory[:] = random.Random(filled).randbytes(len(memory))
    return memory


class DriveContract:
    """Drives given by the fixture have ``DRIVE_BYTES`` and take ``RUNS_QUEUED_MAX`` runs at once."""

    @pytest.fixture
    def drive(self) -> Drive:
        raise NotImplementedError

    async def test_what_is_written_is_read_back(self, drive: Drive) -> None:
        written, read = pages(16, b"a"), pages(16)
        assert await drive.submit_write([Run(5 * PAGE_BYTES, (written,))]) == [True]
        assert await drive.submit_read([Run(5 * PAGE_BYTES, (read,))]) == [True]
        assert read == written

    async def test_a_run_gathers_and_scatters_its_views_in_order(self, drive: Drive) -> None:
        written, read = pages(6, b"b"), pages(6)
        cut = PAGE_BYTES
        parts = (written[4 * cut :], written[: 3 * cut], written[3 * cut : 4 * cut])
        assert await drive.submit_write([Run(0, parts)]) == [True]
        assert await drive.submit_read([Run(0, (read[: 5 * cut], read[5 * cut :]))]) == [True]
        assert bytes(read) == b"".join(parts)

    async def test_a_run_may_have_more_views_than_one_call_takes(self, drive: Drive) -> None:
        count = 1500
        written, read = pages(count, b"c"), pages(count)
        views = [
            tuple(memory[at : at + PAGE_BYTES] for at in range(0, len(memory), PAGE_BYTES))
            for memory in (written, read)
        ]
        assert await drive.submit_write([Run(PAGE_BYTES, views[0])]) == [True]
        assert await drive.submit_read([Run(PAGE_BYTES, views[1])]) == [True]
        assert read == written

    async def test_each_run_of_a_batch_has_its_own_end(self, drive: Drive) -> None:
        memory = pages(3, b"d")
        views = [memory[at : at + PAGE_BYTES] for at in range(0, len(memory), PAGE_BYTES)]
        beyond = Run(DRIVE_BYTES, (views[1],))
        runs = [Run(0, (views[0],)), beyond, Run(PAGE_BYTES, (views[2],))]
        assert await drive.submit_write(runs) == [True, False, True]
        assert await drive.submit_read(runs) == [True, False, True]

    async def test_the_drive_never_grows(self, drive: Drive) -> None:
        half_beyond = Run(DRIVE_BYTES - PAGE_BYTES, (pages(2, b"e"),))
        assert await drive.submit_write([half_beyond]) == [False]
        assert await drive.submit_read([half_beyond]) == [False]
        assert drive.size_bytes == DRIVE_BYTES

    async def test_then_sees_each_run_in_memory_and_has_a_say(self, drive: Drive) -> None:
        count = 40
        written, read = pages(count, b"f"), pages(count)
        assert await drive.submit_write([Run(0, (written,))]) == [True]
        runs = [
            Run(number * PAGE_BYTES, (read[number * PAGE_BYTES : (number + 1) * PAGE_BYTES],))
            for number in range(count)
        ]
        seen = [False] * count

        def then(number: int) -> bool:
            part = slice(number * PAGE_BYTES, (number + 1) * PAGE_BYTES)
            seen[number] = read[part] == written[part]
            return number % 3 != 0

        assert await drive.submit_read(runs, then) == [number % 3 != 0 for number in range(count)]
        assert all(seen)

    async def test_then_is_not_asked_about_a_run_that_was_not_read(self, drive: Drive) -> None:
        asked: list[int] = []

        def then(number: int) -> bool:
            asked.append(number)
            return True

        assert await drive.submit_read([Run(DRIVE_BYTES, (pages(1),))], then) == [False]
        assert asked == []

    async def test_many_batches_at_once_all_end(self, drive: Drive) -> None:
        memories = [pages(4, bytes([number])) for number in range(RUNS_QUEUED_MAX)]
        offsets = itertools.count(0, 4 * PAGE_BYTES)
        batches = [[Run(offset, (memory,))] for memory, offset in zip(memories, offsets, strict=False)]
        ends = await asyncio.gather(*(drive.submit_write(batch) for batch in batches))
        assert ends == [[True]] * RUNS_QUEUED_MAX
        read = pages(4 * RUNS_QUEUED_MAX)
        assert await drive.submit_read([Run(0, (read,))]) == [True]
        assert bytes(read) == b"".join(memories)

    async def test_more_runs_than_may_wait_fail_at_once_and_disturb_no_others(self, drive: Drive) -> None:
        memory = pages(1, b"g")
        under_way = drive.submit_write([Run(0, (memory,))])
        assert drive.queued == 1
        refused = drive.submit_read([Run(0, (pages(1),))] * RUNS_QUEUED_MAX)
        assert refused.done()
        assert refused.result() == [False] * RUNS_QUEUED_MAX
        assert await under_way == [True]
        assert drive.queued == 0
        assert await drive.submit_read([Run(0, (pages(1),))] * RUNS_QUEUED_MAX) == [True] * RUNS_QUEUED_MAX

    async def test_an_empty_batch_ends(self, drive: Drive) -> None:
        assert await drive.submit_read([]) == []
        assert await drive.submit_write([]) == []

    async def test_a_flush_ends(self, drive: Drive) -> None:
        await drive.submit_write([Run(0, (pages(1, b"h"),))])
        assert await drive.submit_flush()
        assert drive.queued == 0

    async def test_a_run_that_is_not_in_whole_pages_is_a_broken_invariant(self, drive: Drive) -> None:
        with pytest.raises(AssertionError, match="page"):
            drive.submit_write([Run(512, (pages(1),))])
        with pytest.raises(AssertionError, match="page"):
            drive.submit_read([Run(0, (pages(1)[:512],))])
        assert drive.queued == 0

    async def test_futures_resolve_on_the_loop_s_thread(self, drive: Drive) -> None:
        resolved_on: list[threading.Thread] = []
        future = drive.submit_read([Run(0, (pages(1),))])
        future.add_done_callback(lambda _: resolved_on.append(threading.current_thread()))
        await future
        await asyncio.sleep(0)
        assert resolved_on == [threading.current_thread()]
