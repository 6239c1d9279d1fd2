"""Lines of a log, written by a thread: to pipes that nobody reads, full disks, and streams of others."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostraca_fabric.telemetry.log_lines import REMIND_S, WAITING_BYTES_MAX, LineWriter, LogDedup

PIPE_BYTES = 4096
LINE_BYTES = 100
SOON_S = 20.0


def told(lost: int, why: str) -> bytes:
    return f"lost {lost}: {why}\n".encode()


def line(number: int) -> bytes:
    return f"{number:0{LINE_BYTES - 1}}\n".encode()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Open a pipe with a capacity of one page."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield read, write
    os.close(read)
    os.close(write)


def read_until(descriptor: int, last: bytes) -> list[str]:
    """Read lines until one is *last*."""
    data, until_s = b"", time.monotonic() + SOON_S
    while not data.endswith(last):
        assert time.monotonic() < until_s, data[-200:]
        data += os.read(descriptor, 1 << 16)
    return data.decode().splitlines()


def test_lines_arrive_in_their_order(pipe: tuple[int, int]) -> None:
    read, write = pipe
    writer = LineWriter(write, told)
    for number in range(1000):
        writer.put(line(number))
    assert read_until(read, line(999)) == [line(number).decode().strip() for number in range(1000)]
    assert writer.lost == 0


def test_who_logs_waits_for_no_reader_and_the_log_says_once_it_is_read_what_is_missing(
    pipe: tuple[int, int],
) -> None:
    read, write = pipe
    writer = LineWriter(write, told, waiting_bytes_max=100 * LINE_BYTES)
    for number in range(10_000):
        writer.put(line(number))
    kept = 10_000 - writer.lost
    assert 100 <= kept <= 100 + 2 * PIPE_BYTES // LINE_BYTES
    assert not writer.flush(0.01), "an end waits for a while, and no longer"
    lost, said = writer.lost, b""
    while (
        sum(map(int, re.findall(rb"lost (\d+): they were not read in time\n", said))) < lost
        or len(re.findall(rb"(?m)^\d+\n", said)) < kept
    ):
        said += os.read(read, 1 << 16)  # what was lost is told, though nothing is logged any more
    assert len(re.findall(rb"(?m)^\d+\n", said)) == kept
    writer.put(line(7))
    assert read_until(read, line(7)) == [line(7).decode().strip()]
    assert writer.lost == lost


def test_what_is_lost_between_lines_is_told_between_them(pipe: tuple[int, int]) -> None:
    read, write = pipe
    writer = LineWriter(write, told, waiting_bytes_max=100 * LINE_BYTES)
    while not writer.lost:
        writer.put(line(1))
    lost, said = -1, b""
    while lost != writer.lost:  # until a line is taken again
        lost = writer.lost
        said += os.read(read, LINE_BYTES)
        writer.put(line(2))
    said += "\n".join(read_until(read, line(2))).encode()
    assert said.endswith(told(lost, "they were not read in time") + line(2).strip())


def test_lines_that_a_full_disk_refuses_are_told_once_there_is_room(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full, (tmp_path / "log").open("wb") as log:
        descriptor = os.dup(full.fileno())
        writer = LineWriter(descriptor, told)
        for number in range(10):
            writer.put(line(number))
        assert writer.flush(SOON_S)
        assert writer.lost == 10
        os.dup2(log.fileno(), descriptor)
        writer.put(line(10))
        assert writer.flush(SOON_S)
    assert (tmp_path / "log").read_bytes() == told(10, "writing failed: No space left on device") + line(10)
    assert writer.lost == 10
    os.close(descriptor)


def test_a_line_after_one_that_was_torn_begins_a_new_one(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "log").open("wb") as log:
        writer = LineWriter(log.fileno(), told)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LINE_BYTES // 2, limits[1]))
        try:
            writer.put(line(1))
            assert writer.flush(SOON_S)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        writer.put(line(2))
        assert writer.flush(SOON_S)
    torn = line(1)[: LINE_BYTES // 2]
    said = torn + b"\n" + told(1, "writing failed: File too large") + line(2)
    assert (tmp_path / "log").read_bytes() == said


def test_a_stream_that_others_made_non_blocking_loses_nothing(pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.set_blocking(write, False)
    writer = LineWriter(write, told)
    for number in range(1000):
        writer.put(line(number))
    assert len(read_until(read, line(999))) == 1000
    assert writer.lost == 0


def test_a_line_longer_than_all_that_may_wait_is_dropped(pipe: tuple[int, int]) -> None:
    read, write = pipe
    writer = LineWriter(write, told)
    writer.put(b"x" * WAITING_BYTES_MAX + b"\n")
    writer.put(line(1))
    assert read_until(read, line(1))[0] == "lost 1: they were not read in time"


def test_a_forked_process_writes_its_own_lines_and_none_of_its_parents(pipe: tuple[int, int]) -> None:
    read, write = pipe
    stuck, stuck_write = os.pipe()
    fcntl.fcntl(stuck_write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    descriptor = os.dup(stuck_write)
    writer = LineWriter(descriptor, told)
    for number in range(100):
        writer.put(line(number))
    if not (child := os.fork()):
        os.dup2(write, descriptor)
        writer.put(line(1000))
        os._exit(not writer.flush(SOON_S))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read_until(read, line(1000)) == [line(1000).decode().strip()]
    assert len(read_until(stuck, line(99))) == 100
    for each in (stuck, stuck_write, descriptor):
        os.close(each)


def test_a_trouble_is_said_when_it_begins_once_a_minute_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 100.0
    spell = LogDedup(logging.getLogger("spells"), lambda: now_s)
    caplog.set_level(logging.INFO, "spells")
    spell.resolve("it is well")
    for second in range(150):
        now_s = 100.0 + second
        spell.report("no answer from %s", "etcd", since_s=98.0)
    assert spell.lasts_s == 151.0
    spell.resolve("it is well")
    spell.resolve("it is well")
    assert REMIND_S == 60
    assert caplog.messages == [
        "no answer from etcd",
        "no answer from etcd; so for 62 s now",
        "no answer from etcd; so for 122 s now",
        "it is well, after 151.0 s",
    ]
    assert spell.lasts_s == 0


def test_another_trouble_than_the_one_said_last_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    spell = LogDedup(logging.getLogger("spells"), lambda: 7.0)
    caplog.set_level(logging.DEBUG, "spells")
    for message in ("it is silent", "it is silent", "it has lost all"):
        spell.report(message)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "it is silent"),
        ("DEBUG", "it is silent"),
        ("WARNING", "it has lost all; so for 0 s now"),
    ]
