"""Standard streams: closed, full, without a reader, or without UTF-8."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.cli.commands.test_up import LAYOUT, SMALL

import ostraca
from ostraca_cli.commands.status import ask
from ostraca_cli.program import main
from ostraca_cli.terminal.logs import JsonFormatter, LineHandler
from ostraca_fabric.telemetry.status import AgentStatus

pytestmark = pytest.mark.slow

PIPE_BYTES = 4096
SOON_S = 30.0
ASCII = {"PYTHONIOENCODING": "ascii"}
DIRECTORY = "fäbric-織"
"""Characters outside ASCII and Latin-1."""


@contextmanager
def shell(
    redirected: str, *words: str, stdout: int | None = None, stderr: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `ostraca` with streams as a shell redirects them, in a locale of ASCII."""
    script = f'exec "$0" "$@" {redirected}'
    command = ["/bin/sh", "-c", script, sys.executable, "-m", "ostraca_cli", *words]
    environment = {**os.environ, **ASCII}
    with subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr) as process:
        try:
            yield process
        finally:
            process.kill()


def status_of(directory: Path) -> AgentStatus:
    """Return a fabric's status, once ready."""
    until_s = time.monotonic() + SOON_S
    while True:
        try:
            return asyncio.run(ask(f"unix://{directory}/agent-0.sock"))
        except ostraca.OstracaError:
            assert time.monotonic() < until_s
            time.sleep(0.02)


def get_and_put(directory: Path, *, gets: int) -> None:
    """Put a block, and get the block *gets* times with a hit each."""
    with ostraca.connect(f"unix://{directory}/agent-0.sock") as client:
        volume = client.volume("kv", LAYOUT, block_bytes=4096, create=True)
        chain, block = volume.chain([secrets.token_bytes(32)]), np.ones((1, 4096), np.uint8)
        volume.put(chain, source=block, deadline_s=20, ack=ostraca.Ack.COMMITTED)
        assert all(volume.get(chain, into=block, deadline_s=20).hits == 1 for _ in range(gets))


def test_a_fabric_whose_log_nobody_reads_serves_and_says_what_it_has_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    words = ("up", "--dir", str(tmp_path), "-v", *SMALL)
    with shell("2>&1", *words, stdout=write) as process:
        os.close(write)
        while not (lost := status_of(tmp_path).lost_log_lines):
            get_and_put(tmp_path, gets=500)
        assert main(["status", "--dir", str(tmp_path)]) == 0
        assert re.search(r"agent-0: \d+ log lines? of its process were dropped", capsys.readouterr().out)
        said = b""
        while not (
            told := re.search(rb"This log has lost (\d+) lines: they were not read in time\.\n", said)
        ):
            said += os.read(read, 1 << 20)
        assert int(told[1]) >= lost
        assert re.search(rb"^ready: ", said, re.MULTILINE), "it is printed once there is room"
        get_and_put(tmp_path, gets=100)  # the pipe is full again
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON_S) == 0, "it ends though nobody reads what it says at last"
    os.close(read)


@pytest.mark.parametrize(
    ("redirected", "lost_min"),
    [("<&- >&- 2>&-", 1), (">/dev/full 2>/dev/full", 1), (">/dev/full", 0)],
    ids=["closed", "full", "stdout-full"],
)
def test_a_fabric_serves_whatever_its_streams_are(tmp_path: Path, redirected: str, lost_min: int) -> None:
    directory = tmp_path / DIRECTORY
    with shell(redirected, "up", "--dir", str(directory), *SMALL, stderr=subprocess.PIPE) as process:
        assert status_of(directory).lost_log_lines >= lost_min
        opened = [str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in range(3)]
        assert not any(str(directory) in each for each in opened), "a library would write into a drive"
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(SOON_S) == 0
    if not lost_min:
        assert b"The ready line can't be written to standard output: No space left on device" in said
        assert rb"Stopped. Blocks stay in " in said
        assert DIRECTORY.encode("ascii", "backslashreplace") in said


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("redirected", "why"), [(">/dev/full", "No space left on"), (">&-", "Bad file")])
@pytest.mark.parametrize("words", ["--version", "up --print-settings"])
def test_output_that_can_not_be_written_is_a_sentence_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, words: str, redirected: str, why: str, unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with shell(redirected, *words.split(), stderr=subprocess.PIPE) as process:
        _, said = process.communicate(timeout=SOON_S)
    assert process.returncode == 1
    assert re.fullmatch(rf"ostraca: cannot write standard output: {why}[^\n]*\n", said.decode())


