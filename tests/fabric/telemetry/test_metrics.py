"""The one table of metrics, the text they are written as, and the page that lists them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.fabric.telemetry.metrics_samples import CLIENT, ENCLOSURE, STATUS, tally

from ostraca.client_metrics import CLIENT_METRICS
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.telemetry.enclosure_metrics import ENCLOSURE_METRICS
from ostraca_fabric.telemetry.metrics import AGENT_METRICS
from ostraca_fabric.telemetry.openmetrics import Metric, MetricKind, render
from ostraca_fabric.telemetry.requests import LATENCY_BOUNDS_S, Tally, tally_text

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
TEXT = render(AGENT_METRICS, STATUS) + CLIENT.openmetrics() + render(ENCLOSURE_METRICS, ENCLOSURE)
METRICS: tuple[Metric[Any], ...] = (*AGENT_METRICS, *CLIENT_METRICS, *ENCLOSURE_METRICS)


def test_the_reference_page_lists_every_metric_and_no_other() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.splitlines()
        if line.startswith("| `ostraca_")
    ]
    assert sorted(rows) == sorted(
        [
            f"`{metric.name}`",
            metric.kind.value,
            " ".join(f"`{label}`" for label in metric.labels),
            metric.help,
        ]
        for metric in METRICS
    )


def test_the_reference_page_shows_a_line_of_each_metric_as_it_is_written() -> None:
    shown = [line for line in PAGE.splitlines() if line.startswith("ostraca_")]
    written = TEXT.splitlines()
    assert [line for line in shown if line not in written] == []
    names = [re.split(r"[{ ]", line)[0] for line in shown]
    suffixes = {MetricKind.COUNTER: "_total", MetricKind.INFO: "_info", MetricKind.HISTOGRAM: "_bucket"}
    assert sorted(names) == sorted(metric.name + suffixes.get(metric.kind, "") for metric in METRICS)


@pytest.mark.parametrize("found", METRICS, ids=lambda metric: metric.name)
def test_a_metrics_name_says_whose_it_is_and_ends_in_its_unit(found: Metric[Any]) -> None:
    assert re.fullmatch(r"ostraca_(agent|drive|shard|client|enclosure)(_[a-z]+)*", found.name)
    assert not found.unit or found.name.endswith(f"_{found.unit}")
    assert found.help.endswith(".")


def test_a_histograms_buckets_add_up_and_end_in_all_requests() -> None:
    lines = [line for line in TEXT.splitlines() if line.startswith("ostraca_agent_request_seconds_")]
    counts = [int(line.split()[-1]) for line in lines if "_bucket" in line and 'operation="get"' in line]
    assert len(counts) == len(LATENCY_BOUNDS_S) + 1
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert 'ostraca_agent_request_seconds_count{operation="get"} 3' in lines
    assert 'ostraca_agent_request_seconds_bucket{operation="get",le="0.0005"} 1' in lines
    assert 'ostraca_agent_request_seconds_bucket{operation="get",le="0.005"} 3' in lines


def test_a_label_can_hold_anything() -> None:
    metric: Metric[str] = Metric(
        "agent", MetricKind.INFO, "", ("name", "start"), "Any.", lambda name: {(name, ""): 1}
    )
    line = render([metric], 'a"b\\c\nd').splitlines()[-2]
    assert line == 'agent_info{name="a\\"b\\\\c\\nd",start=""} 1'


def test_the_text_ends_as_openmetrics_wants_it() -> None:
    assert CLIENT.openmetrics().endswith("\n# EOF\n")


def test_a_time_on_a_buckets_bound_is_within_it() -> None:
    running = Tally("get")
    for bound_s in LATENCY_BOUNDS_S:
        running.timed(bound_s)
    running.timed(1e9)
    assert running.snapshot().buckets == (1,) * (len(LATENCY_BOUNDS_S) + 1)


def test_a_share_of_the_requests_ended_within_a_bound() -> None:
    found = tally("get")
    assert [found.latency_s(share) for share in (0.3, 0.5, 0.99)] == [0.0005, 0.005, 0.005]
    assert Tally("get").snapshot().latency_s(0.5) == 0.0


def test_outcomes_are_counted_by_state_and_reason() -> None:
    found = tally(
        "put",
        (PutState.DECLINED, Reason.NO_SPACE, 2),
        (PutState.COMMITTED, Reason.NONE, 7),
        (PutState.DECLINED, Reason.IN_FLIGHT, 1),
    )
    assert found.of(PutState.DECLINED) == 3
    assert found.of(PutState.DECLINED, Reason.NO_SPACE) == 2
    assert found.of(PutState.EXISTS) == 0


def test_a_reason_that_only_newer_releases_know_is_counted_by_its_number() -> None:
    assert tally_text(bytes([BlockState.MISS]), bytes([250]), BlockState) == "1 MISS (1 250)"
