"""The report."""

from __future__ import annotations

import pytest
from scripts.structure.history import subject_lengths_row
from scripts.structure.measures import get_modules_row
from scripts.structure.table import (
    Row,
    Verdict,
    informative,
    is_met,
    limited,
    offender_lines,
    table_lines,
)

OVER = limited("cycles", 8, 0, ["a, b", "c, d", "e, f"])
FITS = limited("density", 4.0, 4.0, ["not shown"])
NEWS = informative("comments", "0.9 %", ["a.py"])


def test_a_value_at_its_limit_is_ok_and_one_above_is_over() -> None:
    assert [limited("m", value, 4.0).verdict for value in (4.0, 4.01)] == [Verdict.OK, Verdict.OVER]


def test_rows_are_aligned_below_a_heading() -> None:
    assert table_lines([OVER, limited("words", 54_000, 55_000)]) == [
        "measure   today       goal",
        "cycles        8       <= 0  over",
        "words    54,000  <= 55,000  ok",
    ]


def test_offenders_are_listed_up_to_a_number_but_not_those_of_goals_that_are_met() -> None:
    assert offender_lines([OVER, FITS, NEWS], most=2) == [
        *("", "cycles:", "  a, b", "  c, d", "  ... and 1 more"),
        *("", "comments:", "  a.py"),
    ]


def test_no_offenders_are_listed_where_none_are_asked_for() -> None:
    assert offender_lines([OVER, NEWS], most=0) == []


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (Verdict.OK, True),
        (Verdict.INFO, True),
        (Verdict.ABSENT, True),
        (Verdict.OVER, False),
        (Verdict.FAILED, False),
    ],
)
def test_goals_are_missed_where_a_value_is_over_or_a_measure_failed(
    *, verdict: Verdict, expected: bool
) -> None:
    assert is_met([FITS, Row("m", "1", "<= 1", verdict)]) is expected


def test_the_path_of_a_get_is_divided_by_package() -> None:
    modules = [f"sdk/ostraca/m{number}.py" for number in range(45)]
    assert get_modules_row(modules).verdict is Verdict.OK
    row = get_modules_row([*modules, "fabric/ostraca_fabric/wire/codec.py"])
    assert (row.value, row.verdict) == ("46", Verdict.OVER)
    assert row.offenders[:2] == (
        "sdk/ostraca 45, fabric/ostraca_fabric 1",
        "fabric/ostraca_fabric/wire/codec.py",
    )


def test_subjects_over_the_limit_are_listed_the_longest_first() -> None:
    row = subject_lengths_row(["a" * 61, "b" * 60, "c" * 99])
    assert (row.value, row.offenders) == ("61, 99 (2 over 60)", ("  99 " + "c" * 99, "  61 " + "a" * 61))
    assert subject_lengths_row([]).verdict is Verdict.ABSENT
