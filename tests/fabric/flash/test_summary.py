from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraca_fabric.flash.recovery import PLACES_FIRST, RecoveredAreas, places_wanted, recover
from ostraca_fabric.flash.summary import Entries, SummaryLog, entries_of
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.model.extent import MIB, PAGE_BYTES, Generation, Geometry, generation
from ostraca_fabric.model.ids import DriveId, EnclosureId, FabricId, OwnerEpoch, ShardId

GEOMETRY = Geometry.planned(3 * MIB, segment_bytes=MIB, block_bytes=4096)
SUPERBLOCK = Superblock(
    FabricId(bytes(16)), bytes(16), EnclosureId("a"), DriveId("a/b"), ShardId("a/b/0"), 0, GEOMETRY
)
EPOCH = OwnerEpoch(3)


def log_of(segment: int, count: int = 1, superblock: Superblock = SUPERBLOCK) -> SummaryLog:
    made = generation(epoch=EPOCH, count=count)
    return SummaryLog(superblock.geometry, superblock.identity, segment, made, EPOCH)


def blocks(first: int, count: int, segment: int = 0) -> Entries:
    """Return *count* entries of one page each; block *first* lies first in the data area."""
    numbers = np.arange(first, first + count, dtype=np.uint64)
    keys = np.zeros((count, 16), np.uint8)
    keys[:, :8] = numbers.view(np.uint8).reshape(-1, 8)
    offsets = np.uint64(GEOMETRY.data_offset(segment)) + numbers * np.uint64(PAGE_BYTES)
    return entries_of(keys, keys[:, ::-1], numbers * np.uint64(3), offsets, np.full(count, 4000, np.uint32))


class Flash:
    """The bytes of a shard."""

    def __init__(self) -> None:
        self.bytes = bytearray(GEOMETRY.shard_bytes)

    def write(self, pieces: tuple[tuple[int, bytes], ...]) -> None:
        for offset, pages in pieces:
            self.bytes[offset : offset + len(pages)] = pages

    def recovered(self, numbers: list[int] | None = None) -> RecoveredAreas:
        chosen = list(range(GEOMETRY.segments)) if numbers is None else numbers
        begins = [GEOMETRY.summary_offset(segment) for segment in chosen]
        areas = b"".join(self.bytes[begin : begin + GEOMETRY.summary_bytes] for begin in begins)
        rows = np.frombuffer(areas, np.uint8).reshape(len(chosen), GEOMETRY.summary_bytes)
        return recover(SUPERBLOCK, np.array(chosen, np.intp), rows)

    def read_as_wanted(self) -> tuple[RecoveredAreas, int]:
        """Read no more of each summary area than recovery wants; say also how many pages that were."""
        count = GEOMETRY.segments
        numbers, areas = np.arange(count), np.zeros((count, GEOMETRY.summary_bytes), np.uint8)
        read, wanted = np.zeros(count, np.intp), np.full(count, PLACES_FIRST)
        while (wanted > read).any():
            for segment in range(count):
                begin, end = int(read[segment]) * PAGE_BYTES, int(wanted[segment]) * PAGE_BYTES
                if end > begin:
                    at = GEOMETRY.summary_offset(segment)
                    areas[segment, begin:end] = np.frombuffer(self.bytes[at + begin : at + end], np.uint8)
            read = np.maximum(read, wanted)
            wanted = places_wanted(SUPERBLOCK, numbers, areas, read)
        return recover(SUPERBLOCK, numbers, areas), int(read.sum())

    def listed(
        self, segment: int = 0, areas: RecoveredAreas | None = None
    ) -> tuple[Generation, list[int]] | None:
        """Return what recovery finds in a segment: its generation, and the numbers of its blocks."""
        for found in (areas or self.recovered()).segments:
            if found.number == segment:
                return found.generation, found.entries["key"][:, :8].copy().view("<u8").ravel().tolist()
        return None


def test_a_blank_shard_has_no_segments() -> None:
    found = Flash().recovered()
    assert (found.segments, found.highest_epoch, found.highest_count, found.pages_damaged) == ((), 0, 0, 0)


def test_an_opened_segment_is_known_and_empty() -> None:
    flash = Flash()
    flash.write(log_of(0).opening())
    assert flash.listed() == (generation(epoch=3, count=1), [])


