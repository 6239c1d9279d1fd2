"""One budget and its parts: nobody spends what came in for another, and nothing is gained or lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraca_fabric.policies.endurance import DAY_S
from ostraca_fabric.policies.shared_budget import SharedBudget
from ostraca_fabric.policies.write_budget import WriteBudget

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
