from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraca_fabric.errors import UsageError
from ostraca_fabric.policies.endurance import DAY_S, EnduranceSettings, WriteMeter, years_left
from ostraca_fabric.policies.write_budget import WriteBudget

TB = 10**12


def test_a_drive_of_one_write_a_day_gets_its_size_each_day() -> None:
    settings = EnduranceSettings(rated_dwpd=1.0, burst_s=DAY_S / 4, first_touch_reserve=0.2)
    budget = WriteBudget.of_shard(settings, size_bytes=8 * TB, now_s=100.0)
    assert budget.burst_bytes == 2 * TB
    assert budget.level_at(100.0) == pytest.approx(0.4 * TB)
    assert budget.level_at(100.0 + DAY_S / 10) == pytest.approx(1.2 * TB)
    assert budget.level_at(100.0 + DAY_S) == 2 * TB


def test_the_shards_of_a_drive_share_its_budget_by_their_sizes() -> None:
    settings = EnduranceSettings(rated_dwpd=0.5, budget_share=0.8)
    shares = [settings.budget_bytes_per_day(size * TB) for size in (1, 3, 4)]
    assert sum(shares) == pytest.approx(0.4 * 8 * TB)


def test_what_must_be_written_is_spent_below_zero_and_time_pays_it_back() -> None:
    budget = WriteBudget(bytes_per_day=DAY_S, burst_bytes=10, level_bytes=4, now_s=0.0)
    budget.spend(9)
    assert budget.level_at(0.0) == -5
    assert budget.level_at(6.0) == 1
    assert budget.level_at(5.0) == 1, "time never runs backwards"
    assert budget.level_at(6.5) == 1.5


STEPS = st.lists(st.tuples(st.floats(0, 3600), st.integers(0, 4 << 20)), max_size=200)


@given(STEPS, st.floats(0, 1e12), st.integers(0, 1 << 30), st.floats(0, 1))
def test_no_more_is_written_than_the_rate_allows_and_a_burst_and_one_block(
    steps: list[tuple[float, int]], bytes_per_day: float, burst_bytes: int, filled: float
) -> None:
    level_bytes = burst_bytes * filled
    budget = WriteBudget(
        bytes_per_day=bytes_per_day, burst_bytes=burst_bytes, level_bytes=level_bytes, now_s=0.0
    )
    now_s, written_bytes, longest = 0.0, 0, 0
    for passed_s, block_bytes in steps:
        now_s += passed_s
        level = budget.level_at(now_s)
        assert level <= burst_bytes
        if level > 0:
            budget.spend(block_bytes)
            written_bytes += block_bytes
            longest = max(longest, block_bytes)
    allowed = bytes_per_day / DAY_S * now_s + level_bytes + longest
    assert written_bytes <= allowed * (1 + 1e-9) + 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"rated_dwpd": -1.0},
        {"rated_years": 0.0},
        {"budget_share": 0.0},
        {"burst_s": 0.0},
        {"first_touch_reserve": 1.0},
        {"first_touch_reserve": -0.1},
        {"half_way_blocks": 0},
        {"retry_s": -1.0},
        {"ghost_bytes": 100},
    ],
)
def test_settings_that_can_not_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        EnduranceSettings(**wrong)  # type: ignore[arg-type]  # whole numbers among them


def test_a_drive_written_at_its_rating_lasts_its_rated_years() -> None:
    settings = EnduranceSettings(rated_dwpd=3.0, rated_years=5.0)
    rated = settings.rated_bytes(2 * TB)
    assert years_left(rated, 0, 3 * 2 * TB) == pytest.approx(5.0)
    assert years_left(rated, int(rated) // 5, 3 * 2 * TB) == pytest.approx(4.0)
    assert years_left(rated, 0, 6 * 2 * TB) == pytest.approx(2.5)
    assert years_left(rated, int(rated) + 1, 1.0) == 0.0
    assert years_left(rated, 0, 0.0) == years_left(rated, 0, 1.0) == 1000.0


def test_the_rate_is_that_of_the_last_day_and_a_start_counts_as_an_hour() -> None:
    meter = WriteMeter(0.0)
    meter.add(100)
    meter.advance(1.0)
    assert meter.bytes_per_day == 2400
    for minute in range(1, 3 * 1440):
        meter.add(2)
        meter.advance(60.0 * minute)
    assert meter.bytes == 100 + 2 * (3 * 1440 - 1)
    assert meter.bytes_per_day == pytest.approx(2 * 1440)
    for minute in range(3 * 1440, 5 * 1440 + 60):
        meter.advance(60.0 * minute)
    assert meter.bytes_per_day == 0
