"""Pools: whose blocks go when something must, and what nobody else can do to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.agent.assembly import assembled, put_states
from tests.support.agent.owned_shard import OwnedShard, keys_of, seeds_of
from tests.support.agent.shard_invariants import check_core

from ostraca_dpu_agent.shards.core import ShardSettings
from ostraca_dpu_agent.shards.core.ring.pool_limits import COMMON, RingDimensions, pool_limits
from ostraca_dpu_agent.shards.service import OwnerService
from ostraca_fabric.errors import MalformedError
from ostraca_fabric.model.ids import OwnerEpoch
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.policies.endurance import EnduranceSettings
from ostraca_fabric.wire.messages import Reserve, ShardWants

COMMITTED = PutState.COMMITTED
PER_SEGMENT = 15
A, B = 7, (1 << 64) - 1
SMALL = 4096
Put = Callable[[list[int]], object]


def shard_of(segments: int = 16, shares: dict[int, float] | None = None, **settings: object) -> OwnedShard:
    chosen = replace(ShardSettings(reinsertion_share=1.0), **settings)  # type: ignore[arg-type]
    return OwnedShard(segments=segments, settings=chosen, shares=shares or {A: 0.25, B: 0.25})


def segments_of(shard: OwnedShard, pool: int) -> int:
    of_pool = shard.core.ring.pools.of(pool)
    return of_pool.segments + of_pool.draining


# ------------------------------------------------------------------------------------------- who keeps what


@pytest.mark.parametrize("flooding", [A, 0, 12345])
def test_a_flood_in_one_pool_evicts_nothing_of_a_pool_within_its_share(flooding: int) -> None:
    shard, mine = shard_of(), list(range(2 * PER_SEGMENT))
    assert set(shard.put(mine, pool=B)) == {COMMITTED}
    assert set(shard.put(list(range(1000, 1000 + 40 * PER_SEGMENT)), pool=flooding)) == {COMMITTED}
    assert shard.found(mine) == mine
    shard.restart()
    assert set(shard.put(list(range(5000, 5000 + 40 * PER_SEGMENT)), pool=flooding)) == {COMMITTED}
    assert shard.found(mine) == mine


def test_a_pool_never_takes_more_than_its_share_though_there_is_room() -> None:
    shard, newest = shard_of(), list(range(400, 400 + 2 * PER_SEGMENT))
    assert set(shard.put([*range(400), *newest], pool=A)) == {COMMITTED}
    assert segments_of(shard, A) == 4
    assert shard.core.ring.pools.of(A).limits.segments_max == 4
    assert len(shard.core.ring.free) > 4
    assert shard.found(newest) == newest, "its own oldest went"
    assert not shard.found(list(range(300)))


def test_everybody_without_a_share_takes_what_is_free_and_gives_it_back_when_it_is_wanted() -> None:
    shard = shard_of()
    shard.put(list(range(16 * PER_SEGMENT)))
    assert segments_of(shard, 0) > 12
    mine = list(range(1000, 1000 + 2 * PER_SEGMENT))
    shard.put(mine, pool=A)
    assert shard.found(mine) == mine
    assert segments_of(shard, A) == 2


def test_a_pool_above_a_share_that_fell_gives_its_oldest_first() -> None:
    shard = shard_of(shares={A: 0.5, B: 0.25})
    theirs, others = list(range(7 * PER_SEGMENT - 8)), list(range(200, 200 + 7 * PER_SEGMENT))
    shard.put(theirs, pool=A)
    shard.put(others)
    shard.share_out({A: 0.125, B: 0.25})
    shard.pass_time(1.0)
    assert shard.found(theirs) == theirs, "nobody wants the space yet"
    shard.put(list(range(1000, 1000 + 2 * PER_SEGMENT)), pool=B)
    assert shard.found(others) == others
    assert not shard.found(theirs[:PER_SEGMENT])
    assert shard.found(theirs[-PER_SEGMENT:]) == theirs[-PER_SEGMENT:]
    shard.put([2000], pool=A)
    shard.put(list(range(3000, 3000 + PER_SEGMENT)), pool=A)
    assert segments_of(shard, A) <= 2


def test_a_pool_whose_share_is_taken_away_lies_with_the_others_and_gets_its_blocks_back_with_it() -> None:
    shard, mine = shard_of(), list(range(2 * PER_SEGMENT))
    shard.put(mine, pool=B)
    shard.share_out({A: 0.25})
    assert shard.found(mine) == mine
    assert segments_of(shard, 0) == 2
    shard.share_out({A: 0.25, B: 0.25})
    shard.put(list(range(1000, 1000 + 30 * PER_SEGMENT)))
    assert shard.found(mine) == mine
    shard.share_out({})
    shard.put(list(range(2000, 2000 + 30 * PER_SEGMENT)))
    assert shard.found(mine) == []


def test_with_small_blocks_a_flood_takes_none_of_anothers_entries() -> None:
    shard = shard_of(blocks_max=160)
    mine = list(range(20))
    assert set(shard.put(mine, SMALL, pool=B)) == {COMMITTED}
    assert set(shard.put(list(range(1000, 1600)), SMALL, pool=A)) == {COMMITTED}
    assert set(shard.put(list(range(2000, 2600)), SMALL)) == {COMMITTED}
    assert shard.found(mine) == mine
    assert shard.core.ring.pools.of(A).entry_room >= 0
    shard.restart()
    assert shard.found(mine) == mine, "evicted blocks that summaries still list push nobody out"


def test_a_pool_with_writers_in_its_oldest_segment_is_declined_and_nobody_else_loses_anything() -> None:
    shard = shard_of(shares={A: 0.125})
    others = list(range(1000, 1000 + 11 * PER_SEGMENT))
    shard.put(others)
    made = [shard.reserve(list(range(PER_SEGMENT)), pool=A)]
    for first in (100, 200):
        shard.settle()
        made.append(shard.reserve(list(range(first, first + PER_SEGMENT)), pool=A))
    assert [set(each.reasons.tolist()) for each in made] == [{Reason.NONE}, {Reason.NONE}, {Reason.NO_SPACE}]
    shard.core.release(shard.now_s, (), made[0].reservations)
    shard.settle()
    assert set(shard.reserve(list(range(200, 210)), pool=A).reasons.tolist()) == {Reason.NONE}
    assert shard.found(others) == others


def test_what_a_pool_has_emptied_stays_its_own_while_somebody_may_still_write_there() -> None:
    shard = shard_of(shares={A: 0.25}, free_segments=1)
    shard.put(list(range(1000, 1000 + 20 * PER_SEGMENT)))
    for number in range(0, 4 * PER_SEGMENT, PER_SEGMENT):  # never written, never released
        shard.reserve(list(range(number, number + PER_SEGMENT)), hold_s=1.0, pool=A)
        shard.settle()
    shard.pass_time(2.0)
    for number in range(100, 106):
        shard.put([number], 1_000_000, pool=A)
    assert shard.core.ring.pools.of(A).draining == 1
    assert segments_of(shard, A) <= 4
    assert set(shard.put(list(range(5000, 5000 + 3 * PER_SEGMENT)))) == {COMMITTED}, "others lack nothing"


def test_what_pools_have_emptied_and_others_still_read_is_not_counted_on_for_everybody_else() -> None:
    shard = shard_of(free_segments=1)
    shard.put(list(range(1000, 1000 + 20 * PER_SEGMENT)))
    for pool in (A, B):
        mine = list(range(pool % 100 * 100, pool % 100 * 100 + 4 * PER_SEGMENT))
        shard.put(mine, pool=pool)
        shard.core.resolve(shard.now_s, keys_of(mine), pin_s=50.0)
        shard.put([mine[-1] + number for number in range(1, 2 * PER_SEGMENT)], pool=pool)
        assert shard.core.ring.pools.of(pool).draining == 1, "it waits for its readers"
    for number in range(20_000, 20_000 + 3 * PER_SEGMENT):
        assert shard.put([number]) == [COMMITTED]
        assert shard.core.ring.ready, "the next segment is ready before it is wanted"


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([0, A, 99]), st.integers(1, 40), st.sampled_from([SMALL, 64 << 10, 300_000])
        ),
        max_size=25,
    ),
    share=st.sampled_from([0.2, 0.3, 0.5]),
    limit=st.sampled_from([96, 1 << 20]),
    restarts=st.sets(st.integers(0, 24), max_size=2),
    reads=st.booleans(),
)
def test_whatever_others_put_a_pool_within_its_share_keeps_every_block(
    steps: list[tuple[int, int, int]], share: float, limit: int, restarts: set[int], reads: bool
) -> None:
    shard = shard_of(segments=12, shares={A: share, B: 0.25}, blocks_max=limit)
    limits = shard.core.ring.pools.of(B).limits
    room = min(limits.index_entries_max - limits.headroom - 1, (limits.segments_max - 1) * PER_SEGMENT)
    mine, numbers = list(range(room // 2)), count(1000)
    assert set(shard.put(mine, pool=B)) == {COMMITTED}
    for step, (pool, blocks, length) in enumerate(steps):
        theirs = [next(numbers) for _ in range(blocks)]
        shard.put(theirs, length, pool=pool)
        if reads:
            shard.found(theirs)
        if step in restarts:
            shard.restart()
        while (batch := shard.core.reinsertion.take()) is not None:
            copy(shard, batch.keys, batch.lengths, batch.tags)
        assert shard.found(mine) == mine
    more = list(range(500, 500 + room - len(mine)))
    if not restarts:
        assert set(shard.put(more, pool=B)) == {COMMITTED}
    assert shard.found(mine) == mine


def copy(
    shard: OwnedShard,
    keys: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
    lengths: np.ndarray[tuple[int], np.dtype[np.uint32]],
    tags: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
) -> None:
    made = shard.core.reserve_copies(shard.now_s, keys, lengths, hold_s=5.0)
    rows = np.flatnonzero(made.states == PutState.STAGED)
    shard.core.commit(
        shard.now_s,
        made.reservations[rows],
        tags[rows],
        seeds_of([0] * len(rows)),
        epoch=OwnerEpoch(shard.epoch),
    )
    check_core(shard.core)
    shard.settle()
    shard.core.end_reinsertion(shard.now_s)
    check_core(shard.core)


# -------------------------------------------------------------------------------------- reinserted, recovered


def test_copies_lie_in_the_pool_of_what_they_copy() -> None:
    shard, read, numbers = shard_of(shares={A: 0.3}), [0, 3, 7], count(100)
    shard.put(list(range(PER_SEGMENT)), pool=A)
    for _ in range(1000):
        shard.put([next(numbers)], pool=A)
        shard.found(read)
        batch = shard.core.reinsertion.take()
        if batch is not None:
            break
    assert batch is not None
    assert [int(key[0]) for key in batch.keys] == read
    copy(shard, batch.keys, batch.lengths, batch.tags)
    shard.put([next(numbers) for _ in range(2 * PER_SEGMENT)], pool=A)
    assert shard.found(list(range(PER_SEGMENT))) == read
    there = shard.core.resolve(shard.now_s, keys_of(read), pin_s=0.0)
    assert set(shard.core.ring.pool_numbers[shard.core.geometry.segment_of(there.offsets)].tolist()) == {A}


def test_a_segment_that_is_kept_stays_in_its_pool() -> None:
    shard, numbers, first = shard_of(shares={A: 0.3}), count(100), list(range(PER_SEGMENT))
    shard.put(first, pool=A)
    while not shard.core.counts().segments_kept:
        shard.put([next(numbers)], pool=A)
        assert shard.found(first) == first
    assert shard.core.ring.pools.of(A).sealed[-1].is_kept
    shard.put([next(numbers) for _ in range(2 * PER_SEGMENT)], pool=A)
    assert shard.found(first) == first


def test_after_a_restart_everybody_has_what_was_theirs() -> None:
    shard = shard_of()
    shard.put(list(range(20)), pool=A)
    shard.put(list(range(100, 140)), pool=B)
    shard.put(list(range(200, 260)))
    shard.restart()
    of_pools = {pool: segments_of(shard, pool) for pool in (A, B, 0)}
    assert of_pools == {A: 2, B: 3, 0: 4}
    data_bytes = shard.geometry.data_bytes
    assert shard.core.counts().pools == {A: 2 * data_bytes, B: 3 * data_bytes, 0: 4 * data_bytes}


def test_a_successor_knows_whose_the_segments_of_an_unretired_grant_are() -> None:
    before = shard_of()
    before.put(list(range(40)), pool=A)
    after = before.successor(frozenset(range(16)))
    assert segments_of(after, A) == 3
    before.put(list(range(100, 100 + PER_SEGMENT)), pool=A)
    before.put(list(range(200, 200 + PER_SEGMENT)), pool=B)
    after.adopt()
    assert (segments_of(after, A), segments_of(after, B)) == (4, 1)
    after.core.retire(after.now_s, range(16))
    check_core(after.core)
    assert (segments_of(after, A), segments_of(after, B)) == (4, 1)


def test_pages_without_a_pool_are_of_the_common_one() -> None:
    shard = shard_of()
    shard.put(list(range(40)))
    assert {found.pool for found in shard.recovered().segments} == {0}
    shard.put(list(range(100, 140)), pool=B)
    assert {found.pool for found in shard.recovered().segments if len(found.entries)} == {0, B}


# --------------------------------------------------------------------------------------------------- shares


def measures(segments: int, blocks_max: int = 10_000) -> RingDimensions:
    return RingDimensions(segments, 1, 2, blocks_max, 50, 50)


def test_shares_are_segments_rounded_down_but_two_at_least() -> None:
    parts = pool_limits({A: 0.25, B: 0.001}, measures(101))
    assert (parts[A].segments_max, parts[B].segments_max, parts[COMMON].segments_max) == (25, 2, 73)


def test_shares_that_add_up_to_too_much_are_scaled_down_and_leave_the_common_pool_its_least() -> None:
    parts = pool_limits({A: 1.0, B: 0.5}, measures(320))
    assert parts[COMMON].segments_max == 10
    assert parts[A].segments_max == pytest.approx(2 * parts[B].segments_max, abs=2)


def test_a_shard_of_few_segments_gives_parts_to_the_largest_shares_alone() -> None:
    assert pool_limits({A: 0.5}, measures(4)).keys() == {COMMON}
    assert pool_limits({A: 0.1, B: 0.2}, measures(6)).keys() == {COMMON, B}
    assert pool_limits({A: 0.1, B: 0.2, 0: 0.7}, measures(8)).keys() == {COMMON, A, B}


@given(
    shares=st.dictionaries(st.integers(0, 1 << 64), st.floats(0.0, 2.0), max_size=40),
    segments=st.integers(2, 500),
    blocks_max=st.integers(16, 100_000),
)
def test_parts_never_add_up_to_more_than_there_is(
    shares: dict[int, float], segments: int, blocks_max: int
) -> None:
    had = measures(segments, blocks_max)
    parts = pool_limits(shares, replace(had, headroom=min(50, blocks_max // 8)))
    assert sum(part.segments_max for part in parts.values()) == segments - 1
    assert sum(part.index_entries_max for part in parts.values()) == blocks_max - min(50, blocks_max // 8)
    assert all(part.segments_max >= 2 for pool, part in parts.items() if pool != COMMON)
    assert parts[COMMON].segments_max >= min(2, segments - 1)
    for pool, part in parts.items():
        if pool != COMMON:
            assert part.segments_max <= max(2, math.floor(shares[pool] * segments + 1e-6))


# ------------------------------------------------------------------------------------------ grants and budget


def asked_for_grants(shares: dict[int, float], turns: list[int]) -> int:
    """Return how often a grant was asked for while these pools put about a segment's worth, one by one."""
    shard, numbers, times = OwnedShard(segments=64, shares=shares), count(), 0
    shard.restart(withheld=frozenset())
    core = shard.core
    core.confirm(math.inf)
    for pool in turns:
        wanted = core.wanted_grant(shard.now_s)
        if wanted is not None:
            times += 1
            core.apply_grant(shard.now_s, wanted)
        shard.settle()
        put = [next(numbers) for _ in range(PER_SEGMENT)]
        made = shard.reserve(put, pool=pool)
        assert not made.reasons.any()
        shard.commit(made.reservations, put)
        shard.now_s += 30.0
    return times


