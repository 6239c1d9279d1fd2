"""What a successor takes over of segments that its predecessor may yet write."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.support.agent.owned_shard import OwnedShard, key, keys_of
from tests.support.agent.shard_invariants import check_core

from ostraca_dpu_agent.shards.core import ShardSettings
from ostraca_fabric.model.outcome import PutState, Reason

STAGED, COMMITTED, EXISTS = PutState.STAGED, PutState.COMMITTED, PutState.EXISTS
EVERY = frozenset({0, 1})
PER_SEGMENT = 15


def two(
    segments: int = 4, settings: ShardSettings | None = None, *, is_full: bool = False
) -> tuple[OwnedShard, OwnedShard]:
    """Return an owner that may write segments 0 and 1, and its successor; a full shard evicts."""
    before = OwnedShard(segments=segments, settings=settings or ShardSettings())
    if is_full:
        before.put(list(range(1000, 1000 + PER_SEGMENT * segments)))
        before.settle()
    before.restart(withheld=frozenset(range(2, segments)))
    before.core.confirm(math.inf)
    before.core.apply_grant(before.now_s, EVERY)
    before.settle()
    assert before.put([1, 2]) == [COMMITTED] * 2
    after = before.successor(EVERY)
    after.core.confirm(math.inf)
    after.grant()
    after.settle()
    return before, after


def evicted(shard: OwnedShard) -> list[bytes]:
    return [each.tobytes() for keys in shard.core.catalog.take_evicted() for each in keys]


def place(shard: OwnedShard, number: int) -> int:
    return int(shard.core.resolve(shard.now_s, keys_of([number]), pin_s=0.0).offsets[0])


def test_what_the_predecessor_lists_later_is_adopted_once() -> None:
    before, after = two()
    assert after.found([1, 2, 3]) == [1, 2]
    assert before.put([3]) == [COMMITTED]
    assert after.adopt() == 1
    assert after.found([1, 2, 3]) == [1, 2, 3]
    assert place(after, 3) == place(before, 3)
    assert after.adopt() == 0
    assert after.reserve([3]).states[0] == EXISTS


def test_an_own_entry_wins_over_what_is_adopted() -> None:
    before, after = two()
    assert after.put([3]) == [COMMITTED]
    where = place(after, 3)
    assert before.put([3]) == [COMMITTED]
    assert after.adopt() == 0
    assert place(after, 3) == where


def test_an_own_put_under_way_wins_in_the_end_and_loses_nothing_when_it_fails() -> None:
    before, after = two()
    wins, fails = after.reserve([3]), after.reserve([4])
    assert before.put([3, 4]) == [COMMITTED] * 2
    assert after.adopt() == 2
    assert after.found([3, 4]) == [3, 4]
    after.commit(wins.reservations, [3])
    after.core.release(after.now_s, [], fails.reservations)
    after.settle()
    assert after.found([3, 4]) == [3, 4]
    assert place(after, 3) != place(before, 3)
    assert place(after, 4) == place(before, 4)


def test_blocks_of_space_that_was_used_again_leave_the_index_and_are_told_of() -> None:
    before, after = two(is_full=True)
    known = [1, 2, *range(10, 21)]
    assert before.put(known[2:]) == [COMMITTED] * 11
    assert after.adopt() == 11
    assert after.put([100]) == [COMMITTED]
    assert before.put(list(range(30, 65))) == [COMMITTED] * 35  # goes round more than once
    assert len(evicted(after)) == 2 * PER_SEGMENT, "the successor of a full shard makes room at once"
    counted = after.core.counts().blocks_evicted
    after.adopt()
    every = [*known, *range(30, 65), 100]
    assert set(after.found(every)) == {*before.found(every), 100}
    gone = [number for number in known if number not in before.found(known)]
    assert gone == known
    assert sorted(evicted(after)) == sorted(key(number) for number in gone)
    assert after.core.counts().blocks_evicted == counted + len(gone)


def test_a_block_that_was_put_again_elsewhere_did_not_go() -> None:
    before, after = two(is_full=True)
    assert before.put(list(range(10, 45))) == [COMMITTED] * 35
    assert before.put([1, 2]) == [COMMITTED] * 2
    after.adopt()
    assert not {key(1), key(2)} & set(evicted(after))
    assert after.found([1, 2]) == [1, 2]
    assert place(after, 1) == place(before, 1)


def test_what_was_dropped_as_damaged_is_not_adopted_again() -> None:
    before, after = two()
    before.put([3])
    after.adopt()
    found = after.core.resolve(after.now_s, keys_of([1, 3]), pin_s=0.0)
    for row, number in enumerate([1, 3]):
        assert after.core.drop(
            key(number),
            offset=int(found.offsets[row]),
            generation=int(found.generations[row]),
            tag=found.tags[row].tobytes(),
        )
    assert after.adopt() == 0
    assert after.found([1, 2, 3]) == [2]


def test_what_is_not_withheld_is_not_adopted() -> None:
    before, after = two()
    after.core.retire(after.now_s, EVERY)
    before.put([3])
    assert after.adopt() == 0
    assert after.found([3]) == []


def test_an_index_without_room_leaves_out_what_is_adopted_and_says_so() -> None:
    before, after = two(segments=6, settings=ShardSettings(blocks_max=16))
    for number in range(20, 28):
        assert after.put([number]) == [COMMITTED]
        after.grant()
    after.settle()
    held = after.reserve(list(range(30, 34)))
    assert held.states.tolist() == [STAGED] * 4
    assert before.put(list(range(3, 9))) == [COMMITTED] * 6
    assert after.adopt() == 2
    there, listed = before.found(list(range(3, 9))), after.found(list(range(3, 9)))
    left = [key(number) for number in there if number not in listed]
    assert len(left) == after.core.counts().blocks_beyond_limit > 0
    assert set(left) <= set(evicted(after))
    assert after.commit(held.reservations, list(range(30, 34))) == [Reason.NONE] * 4
    after.settle()
    assert after.adopt() == 0


def test_a_summary_counts_as_unreadable_for_as_long_as_it_is_when_it_is_read_again() -> None:
    before, after = two()
    after.core.adopt(after.now_s, replace(before.recovered([1]), segments=(), unreadable=(1,)))
    assert after.core.counts().segments_unreadable == 1
    after.core.adopt(after.now_s, before.recovered([0]))
    assert after.core.counts().segments_unreadable == 1
    after.core.adopt(after.now_s, before.recovered([1]))
    assert after.core.counts().segments_unreadable == 0


def test_a_lower_generation_than_is_known_is_not_believed() -> None:
    before, after = two()
    old = before.recovered()
    before.put(list(range(10, 45)))
    after.adopt()
    listed = after.found(list(range(45)))
    assert after.core.adopt(after.now_s, old) == 0
    assert after.found(list(range(45))) == listed


def test_retired_segments_are_used_again_when_their_readers_are_done() -> None:
    before, after = two(segments=3)
    before.put(list(range(10, 38)))
    after.adopt()
    pin = after.core.resolve(after.now_s, keys_of([1, 10]), pin_s=20.0).pin
    after.core.retire(after.now_s, EVERY)
    check_core(after.core)
    after.grant()
    after.put(list(range(100, 160)))
    offset = place(after, 1)
    assert not offset or after.flash[offset] == 0
    after.core.release(after.now_s, [pin], np.zeros(0, np.uint64))
    after.grant()
    assert COMMITTED in after.put(list(range(200, 230)))


@hypothesis_settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from(["before", "after", "adopt", "adopt"]), st.integers(0, 40)), max_size=40
    )
)
def test_in_the_end_all_that_either_lists_is_found_and_own_entries_win(steps: list[tuple[str, int]]) -> None:
    before, after = two()
    own: dict[int, int] = {}
    for step, number in steps:
        if step == "before":
            before.put([number])
        elif step == "adopt":
            after.adopt()
        elif after.put([number]) == [COMMITTED]:
            own[number] = place(after, number)
        listed = set(after.found(list(range(41))))
        own = {each: where for each, where in own.items() if each in listed}
        assert all(place(after, each) == where for each, where in own.items())
    after.adopt()
    after.core.retire(after.now_s, EVERY)
    check_core(after.core)
    listed = set(after.found(list(range(41))))
    assert set(before.found(list(range(41)))) <= listed


def test_a_page_of_an_owner_of_the_same_epoch_that_lands_late_is_older_than_what_is_opened_next() -> None:
    first = OwnedShard(segments=4)
    first.restart()
    (late,) = first.core.writes_due(first.now_s)  # under way when the store is lost, and its next owner reads
    first.epoch -= 1
    second = first.successor(frozenset(range(4)))
    assert second.epoch == first.core.epoch
    first.write_pieces(late)
    second.adopt()
    second.core.confirm(math.inf)
    second.core.retire(second.now_s, range(4))
    second.core.apply_grant(second.now_s, range(4))
    for number in range(100):
        second.settle()
        second.core.release(second.now_s, (), second.reserve([number]).reservations)
        second.pass_time(10.0)
