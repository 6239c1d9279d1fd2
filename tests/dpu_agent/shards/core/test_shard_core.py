from __future__ import annotations

import numpy as np
import pytest
from tests.support.agent.owned_shard import OwnedShard, key, keys_of, rows16, seeds_of, tag_of
from tests.support.agent.shard_invariants import check_core

from ostraca_dpu_agent.shards.core import SegmentState, ShardSettings, has_in_each
from ostraca_dpu_agent.shards.core.catalog import Promises
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.extent import MIB, PAGE_BYTES
from ostraca_fabric.model.ids import OwnerEpoch
from ostraca_fabric.model.outcome import PutState, Reason

STAGED, COMMITTED, EXISTS, DECLINED = PutState.STAGED, PutState.COMMITTED, PutState.EXISTS, PutState.DECLINED
NO_NUMBERS = np.zeros(0, np.uint64)


@pytest.fixture
def shard() -> OwnedShard:
    made = OwnedShard()
    made.settle()
    return made


def test_no_space_is_handed_out_before_the_opening_page_is_on_flash() -> None:
    shard = OwnedShard()
    answer = shard.reserve([1])
    assert (answer.states[0], answer.reasons[0]) == (DECLINED, Reason.NO_SPACE)
    shard.settle()
    assert shard.reserve([1]).states[0] == STAGED


def test_a_block_can_be_got_only_when_its_summary_is_on_flash(shard: OwnedShard) -> None:
    answer = shard.reserve([1])
    assert shard.commit(answer.reservations, [1]) == [Reason.NONE]
    (write,) = [
        due
        for due in shard.core.writes_due(shard.now_s)
        if due.segment == shard.core.geometry.segment_of(answer.offsets)
    ]
    assert shard.found([1]) == []
    shard.write_pieces(write)
    assert shard.found([1]) == []
    done = shard.core.written(shard.now_s, write, is_ok=True)
    assert (done.reservations.tolist(), done.states.tolist()) == (answer.reservations.tolist(), [COMMITTED])
    assert shard.found([1]) == [1]


def test_blocks_reserved_together_lie_side_by_side(shard: OwnedShard) -> None:
    lengths = np.array([1, 4096, 4097, 70_000], np.uint32)
    answer = shard.core.reserve(shard.now_s, keys_of([1, 2, 3, 4]), lengths, hold_s=1.0)
    steps = np.diff(answer.offsets.astype(np.int64)) // PAGE_BYTES
    assert steps.tolist() == [1, 1, 2]


def test_a_batch_larger_than_what_is_left_goes_on_in_the_next_segment(shard: OwnedShard) -> None:
    shard.reserve(list(range(100, 112)))
    shard.settle()
    answer = shard.reserve([1, 2, 3, 4, 5, 6], length=64 << 10)
    assert answer.states.tolist() == [STAGED] * 6
    assert len(np.unique(shard.core.geometry.segment_of(answer.offsets))) == 2


def test_writers_that_fill_all_segments_kept_free_wait_for_none_to_be_opened() -> None:
    shard = OwnedShard(segments=64)
    shard.settle()
    per_segment = shard.core.geometry.data_bytes // (64 << 10)
    kept_free = shard.core.settings.free_segments
    numbers = list(range(kept_free * per_segment + 1))
    answer = shard.reserve(numbers, length=64 << 10)
    assert answer.states.tolist() == [STAGED] * (len(numbers) - 1) + [DECLINED]
    assert len(np.unique(shard.core.geometry.segment_of(answer.offsets[:-1]))) == kept_free


def test_a_block_that_exists_is_not_reserved_again(shard: OwnedShard) -> None:
    assert shard.put([1]) == [COMMITTED]
    assert shard.put([1, 2]) == [EXISTS, COMMITTED]