def test_pools_ask_for_grants_about_as_often_as_everybody_in_one_ring_did() -> None:
    before = asked_for_grants({}, [0] * 200)
    assert asked_for_grants({A: 0.5}, [A] * 200) <= before + 6
    assert asked_for_grants({A: 0.2, B: 0.2}, [0, A, 0, B] * 50) <= 1.5 * before


SCARCE = EnduranceSettings(rated_dwpd=3000.0, burst_s=20.0, retry_s=0.0, first_touch_reserve=0.0)


def test_a_flood_spends_nothing_of_anothers_write_budget() -> None:
    shard = shard_of(shares={A: 0.25, B: 0.25}, endurance=SCARCE, reinsertion_share=0.0)
    shard.pass_time(100.0)
    for number in range(1000, 1800):
        shard.reserve([number], pool=A)
        shard.reserve([number], pool=A)
        shard.settle()
    assert shard.core.budget.level_of(A) < 64 << 10
    level = shard.core.budget.level_of(B)
    assert level > 0.15 * SCARCE.budget_bytes_per_day(shard.geometry.shard_bytes) * 20 / 86_400
    mine = list(range(PER_SEGMENT))
    assert set(shard.put(mine, pool=B)) <= {COMMITTED, PutState.DECLINED}
    assert set(shard.put(mine, pool=B)) <= {COMMITTED, PutState.EXISTS}
    assert shard.found(mine) == mine


async def test_a_put_takes_of_the_pool_of_its_volume_on_shards_that_were_recovered_before_and_after() -> None:
    async with assembled(segments=8) as fabric:
        await fabric.ready()
        fabric.service.share_out({A: 0.5})
        fabric.volume = replace(fabric.volume, pool=A)
        assert put_states(await fabric.put(fabric.worker(), [1])) == [COMMITTED]
        assert fabric.shard.core.counts().pools.keys() == {A}
        later = OwnerService(lambda: 0.0, fabric.service.events)
        later.share_out({B: 0.5})
        later.serve(fabric.shard)
        assert fabric.shard.core.ring.pools.by_number.keys() == {B}
        wants = (ShardWants(fabric.shard.record.id, b"", b""),)
        for pool in (-1, 1 << 64):
            with pytest.raises(MalformedError, match="64 bits"):
                later.answer(Reserve(1, 1.0, 1.0, wants, pool=pool))
