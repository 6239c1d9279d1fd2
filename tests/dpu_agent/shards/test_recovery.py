"""A shard that is being recovered: what can be got meanwhile, and that no order of reading matters."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.agent.assembly import (
    DRIVE,
    FABRIC,
    FAR_S,
    SHARD,
    HeldDrive,
    assembled,
    chain_of,
    get_states,
    put_states,
    reasons_of,
    until,
)
from tests.support.agent.owned_shard import OwnedShard, keys_of, seeds_of, tag_of
from tests.support.agent.shard_invariants import check_core
from tests.support.invariants import check_index
from tests.support.simulated.drives.memory_drive import MemoryDrive

from ostraca_dpu_agent.controller.recovery import in_slices, read_summaries, read_superblock
from ostraca_dpu_agent.settings import OwnerSettings
from ostraca_dpu_agent.shards.core import SegmentState, ShardCore, ShardSettings
from ostraca_dpu_agent.shards.shard import core_of
from ostraca_fabric.drives.file_drive import FileDrive
from ostraca_fabric.flash.recovery import RecoveredAreas
from ostraca_fabric.flash.summary import SummaryLog, entries_of
from ostraca_fabric.flash.superblock import Superblock, encode_superblock
from ostraca_fabric.model.extent import Generation, Geometry, Pieces, generation
from ostraca_fabric.model.fabric_map import ShardRecord
from ostraca_fabric.model.ids import EnclosureId, OwnerEpoch
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.tables.digests import TagCheck
from ostraca_fabric.wire.messages import Lookup

SEGMENTS = 6


class HeldSummaries(HeldDrive):
    """A drive of what another holds, whose summaries are read only when it is let go."""

    def __init__(self, other: HeldDrive) -> None:
        super().__init__()
        self.bytes[:] = other.bytes
        self.holds_reads = True

    def submit_read(self, pieces: Pieces, check: TagCheck | None = None) -> asyncio.Future[NDArray[np.bool_]]:
        if not pieces.drive_offsets.any():  # the superblock's
            return MemoryDrive.submit_read(self, pieces, check)
        return super().submit_read(pieces, check)


def listing(shard: OwnedShard, segment: int, made: Generation, numbers: list[int]) -> None:
    """Write a segment's summary as an owner does that lists these blocks in it."""
    log = SummaryLog(shard.geometry, shard.superblock.identity, segment, made, OwnerEpoch(1))
    begin = shard.geometry.data_offset(segment)
    offsets = np.uint64(begin) + np.arange(len(numbers), dtype=np.uint64) * np.uint64(4096)
    tags = np.frombuffer(b"".join(tag_of(number) for number in numbers), np.uint8).reshape(-1, 16)
    lengths = np.full(len(numbers), 4096, np.uint32)
    entries = entries_of(keys_of(numbers), tags, seeds_of(numbers), offsets, lengths)
    for offset, pages in (*log.opening(), *log.append(entries)):
        shard.flash[offset : offset + len(pages)] = pages


def unfinished(shard: OwnedShard) -> ShardCore:
    return ShardCore(shard.superblock, settings=ShardSettings())


def extents(core: ShardCore, numbers: range) -> list[tuple[bool, int, int]]:
    """Return what the index says of blocks: whether it lists each, where, and in which generation."""
    found = core.resolve(0.0, keys_of(list(numbers)), pin_s=0.0)
    columns = found.found.tolist(), found.offsets.tolist(), found.generations.tolist()
    return list(zip(*columns, strict=True))


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=8), min_size=SEGMENTS, max_size=SEGMENTS),
    st.permutations(range(SEGMENTS)),
    st.permutations(range(SEGMENTS)),
    st.sets(st.integers(1, SEGMENTS - 1)),
)
def test_in_any_order_and_cutting_the_newest_entry_counts_at_once_and_in_the_end(
    listed: list[list[int]], ages: list[int], order: list[int], cuts: set[int]
) -> None:
    shard = OwnedShard(segments=SEGMENTS, block_bytes=4096)
    for segment, (numbers, age) in enumerate(zip(listed, ages, strict=True)):
        listing(shard, segment, generation(epoch=OwnerEpoch(1), count=age + 1), numbers)
    at_once, in_parts = unfinished(shard), unfinished(shard)
    at_once.take_in(shard.recovered())
    bounds = [0, *sorted(cuts), SEGMENTS]
    for begin, end in pairwise(bounds):
        in_parts.take_in(shard.recovered(list(order[begin:end])))
        known = unfinished(shard)
        known.take_in(shard.recovered(list(order[:end])))
        assert extents(in_parts, range(13)) == extents(known, range(13))
        check_index(in_parts.index)
    for core in (at_once, in_parts):
        core.begin(0.0, epoch=OwnerEpoch(2))
        core.own_alone(0.0)
        check_core(core)
    assert extents(in_parts, range(13)) == extents(at_once, range(13))
    rings = [[segment.number for segment in core.ring.pools.common.sealed] for core in (at_once, in_parts)]
    assert rings[0] == rings[1]
    assert at_once.ring.generations.tolist() == in_parts.ring.generations.tolist()


