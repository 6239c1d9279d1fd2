"""What an owner takes when flash is scarce, and what it says it has spent."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from tests.support.agent.owned_shard import OwnedShard, keys_of
from tests.support.agent.shard_invariants import check_core

from ostraca_dpu_agent.shards.core import ShardSettings
from ostraca_fabric.model.chain import DEPTH_UNKNOWN
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.policies.endurance import DAY_S, EnduranceSettings

BLOCK = 64 << 10
PAGE = 4096
SEGMENTS = 4
SHARD_BYTES = (1 + SEGMENTS) << 20
SCARCE = EnduranceSettings(
    rated_dwpd=DAY_S / 10 * BLOCK / SHARD_BYTES,
    burst_s=400.0,
    first_touch_reserve=0.25,
    half_way_blocks=4,
    retry_s=10.0,
)
"""A budget of a block in 10 s, 40 saved up at most."""


def scarce(**changed: float) -> OwnedShard:
    shard = OwnedShard(
        segments=SEGMENTS,
        settings=ShardSettings(endurance=replace(SCARCE, **changed)),  # type: ignore[arg-type]  # whole numbers among them
    )
    assert shard.geometry.shard_bytes == SHARD_BYTES
    shard.settle()
    return shard


def reserve(shard: OwnedShard, numbers: list[int], depths: list[int] | None = None) -> list[Reason]:
    """Reserve, give the space back at once, and return why not."""
    answer = shard.core.reserve(
        shard.now_s,
        keys_of(numbers),
        np.full(len(numbers), BLOCK, np.uint32),
        hold_s=5.0,
        depths=None if depths is None else np.array(depths, np.uint32),
    )
    check_core(shard.core)
    is_taken = answer.states == PutState.STAGED
    assert is_taken.tolist() == [reason == Reason.NONE for reason in answer.reasons]
    shard.core.release(shard.now_s, [], answer.reservations[is_taken])
    shard.settle()
    return [Reason(reason) for reason in answer.reasons]


def test_a_shard_without_a_rating_takes_everything_and_remembers_nothing() -> None:
    shard = OwnedShard(segments=SEGMENTS)
    shard.settle()
    assert reserve(shard, list(range(10))) == [Reason.NONE] * 10
    spending = shard.core.budget
    assert (spending.level_bytes, spending.budget_bytes_per_day, spending.years_left) == (math.inf, 0.0, None)
    assert spending.written_bytes >= 10 * BLOCK
    assert spending._admission is None


def test_a_new_owner_takes_only_what_it_has_seen_before() -> None:
    shard = scarce()
    assert reserve(shard, [1, 2], [0, 1]) == [Reason.ADMISSION] * 2
    shard.now_s += 9.0
    assert reserve(shard, [1], [0]) == [Reason.ADMISSION], "a retry is no second touch"
    shard.now_s += 1.0
    assert reserve(shard, [1, 2, 3], [0, DEPTH_UNKNOWN, 0]) == [Reason.NONE, Reason.NONE, Reason.ADMISSION]


def test_beginnings_of_chains_are_taken_when_there_is_more_than_the_reserve() -> None:
    shard = scarce()
    shard.now_s += 133.0  # 23 blocks: half-way from the reserve to plenty
    depths = [*range(12), DEPTH_UNKNOWN]
    answer = reserve(shard, list(range(13)), depths)
    assert answer == [Reason.NONE] * 4 + [Reason.ADMISSION] * 9


def test_with_enough_saved_up_everything_is_taken() -> None:
    shard = scarce()
    shard.now_s += 400.0
    assert reserve(shard, [1, 2], None) == [Reason.NONE] * 2


def test_what_is_spent_is_told_apart_from_what_is_not_worth_it() -> None:
    shard = scarce()
    numbers = list(range(25))
    assert reserve(shard, numbers, numbers) == [Reason.ADMISSION] * 25
    shard.now_s += 10.0
    answer = reserve(shard, numbers, numbers)
    assert answer == [Reason.NONE] * 11 + [Reason.BUDGET] * 14
    shard.now_s += 10.0
    assert reserve(shard, numbers[20:], numbers[20:]).count(Reason.NONE) <= 1


def test_blocks_that_are_there_or_under_way_are_said_so_whatever_the_budget() -> None:
    shard = scarce()
    shard.reserve([1], BLOCK)
    shard.now_s += 10.0
    made = shard.reserve([1], BLOCK)
    assert made.states[0] == PutState.STAGED
    shard.core.budget.spend(100 * BLOCK)
    assert shard.reserve([1, 2], BLOCK).reasons.tolist() == [Reason.IN_FLIGHT, Reason.ADMISSION]
    shard.commit(made.reservations, [1])
    shard.settle()
    assert shard.reserve([1], BLOCK).states[0] == PutState.EXISTS


def test_declines_cost_nothing_and_space_and_summaries_what_they_take() -> None:
    shard = scarce()
    before, level = shard.core.budget.written_bytes, shard.core.budget.level_bytes
    reserve(shard, [1, 2])
    assert shard.core.budget.written_bytes == before
    shard.now_s += 10.0
    shard.core.expire(shard.now_s)
    assert shard.core.budget.level_bytes == pytest.approx(level + BLOCK)
    made = shard.reserve([1], 5000)
    assert shard.core.budget.written_bytes == before + 2 * PAGE
    shard.commit(made.reservations, [1])
    pages = sum(len(data) for write in shard.core.writes_due(shard.now_s) for _, data in write.pieces)
    assert pages >= PAGE
    assert shard.core.budget.written_bytes == before + 2 * PAGE + pages
    assert shard.core.budget.level_bytes == pytest.approx(level + BLOCK - 2 * PAGE - pages)


def test_years_left_are_those_of_the_rating_at_the_rate_of_the_last_day() -> None:
    shard = scarce(rated_years=2.0)
    spending = shard.core.budget
    assert spending.years_left is not None
    assert spending.years_left > 2
    hourly = int(spending.budget_bytes_per_day / 24)
    for _ in range(50):
        spending.spend(hourly)
        shard.now_s += 3600.0
        shard.core.expire(shard.now_s)
    assert spending.bytes_per_day == pytest.approx(spending.budget_bytes_per_day, rel=0.01)
    assert spending.years_left == pytest.approx(2.0 - 50 / 24 / 365, rel=0.01)