def test_the_second_of_two_puts_of_a_block_is_in_flight_until_the_first_has_ended(shard: OwnedShard) -> None:
    first = shard.reserve([1, 1, 2])
    assert first.states.tolist() == [STAGED, DECLINED, STAGED]
    assert first.reasons.tolist() == [Reason.NONE, Reason.IN_FLIGHT, Reason.NONE]
    assert shard.reserve([1]).reasons[0] == Reason.IN_FLIGHT
    shard.commit(first.reservations[[0]], [1])
    assert shard.reserve([1]).reasons[0] == Reason.IN_FLIGHT
    shard.settle()
    assert shard.reserve([1]).states[0] == EXISTS


def test_a_block_that_no_segment_holds_is_declined_with_its_reason(shard: OwnedShard) -> None:
    assert shard.reserve([1], length=MIB).reasons[0] == Reason.BAD_LENGTH
    assert shard.reserve([1], length=0).reasons[0] == Reason.BAD_LENGTH
    assert shard.reserve([1], length=shard.geometry.data_bytes).states[0] == STAGED


def test_a_commit_after_the_reservation_s_end_is_refused(shard: OwnedShard) -> None:
    answer = shard.reserve([1], hold_s=5.0)
    shard.now_s += 5.0
    assert shard.commit(answer.reservations, [1]) == [Reason.EXPIRED]
    assert not any(len(done.states) for done in shard.settle())
    assert shard.found([1]) == []


def test_a_commit_in_time_outlives_its_reservation(shard: OwnedShard) -> None:
    answer = shard.reserve([1], hold_s=5.0)
    shard.commit(answer.reservations, [1])
    shard.pass_time(6.0)
    shard.settle()
    assert shard.found([1]) == [1]


def test_a_late_commit_does_not_take_the_place_of_a_later_put(shard: OwnedShard) -> None:
    late = shard.reserve([1], hold_s=5.0)
    shard.pass_time(5.0)
    assert shard.put([1]) == [COMMITTED]
    assert shard.commit(late.reservations, [1]) == [Reason.EXPIRED]


def test_a_commit_of_another_owner_epoch_is_refused(shard: OwnedShard) -> None:
    answer = shard.reserve([1])
    refused = shard.core.commit(
        shard.now_s,
        answer.reservations,
        rows16([tag_of(1)]),
        seeds_of([1]),
        epoch=OwnerEpoch(shard.epoch - 1),
    )
    assert (refused.states[0], refused.reasons[0]) == (DECLINED, Reason.EXPIRED)
    assert shard.commit(answer.reservations, [1]) == [Reason.NONE]


def test_a_commit_said_twice_is_taken_once(shard: OwnedShard) -> None:
    answer = shard.reserve([1])
    assert shard.commit(np.repeat(answer.reservations, 2), [1, 1]) == [Reason.NONE, Reason.EXPIRED]
    assert shard.commit(answer.reservations, [1]) == [Reason.IN_FLIGHT]
    shard.settle()
    assert shard.commit(answer.reservations, [1]) == [Reason.EXPIRED]
    assert shard.commit(np.array([0, 12345], np.uint64), [1, 2]) == [Reason.EXPIRED, Reason.EXPIRED]


def test_an_abandoned_extent_is_not_handed_out_again_in_its_generation(shard: OwnedShard) -> None:
    first = shard.reserve([1], hold_s=5.0)
    shard.pass_time(5.0)
    second = shard.reserve([1])
    shard.core.release(shard.now_s, [], second.reservations)
    third = shard.reserve([1])
    assert first.offsets[0] < second.offsets[0] < third.offsets[0]
    assert third.states[0] == STAGED


def test_a_failed_summary_write_declines_its_blocks_and_seals_the_segment(shard: OwnedShard) -> None:
    assert shard.put([1]) == [COMMITTED]
    answer = shard.reserve([2, 3, 4])
    shard.commit(answer.reservations[:1], [2])
    (write,) = [
        due
        for due in shard.core.writes_due(shard.now_s)
        if due.segment == shard.core.geometry.segment_of(answer.offsets)[0]
    ]
    shard.commit(answer.reservations[1:2], [3])
    done = shard.core.written(shard.now_s, write, is_ok=False)
    assert sorted(done.reservations.tolist()) == sorted(answer.reservations[:2].tolist())
    assert set(done.states.tolist()) == {DECLINED}
    assert set(done.reasons.tolist()) == {Reason.DRIVE_ERROR}
    assert shard.core.ring.segments[write.segment].state is SegmentState.SEALED
    assert shard.commit(answer.reservations[2:], [4]) == [Reason.DRIVE_ERROR]
    assert shard.found([1, 2, 3, 4]) == [1]
    assert shard.put([2, 3, 4]) == [COMMITTED] * 3


