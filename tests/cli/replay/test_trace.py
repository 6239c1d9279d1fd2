"""Traces: what is read, what is refused, and the numbers they are told by."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from tests.cli.replay.made import trace_of, traces

from ostraca.cli.replay.statistics import prefix_lengths, statistics_of
from ostraca.cli.replay.trace import Request, Trace, read_trace, write_trace
from ostraca_fabric.errors import UsageError

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]}\n'


def read(tmp_path: Path, text: str) -> Trace:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    return read_trace(path)


def test_a_trace_is_read_with_blocks_numbered_as_they_come_and_times_from_zero(tmp_path: Path) -> None:
    later = '{"timestamp": 1500, "input_length": 700, "output_length": 6, "hash_ids": [9, 4], "type": "chat"}'
    trace = read(tmp_path, GOOD.replace("0, ", "500, ", 1) + "\n" + later)
    assert trace.times_s.tolist() == [0.0, 1.0]
    assert [trace.chain(request).tolist() for request in range(2)] == [[0, 1], [1, 2]]
    assert (trace.unique_blocks, trace.span_s) == (3, 1.0)
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([600, 700], [5, 6])


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("nonsense", "line 2: JSON is malformed"),
        ("[1, 2]", "line 2: Expected `object`"),
        ('{"timestamp": 1}', "line 2: Object missing required field `input_length`"),
        (GOOD.replace("[7, 9]", '["a"]'), "line 2: Expected `int`, got `str` - at `$.hash_ids["),
        (GOOD.replace("600", "-1"), "line 2: Expected `int` >= 0 - at `$.input_length`"),
        (GOOD.replace(" 0,", " -5,"), "line 2: Expected `float` >= 0.0 - at `$.timestamp`"),
    ],
)
def test_a_bad_line_is_refused_by_its_number_with_what_to_do(tmp_path: Path, bad: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(tmp_path, GOOD + bad)
    assert said in str(refused.value)
    assert str(refused.value).endswith("correct or remove it")


def test_lines_out_of_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"line 2: its timestamp 0 is before .* 5: sort the lines"):
        read(tmp_path, GOOD.replace("0, ", "5, ", 1) + GOOD)


@pytest.mark.parametrize("text", ["", "\n\n", GOOD.replace("[7, 9]", "[]")])
def test_a_trace_that_asks_for_nothing_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="asks for no block"):
        read(tmp_path, text)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere can't be read: No such file"):
        read_trace(tmp_path / "nowhere")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    requests = [Request(0.0, 10, 3, [1]), Request(12.5, 2000, 4, [1, 2, 3, 4])]
    write_trace(requests, tmp_path / "trace.jsonl")
    found, made = read_trace(tmp_path / "trace.jsonl"), Trace.of(requests)
    assert found.times_s.tolist() == made.times_s.tolist() == [0.0, 0.0125]
    assert found.blocks.tolist() == made.blocks.tolist()


def test_time_can_pass_faster() -> None:
    assert trace_of([1], [1], [1]).faster(4.0).times_s.tolist() == [0.0, 0.25, 0.5]


def test_a_small_trace_is_counted_right() -> None:
    found = statistics_of(trace_of([1, 2, 3], [1, 2, 4], [5, 2], every_ms=2000))
    assert (found.requests, found.span_s, found.requests_per_s) == (3, 4.0, 0.75)
    assert (found.blocks, found.unique_blocks, found.blocks_per_request_max) == (8, 5, 3)
    assert found.reusable_share == 3 / 8  # 1, 2 and 2
    assert found.reusable_prefix_share == 2 / 8  # the last 2 comes after a hole
    assert found.asked_once_share == 3 / 5  # 3, 4 and 5
    assert found.reuse_gap_s_p50 == found.reuse_gap_s_p90 == 2.0


@given(traces())
def test_prefixes_are_as_long_as_counting_says(trace: Trace) -> None:
    there = np.random.default_rng(len(trace.blocks)).random(len(trace.blocks)) < 0.7
    filled = [request for request in range(len(trace)) if len(trace.chain(request))]
    expected = []
    for request in filled:
        own = there[trace.bounds[request] : trace.bounds[request + 1]].tolist()
        expected.append((*own, False).index(False))
    assert prefix_lengths(there, trace.bounds[filled]).tolist() == expected
