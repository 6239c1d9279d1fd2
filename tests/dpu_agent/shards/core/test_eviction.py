"""Eviction: what is reinserted out of a segment that goes, and what that may cost."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
from tests.support.agent.owned_shard import OwnedShard, key, keys_of, seeds_of, tag_of
from tests.support.agent.shard_invariants import check_core

from ostraca_dpu_agent.shards.core import ReinsertionBatch, ShardSettings
from ostraca_fabric.model.ids import OwnerEpoch
from ostraca_fabric.model.outcome import PutState
from ostraca_fabric.policies.endurance import DAY_S, EnduranceSettings

COMMITTED = PutState.COMMITTED
PER_SEGMENT = 15
BLOCK_BYTES = 64 << 10
FIRST = list(range(PER_SEGMENT))
PLENTY_BYTES = 20 * BLOCK_BYTES
SCARCE = EnduranceSettings(rated_dwpd=1e5, burst_s=1.0, first_touch_reserve=0.0, retry_s=0.0)
"""A budget that takes only blocks it has heard of before, and those while it is above zero."""
PART = list(range(8))
"""Too few of a segment's blocks for all of it to be kept as it is."""


def shard_of(segments: int = 8, reinsertion_share: float = 1.0) -> OwnedShard:
    return OwnedShard(segments=segments, settings=ShardSettings(reinsertion_share=reinsertion_share))


def numbers_of(batch: ReinsertionBatch) -> list[int]:
    return [int.from_bytes(each.tobytes(), "little") for each in batch.keys]


def until_reinsertion(shard: OwnedShard, fresh: Iterator[int], read: list[int]) -> ReinsertionBatch:
    """Put new blocks, and read these after each, until a segment is to be reinserted."""
    for _ in range(1000):
        assert shard.put([next(fresh)]) == [COMMITTED]
        shard.found(read)
        batch = shard.core.reinsertion.take()
        if batch is not None:
            return batch
    raise AssertionError("nothing was ever to be reinserted")


def copy(shard: OwnedShard, batch: ReinsertionBatch) -> list[int]:
    """Copy as the shell does, but for the bytes; returns the blocks that found space."""
    made = shard.core.reserve_copies(shard.now_s, batch.keys, batch.lengths, hold_s=5.0)
    rows = np.flatnonzero(made.states == PutState.STAGED)
    numbers = [numbers_of(batch)[row] for row in rows.tolist()]
    shard.core.commit(
        shard.now_s,
        made.reservations[rows],
        batch.tags[rows],
        seeds_of(numbers),
        epoch=OwnerEpoch(shard.epoch),
    )
    check_core(shard.core)
    shard.settle()
    shard.core.end_reinsertion(shard.now_s)
    check_core(shard.core)
    return numbers


def gone(shard: OwnedShard, fresh: Iterator[int], segments: int) -> None:
    """Put new blocks until so many more segments were evicted."""
    until = shard.core.counts().segments_evicted + segments
    while shard.core.counts().segments_evicted < until:
        assert shard.put([next(fresh)]) == [COMMITTED]


def scarce() -> OwnedShard:
    return OwnedShard(segments=8, settings=ShardSettings(reinsertion_share=1.0, endurance=SCARCE))


def put_at_level(shard: OwnedShard, number: int, level_bytes: float) -> None:
    """Wait until so much may be written, and put a block when it is wanted for the second time."""
    spending = shard.core.budget
    bytes_per_s = spending.budget_bytes_per_day / DAY_S
    shard.pass_time((level_bytes - spending.level_bytes) / bytes_per_s)
    assert shard.put([number]) == [PutState.DECLINED]
    assert shard.put([number]) == [COMMITTED]


def test_blocks_that_are_read_outlive_their_segment_and_others_go() -> None:
    shard, fresh, read = shard_of(), count(100), [0, 3, 7]
    shard.put(FIRST)
    before = shard.core.resolve(shard.now_s, keys_of(read), pin_s=0.0)
    batch = until_reinsertion(shard, fresh, read)
    assert numbers_of(batch) == read
    assert shard.found(FIRST) == FIRST, "they can be got meanwhile, and the others too"
    assert copy(shard, batch) == read
    gone(shard, fresh, 2)
    assert shard.found(FIRST) == read
    after = shard.core.resolve(shard.now_s, keys_of(read), pin_s=0.0)
    assert (after.generations > before.generations).all()
    counts = shard.core.counts()
    assert (counts.blocks_reinserted, counts.bytes_reinserted) == (3, 3 * BLOCK_BYTES)