@given(st.lists(st.integers(1, 120), min_size=1, max_size=8))
def test_every_listed_block_is_recovered_in_order(batches: list[int]) -> None:
    flash, log, written = Flash(), log_of(0), 0
    flash.write(log.opening())
    for batch in batches:
        wanted = min(batch, GEOMETRY.entries_max - written, GEOMETRY.data_bytes // PAGE_BYTES - written)
        if wanted:
            flash.write(log.append(blocks(written, wanted)))
            written += wanted
        assert flash.listed() == (generation(epoch=3, count=1), list(range(written)))
        areas, places = flash.read_as_wanted()
        assert flash.listed(areas=areas) == flash.listed()
        assert places == 2 * GEOMETRY.segments + written // 50 + 1 + (GEOMETRY.segments - 1)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.integers(0, 1 << 30))
def test_a_torn_group_commit_loses_none_of_the_blocks_listed_before_it(batches: list[int], seed: int) -> None:
    flash, log, written, roll = Flash(), log_of(0), 0, random.Random(seed)
    flash.write(log.opening())
    for batch in batches[:-1]:
        if written + batch <= 240:
            flash.write(log.append(blocks(written, batch)))
            written += batch
    last = min(batches[-1], 240 - written)
    if not last:
        return
    for offset, pages in log.append(blocks(written, last)):
        for at in range(0, len(pages), PAGE_BYTES):
            page = pages[at : at + PAGE_BYTES]
            torn = roll.randrange(PAGE_BYTES + 1)
            kept = bytes(flash.bytes[offset + at : offset + at + PAGE_BYTES])
            garbage = roll.randbytes(PAGE_BYTES)
            flash.write(((offset + at, roll.choice([page, kept, garbage, page[:torn] + kept[torn:]])),))
    found = flash.listed()
    assert found is not None
    assert set(range(written)) <= set(found[1]) <= set(range(written + last))
    sparse = flash.listed(areas=flash.read_as_wanted()[0])
    assert sparse is not None
    assert set(range(written)) <= set(sparse[1]) <= set(found[1]), "what was answered for is found"


def test_a_full_page_is_never_written_again() -> None:
    log = log_of(0)
    full_places = {GEOMETRY.page_offset(0, page) for page in range(GEOMETRY.entries_max // 50)}
    seen: list[int] = []
    for first in range(0, 200, 20):
        for offset, pages in log.append(blocks(first, 20)):
            seen += [at for at in range(offset, offset + len(pages), PAGE_BYTES) if at in full_places]
    assert seen == [GEOMETRY.page_offset(0, page) for page in range(4)]


def test_the_tail_alternates_between_its_two_slots() -> None:
    log = log_of(1)
    offsets = [log.opening()[0][0]] + [log.append(blocks(i, 1, 1))[0][0] for i in range(3)]
    first, second = GEOMETRY.tail_offset(1, 0), GEOMETRY.tail_offset(1, 1)
    assert offsets == [first, second, first, second]


def test_pages_of_an_earlier_generation_are_not_believed_once_the_next_is_opened() -> None:
    flash, log = Flash(), log_of(0, count=1)
    flash.write(log.opening())
    flash.write(log.append(blocks(0, 130)))
    flash.write(log_of(0, count=2).opening())
    assert flash.listed() == (generation(epoch=3, count=2), [])


def test_a_torn_opening_leaves_the_generation_before_it() -> None:
    flash, log = Flash(), log_of(0, count=1)
    flash.write(log.opening())
    flash.write(log.append(blocks(0, 130)))
    ((offset, page),) = log_of(0, count=2).opening()
    flash.write(((offset, page[:44]),))
    assert flash.listed() == (generation(epoch=3, count=1), list(range(130)))


def test_a_flipped_bit_anywhere_in_a_page_makes_it_unbelievable() -> None:
    log = log_of(0)
    ((offset, page),) = log.append(blocks(0, 1))
    for at in (0, 8, 16, 24, 48, 56, 96, 200, 4095):
        flash, flipped = Flash(), bytearray(page)
        flipped[at] ^= 4
        flash.write(((offset, bytes(flipped)),))
        assert flash.listed() is None


def test_pages_of_another_shard_or_segment_are_not_believed() -> None:
    flash, other = (
        Flash(),
        Superblock(
            FabricId(bytes(16)), b"1" * 16, EnclosureId("a"), DriveId("a/b"), ShardId("a/b/0"), 0, GEOMETRY
        ),
    )
    flash.write(log_of(0, superblock=other).append(blocks(0, 3)))
    assert flash.listed() is None
    ((_, page),) = log_of(1).append(blocks(0, 3, 1))
    flash.write(((GEOMETRY.tail_offset(0, 0), page),))
    assert flash.listed() is None


def test_a_full_page_in_the_place_of_another_is_not_believed() -> None:
    flash, log = Flash(), log_of(0)
    (offset, pages), _ = log.append(blocks(0, 100))
    flash.write(((offset, pages[PAGE_BYTES:] + pages[:PAGE_BYTES]),))
    assert flash.listed() is None


def test_a_damaged_tail_takes_no_full_page_along() -> None:
    for slot in (0, 1):
        flash, log = Flash(), log_of(0)
        flash.write(log.opening())
        for first in range(0, 240, 40):
            flash.write(log.append(blocks(first, 40)))
        flash.bytes[GEOMETRY.tail_offset(0, slot) + 9] ^= 1
        assert flash.listed(areas=flash.read_as_wanted()[0]) == flash.listed()
        listed = flash.listed()
        assert listed is not None
        assert listed[1][:200] == list(range(200))


def test_a_tail_that_never_arrived_takes_no_full_page_along() -> None:
    flash, log = Flash(), log_of(0)
    flash.write(log.opening())
    flash.write(log.append(blocks(0, 30)))
    full_pages, _ = log.append(blocks(30, 150))
    flash.write((full_pages,))
    assert flash.listed() == (generation(epoch=3, count=1), list(range(150)))
    assert flash.listed(areas=flash.read_as_wanted()[0]) == flash.listed()


def test_a_damaged_tail_and_a_damaged_full_page_take_no_other_page_along() -> None:
    flash, log = Flash(), log_of(0)
    flash.write(log.opening())
    flash.write(log.append(blocks(0, 30)))
    full_pages, tail = log.append(blocks(30, 150))
    flash.write((full_pages, tail))
    flash.bytes[tail[0] + 200] ^= 1  # it still bears the name of its shard
    flash.bytes[GEOMETRY.page_offset(0, 0) + 200] ^= 1
    assert flash.listed() == (generation(epoch=3, count=1), [*range(30), *range(50, 150)])
    assert flash.listed(areas=flash.read_as_wanted()[0]) == flash.listed()


def test_entries_that_reach_out_of_the_data_area_are_refused() -> None:
    flash, entries = Flash(), blocks(0, 6)
    end = (GEOMETRY.summary_offset(0) + GEOMETRY.segment_bytes) // PAGE_BYTES
    entries["first_page"][0] = GEOMETRY.data_offset(0) // PAGE_BYTES - 1
    entries["first_page"][1] = end
    entries["first_page"][2], entries["length"][2] = end - 1, PAGE_BYTES + 1
    entries["first_page"][3] = (1 << 32) - 1
    entries["length"][4] = 0
    flash.write(log_of(0).append(entries))
    assert flash.listed() == (generation(epoch=3, count=1), [5])
    assert flash.recovered().entries_refused == 5


def test_entries_whose_extents_overlap_are_all_refused() -> None:
    flash, entries = Flash(), blocks(0, 9)
    entries["length"][2] = 3 * PAGE_BYTES  # covers 3 and 4
    entries["first_page"][7] = entries["first_page"][8]
    flash.write(log_of(0).append(entries))
    assert flash.listed() == (generation(epoch=3, count=1), [0, 1, 5, 6])


def test_recovery_says_where_epochs_and_counts_go_on() -> None:
    flash = Flash()
    flash.write(log_of(0, count=7).opening())
    flash.write(log_of(1, count=9).opening())
    found = flash.recovered()
    assert [segment.number for segment in found.segments] == [0, 1]
    assert (found.highest_epoch, found.highest_count) == (EPOCH, 9)


def test_a_summary_area_that_could_not_be_read_costs_its_own_segment_only() -> None:
    flash = Flash()
    flash.write(log_of(0).opening())
    flash.write(log_of(1).opening())
    assert [segment.number for segment in flash.recovered([1]).segments] == [1]


def test_a_summary_page_is_laid_out_as_the_reference_says() -> None:
    ((_, page),) = log_of(1).append(blocks(0, 2, 1))
    assert page[8:16] == b"OSTRsumm"
    assert int.from_bytes(page[16:20], "little") == 1  # version
    assert int.from_bytes(page[20:24], "little") == 2  # entries
    assert page[24:40] == SUPERBLOCK.identity.digest
    assert int.from_bytes(page[40:44], "little") == 1  # segment
    assert int.from_bytes(page[48:56], "little") == generation(epoch=3, count=1)
    second = page[96 + 80 : 96 + 2 * 80]
    assert int.from_bytes(second[32:40], "little") == 3  # seed
    assert int.from_bytes(second[40:44], "little") == GEOMETRY.data_offset(1) // PAGE_BYTES + 1
    assert int.from_bytes(second[44:48], "little") == 4000


def test_more_entries_than_the_summary_area_lists_are_a_broken_invariant() -> None:
    log = log_of(0)
    with pytest.raises(AssertionError, match="full"):
        log.append(blocks(0, GEOMETRY.entries_max + 1))


def test_a_pool_is_in_every_page_behind_the_first_and_changes_nothing_else() -> None:
    pool, logs = (1 << 64) - 3, [log_of(0), log_of(0)]
    assert logs[0].opening() == logs[1].opening()
    logs[1].pool = pool
    pieces = [log.append(blocks(0, 1)) for log in logs]
    (_, without), (_, named) = (each[-1] for each in pieces)
    assert without[72:96] == bytes(24), "as in pages of releases that knew none"
    assert named[72:96] == pool.to_bytes(8, "little") + bytes(16)
    assert (named[8:72], named[96:]) == (without[8:72], without[96:])
