"""Smoke test of every benchmark; figures are ignored."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.program import NAMES
from benchmarks.support.figure import Figure, Target
from benchmarks.support.write_throttle import unavailable_reason

from ostraca_cli.tools.bench.series import Measurement, Series

ROOT = Path(__file__).parents[3]

ROWS = {
    "get_from_dram": ["D1", "D1c", "D1p", "D1m", "D1mc", "D1mp", "D1mv", "D1mr", "D1nv", "D1nr"],
    "get_from_flash": ["D2", "D2", "D2", "D2", "D2", "D2", "D2"],
    "get_from_fast_flash": ["D2f", "D2f"],
    "put_staged": ["D3", "D3", "D3m", "D3m", "D3n", "D6p"],
    "put_committed": ["D4", "D4"] if unavailable_reason() else ["D4", "D4", "D4"],
    "lookup": ["D5", "D5"],
    "small_get": ["D6", "D6", "D6m", "D6c", "D6c"],
    "processor_time": ["D7", "D7", "D7m", "D7m"],
    "event_loop_time": ["D7l"],
    "many_workers": ["D12", "D12", "D12m", "D12m"],
    "busy_process": ["D13", "D13", "D13"],
    "long_chain": ["D11", "D11"],
    "tag_checks": ["D8", "D8"],
    "get_over_tcp": ["D9"],
    "get_inline": ["D10", "D10v", "D10c", "D10p"],
    "full_fabric": ["full", "full"],
    "agent_failure": ["P7", "P7", "P7"],
    "index_memory": ["S1"],
    "index_lookup": ["S2"],
    "shard_recovery": ["S3", "S3"],
    "placement": ["S4", "S4"],
    "shard_takeover_time": ["S5", "S5"],
    "write_amplification": ["S6", "S6"],
    "hit_rate": ["S7", "S7", "S7"],
    "idle_agent": ["S8", "S8"],
    "garbage_collections": ["S11", "S11"],
    "import_time": ["S9"],
    "many_drives": ["S10", "S10", "S10", "S10", "S10"],
}


LITTLE = {"OSTRACA_AGENT_MEMORY_STAGING_BYTES": "128MiB"}
"""Enough for short runs: an agent fills its memory before serving, a quarter of a second for more."""


def benchmarks(*arguments: str, timeout_s: float = 100) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=os.environ | LITTLE,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_benchmark_runs_and_leaves_figures_values_and_a_plot(tmp_path: Path) -> None:
    done = benchmarks("--short", "--out", str(tmp_path / "out"), timeout_s=580)
    assert done.returncode == 0, done.stderr
    assert "these figures mean nothing" in done.stdout
    summary = json.loads((tmp_path / "out" / "results.json").read_text())
    left_out = set(re.findall(r"^(\w+) is left out", done.stderr, re.MULTILINE))
    ran = [name for name in NAMES if name not in left_out]
    assert [figure["row"] for figure in summary["figures"]] == [row for name in ran for row in ROWS[name]]
    for name in ran:
        values = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        assert all(len(each["values"]) == len(each["limit_values"]) == each["rounds"] for each in values)
        assert (tmp_path / "out" / f"{name}.svg").read_text().startswith("<?xml"), name
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_benchmark_that_fails_takes_nothing_along_of_what_others_measured(tmp_path: Path) -> None:
    def forbid_large_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))

    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "put_committed",
        "import_time",
        "--short",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        preexec_fn=forbid_large_files,
    )
    assert done.returncode == 1
    assert "put_committed failed:" in done.stderr
    summary = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [figure["row"] for figure in summary["figures"]] == ROWS["import_time"]


@pytest.mark.slow
def test_processor_time_is_measured_by_thread(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.thread_time",
        "--short",
        "--out",
        str(tmp_path / "where.json"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "ms per turn" in done.stdout
    found = json.loads((tmp_path / "where.json").read_text())
    spent = {each["name"].partition(" ")[0]: each["cpu_ms"] for each in found["spent"]}
    assert all(times["worker"] > 0 and times["loop"] > 0 for times in spent.values())
    assert spent["put"]["drive"] > 0
    assert spent["look-up"]["drive"] == 0


def test_a_name_that_is_none_is_refused_with_those_that_are() -> None:
    done = benchmarks("d99", "--short")
    assert done.returncode == 2
    assert "no benchmark is called d99: name any of get_from_dram, get_from_flash" in done.stderr


@pytest.mark.parametrize(
    ("target", "is_met"),
    [
        (Target(ratio_at_least=0.5), True),
        (Target(ratio_at_least=0.51), False),
        (Target(value_at_most=3.0), True),
        (Target(value_at_most=2.9), False),
        (Target(ratio_at_most=0.5), True),
        (Target(ratio_at_most=0.49), False),
    ],
)
def test_a_target_asks_for_a_ratio_or_for_a_value(target: Target, is_met: bool) -> None:
    finding = Measurement("x", Series((2.0, 3.0, 4.0)), "y", Series((4.0, 6.0, 8.0)))
    assert Figure("D0", "x", "ms", finding, target).is_met is is_met


def test_a_figure_of_a_quantile_is_that_quantile() -> None:
    finding = Measurement("x", Series(tuple(map(float, range(1, 101)))), "y", Series((1.0,) * 100))
    figure = Figure("D0", "x", "ms", finding, Target(ratio_at_most=99), quantile=0.99)
    assert figure.value == figure.ratio == 100.0
    assert not figure.is_met