def test_blocks_read_soon_after_they_were_written_and_then_no_more_are_not_kept() -> None:
    shard, fresh = shard_of(), count(100)
    shard.put(FIRST)
    assert shard.found(FIRST) == FIRST
    gone(shard, fresh, 4)
    assert shard.core.reinsertion.take() is None
    assert shard.found(FIRST) == []


def test_a_copy_has_to_be_read_again_to_be_reinserted_again() -> None:
    shard, fresh = shard_of(), count(100)
    shard.put(FIRST)
    copy(shard, until_reinsertion(shard, fresh, [0, 3]))
    batch = until_reinsertion(shard, fresh, [3])
    assert numbers_of(batch) == [3]
    copy(shard, batch)
    gone(shard, fresh, 2)
    assert shard.found([0, 3]) == [3]


def test_a_copy_is_found_again_after_a_restart() -> None:
    shard, fresh = shard_of(), count(100)
    shard.put(FIRST)
    copy(shard, until_reinsertion(shard, fresh, [5]))
    gone(shard, fresh, 2)
    shard.restart()
    assert 5 in shard.found(FIRST)


@pytest.mark.parametrize("reinsertion_share", [0.0, 0.1, 0.25])
def test_what_is_reinserted_is_at_most_a_share_of_what_is_committed(reinsertion_share: float) -> None:
    shard, everything = shard_of(reinsertion_share=reinsertion_share), list(range(300))
    read = keys_of([number for number in everything if number % 5 < 2])
    for number in everything:
        assert shard.put([number]) == [COMMITTED]
        shard.core.resolve(shard.now_s, read, pin_s=0.0)
        batch = shard.core.reinsertion.take()
        if batch is not None:
            copy(shard, batch)
    counts = shard.core.counts()
    assert counts.bytes_reinserted <= reinsertion_share * counts.bytes_committed
    assert counts.bytes_reinserted >= 0.5 * reinsertion_share * counts.bytes_committed, (
        "the share is made use of"
    )


def test_copies_are_spent_from_the_write_budget() -> None:
    shard, fresh, batch = scarce(), count(), None
    while batch is None:
        put_at_level(shard, next(fresh), PLENTY_BYTES)
        shard.found([0, 1, 2])
        batch = shard.core.reinsertion.take()
    spending, copied_bytes = shard.core.budget, 3 * BLOCK_BYTES
    written_bytes, level_bytes = spending.written_bytes, spending.level_bytes
    made = shard.core.reserve_copies(shard.now_s, batch.keys, batch.lengths, hold_s=5.0)
    assert made.states.tolist() == [PutState.STAGED] * 3
    assert spending.written_bytes == written_bytes + copied_bytes
    assert spending.level_bytes == pytest.approx(level_bytes - copied_bytes)


@pytest.mark.parametrize(("left_blocks", "copied"), [(-1, []), (0, []), (2, []), (3, [0, 1, 2])])
def test_no_more_is_copied_than_writers_leave_of_the_write_budget(
    left_blocks: int, copied: list[int]
) -> None:
    shard, fresh, reinserted = scarce(), count(), list[int]()
    while not shard.core.counts().segments_evicted:
        put_at_level(shard, next(fresh), (left_blocks + 1.5) * BLOCK_BYTES)
        shard.found([0, 1, 2])
        batch = shard.core.reinsertion.take()
        if batch is not None:
            reinserted += numbers_of(batch)
    assert reinserted == copied, "where it does not pay for all, their segment stays"


def test_a_segment_that_is_read_for_the_most_part_stays_where_it_is_until_it_is_not() -> None:
    shard, fresh = shard_of(), count(100)
    shard.put(FIRST)
    before = shard.core.resolve(shard.now_s, keys_of(FIRST), pin_s=0.0)
    while shard.core.counts().segments_evicted < 12:
        assert shard.found(FIRST[2:]) == FIRST[2:]
        assert shard.put([next(fresh)]) == [COMMITTED]
        assert shard.core.reinsertion.take() is None
        check_core(shard.core)
    after = shard.core.resolve(shard.now_s, keys_of(FIRST), pin_s=0.0)
    assert after.found.all()
    assert after.offsets.tolist() == before.offsets.tolist()
    assert after.generations.tolist() == before.generations.tolist()
    assert shard.core.counts().segments_kept >= 2
    gone(shard, fresh, 12)
    assert shard.found(FIRST) == []


