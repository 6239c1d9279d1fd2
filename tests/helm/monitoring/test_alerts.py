"""Alerts of the chart: promtool evaluates each rule on a firing and on a silent series."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.support.debian import program

ROOT = Path(__file__).parents[3]
RULES = ROOT / "helm" / "ostraca" / "files" / "alerts.yaml"
CASES = Path(__file__).with_name("alerts_test.yaml")
RUNBOOK = ROOT / "docs" / "howto" / "kubernetes" / "alerts.md"

NAMES = re.findall(r"- alert: (\w+)", RULES.read_text())


def promtool(*words: str | Path) -> str:
    """Run promtool, and return its output after success."""
    tool = program("promtool", "prometheus")
    done = subprocess.run([tool, *words], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_are_valid() -> None:
    assert f"{len(NAMES)} rules found" in promtool("check", "rules", RULES)


def test_rules_fire_and_stay_silent_as_the_cases_say() -> None:
    assert "SUCCESS" in promtool("test", "rules", CASES)


@pytest.mark.parametrize("name", NAMES)
def test_each_alert_has_both_cases_and_a_section_of_the_runbook(name: str) -> None:
    cases = CASES.read_text()
    assert (cases.count(f"name: {name} fires\n"), cases.count(f"name: {name} is silent\n")) == (1, 1)
    assert f"\n### {name}\n" in RUNBOOK.read_text()
    assert f"RUNBOOKS#{name.lower()}\n" in RULES.read_text()


def test_alerts_and_dashboards_use_metrics_of_the_reference_alone() -> None:
    known = set(
        re.findall(r"^\| `(ostraca_\w+)`", (ROOT / "docs/reference/metrics.md").read_text(), re.MULTILINE)
    )
    texts = [RULES.read_text(), *(each.read_text() for each in (RULES.parent / "dashboards").glob("*.json"))]
    used = {name for text in texts for name in re.findall(r"\b(ostraca_\w+)\b", text)}
    assert {name for name in used if re.sub(r"_(total|info|bucket)$", "", name) not in known} == set()
