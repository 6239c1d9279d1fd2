from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraca_fabric.errors import UsageError
from ostraca_fabric.policies.endurance import DAY_S, EnduranceSettings, WriteMeter, years_left
from ostraca_fabric.policies.write_budget import SharedBudget, WriteBudget

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


A, B = 7, 8
BURST = 1000.0


def made(level: float = BURST, shares: dict[int, float] | None = None) -> SharedBudget:
    """Ten bytes come in each second."""
    whole = WriteBudget(bytes_per_day=10 * DAY_S, burst_bytes=BURST, level_bytes=level, now_s=0.0)
    budget = SharedBudget(whole, 0.0)
    budget.share_out(shares or {}, 0.0)
    return budget


def test_without_parts_it_is_the_budget_that_it_was_made_of() -> None:
    whole = WriteBudget(bytes_per_day=10 * DAY_S, burst_bytes=BURST, level_bytes=400, now_s=0.0)
    budget = made(400)
    for now_s, written in ((1.0, 200), (3.5, 700), (10.0, 0), (500.0, 10)):
        assert budget.level_at(now_s) == budget.part_of(A).level_at(now_s) == whole.level_at(now_s)
        budget.spend(written, A)
        whole.spend(written)
    assert budget.part_of(A).burst_bytes == BURST


def test_what_came_in_for_one_pool_is_spent_by_nobody_else() -> None:
    budget = made(shares={A: 0.25, B: 0.25})
    assert [budget.part_of(pool).level_at(0.0) for pool in (0, A, B, 99)] == [500, 250, 250, 500]
    budget.spend(3000, A)
    budget.spend(3000)
    assert budget.part_of(B).level_at(0.0) == 250
    assert budget.part_of(A).level_at(10.0) < -2000
    assert budget.part_of(B).level_at(10.0) == 275, "its own, and what it lends"


def test_what_one_pool_has_no_room_to_save_is_lent_to_whoever_has_spent_its_own() -> None:
    budget = made(shares={A: 0.25, B: 0.25})
    budget.spend(500)
    assert budget.part_of(0).level_at(10.0) == pytest.approx(50 + 50), "its own, and what two others lend"
    assert budget.part_of(A).level_at(10.0) == pytest.approx(250 + 50)
    budget.spend(80)
    assert budget.part_of(0).level_at(10.0) == pytest.approx(20)
    assert budget.part_of(A).level_at(10.0) == pytest.approx(250 + 20), "first come, first served"


def test_a_new_part_takes_its_level_along_and_one_that_ends_leaves_it() -> None:
    budget = made(400)
    budget.share_out({A: 0.25}, 0.0)
    assert [budget.part_of(pool).level_at(0.0) for pool in (0, A)] == [300, 100]
    budget.spend(100, A)
    budget.share_out({A: 0.25}, 0.0)
    assert budget.part_of(A).level_at(0.0) == 0, "the same shares again are no new ones"
    budget.spend(50, A)
    budget.share_out({}, 0.0)
    assert budget.level_at(0.0) == budget.part_of(A).level_at(0.0) == 250


POOLS = st.sampled_from([0, A, B, 9])


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("wait"), st.floats(0, 200)),
            st.tuples(st.just("spend"), POOLS, st.integers(0, 800)),
            st.tuples(st.just("share"), st.dictionaries(POOLS, st.floats(0.01, 0.3))),
        ),
        max_size=40,
    )
)
def test_all_parts_together_are_never_more_than_one_budget_would_be(steps: list[tuple[object, ...]]) -> None:
    """Asking first, nobody can spend more than rate x time and one burst."""
    budget, now_s, spent = made(250.0), 0.0, 0.0
    for step in steps:
        match step:
            case ("wait", float(seconds)):
                now_s += seconds
            case ("spend", int(pool), int(wanted)):
                may = budget.part_of(pool).level_at(now_s)
                taken = min(float(wanted), max(0.0, may))
                budget.spend(int(taken), pool)
                spent += int(taken)
            case ("share", dict(shares)):
                before = budget.level_at(now_s)
                budget.share_out(shares, now_s)
                assert budget.level_at(now_s) == pytest.approx(before)
        assert budget.level_at(now_s) <= BURST + 1e-6
        assert spent <= 250 + 10 * (now_s + 1.0) + 1e-6
