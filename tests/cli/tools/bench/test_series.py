"""Figures from measurements."""

from ostraca_cli.tools.bench.series import SHORT, Comparison, Measurement, Pacing, Series, measure


def test_what_is_measured_and_its_limit_take_turns_in_changing_order() -> None:
    order: list[str] = []

    def turn(name: str) -> float:
        order.append(name)
        return 1.0

    case = Comparison("a", lambda: turn("a"), "b", lambda: turn("b"))
    measure(case, Pacing(seconds=0.0, rounds_min=4, warm_ups=1))
    assert "".join(order) == "ab" + "ab" + "ba" + "ab" + "ba"


def test_a_machine_that_slows_down_in_the_middle_does_not_move_the_ratio() -> None:
    turns = 0

    def at_share(share: float) -> float:
        nonlocal turns
        turns += 1
        machine_speed = 100.0 if turns <= 10 else 20.0
        return machine_speed * share

    case = Comparison("half", lambda: at_share(0.5), "whole", lambda: at_share(1.0))
    assert measure(case, Pacing(0.0, rounds_min=10, warm_ups=0)).ratio == 0.5


def test_the_ratio_is_the_median_of_ratios_within_a_round() -> None:
    found = Measurement("x", Series((1.0, 10.0, 3.0)), "y", Series((2.0, 20.0, 4.0)))
    assert found.ratio == 0.5


def test_progress_ends_at_one() -> None:
    told: list[float] = []
    measure(Comparison("a", lambda: 1.0, "b", lambda: 1.0), SHORT, told.append)
    assert told == [0.5, 1.0]


def test_quantiles_are_values_that_were_measured() -> None:
    series = Series(tuple(float(value) for value in range(100, 0, -1)))
    assert (series.quantile(0.0), series.quantile(0.5), series.quantile(0.99), series.quantile(1.0)) == (
        1.0,
        51.0,
        100.0,
        100.0,
    )