def test_what_cannot_be_read_is_used_again_when_no_reader_of_an_earlier_owner_is_left() -> None:
    shard = OwnedShard(segments=SEGMENTS)
    core = ShardCore(shard.superblock, settings=ShardSettings(), earlier_pins_end_s=30.0)
    core.take_in(shard.recovered([0, 1]))
    core.take_in(replace(shard.recovered([]), areas=SEGMENTS - 2, unreadable=tuple(range(2, SEGMENTS))))
    known = core.ring.generations_made
    core.begin(0.0, epoch=OwnerEpoch(2))
    assert core.ring.generations_made == known + SEGMENTS - 2, "each may have been opened since"
    core.own_alone(0.0)
    check_core(core)
    assert core.counts().segments_unreadable == SEGMENTS - 2
    for now_s, is_free in ((29.9, False), (30.0, True)):
        core.expire(now_s)
        states = {core.ring.segments[number].state for number in range(2, SEGMENTS)}
        assert states == {SegmentState.FREE if is_free else SegmentState.DRAINING}
    for _ in range(SEGMENTS):
        for write in core.writes_due(31.0):
            core.written(31.0, write, is_ok=True)
        core.ring.take_next(core.ring.pools.common)
        core.expire(31.0)
    assert core.counts().segments_unreadable < SEGMENTS - 2, "what is written anew can be read"


@settings(deadline=None)
@given(st.permutations(range(SEGMENTS)), st.permutations(range(SEGMENTS)), st.integers(1, SEGMENTS))
def test_an_index_too_small_for_all_that_is_listed_keeps_the_newest_in_any_order(
    ages: list[int], order: list[int], at_once: int
) -> None:
    shard = OwnedShard(segments=SEGMENTS, block_bytes=4096)
    blocks = [list(range(8 * segment, 8 * segment + 8)) for segment in range(SEGMENTS)]
    for segment, age in enumerate(ages):
        listing(shard, segment, generation(epoch=OwnerEpoch(1), count=age + 1), blocks[segment])
    core = ShardCore(shard.superblock, settings=ShardSettings(blocks_max=24))
    for begin in range(0, SEGMENTS, at_once):
        core.take_in(shard.recovered(order[begin : begin + at_once]))
        check_index(core.index)
    newest = [segment for segment, age in enumerate(ages) if age >= SEGMENTS - 3]
    numbers = range(8 * SEGMENTS)
    found = {
        number for number, (is_found, _, _) in zip(numbers, extents(core, numbers), strict=True) if is_found
    }
    assert found == {number for segment in newest for number in blocks[segment]}
    gone = [int.from_bytes(key.tobytes(), "little") for keys in core.catalog.take_evicted() for key in keys]
    assert sorted(gone) == sorted(set(numbers) - found)
    core.begin(0.0, epoch=OwnerEpoch(2))
    core.own_alone(0.0)
    check_core(core)


def test_slices_are_the_whole_and_none_is_long() -> None:
    shard = OwnedShard(segments=200, block_bytes=4096)
    for segment in range(0, 200, 3):
        listing(shard, segment, generation(epoch=OwnerEpoch(1), count=segment + 1), list(range(200)))
    whole = shard.recovered()
    slices: list[RecoveredAreas] = list(in_slices(whole))
    assert sum(each.areas for each in slices) == whole.areas == 200
    assert [each.number for part in slices for each in part.segments] == [
        each.number for each in whole.segments
    ]
    assert max(sum(len(each.entries) for each in part.segments) for part in slices) <= 1024


