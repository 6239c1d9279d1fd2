"""The page on endurance: its numbers are what its formulas give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.policies.endurance import EnduranceSettings
from ostraca_fabric.policies.flash_admission import FlashAdmission, GhostFilter
from ostraca_fabric.policies.write_budget import WriteBudget

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "endurance.md").read_text()
TB = 10**12


def test_the_worked_example_of_the_break_even_length_is_what_the_code_says() -> None:
    first, *others = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(first, {})  # it asserts
    assert len(others) == 1
    assert "client.volume(" in others[0]


def test_the_worked_example_of_a_rating_is_what_the_code_says() -> None:
    settings = EnduranceSettings(rated_dwpd=1.0)
    size = 15.36 * TB
    assert "takes 28 PB, or 178 MB/s day and night" in PAGE
    assert settings.rated_bytes(int(size)) == pytest.approx(28e15, rel=0.01)
    assert settings.budget_bytes_per_day(int(size)) / 86_400 == pytest.approx(178e6, rel=0.01)
    made_bytes_per_s = 11_900 * (320 << 10)
    assert "makes 3.9 GB/s, 22 drive\nwrites a day" in PAGE
    assert made_bytes_per_s == pytest.approx(3.9e9, rel=0.01)
    assert made_bytes_per_s * 86_400 / size == pytest.approx(22, rel=0.01)


def test_the_page_tells_the_defaults() -> None:
    settings = EnduranceSettings(rated_dwpd=1.0)
    assert (settings.burst_s, settings.first_touch_reserve, settings.retry_s) == (6 * 3600, 0.25, 10)
    budget = WriteBudget.of_shard(settings, size_bytes=TB, now_s=0.0)
    assert budget.level_at(0.0) == budget.burst_bytes / 4
    ghost = GhostFilter(settings.ghost_bytes, retry_s=settings.retry_s)
    assert 1e6 <= ghost.capacity <= 1.1e6
    admission = FlashAdmission(
        budget, ghost, first_touch_reserve=0.25, half_way_blocks=settings.half_way_blocks
    )
    limits = [admission.depth_limit(part * budget.burst_bytes) for part in (0.25, 0.5751, 0.901)]
    assert limits == [0, 64, 1 << 32]


def test_the_page_explains_each_reason() -> None:
    for reason in (Reason.ADMISSION, Reason.BUDGET, Reason.TOO_SHORT):
        assert f"| `{reason.name}` |" in PAGE
