"""Reading a shard's summaries back from its drive."""

from __future__ import annotations

import time
from contextlib import aclosing

import numpy as np
import pytest
from tests.agent.assembly import BLOCK_BYTES, DRIVE, FABRIC, SETTINGS, SHARD, HeldDrive
from tests.agent.owned_shard import keys_of, rows16, seeds_of, tag_of

from ostraca_dpu_agent.events import EventRing
from ostraca_dpu_agent.owner.core import ShardCore
from ostraca_dpu_agent.owner.shard import OwnedShard, core_of
from ostraca_dpu_agent.steward.recover import in_slices, read_summaries, read_superblock
from ostraca_fabric.errors import DriveError, FormatError
from ostraca_fabric.fabric_map import ShardRecord
from ostraca_fabric.ids import FabricId, OwnerEpoch
from ostraca_fabric.outcome import PutState

RECORD = ShardRecord(SHARD, DRIVE, 0, 0, weight=1)


async def recovered_core(drive: HeldDrive) -> ShardCore:
    """Read what the drive's shard holds, up to where its owner would begin."""
    superblock = await read_superblock(drive, RECORD, FABRIC)
    core = core_of(superblock, SETTINGS.owner)
    async with aclosing(read_summaries(drive, RECORD, superblock)) as parts:
        async for part in parts:
            for some in in_slices(part):
                core.take_in(some)
    return core


async def with_blocks(drive: HeldDrive, numbers: list[int]) -> None:
    """Commit blocks to the drive's shard."""
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
    shard.own_alone()
    lengths = np.full(len(numbers), BLOCK_BYTES, np.uint32)
    made = await shard.reserve(keys_of(numbers), lengths, hold_s=5, within_s=5)
    tags = rows16([tag_of(number) for number in numbers])
    states, _ = await shard.commit(made.reservations, tags, seeds_of(numbers), epoch=epoch)
    assert list(states) == [PutState.COMMITTED] * len(numbers)
    assert await shard.close(within_s=5)


async def test_a_shard_of_more_segments_than_a_drive_takes_reads_at_once_is_found_whole() -> None:
    drive = HeldDrive(segments=40)
    await with_blocks(drive, [1, 2, 3])
    drive._pieces_queued_max = 4
    assert len((await recovered_core(drive)).index) == 3


async def test_a_shard_whose_summaries_cannot_be_read_is_not_taken_for_an_empty_one() -> None:
    drive = HeldDrive()
    await with_blocks(drive, [1])
    superblock = await read_superblock(drive, RECORD, FABRIC)
    drive.fail_reads(superblock.geometry.summary_offset(0), drive.size_bytes)
    with pytest.raises(DriveError, match="summaries"):
        await recovered_core(drive)


async def test_a_summary_that_cannot_be_read_costs_its_segment_alone() -> None:
    drive = HeldDrive()
    await with_blocks(drive, [1, 2])
    core = await recovered_core(drive)
    unused = core.ring.generations.tolist().index(0)
    drive.fail_reads(core.geometry.summary_offset(unused), 4096)
    assert len((await recovered_core(drive)).index) == 2


async def test_a_superblock_of_another_fabric_or_none_is_refused() -> None:
    drive = HeldDrive()
    with pytest.raises(FormatError, match="attach the right drive"):
        await read_superblock(drive, RECORD, FabricId(bytes([1]) * 16))
    drive.fail_reads(0, 8192)
    with pytest.raises(DriveError, match="superblock"):
        await read_superblock(drive, RECORD, FABRIC)


@pytest.mark.parametrize("page", [0, 1])
async def test_one_readable_copy_of_the_superblock_is_enough(page: int) -> None:
    drive = HeldDrive()
    await with_blocks(drive, [1])
    drive.fail_reads(page * 4096, 4096)
    assert await read_superblock(drive, RECORD, FABRIC) == await read_superblock(HeldDrive(), RECORD, FABRIC)
    assert len((await recovered_core(drive)).index) == 1


async def test_what_was_recovered_from_a_volatile_cache_is_flushed() -> None:
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
