"""A tenant's rate: over any time no more is used than it, a second of it, and the last request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ostraca_fabric.policies.rate_limit import RateLimit

RATE = 1000


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 5000), st.floats(0, 1)), max_size=60))
def test_no_more_is_used_than_the_rate_allows(requests: list[tuple[float, int, float]]) -> None:
    limit, now_s, used_bytes, largest = RateLimit(0.0), 0.0, 0.0, 0
    for after_s, asked_bytes, part in requests:
        now_s += after_s
        if limit.fullness(now_s, RATE) > 0:
            limit.take(asked_bytes)
            moved_bytes = int(part * asked_bytes)
            limit.take(moved_bytes - asked_bytes)
            used_bytes += moved_bytes
            largest = max(largest, asked_bytes)
        assert used_bytes <= RATE * (now_s + 1) + largest


def test_what_was_not_used_is_given_back() -> None:
    limit = RateLimit(0.0)
    assert limit.fullness(0.0, RATE) == 1.0
    limit.take(5000)
    assert limit.fullness(0.0, RATE) == -4.0
    limit.take(-5000)
    assert limit.fullness(0.0, RATE) == 1.0


def test_what_is_owed_is_paid_back_at_the_rate() -> None:
    limit = RateLimit(0.0)
    assert limit.fullness(0.0, RATE) == 1.0
    limit.take(3000)
    assert limit.fullness(1.5, RATE) == -0.5
    assert limit.fullness(2.5, RATE) == 0.5
    assert limit.fullness(100.0, RATE) == 1.0, "no more than a second is saved up"


def test_a_rate_may_change_or_end_at_any_time() -> None:
    limit = RateLimit(0.0)
    assert limit.fullness(0.0, 0) == 1.0
    limit.take(10_000)
    assert limit.fullness(0.0, RATE) == 1.0, "without a limit nothing was counted"
    limit.take(1500)
    assert limit.fullness(0.0, 100) == -5.0, "what is owed is owed still"
    assert limit.fullness(0.0, 0) == 1.0