@pytest.mark.parametrize(("read", "kept"), [([0], []), ([0, 3], FIRST)])
def test_where_copies_may_cost_no_more_a_segment_stays_for_less(read: list[int], kept: list[int]) -> None:
    shard, fresh = shard_of(reinsertion_share=0.0), count(100)
    shard.put(FIRST)
    while shard.core.counts().segments_evicted < 4:
        shard.found(read)
        assert shard.put([next(fresh)]) == [COMMITTED]
    assert shard.found(FIRST) == kept
    assert shard.core.counts().bytes_reinserted == 0


def test_puts_find_space_though_all_that_is_there_is_read_all_the_time() -> None:
    shard, everything = shard_of(), list(range(300))
    for number in everything:
        assert shard.put([number]) == [COMMITTED]
        shard.core.resolve(shard.now_s, keys_of(everything), pin_s=0.0)
    counts = shard.core.counts()
    assert counts.segments_evicted > 0
    assert counts.segments_kept > 0
    check_core(shard.core)


def test_writers_who_need_the_space_are_not_held_up_by_copies() -> None:
    shard, fresh = shard_of(), count(100)
    shard.put(FIRST)
    batch = until_reinsertion(shard, fresh, PART)
    gone(shard, fresh, 3)  # whoever copies has stopped, and nobody waits
    assert not shard.core.reinsertion.is_current(batch)
    assert shard.found(FIRST) == []
    assert copy(shard, batch) == [], "what has gone is not brought back"


def test_copies_that_were_under_way_when_their_segment_went_are_found_in_the_end() -> None:
    shard, fresh = shard_of(), count(100)
    shard.put(FIRST)
    batch = until_reinsertion(shard, fresh, [1, 2])
    made = shard.core.reserve_copies(shard.now_s, batch.keys, batch.lengths, hold_s=5.0)
    while shard.core.reinsertion.is_current(batch):
        assert shard.put([next(fresh)]) == [COMMITTED]
    assert shard.found([1, 2]) == []
    assert shard.reserve([1]).states[0] == PutState.DECLINED, "somebody is writing it"
    shard.commit(made.reservations, [1, 2])
    shard.settle()
    assert shard.found([1, 2]) == [1, 2]


def test_a_block_that_a_look_up_was_promised_is_found_also_where_it_was_copied_to() -> None:
    shard, fresh = shard_of(), count(100)
    shard.put(FIRST)
    batch = until_reinsertion(shard, fresh, [4])
    assert shard.core.resolve(shard.now_s, keys_of([9, 4]), pin_s=3.0, promises=True).found.all()
    copy(shard, batch)
    gone(shard, fresh, 12)
    assert shard.found([9, 4]) == [9, 4]
    shard.pass_time(3.0)
    gone(shard, fresh, 3)
    assert 9 not in shard.found([9, 4])


def test_a_block_found_damaged_before_it_was_copied_is_not_copied() -> None:
    shard, fresh = shard_of(), count(100)
    shard.put(FIRST)
    batch = until_reinsertion(shard, fresh, [1, 2])
    place = shard.core.resolve(shard.now_s, keys_of([1]), pin_s=0.0)
    assert shard.core.drop(
        key(1), offset=int(place.offsets[0]), generation=int(place.generations[0]), tag=tag_of(1)
    )
    assert copy(shard, batch) == [2]
    assert shard.found([1, 2]) == [2]


def test_a_shard_of_two_segments_reinserts_nothing_and_takes_every_put() -> None:
    shard = shard_of(segments=2)
    for number in range(100):
        assert shard.put([number]) == [COMMITTED]
        shard.found([number])
        assert shard.core.reinsertion.take() is None


def test_a_copy_whose_summary_can_not_be_written_leaves_the_block_where_it_was() -> None:
    shard, fresh = shard_of(), count(100)
    shard.put(FIRST)
    batch = until_reinsertion(shard, fresh, [1])
    place = shard.core.resolve(shard.now_s, keys_of([1]), pin_s=0.0).offsets[0]
    made = shard.core.reserve_copies(shard.now_s, batch.keys, batch.lengths, hold_s=5.0)
    shard.commit(made.reservations, [1])
    writes = [write for write in shard.core.writes_due(shard.now_s) if write.segment != batch.segment]
    shard.core.written(shard.now_s, writes[-1], is_ok=False)
    check_core(shard.core)
    assert shard.core.resolve(shard.now_s, keys_of([1]), pin_s=0.0).offsets[0] == place


