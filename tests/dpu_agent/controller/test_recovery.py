"""Reading a shard's summaries back from its drive."""

from __future__ import annotations

import asyncio
import errno
import math
import time
from contextlib import aclosing

import numpy as np
import pytest
from tests.support.agent.assembly import BLOCK_BYTES, DRIVE, FABRIC, SETTINGS, SHARD, HeldDrive
from tests.support.agent.owned_shard import OwnedShard as OwnedCore
from tests.support.agent.owned_shard import keys_of, rows16, seeds_of, tag_of
from tests.support.simulated.drives.memory_drive import MemoryDrive
from tests.support.simulated.drives.reference_engine import Done, ReferenceIo
from tests.support.simulated.virtual_time import VirtualLoop

from ostraca_dpu_agent.controller.recovery import read_slices, read_summaries, read_superblock
from ostraca_dpu_agent.shards.core import ShardCore
from ostraca_dpu_agent.shards.shard import OwnedShard, core_of
from ostraca_fabric.drives.drive_health import HealthSettings
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.drives.io_engine import IoOperation
from ostraca_fabric.errors import DriveError, FormatError
from ostraca_fabric.flash.summary import SummaryLog, entries_of
from ostraca_fabric.flash.superblock import Superblock, encode_superblock
from ostraca_fabric.model.extent import ENTRIES_PER_PAGE, PAGE_BYTES, TAIL_SLOTS, Geometry, Pieces, generation
from ostraca_fabric.model.fabric_map import ShardRecord
from ostraca_fabric.model.ids import EnclosureId, FabricId, OwnerEpoch
from ostraca_fabric.model.outcome import PutState
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.telemetry.requests import EventRing

RECORD = ShardRecord(SHARD, DRIVE, 0, 0, weight=1)


class FailingLate(HeldDrive):
    """A drive whose reads of some bytes land, and fail then."""

    fails_late = range(0)

    def begin(self, io: ReferenceIo, done: Done) -> None:
        places = range(io.offset, io.offset + io.size_bytes, PAGE_BYTES)
        is_late = io.operation is IoOperation.READ and any(place in self.fails_late for place in places)
        super().begin(io, lambda failure: done(errno.EIO if is_late else failure))


async def recovered_core(drive: Drive) -> ShardCore:
    """Read what the drive's shard holds, up to where its owner would begin."""
    superblock = await read_superblock(drive, RECORD, FABRIC)
    core = core_of(superblock, SETTINGS.owner)
    async with aclosing(read_slices(drive, RECORD, superblock)) as slices:
        async for areas in slices:
            core.take_in(areas)
    return core


async def with_blocks(drive: HeldDrive, *commits: list[int]) -> None:
    """Commit blocks to the drive's shard, some at a time."""
    core = await recovered_core(drive)
    shard = OwnedShard(
        RECORD,
        drive,
        core,
        settings=SETTINGS.owner,
        clock=time.monotonic,
        events=EventRing("a", 16, time.monotonic),
    )
    epoch = OwnerEpoch(core.highest_epoch + 1)
    shard.begin(epoch)
    shard.confirm(math.inf)
    shard.apply_grant(range(shard.core.geometry.segments))
    for numbers in commits:
        lengths = np.full(len(numbers), BLOCK_BYTES, np.uint32)
        made = await shard.reserve(keys_of(numbers), lengths, hold_s=5, within_s=5)
        tags = rows16([tag_of(number) for number in numbers])
        states, _ = await shard.commit(made.reservations, tags, seeds_of(numbers), epoch=epoch)
        assert list(states) == [PutState.COMMITTED] * len(numbers)
    assert await shard.close(within_s=5)


def guarded(drive: Drive) -> GuardedDrive:
    """Watch a drive as an agent does."""
    return GuardedDrive(drive, HealthSettings(), asyncio.get_running_loop().time)


async def used_segment(drive: HeldDrive) -> int:
    """Return the segment that was written first."""
    generations = (await recovered_core(drive)).ring.generations
    return int(np.flatnonzero(generations)[0])


async def test_a_shard_of_more_segments_than_a_drive_takes_reads_at_once_is_found_whole() -> None:
    drive = HeldDrive(segments=40)
    await with_blocks(drive, [1, 2, 3])
    drive._pieces_queued_max = 4
    assert len((await recovered_core(drive)).index) == 3


