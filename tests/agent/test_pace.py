from __future__ import annotations

import pytest

from ostraca_dpu_agent.mover.pace import Pace


def test_nothing_is_declined_before_anything_was_measured() -> None:
    assert Pace().estimate_s(1 << 40) == 0


def test_an_estimate_counts_what_is_queued_before() -> None:
    pace = Pace()
    pace.begin(0.0, 1000)
    pace.end(1.0, 1000)
    assert pace.estimate_s(500) == pytest.approx(0.5)
    pace.begin(5.0, 2000)
    assert pace.estimate_s(500) == pytest.approx(2.5)


def test_idle_time_does_not_count_as_slowness() -> None:
    pace = Pace()
    for start in (0.0, 100.0, 200.0):
        pace.begin(start, 1000)
        pace.end(start + 1.0, 1000)
    assert pace.estimate_s(1000) == pytest.approx(1.0)


def test_loads_that_overlap_share_the_time() -> None:
    pace = Pace()
    pace.begin(0.0, 1000)
    pace.begin(0.0, 1000)
    pace.end(1.0, 1000)
    pace.end(1.0, 1000)
    assert pace.estimate_s(2000) == pytest.approx(1.0)


def test_the_past_fades() -> None:
    pace = Pace()
    now = 0.0
    for seconds_per_load in [10.0] * 4 + [1.0] * 40:
        pace.begin(now, 64 << 20)
        now += seconds_per_load
        pace.end(now, 64 << 20)
    assert pace.estimate_s(64 << 20) < 1.5