def test_errors_that_can_not_be_written_change_no_exit_code() -> None:
    for redirected in ("2>/dev/full", "2>&-"):
        with shell(redirected, "status", "--dir", "/nowhere", stdout=subprocess.PIPE) as process:
            assert process.communicate(timeout=SOON_S)[0] == b""
        assert process.returncode == 1


def test_a_status_is_shown_in_any_encoding(tmp_path: Path) -> None:
    directory = tmp_path / DIRECTORY
    with shell("", "up", "--dir", str(directory), *SMALL, stdout=subprocess.PIPE) as fabric:
        assert fabric.stdout is not None
        assert f"unix://{directory}/agent-0.sock" in fabric.stdout.readline().decode()
        fabric.stdout.close()
        for words in (("status", "--dir"), ("doctor",)):
            with shell("", *words, str(directory), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
                out, err = process.communicate(timeout=SOON_S)
            assert (process.returncode, err) == (0, b"")
            assert rb"\u" in out, "what ASCII lacks is escaped"


def test_a_log_is_whole_at_the_end_whatever_libraries_do_to_logging() -> None:
    program = (
        "import argparse, logging, logging.config\n"
        "from ostraca_cli.terminal.logs import log_to_stderr\n"
        "log_to_stderr(argparse.Namespace(log_level='info', log_format='text'))\n"
        "log = logging.getLogger('ostraca')\n"
        "log.info('first')\n"
        "logging.config.dictConfig({'version': 1, 'disable_existing_loggers': False})\n"
        "for number in range(5000): log.info('line %d', number)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=SOON_S
    )
    assert done.stderr.splitlines() == ["first", *(f"line {number}" for number in range(5000))]


def test_what_a_daemon_writes_to_standard_error_itself_is_a_part_of_its_log_and_waits_for_nobody() -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    program = (
        "import argparse, sys\n"
        "from ostraca_cli.terminal import logs, streams\n"
        "logs._ENDING_S = 0.1\n"
        "streams.repair_streams()\n"
        "logs.log_to_stderr(argparse.Namespace(log_level='info', log_format='text'))\n"
        "for number in range(1000): print(number, 'x' * 100, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stderr=write, check=False, timeout=SOON_S)
    os.close(write)
    assert done.returncode == 0
    assert os.read(read, PIPE_BYTES).startswith(b"0 xxx")
    os.close(read)


def test_a_library_that_writes_to_a_daemons_streams_does_not_wait_and_others_notice_nothing() -> None:
    read, write = os.pipe()
    program = (
        "import os; from ostraca_cli.terminal.streams import unblock; unblock()\n"
        "try:\n"
        "    while True: os.write(2, b'x' * 4096)\n"
        "except BlockingIOError: os._exit(7)"
    )
    done = subprocess.run([sys.executable, "-c", program], stderr=write, check=False, timeout=SOON_S)
    assert done.returncode == 7
    assert os.get_blocking(write)
    os.close(read)
    os.close(write)


def test_an_interrupted_command_writes_no_line_twice() -> None:
    program = (
        "import signal, sys, time\n"
        "from ostraca_cli.terminal import streams\n"
        "streams.repair_streams()\n"
        "def interrupt(*_): raise KeyboardInterrupt\n"
        "signal.signal(signal.SIGALRM, interrupt)\n"
        "end_s, number = time.monotonic() + 2.0, 0\n"
        "while time.monotonic() < end_s:\n"
        "    try:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 5e-5)\n"
        "        while True:\n"
        "            number += 1\n"
        "            print(f'line {number}', flush=True)\n"
        "    except KeyboardInterrupt: pass\n"
        "print('\\nend')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=SOON_S
    )
    *lines, last = done.stdout.splitlines()
    assert (done.returncode, done.stderr, last) == (0, "", "end")
    assert len(lines) == len(set(lines))


def test_a_command_waits_for_the_reader_of_a_stream_that_another_process_made_non_blocking() -> None:
    read, write = socket.socketpair()
    write.setblocking(False)
    program = (
        "from ostraca_cli.terminal import streams\n"
        "streams.repair_streams()\n"
        "for n in range(100_000): print(n, 'x' * 50)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=write.fileno()) as process:
        write.close()
        with read, read.makefile("rb") as lines:
            assert sum(1 for _ in lines) == 100_000
    assert process.returncode == 0


def test_what_a_log_has_lost_is_told_as_all_else_in_it() -> None:
    handler = LineHandler()
    handler.setFormatter(JsonFormatter("agent-7"))
    line = handler._loss_line(3, "they were not read in time")
    assert re.search(
        rb'"level": "warning".*"message": "This log has lost 3 lines: .*"agent": "agent-7"}', line
    )