def test_a_segment_that_can_not_be_opened_is_tried_again_a_while_later() -> None:
    shard = OwnedShard()
    shard.settle(is_ok=False)
    assert shard.reserve([1]).reasons[0] == Reason.NO_SPACE
    assert not shard.core.has_writes_due
    shard.pass_time(shard.settings.retry_s)
    shard.settle()
    assert shard.reserve([1]).states[0] == STAGED


def test_a_segment_whose_summary_failed_to_be_written_is_not_used_again_while_the_write_may_land() -> None:
    shard = OwnedShard(segments=2)
    (failed,) = shard.core.writes_due(shard.now_s)
    shard.core.written(shard.now_s, failed, is_ok=False)
    late_s = shard.settings.late_write_s
    opened = set()
    for _ in range(40):
        shard.pass_time(late_s / 50)
        opened |= {write.segment for write in shard.core.writes_due(shard.now_s)}
    assert failed.segment not in opened
    shard.pass_time(late_s)
    assert shard.core.counts().segments[SegmentState.DRAINING] == 0


@pytest.mark.parametrize("may_land", [False, True])
def test_a_segment_where_a_write_failed_is_not_used_again_while_the_write_may_land(
    may_land: bool,
) -> None:
    shard = OwnedShard(segments=3)
    shard.settle()
    ring, failed = shard.core.ring, shard.reserve([1])
    (number,) = ring.geometry.segment_of(failed.offsets).tolist()
    generation = int(ring.generations[number])
    shard.core.release(shard.now_s, [], failed.reservations, may_land=may_land)
    assert shard.put([1]) == [COMMITTED], "the block itself need not wait"
    shard.put(list(range(100, 300)))
    assert (int(ring.generations[number]) == generation) == may_land
    shard.pass_time(shard.settings.late_write_s - 1.0)
    shard.put(list(range(300, 350)))
    assert (int(ring.generations[number]) == generation) == may_land
    shard.pass_time(1.0)
    assert shard.put(list(range(350, 400))) == [COMMITTED] * 50
    assert int(ring.generations[number]) > generation