def test_a_shard_of_two_segments_answers_for_the_one_that_was_read_and_stores_nothing() -> None:
    shard = OwnedShard(segments=2, block_bytes=4096)
    listing(shard, 0, generation(epoch=OwnerEpoch(1), count=1), [1])
    listing(shard, 1, generation(epoch=OwnerEpoch(1), count=2), [2])
    core = unfinished(shard)
    core.take_in(shard.recovered([1]))
    assert [is_found for is_found, _, _ in extents(core, range(1, 3))] == [False, True]
    assert core.recovered_share == 0.5
    made = core.reserve(0.0, keys_of([1, 2]), np.full(2, 4096, np.uint32), hold_s=5)
    assert made.states.tolist() == [PutState.DECLINED, PutState.EXISTS]
    assert made.reasons.tolist() == [Reason.RECOVERING, Reason.NONE]
    core.expire(100.0)
    assert not core.has_writes_due
    core.take_in(shard.recovered([0]))
    core.begin(0.0, epoch=OwnerEpoch(2))
    core.own_alone(0.0)
    assert core.recovered_share == 1.0


async def test_while_a_shard_is_recovered_blocks_not_read_yet_are_misses_that_say_so() -> None:
    drive = HeldDrive()
    async with assembled(drive=drive) as fabric:
        worker = fabric.worker()
        assert put_states(await fabric.put(worker, [1])) == [PutState.COMMITTED]
        first = fabric.shard.epoch
    held = HeldSummaries(drive)
    async with assembled(drive=held) as fabric:
        worker = fabric.worker()
        assert fabric.shard.core.is_recovering
        assert fabric.agent.status().shards[0].recovered < 1
        missed = await fabric.get(worker, [1])
        assert (get_states(missed), reasons_of(missed)) == ([BlockState.MISS], [Reason.RECOVERING])
        absent = await fabric.data_path.lookup(worker, fabric.volume, Lookup(99, 0, FAR_S, chain_of([1])))
        assert (list(absent.states), list(absent.reasons)) == ([BlockState.MISS], [Reason.RECOVERING])
        declined = await fabric.put(worker, [2])
        assert (put_states(declined), reasons_of(declined)) == ([PutState.DECLINED], [Reason.RECOVERING])
        held.let_go()
        await until(lambda: not fabric.shard.core.is_recovering)
        assert fabric.shard.epoch > first
        assert get_states(await fabric.get(worker, [1])) == [BlockState.HIT]
        assert put_states(await fabric.put(worker, [1, 2])) == [PutState.EXISTS, PutState.COMMITTED]
        assert fabric.agent.status().shards[0].recovered == 1


async def test_an_agent_that_stops_while_it_recovers_ends_what_it_reads_first() -> None:
    held = HeldSummaries(HeldDrive())
    async with assembled(drive=held) as fabric:  # which lets go of the drive, and then stops
        assert fabric.shard.core.is_recovering
    assert fabric.service.shards == {}
    assert fabric.membership.map.claims == {}
    assert held.held == []


async def test_a_sparse_shard_of_a_terabyte_is_recovered(tmp_path: Path) -> None:
    geometry = Geometry.planned(1 << 40, segment_bytes=256 << 20, block_bytes=2 << 20)
    superblock = Superblock(FABRIC, bytes(16), EnclosureId("e"), DRIVE, SHARD, 0, geometry)
    used = {0: [1, 2], geometry.segments - 1: [3]}
    with (tmp_path / "drive.img").open("wb") as file:
        file.truncate(geometry.shard_bytes)
        os.pwrite(file.fileno(), encode_superblock(superblock), 0)
        for segment, numbers in used.items():
            log = SummaryLog(
                geometry, superblock.identity, segment, generation(epoch=1, count=segment + 1), OwnerEpoch(1)
            )
            places = np.arange(len(numbers), dtype=np.uint64) * np.uint64(2 << 20)
            offsets = places + np.uint64(geometry.data_offset(segment))
            keys = keys_of(numbers)
            lengths = np.full(len(numbers), 2 << 20, np.uint32)
            entries = entries_of(keys, keys, seeds_of(numbers), offsets, lengths)
            for offset, pages in (*log.opening(), *log.append(entries)):
                os.pwrite(file.fileno(), pages, offset)
    record = ShardRecord(SHARD, DRIVE, 0, geometry.shard_bytes, weight=1)
    drive = FileDrive.open(DRIVE, str(tmp_path / "drive.img"))
    try:
        core = core_of(await read_superblock(drive, record, FABRIC), OwnerSettings())
        async with aclosing(read_summaries(drive, record, superblock)) as parts:
            async for part in parts:
                core.take_in(part)
    finally:
        drive.close()
    core.begin(0.0, epoch=OwnerEpoch(2))
    core.own_alone(0.0)
    assert core.recovery.areas == geometry.segments
    assert core.resolve(0.0, keys_of([1, 2, 3, 4]), pin_s=0).found.tolist() == [True, True, True, False]
