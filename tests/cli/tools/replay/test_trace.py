"""Traces: valid and refused files, and their statistics."""

import bz2
import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from tests.cli.tools.replay.small_traces import trace_of, traces

from ostraca_cli.tools.replay.reports.statistics import prefix_lengths, statistics_of
from ostraca_cli.tools.replay.trace import Request, Trace, read_trace, write_trace
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
        (GOOD.replace(" 0,", " 1e308,"), "line 2: Expected `float` <= 1000000000000000.0 - at `$.timestamp`"),
        (GOOD.replace(" 0,", " 1e400,"), "line 2: Number out of range - at `$.timestamp`"),
        (GOOD.replace(" 0,", " NaN,"), "line 2: JSON is malformed"),
        (GOOD.replace("600", "9" * 20), "line 2: Expected `int` <= 1099511627776 - at `$.input_length`"),
        (GOOD.replace("5", "9" * 400), "line 2: "),
        (GOOD.replace("{", '{"deep": ' + 9999 * "[" + 9999 * "]" + ", "), "line 2: maximum recursion depth"),
    ],
)
def test_a_bad_line_is_refused_by_its_number_with_what_to_do(tmp_path: Path, bad: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(tmp_path, GOOD + bad)
    assert said in str(refused.value)
    assert str(refused.value).endswith("correct or remove the line")


def test_hash_ids_may_be_any_whole_numbers(tmp_path: Path) -> None:
    trace = read(tmp_path, GOOD.replace("[7, 9]", f"[-1, {'9' * 300}, -1]"))
    assert trace.blocks.tolist() == [0, 1, 0]


def test_a_byte_order_mark_and_lines_of_windows_are_read(tmp_path: Path) -> None:
    text = GOOD.replace("\n", "\r\n")
    assert len(read(tmp_path, f"\ufeff{text}{text}")) == 2


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        (gzip.compress(GOOD.encode(), mtime=0), "is a gzip file: unpack the file"),
        (bz2.compress(GOOD.encode()), "is a bzip2 file: unpack the file"),
        (lzma.compress(GOOD.encode()), "is a xz file: unpack the file"),
        (GOOD.encode("utf-16"), "line 1: JSON is malformed"),
        (bytes(1000), "line 1: JSON is malformed"),
    ],
    ids=["gzip", "bzip2", "xz", "utf-16", "zeroes"],  # the same in each process that runs tests
)
def test_what_is_no_text_is_refused(packed: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(packed)
    with pytest.raises(UsageError, match=said):
        read_trace(path)


def test_a_file_without_lines_is_refused_before_it_fills_the_memory() -> None:
    with pytest.raises(UsageError, match="/dev/zero, line 1 is longer than 64 MiB"):
        read_trace(Path("/dev/zero"))


def test_lines_out_of_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"line 2: the timestamp 0 precedes the timestamp above, 5: sort the lines"
    ):
        read(tmp_path, GOOD.replace("0, ", "5, ", 1) + GOOD)


@pytest.mark.parametrize("text", ["", "\n\n", GOOD.replace("[7, 9]", "[]")])
def test_a_trace_that_asks_for_nothing_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="requests no block"):
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
    assert trace_of([1], [1], [1]).accelerate(4.0).times_s.tolist() == [0.0, 0.25, 0.5]


def test_a_small_trace_is_counted_right() -> None:
    found = statistics_of(trace_of([1, 2, 3], [1, 2, 4], [5, 2], every_ms=2000))
    assert (found.requests, found.span_s, found.requests_per_s) == (3, 4.0, 0.75)
    assert (found.blocks, found.unique_blocks, found.blocks_per_request_max) == (8, 5, 3)
    assert found.reusable_share == 3 / 8  # 1, 2 and 2
    assert found.reusable_prefix_share == 2 / 8  # the last 2 comes after a hole
    assert found.requested_once_share == 3 / 5  # 3, 4 and 5
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