async def test_shard_with_unreadable_summaries_is_not_empty() -> None:
    drive = HeldDrive()
    await with_blocks(drive, [1])
    superblock = await read_superblock(drive, RECORD, FABRIC)
    drive.fail_reads(superblock.geometry.summary_offset(0), drive.size_bytes)
    with pytest.raises(DriveError, match="summaries"):
        await recovered_core(drive)


async def test_unreadable_summary_loses_only_its_segment() -> None:
    drive = HeldDrive()
    await with_blocks(drive, [1, 2])
    core = await recovered_core(drive)
    unused = core.ring.generations.tolist().index(0)
    drive.fail_reads(core.geometry.summary_offset(unused), 4096)
    assert len((await recovered_core(drive)).index) == 2


async def test_unreadable_page_loses_only_its_own_entries() -> None:
    drive = HeldDrive()
    await with_blocks(drive, [1], [2])
    segment, found = await used_segment(drive), []
    for page in range(2):
        core = await recovered_core(drive)
        drive.fail_reads(core.geometry.summary_offset(segment) + page * 4096, 4096)
        core = await recovered_core(drive)
        assert core.ring.unreadable == {segment}
        found.append(len(core.index))
        drive.mend()
    assert sorted(found) == [1, 2], "of two tails the older one lists less"


async def test_later_pages_are_read_after_unreadable_first_pages() -> None:
    shard = OwnedCore(segments=2, block_bytes=4096)
    numbers = list(range(2 * ENTRIES_PER_PAGE))
    log = SummaryLog(
        shard.geometry, shard.superblock.identity, 0, generation(epoch=OwnerEpoch(1), count=1), OwnerEpoch(1)
    )
    offsets = np.uint64(shard.geometry.data_offset(0)) + np.arange(len(numbers), dtype=np.uint64) * np.uint64(
        4096
    )
    tags, lengths = rows16([tag_of(number) for number in numbers]), np.full(len(numbers), 4096, np.uint32)
    entries = entries_of(keys_of(numbers), tags, seeds_of(numbers), offsets, lengths)
    drive = MemoryDrive(DRIVE, shard.geometry.shard_bytes)
    for offset, pages in ((0, encode_superblock(shard.superblock)), *log.opening(), *log.append(entries)):
        drive.bytes[offset : offset + len(pages)] = bytes(pages)
    drive.fail_reads(shard.geometry.summary_offset(0), (TAIL_SLOTS + 1) * 4096)
    record = ShardRecord(shard.superblock.shard, DRIVE, 0, 0, weight=1)
    found = [part async for part in read_summaries(drive, record, shard.superblock)]
    assert [len(segment.entries) for part in found for segment in part.segments] == [ENTRIES_PER_PAGE]


async def test_memory_after_a_failed_read_is_ignored() -> None:
    drive = FailingLate()
    await with_blocks(drive, [1])
    assert len((await recovered_core(drive)).index) == 1
    segment, geometry = await used_segment(drive), (await recovered_core(drive)).geometry
    drive.fails_late = range(geometry.summary_offset(segment), geometry.data_offset(segment))
    assert len((await recovered_core(drive)).index) == 0


async def test_consecutive_bad_pages_keep_the_breaker_closed() -> None:
    drive = HeldDrive(segments=40)
    await with_blocks(drive, [1])
    used, geometry = await used_segment(drive), (await recovered_core(drive)).geometry
    others = set(range(40)) - {used}
    for segment in others:
        drive.fail_reads(geometry.summary_offset(segment), 4096)
    watched = guarded(drive)
    core = await recovered_core(watched)
    assert (len(core.index), core.ring.unreadable) == (1, others)
    status = watched.status()
    assert (status.reads_held_off, status.refused) == (False, 0)
    assert status.condition == "suspect", "forty bad pages are in ten places"
    watched.unwatch()


async def test_drive_failing_all_reads_is_given_up_at_once() -> None:
    drive = HeldDrive(segments=40)
    watched = guarded(drive)
    superblock = await read_superblock(watched, RECORD, FABRIC)
    drive.fail_reads(0, drive.size_bytes)
    with pytest.raises(DriveError, match="fails all reads"):
        await anext(read_summaries(watched, RECORD, superblock))
    status = watched.status()
    assert (status.failed_reads, status.reads_held_off) == (3, True)
    watched.unwatch()


