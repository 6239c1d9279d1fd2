"""Until when blocks are worth keeping: rounded up, never down, in three bits for each."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraca_dpu_agent.shards.core.catalog import NO_END_S, Lifetimes, end_of

TIMES = st.floats(0.0, 1e9)


@given(TIMES, st.floats(0.01, 1e9))
def test_an_end_is_never_early_and_late_by_an_eighth_at_most(now_s: float, ttl_s: float) -> None:
    end_s = end_of(now_s, ttl_s)
    assert now_s + ttl_s <= end_s <= now_s + 1.125 * ttl_s + 1e-6


def test_puts_of_one_kind_share_their_ends() -> None:
    assert len({end_of(1000.0 + put / 100, 3600.0) for put in range(10_000)}) == 2


@pytest.mark.parametrize("ttl_s", [math.inf, math.nan, 1e308, 1.7e308])
def test_what_ends_at_no_time_that_comes_never_ends(ttl_s: float) -> None:
    assert end_of(1000.0, ttl_s) > 1e300


@pytest.mark.parametrize("ttl_s", [5e-324, 1e-9])
def test_the_shortest_times_end_soon(ttl_s: float) -> None:
    assert 1000.0 <= end_of(1000.0, ttl_s) <= 1000.002


@given(st.lists(st.lists(st.one_of(st.just(NO_END_S), st.floats(0.001, 100.0)), max_size=6), max_size=12))
def test_no_block_ends_before_it_should_nor_after_the_last_of_its_segment(puts: list[list[float]]) -> None:
    lifetimes, said, marks = Lifetimes(3), list[float](), np.zeros(0, np.uint32)
    for put in puts:
        said += put
        marks = np.concatenate([marks, lifetimes.marks(1, np.array(put, np.float64))])
    ends_s, wanted_s = lifetimes.ends_s(1, marks), np.array(said, np.float64)
    assert (ends_s >= wanted_s).all()
    has_end = wanted_s < NO_END_S
    assert (ends_s[~has_end] == NO_END_S).all()
    assert ends_s[has_end].max(initial=0.0) <= wanted_s[has_end].max(initial=0.0)
    if len(set(wanted_s[has_end].tolist())) <= 7:
        assert (ends_s == wanted_s).all()
    lifetimes.forget(1)
    assert (lifetimes.ends_s(1, marks) == NO_END_S).all()


def test_each_segment_has_its_own_ends() -> None:
    lifetimes = Lifetimes(2)
    first, second = (lifetimes.marks(segment, np.array([10.0 + segment])) for segment in (0, 1))
    both = lifetimes.ends_s(np.array([0, 1]), np.concatenate([first, second]))
    assert both.tolist() == [10.0, 11.0]