def test_blocks_whose_session_ended_go_and_can_be_got_until_then() -> None:
    shard, fresh = shard_of(), count(100)
    shard.put(FIRST)
    while shard.core.reinsertion.take() is None:
        assert shard.found(PART) == PART
        shard.core.catalog.end_session(keys_of([0, 2, 4, 999]))
        assert shard.put([next(fresh)]) == [COMMITTED]
        assert not shard.core.counts().segments_evicted
    assert shard.found([0, 2, 4]) == [0, 2, 4]


def test_of_blocks_that_were_read_alike_those_whose_session_ended_are_left_out() -> None:
    shard, fresh, ended = shard_of(), count(100), [0, 2, 4]
    shard.put(FIRST)
    batch = None
    while batch is None:
        shard.found(PART)
        shard.core.catalog.end_session(keys_of(ended))
        assert shard.put([next(fresh)]) == [COMMITTED]
        batch = shard.core.reinsertion.take()
    assert numbers_of(batch) == [number for number in PART if number not in ended]


def test_a_read_after_a_session_ended_counts_anew() -> None:
    shard, fresh = shard_of(), count(100)
    shard.put(FIRST)
    batch = None
    while batch is None:
        shard.found([0, 1, 2])
        shard.core.catalog.end_session(keys_of([0, 1, 2]))
        shard.found([1])
        assert shard.put([next(fresh)]) == [COMMITTED]
        batch = shard.core.reinsertion.take()
    assert numbers_of(batch) == [1]


def test_a_session_that_ends_before_its_blocks_were_copied_is_in_time() -> None:
    shard, fresh = shard_of(), count(100)
    shard.put(FIRST)
    batch = until_reinsertion(shard, fresh, [1, 2, 3])
    shard.core.catalog.end_session(keys_of([1, 3]))
    assert copy(shard, batch) == [2]
    gone(shard, fresh, 2)
    assert shard.found(FIRST) == [2]


def test_blocks_whose_time_to_live_has_run_out_are_not_kept_however_often_they_are_read() -> None:
    shard, fresh = shard_of(), count(100)
    shard.put([0, 1], ttl_s=10.0)
    shard.put([2, 3], ttl_s=1000.0)
    shard.put([4, 5])
    shard.pass_time(12.0)
    assert shard.found([0, 1]) == [0, 1]
    batch = until_reinsertion(shard, fresh, list(range(6)))
    assert numbers_of(batch) == [2, 3, 4, 5]
    copy(shard, batch)
    gone(shard, fresh, 2)
    assert shard.found(list(range(6))) == [2, 3, 4, 5]


def test_a_copy_lives_no_longer_than_what_it_is_a_copy_of() -> None:
    shard, fresh = shard_of(), count(100)
    shard.put([0, 1], ttl_s=100.0)
    shard.put([2])
    shard.pass_time(60.0)
    copy(shard, until_reinsertion(shard, fresh, [0, 2]))
    shard.pass_time(60.0)
    batch = until_reinsertion(shard, fresh, [0, 2])
    assert numbers_of(batch) == [2]


def test_a_segment_used_again_has_no_ends_of_its_earlier_blocks() -> None:
    shard, fresh = shard_of(), count(100)
    for number in range(20):
        shard.put([number], ttl_s=1.0 + number)
    gone(shard, fresh, 8)
    shard.pass_time(100.0)
    shard.put([50], ttl_s=1000.0)
    assert numbers_of(until_reinsertion(shard, fresh, [50])) == [50]


def test_after_a_restart_blocks_have_no_end() -> None:
    shard, fresh = shard_of(), count(100)
    shard.put([0], ttl_s=10.0)
    shard.restart()
    shard.pass_time(20.0)
    assert numbers_of(until_reinsertion(shard, fresh, [0])) == [0]


@pytest.mark.parametrize(("segments", "is_index_full"), [(8, False), (64, True)])
def test_the_index_is_full_while_it_evicts_blocks_though_flash_has_room(
    segments: int, is_index_full: bool
) -> None:
    shard = OwnedShard(segments=segments, settings=ShardSettings(blocks_max=128))
    fresh = count(100)
    assert not shard.core.counts().is_index_full
    gone(shard, fresh, 1)
    found = set()
    for _ in range(4 * PER_SEGMENT):
        shard.put([next(fresh)])
        found.add(shard.core.counts().is_index_full)
    assert found == {is_index_full}
