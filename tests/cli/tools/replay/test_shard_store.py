"""Shard owner's code on a trace's time: hits as counted by hand, and never too many blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.cli.tools.replay.small_traces import trace_of, traces
from tests.support.agent.shard_invariants import check_core

from ostraca_cli.tools.replay.research.belady import Belady
from ostraca_cli.tools.replay.shard_store import ShardPlan, ShardStore
from ostraca_cli.tools.replay.suite import PolicyStore, replay_hits
from ostraca_cli.tools.replay.trace import Trace
from ostraca_dpu_agent.settings import OwnerSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.policies.endurance import EnduranceSettings

MIB = 1 << 20


def keys(count: int) -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, (count, 16), np.uint8)


def store_of(
    trace: Trace, capacity_blocks: int, *, block_bytes: int = 160 * MIB, bytes_per_day: float = 0.0
) -> ShardStore:
    plan = ShardPlan.for_capacity(
        capacity_blocks=capacity_blocks, block_bytes=block_bytes, blocks_per_segment=2
    )
    wear = EnduranceSettings(rated_dwpd=plan.dwpd_of(bytes_per_day), burst_s=600.0)
    return ShardStore(plan, keys(trace.unique_blocks), OwnerSettings(endurance=wear))


@pytest.mark.parametrize("block_bytes", [1, 4096, 70_000, MIB, 16 * MIB, 160 * MIB])
@pytest.mark.parametrize("blocks_per_segment", [1, 16, 255])
def test_a_shard_holds_whole_segments_and_at_most_the_capacity(
    block_bytes: int, blocks_per_segment: int
) -> None:
    plan = ShardPlan.for_capacity(
        capacity_blocks=10_000, block_bytes=block_bytes, blocks_per_segment=blocks_per_segment
    )
    assert plan.blocks_per_segment >= blocks_per_segment
    assert plan.capacity_blocks == plan.geometry.segments * plan.blocks_per_segment
    assert 10_000 - plan.blocks_per_segment < plan.capacity_blocks <= 10_000
    assert plan.geometry.entries_max >= plan.blocks_per_segment


def test_a_capacity_of_too_few_segments_is_refused() -> None:
    with pytest.raises(UsageError, match="31 blocks is less than 4 segments: take at least 32 blocks"):
        ShardPlan.for_capacity(capacity_blocks=31, block_bytes=MIB, blocks_per_segment=8)


@given(traces())
@settings(max_examples=30)
def test_with_room_for_everything_it_finds_all_that_was_asked_for_before(trace: Trace) -> None:
    store = store_of(trace, 100)
    seen: set[int] = set()
    for request, now_s in enumerate(trace.times_s.tolist()):
        chain = trace.chain(request).tolist()
        assert store.request(now_s, trace.chain(request)).tolist() == [block in seen for block in chain]
        seen.update(chain)
    assert store.written.blocks == len(seen)
    assert store.written.block_bytes == len(seen) * 160 * MIB


@given(traces(), st.integers(8, 30))
@settings(max_examples=30)
def test_under_pressure_it_keeps_the_capacity_and_finds_no_more_than_belady(
    trace: Trace, capacity: int
) -> None:
    store = store_of(trace, capacity)
    seen: set[int] = set()
    hits = 0
    for request, now_s in enumerate(trace.times_s.tolist()):
        chain = trace.chain(request)
        found = store.request(now_s, chain)
        check_core(store.core)
        assert set(chain[found].tolist()) <= seen
        assert len(store.core.index) <= capacity
        seen.update(chain.tolist())
        hits += int(found.sum())
    assert hits <= replay_hits(trace, PolicyStore(Belady(capacity, trace), 1)).hits
    assert store.written.declined == {}


def test_what_was_just_put_is_found_and_what_was_put_long_ago_is_not() -> None:
    trace = trace_of([1, 2, 3], *([number, number + 1] for number in range(10, 60, 2)), [1, 2, 3], [1, 2, 3])
    store = store_of(trace, 12)
    found = [
        store.request(now_s, trace.chain(at)).tolist() for at, now_s in enumerate(trace.times_s.tolist())
    ]
    assert found[-2:] == [[False] * 3, [True] * 3]


def test_a_store_with_a_budget_writes_what_it_is_allowed_and_what_was_wanted_twice_first() -> None:
    # 100 blocks are asked for, a second apart; the even ones again and again.
    chains = [[number] if number % 2 else [number, 1000 + number % 8] for number in range(100)]
    trace = trace_of(*chains, every_ms=60_000)
    store = store_of(trace, 40, bytes_per_day=20 * 160 * MIB * 86_400 / trace.span_s)
    replay_hits(trace, store)
    assert 5 <= store.written.blocks <= 25
    assert sum(store.written.declined.values()) > 50
    assert set(store.written.declined) <= {"ADMISSION", "BUDGET"}
    again = keys(trace.unique_blocks)[trace.chain(98)[1:]]
    assert store.core.index.find(again).tolist() != [-1]


def test_summaries_count_as_written() -> None:
    trace = trace_of(*([number] for number in range(50)))
    store = store_of(trace, 1000, block_bytes=4096)
    replay_hits(trace, store)
    assert store.written.block_bytes == 50 * 4096
    # Each request is a group commit of its own, of one page; each segment is opened by one.
    assert store.written.summary_bytes >= 50 * 4096
    assert store.written.all_bytes == store.written.block_bytes + store.written.summary_bytes


def test_a_block_that_a_request_names_twice_is_put_once() -> None:
    store = store_of(trace_of([1, 1]), 12)
    assert store.request(0.0, np.array([0, 0])).tolist() == [False, False]
    assert store.request(1.0, np.array([0, 0])).tolist() == [True, True]
    assert (store.written.blocks, store.written.declined) == (1, {})