@pytest.mark.parametrize("segments", [2, 3, 4, 9])
def test_the_oldest_blocks_make_room_for_the_newest(segments: int) -> None:
    shard = OwnedShard(segments=segments)
    numbers = list(range(15 * segments * 3))
    assert shard.put(numbers) == [COMMITTED] * len(numbers)
    kept = shard.found(numbers)
    assert kept == numbers[-len(kept) :]
    spare = min(shard.settings.free_segments, segments // 3) or 1
    assert len(kept) >= 15 * (segments - spare - 1)
    counts = shard.core.counts()
    assert counts.blocks == len(kept)
    assert counts.blocks_evicted == len(numbers) - len(kept)
    assert counts.blocks_committed == len(numbers)


def test_blocks_of_all_sizes_share_a_segment() -> None:
    shard = OwnedShard(segments=3, block_bytes=4096)
    for number, length in enumerate([1, 4096, 300_000, 5000, 900_000, 17, 65_536] * 3):
        assert shard.put([number], length) == [COMMITTED]


def test_a_segment_is_sealed_when_its_summary_area_is_full() -> None:
    shard = OwnedShard(segments=3)
    answers = shard.put(list(range(120)), length=100)
    assert answers == [COMMITTED] * 120
    assert shard.geometry.entries_max == 50
    assert shard.core.counts().segments[SegmentState.SEALED] >= 1


def test_a_pinned_segment_is_not_reused_before_the_pin_ends() -> None:
    shard = OwnedShard(segments=2)
    shard.put([1])
    pinned = shard.core.resolve(shard.now_s, keys_of([1]), pin_s=3.0)
    numbers = iter(range(100, 1000))
    while shard.put([next(numbers)]) == [COMMITTED]:
        pass
    assert shard.found([1]) == []
    assert shard.core.counts().segments[SegmentState.DRAINING] == 1
    shard.pass_time(2.9)
    assert shard.put([next(numbers)]) == [DECLINED]
    shard.pass_time(0.2)
    assert shard.put([next(numbers)]) == [COMMITTED]
    assert shard.core.counts().pins == 0
    shard.core.release(shard.now_s, [pinned.pin], NO_NUMBERS)


@pytest.mark.parametrize("written", range(60, 120, 15))
def test_a_pin_of_blocks_in_several_segments_holds_every_one_of_them(written: int) -> None:
    shard = OwnedShard(segments=4)
    shard.put(list(range(written)))
    oldest, *_, newest = shard.found(list(range(written)))
    there = shard.core.resolve(shard.now_s, keys_of([oldest, newest]), pin_s=3.0)
    pinned = shard.core.geometry.segment_of(there.offsets)
    assert pinned[0] != pinned[1]
    numbers = iter(range(1000, 2000))
    while shard.put([next(numbers)]) == [COMMITTED]:
        pass
    assert shard.core.ring.generations[pinned].tolist() == there.generations.tolist()
    shard.core.release(shard.now_s, [there.pin], NO_NUMBERS)
    for number in range(2000, 2100):
        assert shard.put([number]) == [COMMITTED]
    assert (shard.core.ring.generations[pinned] > there.generations).all()


def test_a_promised_block_is_found_again_while_others_are_evicted_in_its_place() -> None:
    shard = OwnedShard(segments=4)
    shard.put([1])
    assert shard.core.resolve(shard.now_s, keys_of([1]), pin_s=3.0, promises=True).found.all()
    for number in range(100, 400):
        assert shard.put([number]) == [COMMITTED]
    assert shard.core.counts().segments_evicted > shard.geometry.segments, "the ring went round"
    assert shard.found([1]) == [1]
    shard.pass_time(3.0)
    for number in range(400, 700):
        assert shard.put([number]) == [COMMITTED]
    assert shard.found([1]) == []


def test_an_owner_with_a_successor_promises_nothing_beyond_what_that_one_waits_for() -> None:
    shard = OwnedShard(segments=4)
    shard.put([1])
    longest_s = shard.settings.pin_max_s
    shard.core.fence(shard.now_s)

    def promised(pin_s: float) -> bool:
        said = shard.core.resolve(shard.now_s, keys_of([1]), pin_s=pin_s, promises=True)
        return bool(said.found.all())

    assert promised(longest_s)
    shard.pass_time(1.0)
    shard.core.fence(shard.now_s)
    assert not promised(longest_s)
    assert promised(longest_s - 1.0)
    assert shard.found([1]) == [1], "it is still there for who asks for no promise"


def test_promises_one_after_the_other_hold_a_segment_up_no_longer_than_one_pin() -> None:
    shard = OwnedShard(segments=2)
    shard.put([1])
    assert shard.core.resolve(shard.now_s, keys_of([1]), pin_s=1.0, promises=True).found.all()
    numbers = iter(range(100, 10_000))
    while shard.put([next(numbers)]) == [COMMITTED]:
        pass
    wanted_since_s = shard.now_s
    while shard.core.resolve(shard.now_s, keys_of([1]), pin_s=1.0, promises=True).found.all():
        assert shard.put([next(numbers)]) == [DECLINED]
        shard.pass_time(0.9)
    assert shard.now_s <= wanted_since_s + shard.settings.pin_max_s
    assert shard.found([1]) == [1], "it is still there for who asks for no promise"
    shard.pass_time(1.0)
    while shard.put([next(numbers)]) != [COMMITTED]:
        shard.pass_time(0.1)
        assert shard.now_s <= wanted_since_s + shard.settings.pin_max_s + 1.0
    assert shard.found([1]) == []


def test_what_a_wanted_segment_refuses_to_promise_it_promises_when_it_is_wanted_no_more() -> None:
    promises, first = Promises(segments=2), np.array([0])
    promises.make(first, 5.0)
    assert promises.bound(0, 1.0, latest_s=11.0)
    assert promises.bound(0, 2.0, latest_s=12.0), "the first time counts"
    assert promises.may_promise(first, 11.0).all()
    assert not promises.may_promise(first, 11.5).any()
    promises.lift_bounds()
    assert promises.may_promise(first, 11.5).all()
    assert not promises.bound(1, 1.0, latest_s=11.0), "nothing was promised there"
    assert not promises.bound(0, 5.0, latest_s=15.0), "that was promised until then"


def test_a_pin_released_early_lets_its_segment_go() -> None:
    shard = OwnedShard(segments=2)
    shard.put([1])
    pin = shard.core.resolve(shard.now_s, keys_of([1, 2]), pin_s=3.0).pin
    numbers = iter(range(100, 1000))
    while shard.put([next(numbers)]) == [COMMITTED]:
        pass
    shard.core.release(shard.now_s, [pin, pin, 77], NO_NUMBERS)
    assert shard.put([next(numbers)]) == [COMMITTED]


def test_a_pin_never_lasts_longer_than_the_limit(shard: OwnedShard) -> None:
    shard.put([1])
    shard.core.resolve(shard.now_s, keys_of([1]), pin_s=1e9)
    shard.pass_time(shard.settings.pin_max_s)
    assert shard.core.counts().pins == 0


def test_nothing_found_is_not_pinned(shard: OwnedShard) -> None:
    assert shard.core.resolve(shard.now_s, keys_of([1, 2]), pin_s=3.0).pin == 0


def test_beyond_the_limit_of_pins_nothing_is_found() -> None:
    shard = OwnedShard(settings=ShardSettings(pins_max=1))
    shard.put([1])
    assert shard.core.resolve(shard.now_s, keys_of([1]), pin_s=1.0).found.tolist() == [True]
    assert shard.core.resolve(shard.now_s, keys_of([1]), pin_s=1.0).found.tolist() == [False]
    shard.pass_time(1.0)
    assert shard.core.resolve(shard.now_s, keys_of([1]), pin_s=1.0).found.tolist() == [True]


def test_look_ups_leave_the_pins_to_readers() -> None:
    shard = OwnedShard(settings=ShardSettings(pins_max=1))
    shard.put([1])
    for _ in range(3):
        assert shard.core.resolve(shard.now_s, keys_of([1]), pin_s=1.0, promises=True).found.all()
    assert shard.core.resolve(shard.now_s, keys_of([1]), pin_s=1.0).found.all()


def test_a_segment_waits_for_late_writes_of_abandoned_reservations() -> None:
    shard = OwnedShard(segments=2, settings=ShardSettings(late_write_s=50.0))
    shard.settle()
    shard.reserve([1], hold_s=1.0)
    numbers = iter(range(100, 1000))
    while shard.put([next(numbers)]) == [COMMITTED]:
        shard.pass_time(0.1)
    shard.pass_time(40.0)
    assert shard.put([next(numbers)]) == [DECLINED]
    shard.pass_time(11.0)
    assert shard.put([next(numbers)]) == [COMMITTED]


@pytest.mark.parametrize("segments", [2, 4])
def test_a_segment_whose_writers_are_at_work_is_not_evicted(segments: int) -> None:
    shard = OwnedShard(segments=segments)
    shard.settle()
    slow = shard.reserve([1], hold_s=30.0)
    others = [shard.put([number]) for number in range(100, 300)]
    if segments > 2:  # others go round without it
        assert others == [[COMMITTED]] * 200
    assert shard.commit(slow.reservations, [1]) == [Reason.NONE]
    assert [state for done in shard.settle() for state in done.states] == [COMMITTED]
    assert shard.put([300]) == [COMMITTED]


def test_beyond_the_limit_of_reservations_puts_are_declined() -> None:
    shard = OwnedShard(settings=ShardSettings(reservations_max=2))
    shard.settle()
    answer = shard.reserve([1, 2, 3])
    assert answer.reasons.tolist() == [Reason.NONE, Reason.NONE, Reason.OVERLOADED]
    shard.core.release(shard.now_s, [], answer.reservations[:1])
    assert shard.reserve([3]).states[0] == STAGED


@pytest.mark.parametrize("blocks_max", [16, 20, 50])
def test_at_the_limit_of_blocks_the_oldest_segment_is_evicted(blocks_max: int) -> None:
    shard = OwnedShard(settings=ShardSettings(blocks_max=blocks_max))
    assert shard.put(list(range(90)), length=100) == [COMMITTED] * 90
    kept = shard.found(list(range(90)))
    assert kept == list(range(90))[-len(kept) :]
    assert blocks_max // 2 <= len(kept) <= blocks_max


def test_an_index_too_small_to_be_of_use_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 16 blocks"):
        ShardSettings(blocks_max=15)


def test_what_was_committed_is_found_after_a_restart(shard: OwnedShard) -> None:
    shard.put(list(range(20)))
    unfinished = shard.reserve([77])
    shard.commit(unfinished.reservations, [77])
    shard.restart()
    assert shard.found([*range(20), 77]) == list(range(20))
    shard.settle()
    assert shard.put([77, 5]) == [COMMITTED, EXISTS]


def test_a_full_shard_can_be_restarted_again_and_again() -> None:
    shard = OwnedShard(segments=2)
    for start in range(6):
        numbers = list(range(start * 30, start * 30 + 30))
        assert shard.put(numbers) == [COMMITTED] * 30
        kept = shard.found(numbers)
        assert kept
        assert kept == numbers[-len(kept) :]
        shard.restart()
        assert set(shard.found(numbers)) & set(kept)


def test_recovered_blocks_are_not_overwritten_while_earlier_readers_may_remain() -> None:
    shard = OwnedShard(segments=2)
    shard.put(list(range(40)))
    shard.restart(earlier_pins_end_s=shard.now_s + 10.0)
    shard.settle()
    assert shard.reserve([100]).reasons[0] == Reason.NO_SPACE
    shard.pass_time(10.0)
    assert shard.put([100]) == [COMMITTED]


def test_an_epoch_below_that_on_flash_is_refused(shard: OwnedShard) -> None:
    shard.epoch -= 2
    with pytest.raises(UsageError, match="claim the shard with a higher epoch"):
        shard.restart()


def test_the_same_epoch_may_own_again_and_its_generations_go_on(shard: OwnedShard) -> None:
    shard.put([1])
    before = shard.core.resolve(shard.now_s, keys_of([1]), pin_s=0.0).generations[0]
    shard.epoch -= 1
    shard.restart()
    shard.settle()
    shard.put([2])
    assert shard.core.resolve(shard.now_s, keys_of([2]), pin_s=0.0).generations[0] > before


def test_whoever_outlived_an_owner_ends_nothing_that_its_successor_holds(shard: OwnedShard) -> None:
    """Not even where a process takes its shard again, which keeps the epoch."""
    shard.put([1])
    ended = shard.reserve([2]).reservations
    pin = shard.core.resolve(shard.now_s, keys_of([1]), pin_s=5.0).pin
    for lower in (0, 1):
        shard.epoch -= lower
        shard.restart()
        shard.settle()
        held = shard.reserve([3]).reservations
        pinned = shard.core.resolve(shard.now_s, keys_of([1]), pin_s=5.0).pin
        assert pinned != pin
        shard.core.release(shard.now_s, [pin], ended)
        assert len(shard.core.pins) == 1
        assert shard.commit(ended, [2]) == [Reason.EXPIRED]
        assert shard.commit(held, [3]) == [Reason.NONE]
        check_core(shard.core)


def test_a_damage_report_counts_only_when_it_is_current(shard: OwnedShard) -> None:
    shard.put([1, 2])
    found = shard.core.resolve(shard.now_s, keys_of([1, 2]), pin_s=0.0)
    offset, generation, tag = int(found.offsets[0]), int(found.generations[0]), tag_of(1)
    other = int(found.offsets[1])
    assert not shard.core.drop(key(9), offset=offset, generation=generation, tag=tag)
    assert not shard.core.drop(key(1), offset=other, generation=generation, tag=tag)
    assert not shard.core.drop(key(1), offset=offset, generation=generation + 1, tag=tag)
    assert not shard.core.drop(key(1), offset=offset, generation=generation, tag=tag_of(1, version=1))
    assert not shard.core.is_current(b"short", offset=offset, generation=generation, tag=tag)
    assert shard.found([1, 2]) == [1, 2]
    assert shard.core.is_current(key(1), offset=offset, generation=generation, tag=tag)
    assert shard.core.drop(key(1), offset=offset, generation=generation, tag=tag)
    assert shard.found([1, 2]) == [2]
    assert not shard.core.drop(key(1), offset=offset, generation=generation, tag=tag)


def test_a_dropped_block_can_be_put_again_and_the_newer_counts_after_a_restart(shard: OwnedShard) -> None:
    shard.put([1])
    first = shard.core.resolve(shard.now_s, keys_of([1]), pin_s=0.0)
    assert shard.core.drop(
        key(1), offset=int(first.offsets[0]), generation=int(first.generations[0]), tag=tag_of(1)
    )
    assert shard.put([1]) == [COMMITTED]
    shard.restart()
    again = shard.core.resolve(shard.now_s, keys_of([1]), pin_s=0.0)
    assert again.offsets[0] > first.offsets[0]


def test_of_two_segments_that_list_a_block_the_newer_counts_after_a_restart(shard: OwnedShard) -> None:
    shard.put([1])
    first = shard.core.resolve(shard.now_s, keys_of([1]), pin_s=0.0)
    offset, generation = int(first.offsets[0]), int(first.generations[0])
    assert shard.core.drop(key(1), offset=offset, generation=generation, tag=tag_of(1))
    shard.put(list(range(100, 116)))
    assert shard.put([1]) == [COMMITTED]
    shard.restart()
    again = shard.core.resolve(shard.now_s, keys_of([1]), pin_s=0.0)
    assert again.generations[0] > generation


def test_an_ended_reservation_s_number_is_not_taken_for_the_next_one(shard: OwnedShard) -> None:
    ended = shard.reserve([1])
    shard.core.release(shard.now_s, [], ended.reservations)
    live = shard.reserve([2])
    assert shard.commit(ended.reservations, [1]) == [Reason.EXPIRED]
    assert shard.commit(live.reservations, [2]) == [Reason.NONE]


def test_what_is_committed_during_a_summary_write_waits_for_the_next(shard: OwnedShard) -> None:
    first, second = shard.reserve([1]), shard.reserve([2])
    shard.settle()
    shard.commit(first.reservations, [1])
    (write,) = shard.core.writes_due(shard.now_s)
    shard.commit(second.reservations, [2])
    assert not shard.core.has_writes_due
    assert shard.core.writes_due(shard.now_s) == []
    shard.write_pieces(write)
    shard.core.written(shard.now_s, write, is_ok=True)
    assert shard.found([1, 2]) == [1]
    shard.settle()
    assert shard.found([1, 2]) == [1, 2]


def test_a_segment_is_not_evicted_while_its_summary_is_being_written() -> None:
    shard = OwnedShard(segments=2)
    shard.settle()
    first = shard.reserve([1])
    shard.commit(first.reservations, [1])
    (write,) = shard.core.writes_due(shard.now_s)
    ring, numbers = shard.core.ring, iter(range(100, 1000))
    while ring.free or ring.ready or not ring.pools.common.needs_next:
        answer = shard.reserve([next(numbers)], length=300_000)
        shard.core.release(shard.now_s, [], answer.reservations)
        shard.settle()
    assert ring.pools.common.sealed[0].is_writing
    shard.write_pieces(write)
    assert shard.core.written(shard.now_s, write, is_ok=True).states.tolist() == [COMMITTED]
    check_core(shard.core)


def test_a_shard_that_can_not_write_declines_puts_and_can_still_be_read(shard: OwnedShard) -> None:
    shard.put([1])
    committing, held = shard.reserve([2]), shard.reserve([3])
    shard.commit(committing.reservations, [2])
    assert shard.core.has_writes_due
    shard.core.end_writing()
    lengths = np.array([4096, 4096, 4096, MIB], np.uint32)
    answer = shard.core.reserve(shard.now_s, keys_of([1, 2, 4, 5]), lengths, hold_s=1.0)
    assert answer.states.tolist() == [EXISTS, DECLINED, DECLINED, DECLINED]
    assert answer.reasons.tolist() == [
        Reason.NONE,
        Reason.DRIVE_ERROR,
        Reason.DRIVE_ERROR,
        Reason.BAD_LENGTH,
    ]
    assert shard.commit(held.reservations, [3]) == [Reason.DRIVE_ERROR]
    shard.pass_time(1000.0)
    assert shard.core.writes_due(shard.now_s) == []
    assert shard.found([1, 2, 3]) == [1]


def test_what_runs_out_at_once_holds_back_each_segment_it_lies_in() -> None:
    shard = OwnedShard(settings=ShardSettings(late_write_s=50.0))
    shard.settle()
    shard.reserve(list(range(100, 112)), hold_s=2.0)
    shard.settle()
    first, second = shard.reserve([1], hold_s=4.0), shard.reserve([2, 3, 4, 5, 6], hold_s=3.0)
    numbers = shard.core.geometry.segment_of(np.concatenate([first.offsets, second.offsets]))
    assert len(np.unique(numbers)) == 2
    ends_s = dict.fromkeys(numbers.tolist(), shard.now_s + 3.0)
    ends_s[int(numbers[0])] = shard.now_s + 4.0
    shard.pass_time(5.0)
    quiet_at_s = {number: shard.core.ring.segments[number].quiet_at_s for number in ends_s}
    assert quiet_at_s == {number: end_s + 50.0 for number, end_s in ends_s.items()}
    assert shard.core.counts().reservations == 0


def test_blocks_of_several_shards_are_looked_up_and_counted_at_each() -> None:
    one, other = OwnedShard(), OwnedShard()
    for each, numbers in ((one, [1, 2]), (other, [3])):
        each.settle()
        each.put(numbers)
        each.core.index.forget_all_reads()
    runs = [(one.core, 2), (None, 1), (other.core, 3), (one.core, 0), (one.core, 2)]
    found = has_in_each(runs, keys_of([1, 9, 3, 3, 1, 3, 2, 3]))
    assert found.tolist() == [True, False, False, True, False, True, True, False]
    counted = [(each.core.counts().keys_asked, each.core.counts().keys_found) for each in (one, other)]
    assert counted == [(4, 2), (3, 2)]
    for each, number in ((one, 1), (one, 2), (other, 3)):
        assert each.core.index.is_read(each.core.index.find(keys_of([number]))).all()


def test_the_counts_say_what_happened(shard: OwnedShard) -> None:
    shard.put([1, 2, 3], length=5000)
    shard.found([1, 2, 9])
    counts = shard.core.counts()
    assert (counts.blocks, counts.block_bytes, counts.keys_asked, counts.keys_found) == (3, 15000, 3, 2)
    assert counts.capacity_bytes == 4 * shard.geometry.data_bytes
    assert sum(counts.segments.values()) == 4
    assert (counts.summary_write_failures, counts.reservations, counts.pins) == (0, 0, 0)