def test_stuck_write_does_not_end_reads() -> None:
    async def story() -> None:
        drive = HeldDrive()
        watched = guarded(drive)
        drive.holds_writes = True
        page = np.zeros(4096, np.uint8)
        watched.submit_write(Pieces.one(page, drive_offset=drive.size_bytes - 4096))
        writes_given_up = watched.writes_given_up
        until_s = asyncio.get_running_loop().time() + HealthSettings().stuck_s
        while asyncio.get_running_loop().time() < until_s:
            assert await watched.submit_read(Pieces.one(page, drive_offset=0))
            await asyncio.sleep(0.01)
        drive.holds_reads = True  # for far less than a read may take
        reading = asyncio.create_task(read_superblock(watched, RECORD, FABRIC))
        await writes_given_up
        drive.let_go()
        assert (await reading).shard == SHARD
        assert watched.status().silences == 1
        watched.unwatch()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(story())


def test_hanging_flush_ends_recovery_as_a_failure() -> None:
    async def story() -> None:
        drive = HeldDrive()
        drive.has_volatile_cache = drive.holds_flushes = True
        watched = guarded(drive)
        with pytest.raises(DriveError, match="does not answer a flush"):
            await recovered_core(watched)
        assert asyncio.get_running_loop().time() < 2.0
        assert drive.asked == ["flush"]
        drive.let_go()
        watched.unwatch()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(story())


async def test_suspended_reads_are_not_lost_pages() -> None:
    drive = HeldDrive()
    watched = guarded(drive)
    superblock = await read_superblock(watched, RECORD, FABRIC)
    far = drive.size_bytes - 4096
    drive.fail_reads(far, 4096)
    for _ in range(3):
        await watched.submit_read(Pieces.one(np.zeros(4096, np.uint8), drive_offset=far))
    with pytest.raises(DriveError, match="suspended"):
        await anext(read_summaries(watched, RECORD, superblock))
    watched.unwatch()


async def test_wholly_bad_summary_is_tried_for_a_few_pages_only() -> None:
    geometry = Geometry.planned(33 << 20, segment_bytes=16 << 20, block_bytes=4096)
    assert geometry.summary_pages > 50
    drive = MemoryDrive(DRIVE, geometry.shard_bytes)
    superblock = Superblock(FABRIC, bytes(16), EnclosureId("e"), DRIVE, SHARD, 0, geometry)
    pages = encode_superblock(superblock)
    drive.bytes[: len(pages)] = pages
    drive.fail_reads(geometry.summary_offset(1), geometry.summary_bytes)
    watched = guarded(drive)
    assert (await recovered_core(watched)).ring.unreadable == {1}
    assert 0 < watched.status().failed_reads < 20
    watched.unwatch()


async def test_unreadable_segments_are_listed() -> None:
    drive = HeldDrive()
    superblock = await read_superblock(drive, RECORD, FABRIC)
    geometry = superblock.geometry
    drive.fail_reads(geometry.summary_offset(2), geometry.summary_bytes)
    areas = [part async for part in read_summaries(drive, RECORD, superblock, [2])]
    assert [(each.areas, each.segments, each.unreadable) for each in areas] == [(1, (), (2,))]


async def test_a_superblock_of_another_fabric_or_none_is_refused() -> None:
    drive = HeldDrive()
    with pytest.raises(FormatError, match="attach the right drive"):
        await read_superblock(drive, RECORD, FabricId(bytes([1]) * 16))
    drive.fail_reads(0, 8192)
    with pytest.raises(DriveError, match="superblock"):
        await read_superblock(drive, RECORD, FABRIC)


@pytest.mark.parametrize("page", [0, 1])
async def test_single_readable_superblock_copy_suffices(page: int) -> None:
    drive = HeldDrive()
    await with_blocks(drive, [1])
    drive.fail_reads(page * 4096, 4096)
    assert await read_superblock(drive, RECORD, FABRIC) == await read_superblock(HeldDrive(), RECORD, FABRIC)
    assert len((await recovered_core(drive)).index) == 1


async def test_recovered_contents_of_a_volatile_cache_are_flushed() -> None:
    """The owner before may have died between a summary and its flush; then a power cut must not take it."""
    drive = HeldDrive()
    await with_blocks(drive, [1])
    drive.has_volatile_cache = True
    drive.asked.clear()
    await recovered_core(drive)
    assert drive.asked == ["flush"]
    drive.fails_flushes = True
    drive.asked.clear()
    with pytest.raises(DriveError, match="flush"):
        await recovered_core(drive)
    assert drive.asked == ["flush"], "what a cache has lost is not made durable by asking twice"
