"""An owner among others: what it may write, and until when."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.support.agent.owned_shard import OwnedShard, keys_of, rows16, seeds_of, tag_of
from tests.support.agent.shard_invariants import check_core

from ostraca_dpu_agent.shards.core import (
    SegmentState,
    ShardCore,
    ShardSettings,
    may_get_space,
    space_shortage,
)
from ostraca_fabric.model.ids import OwnerEpoch
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.policies.endurance import EnduranceSettings

STAGED, COMMITTED, EXISTS, DECLINED = PutState.STAGED, PutState.COMMITTED, PutState.EXISTS, PutState.DECLINED
NOTHING = frozenset[int]()
PER_SEGMENT = 15


def among_others(
    segments: int = 8, withheld: frozenset[int] = NOTHING, until_s: float = math.inf
) -> OwnedShard:
    shard = OwnedShard(segments=segments)
    shard.restart(withheld=withheld)
    shard.core.confirm(until_s)
    shard.core.expire(shard.now_s)
    return shard


def opened(shard: OwnedShard) -> set[int]:
    return {segment.number for segment in shard.core.ring.segments if segment.log is not None}


def test_nothing_is_opened_before_it_is_granted() -> None:
    shard = among_others()
    shard.pass_time(10.0)
    assert not shard.core.has_writes_due
    assert shard.reserve([1]).reasons[0] == Reason.NO_SPACE
    shard.core.apply_grant(shard.now_s, [1])
    (write,) = shard.core.writes_due(shard.now_s)
    assert write.segment == 1


def test_nothing_is_handed_out_before_the_claim_is_confirmed() -> None:
    shard = OwnedShard()
    shard.restart(withheld=NOTHING)
    shard.core.apply_grant(shard.now_s, range(4))
    assert not shard.core.has_writes_due
    assert shard.reserve([1]).reasons[0] == Reason.FENCED
    shard.core.confirm(shard.now_s + 1.0)
    shard.pass_time(0.0)
    shard.settle()
    assert shard.reserve([1]).states[0] == STAGED


def test_at_the_fence_space_commits_and_what_was_committed_before_are_declined() -> None:
    shard = among_others(until_s=1005.0)
    shard.core.apply_grant(shard.now_s, range(8))
    shard.settle()
    assert shard.put([1]) == [COMMITTED]
    early, late = shard.reserve([2], hold_s=30.0), shard.reserve([3], hold_s=30.0)
    shard.commit(early.reservations, [2])
    shard.now_s = 1005.0
    assert shard.core.writes_due(shard.now_s) == []
    assert shard.commit(late.reservations, [3]) == [Reason.FENCED]
    (declined,) = shard.core.commits.take_declined()
    assert declined.reservations.tolist() == early.reservations.tolist()
    assert (declined.states.tolist(), declined.reasons.tolist()) == ([DECLINED], [Reason.FENCED])
    again = shard.reserve([1, 2])
    assert (again.states.tolist(), again.reasons.tolist()) == (
        [EXISTS, DECLINED],
        [Reason.NONE, Reason.FENCED],
    )
    assert shard.found([1, 2, 3]) == [1]
    assert not shard.core.has_writes_due
    assert len(shard.core.reservations) == 0


def test_a_fence_that_is_put_off_in_time_or_late_lets_writing_go_on() -> None:
    shard = among_others(until_s=1005.0)
    shard.core.apply_grant(shard.now_s, range(8))
    shard.settle()
    shard.core.confirm(1020.0)
    shard.core.confirm(1010.0)  # an older word that comes later takes nothing back
    shard.now_s = 1019.0
    assert shard.put([1]) == [COMMITTED]
    shard.pass_time(10.0)
    assert shard.reserve([2]).reasons[0] == Reason.FENCED
    shard.core.confirm(1040.0)
    assert shard.put([2]) == [COMMITTED]


def test_a_write_that_was_begun_before_the_fence_may_end_after_it() -> None:
    shard = among_others(until_s=1005.0)
    shard.core.apply_grant(shard.now_s, range(8))
    shard.settle()
    made = shard.reserve([1])
    shard.settle()
    shard.commit(made.reservations, [1])
    (write,) = shard.core.writes_due(1004.9)
    shard.now_s = 1006.0
    shard.write_pieces(write)
    assert shard.core.written(shard.now_s, write, is_ok=True).states.tolist() == [COMMITTED]
    assert shard.found([1]) == [1]


@pytest.mark.parametrize("shown_by", ["summary", "controller"])
def test_an_owner_that_is_shown_a_higher_epoch_writes_no_more_and_goes_on_resolving(shown_by: str) -> None:
    shard = among_others(until_s=1005.0)
    shard.core.apply_grant(shard.now_s, range(8))
    shard.settle()
    assert shard.put([1]) == [COMMITTED]
    made = shard.reserve([2])
    higher = OwnerEpoch(shard.epoch + 1)
    if shown_by == "summary":
        shard.core.adopt(shard.now_s, replace(shard.recovered(), highest_epoch=higher))
    else:
        shard.core.fence(shard.now_s)
    assert shard.commit(made.reservations, [2]) == [Reason.FENCED]
    shard.core.confirm(math.inf)
    assert shard.reserve([2]).reasons[0] == Reason.FENCED
    assert shard.core.wanted_grant(shard.now_s) is None
    assert shard.found([1]) == [1]


def name_a_higher_epoch(shard: OwnedShard) -> None:
    none = np.empty(0, np.uint64)
    tags = np.empty((0, 16), np.uint8)
    shard.core.commit(shard.now_s, none, tags, none, epoch=OwnerEpoch(shard.epoch + 1))


def test_who_names_a_higher_epoch_stops_an_owner_only_until_the_store_was_asked() -> None:
    shard = among_others(until_s=1005.0)
    shard.core.apply_grant(shard.now_s, range(8))
    shard.settle()
    queued, held = shard.reserve([1]), shard.reserve([2])
    shard.core.commit(
        shard.now_s,
        queued.reservations,
        rows16([tag_of(1)]),
        seeds_of([1]),
        epoch=OwnerEpoch(shard.epoch),
    )
    shard.now_s = 1001.0
    name_a_higher_epoch(shard)
    assert shard.core.grants.is_doubted
    assert shard.reserve([3]).reasons[0] == Reason.FENCED
    assert shard.commit(held.reservations, [2]) == [Reason.FENCED]
    assert not shard.core.has_writes_due
    shard.core.confirm(1005.5, asked_s=1000.5)  # it was asked before the doubt, and says nothing of it
    assert shard.core.grants.is_doubted
    shard.core.confirm(1006.0, asked_s=1001.0)
    shard.settle()
    assert shard.found([1]) == [1], "what waited is written"
    assert shard.put([3]) == [COMMITTED]


def test_a_doubt_that_the_store_does_not_end_is_a_fence_when_its_time_comes() -> None:
    shard = among_others(until_s=1005.0)
    shard.core.apply_grant(shard.now_s, range(8))
    shard.settle()
    queued = shard.reserve([1])
    answer = shard.core.commit(
        shard.now_s,
        queued.reservations,
        rows16([tag_of(1)]),
        seeds_of([1]),
        epoch=OwnerEpoch(shard.epoch),
    )
    assert answer.states[0] == PutState.STAGED
    name_a_higher_epoch(shard)
    assert shard.core.commits.take_declined() == [], "it waits for the store's word"
    shard.now_s = 1005.0
    shard.core.expire(shard.now_s)
    (done,) = shard.core.commits.take_declined()
    assert (done.states.tolist(), done.reasons.tolist()) == ([PutState.DECLINED], [Reason.FENCED])
    assert not shard.core.has_writes_due


def test_who_names_higher_epochs_all_the_time_does_not_keep_an_owner_from_writing() -> None:
    shard = among_others(until_s=1005.0)
    shard.core.apply_grant(shard.now_s, range(8))
    shard.settle()
    name_a_higher_epoch(shard)
    shard.core.confirm(1005.0, asked_s=shard.now_s)
    shard.now_s += 0.5
    name_a_higher_epoch(shard)
    assert shard.put([1]) == [COMMITTED], "the store has just said so"
    shard.now_s += 0.5
    name_a_higher_epoch(shard)
    assert shard.reserve([2]).reasons[0] == Reason.FENCED


def test_an_owner_that_knows_of_no_store_is_stopped_by_nobody() -> None:
    shard = OwnedShard()
    name_a_higher_epoch(shard)
    assert shard.put([1]) == [COMMITTED]


def test_a_summary_that_was_never_submitted_declines_its_blocks_and_its_segment_is_left() -> None:
    shard = OwnedShard()
    shard.settle()
    made = shard.reserve([1, 2])
    shard.settle()
    shard.commit(made.reservations[:1], [1])
    (write,) = shard.core.writes_due(shard.now_s)
    done = shard.core.dropped(shard.now_s, write)
    assert (done.states.tolist(), done.reasons.tolist()) == ([DECLINED], [Reason.FENCED])
    assert shard.commit(made.reservations[1:], [2]) == [Reason.DRIVE_ERROR]
    shard.settle()
    assert shard.put([1, 2]) == [COMMITTED, COMMITTED]


def test_what_is_withheld_is_neither_emptied_nor_opened_and_can_be_got_and_is_never_promised() -> None:
    before = OwnedShard(segments=6)
    first = list(range(45))
    assert before.put(first) == [COMMITTED] * 45
    withheld = frozenset({0, 1, 3, 4})
    shard = before.successor(withheld)
    shard.core.confirm(math.inf)
    assert shard.grant().isdisjoint(withheld)
    shard.settle()
    states = shard.put(list(range(100, 200)))
    assert COMMITTED in states
    for _ in range(40):
        shard.grant()
        shard.put(list(range(200, 210)))
    assert opened(shard) <= {2, 5}
    kept = shard.found(first)
    assert set(kept) >= set(range(30)), "those in segments 0 and 1"
    assert shard.reserve([0]).states[0] == EXISTS
    answer = shard.core.resolve(shard.now_s, keys_of([0]), pin_s=1.0, promises=True)
    assert not answer.found[0]
    shard.core.retire(shard.now_s, withheld)
    check_core(shard.core)
    answer = shard.core.resolve(shard.now_s, keys_of([0]), pin_s=1.0, promises=True)
    assert answer.found[0]


def test_an_almost_empty_shard_waits_for_withheld_segments_and_evicts_nothing() -> None:
    before = OwnedShard(segments=8)
    first = list(range(3 * PER_SEGMENT))
    assert before.put(first) == [COMMITTED] * len(first)
    unused = frozenset(
        segment.number for segment in before.core.ring.segments if segment.state is not SegmentState.SEALED
    )
    shard = before.successor(unused - {min(unused)})
    shard.core.confirm(math.inf)
    for turn in range(4):
        shard.grant()
        shard.settle()
        shard.put(list(range(100 + 10 * turn, 110 + 10 * turn)))
    assert shard.found(first) == first
    made = shard.reserve([200])
    assert made.reasons[0] == Reason.NO_SPACE
    assert not may_get_space(shard.core.ring, shard.core.grants, shard.now_s, within_s=60.0)
    shortage = space_shortage(shard.core.ring, shard.core.grants, shard.now_s, retires_in_s=134.0)
    assert shortage is not None
    assert shortage.ends_in_s == 134.0
    shard.core.retire(shard.now_s, unused)
    shard.grant()
    shard.settle()
    assert shard.put([200]) == [COMMITTED]
    assert shard.found(first) == first


def test_with_no_segment_left_to_open_puts_are_declined_until_the_grant_is_retired() -> None:
    shard = OwnedShard(segments=4).successor(frozenset(range(4)))
    shard.core.confirm(math.inf)
    assert shard.core.wanted_grant(shard.now_s) is None
    assert shard.reserve([1]).reasons[0] == Reason.NO_SPACE
    shard.core.retire(shard.now_s, range(4))
    assert len(shard.grant()) == 2
    assert shard.put([1]) == [COMMITTED]


def test_retired_segments_are_emptied_in_the_order_of_their_generations() -> None:
    before = OwnedShard(segments=6)
    assert before.put(list(range(110))) == [COMMITTED] * 110
    ages = [segment.number for segment in before.core.ring.pools.common.sealed]
    assert ages != sorted(ages), "it has gone round"
    shard = before.successor(frozenset(ages[1::2]))
    sealed = shard.core.ring.pools.common.sealed
    assert [segment.number for segment in sealed][: len(ages[::2])] == ages[::2]
    shard.core.retire(shard.now_s, ages[1::2])
    check_core(shard.core)
    in_order = [segment.number for segment in shard.core.ring.pools.common.sealed]
    assert [number for number in in_order if number in ages] == ages


def test_a_segment_that_stayed_keeps_its_turn_when_others_are_retired() -> None:
    before, read = OwnedShard(segments=12), list(range(PER_SEGMENT * 3, PER_SEGMENT * 4))
    before.put(list(range(PER_SEGMENT * 10)))
    ages = [segment.number for segment in before.core.ring.pools.common.sealed]
    shard = before.successor(frozenset(ages[5:8]))
    shard.core.confirm(math.inf)
    number = 1000
    while not shard.core.counts().segments_kept:
        shard.grant()
        assert shard.found(read) == read
        shard.put([number := number + 1])
    sealed = shard.core.ring.pools.common.sealed
    assert (sealed[-1].number, sealed[-1].is_kept) == (ages[3], True)
    own = [segment.number for segment in sealed]
    shard.core.retire(shard.now_s, ages[5:8])
    check_core(shard.core)
    in_turn = [segment.number for segment in shard.core.ring.pools.common.sealed]
    assert [each for each in in_turn if each in own] == own
    older = [each for each in ages if each in in_turn and each != ages[3]]
    assert [each for each in in_turn if each in older] == older


@pytest.mark.parametrize(("granted", "may"), [(5, False), (6, True)])
def test_a_granted_segment_may_stay_while_about_half_of_the_line_is_granted_without_it(
    granted: int, may: bool
) -> None:
    shard = among_others(segments=40)
    shard.core.apply_grant(shard.now_s, range(granted))
    assert shard.core.grants.ahead == 10
    assert shard.core.grants.may_spare(1) == may
    assert shard.core.grants.may_spare(30), "it is not granted anyway"


def test_what_stays_leaves_something_granted_for_when_nobody_can_be_asked() -> None:
    shard, everything = (
        OwnedShard(8, settings=ShardSettings(reinsertion_share=0.0)),
        list(range(PER_SEGMENT * 8)),
    )
    shard.restart(withheld=NOTHING)
    shard.core.confirm(math.inf)
    for begin in range(0, len(everything), PER_SEGMENT):
        shard.grant()
        shard.put(everything[begin : begin + PER_SEGMENT])
        shard.pass_time(shard.settings.late_write_s)
    grants, ring, fresh = shard.core.grants, shard.core.ring, count(1000)
    where = shard.core.resolve(shard.now_s, keys_of(everything), pin_s=0.0)
    segments = ring.geometry.segment_of(where.offsets[where.found])
    read = np.array(everything)[where.found][np.isin(segments, list(grants.segments))].tolist()
    made = ring.generations_made
    while COMMITTED in shard.put([next(fresh) for _ in range(5)]):
        shard.core.resolve(shard.now_s, keys_of(read), pin_s=0.0)
    assert shard.core.counts().segments_kept > 0
    assert ring.generations_made - made == 3


def test_in_doubt_is_what_the_owner_would_not_use_again_itself_yet() -> None:
    shard = among_others(segments=8)
    shard.grant()
    shard.settle()
    late_s = shard.settings.late_write_s
    assert set(shard.put(list(range(PER_SEGMENT + 5)))) == {COMMITTED}
    assert shard.core.grants.in_doubt(shard.now_s) == (), "what has ended well has ended"
    held = shard.reserve([100])
    (where,) = shard.core.geometry.segment_of(held.offsets).tolist()
    assert shard.core.grants.in_doubt(shard.now_s) == (where,)
    shard.core.release(shard.now_s, (), held.reservations)
    assert shard.core.grants.in_doubt(shard.now_s) == (), "its holder has nothing under way"
    failed = shard.reserve([101])
    shard.core.release(shard.now_s, (), failed.reservations, may_land=True)
    assert shard.core.grants.in_doubt(shard.now_s) == (where,)
    shard.pass_time(late_s - 1.0)
    assert shard.core.grants.in_doubt(shard.now_s) == (where,)
    shard.pass_time(1.0)
    assert shard.core.grants.in_doubt(shard.now_s) == ()


def test_space_that_was_abandoned_is_in_doubt_from_its_end_on() -> None:
    shard = among_others(segments=8)
    shard.grant()
    shard.settle()
    held = shard.reserve([1], hold_s=5.0)
    (where,) = shard.core.geometry.segment_of(held.offsets).tolist()
    shard.pass_time(5.0 + shard.settings.late_write_s - 1.0)
    assert shard.core.grants.in_doubt(shard.now_s) == (where,)
    shard.pass_time(1.0)
    assert shard.core.grants.in_doubt(shard.now_s) == ()


def test_a_grant_is_what_is_in_use_and_next_in_line_a_quarter_of_the_shard_at_most() -> None:
    shard = among_others(segments=40)
    assert shard.grant() == frozenset(range(10))
    shard.settle()
    shard.put(list(range(15 * 2 + 1)))
    assert opened(shard) == {0, 1, 2, 3, 4}
    assert shard.core.wanted_grant(shard.now_s) is None, "half of what is next in line is left"
    shard.put(list(range(100, 116)))
    assert shard.core.wanted_grant(shard.now_s) == tuple(range(16))


def test_a_shard_that_is_filled_at_once_is_granted_what_is_free_still_and_then_goes_round() -> None:
    shard = among_others(segments=12)
    for begin in range(0, 300, 5):
        shard.grant()
        assert shard.put(list(range(begin, begin + 5))) == [COMMITTED] * 5
    assert shard.core.counts().segments_evicted > 0


def test_what_is_wanted_stays_so_until_it_is_granted_and_nothing_else_is_opened() -> None:
    shard = among_others(segments=8)
    shard.core.apply_grant(shard.now_s, [0, 7])
    assert shard.core.grants.may_open(7)
    wanted = shard.core.wanted_grant(shard.now_s)
    assert wanted == (0, 1, 2)
    assert not shard.core.grants.may_open(7), "whoever is granted it next may be told first"
    shard.settle()
    shard.put(list(range(60)))
    assert shard.core.wanted_grant(shard.now_s) == wanted
    assert opened(shard) == {0}
    shard.core.apply_grant(shard.now_s, wanted)
    shard.settle()
    assert opened(shard) == {0, 1}


def test_a_segment_leaves_the_grant_when_no_write_to_it_is_left() -> None:
    late_s = 5.0
    shard = OwnedShard(segments=40, settings=ShardSettings(late_write_s=late_s))
    shard.restart(withheld=NOTHING)
    shard.core.confirm(math.inf)
    shard.grant()
    shard.settle()
    held = shard.reserve([999], hold_s=20.0)
    shard.put(list(range(15 * 6)))
    shard.pass_time(late_s)
    shard.put([1000])
    left = shard.grant()
    assert left >= {0}, "there is a reservation on it"
    assert not left & {1, 2, 3}, "these are full, and long written"
    shard.core.release(shard.now_s, [], held.reservations)
    shard.put(list(range(1001, 1001 + 15 * 6)))
    assert 0 in shard.grant(), "its writer may have a path that is late"
    shard.pass_time(late_s)
    shard.put(list(range(2001, 2001 + 15 * 6)))
    assert 0 not in shard.grant()


def test_resumed_segments_stay_in_the_grant_and_are_not_opened_before_they_are_retired() -> None:
    shard = OwnedShard(segments=8)
    core = shard.core = ShardCore(shard.superblock, settings=shard.settings)
    core.take_in(shard.recovered())
    core.begin(shard.now_s, epoch=OwnerEpoch(shard.epoch), resumed=frozenset({0, 1}))
    core.confirm(math.inf)
    assert shard.grant() == {0, 1, 2, 3}
    shard.settle()
    assert opened(shard) == {2}
    shard.put(list(range(40)))
    assert shard.grant() >= {0, 1}
    core.retire(shard.now_s, [0, 1])
    shard.settle()
    check_core(core)
    assert opened(shard) <= core.grants.segments


@pytest.mark.parametrize(
    ("segments", "dwpd", "ahead"), [(2, 0.0, 1), (3, 0.0, 2), (40, 0.0, 10), (400, 1.0, 3), (400, 40.0, 100)]
)
def test_how_many_segments_are_granted_ahead(segments: int, dwpd: float, ahead: int) -> None:
    settings = ShardSettings(endurance=EnduranceSettings(rated_dwpd=dwpd))
    shard = OwnedShard(segments=segments, settings=settings)
    assert shard.core.grants.ahead == ahead


@hypothesis_settings(deadline=None, max_examples=12)
@given(
    withheld=st.frozensets(st.integers(0, 7), max_size=8),
    steps=st.lists(st.sampled_from(["put", "grant", "time", "retire", "write", "confirm"]), max_size=30),
)
def test_whatever_happens_nothing_outside_the_grant_is_opened(
    withheld: frozenset[int], steps: list[str]
) -> None:
    before = OwnedShard(segments=8)
    before.put(list(range(70)))
    shard = before.successor(withheld)
    number = 1000
    for step in steps:
        if step == "put":
            made = shard.reserve([number])
            if made.states[0] == STAGED:
                shard.commit(made.reservations, [number])
            number += 1
        elif step == "grant":
            assert shard.grant().isdisjoint(shard.core.grants.withheld)
        elif step == "time":
            shard.pass_time(3.0)
        elif step == "retire":
            shard.core.retire(shard.now_s, list(withheld)[::2])
        elif step == "write":
            for done in shard.settle():
                assert set(done.states.tolist()) <= {COMMITTED}
        else:
            shard.core.confirm(shard.now_s + 5.0)
        check_core(shard.core)
        assert opened(shard) <= shard.core.grants.segments
        is_withheld = [shard.core.ring.segments[n].state is SegmentState.WITHHELD for n in range(8)]
        assert np.array_equal(is_withheld, shard.core.grants.is_withheld)
