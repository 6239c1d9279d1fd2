"""Signals, as a process of its own hears them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.commands.test_up import SMALL, up

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio
from ostraca_cli.commands.serve.signals import stop_on_signals
async def main():
    stop = stop_on_signals(lambda: print("again", flush=True))
    print("up", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    await asyncio.Event().wait()  # a stop that takes for ever
asyncio.run(main())
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as started:
        assert said(started) == "up"
        yield started
        started.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_stops_in_order_and_the_second_at_once(
    process: subprocess.Popen[str], number: signal.Signals
) -> None:
    process.send_signal(number)
    assert said(process) == "stopping"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130


def test_a_hangup_reads_again_and_stops_nothing(process: subprocess.Popen[str]) -> None:
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        assert said(process) == "again"
    assert process.poll() is None


SENT = """\
import os
import signal
import sys

def send_once(event, words):
    wanted = os.environ.get("PLANTED_SIGNAL_AT")
    if wanted and event in ("import", "open") and str(words[0]).endswith(wanted):
        os.environ["PLANTED_SIGNAL_AT"] = ""
        os.kill(os.getpid(), signal.SIGTERM)

sys.addaudithook(send_once)
"""
"""Has a process sent SIGTERM when it begins to import a module, or to open a file."""

FIRST_PROCESS = ("unshare", "--pid", "--fork", "--kill-child")
"""A command is process 1 of its namespace, as in a container: the kernel drops signals without a handler."""


@pytest.fixture(params=[(), FIRST_PROCESS], ids=["process", "process-1"])
def by(request: pytest.FixtureRequest) -> tuple[str, ...]:
    before: tuple[str, ...] = request.param
    if before and subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of processes")
    return before


def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, *command: str) -> tuple[int, str, str]:
    """Run `ostraca` with a signal *at* a name that it imports or opens; return its code and what it said."""
    (tmp_path / "sitecustomize.py").write_text(SENT)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("PLANTED_SIGNAL_AT", at)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.returncode, done.stdout, done.stderr


def up_command(directory: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "ostraca_cli", "up", "--dir", str(directory), *SMALL)


@pytest.mark.parametrize(
    "at",
    ["ostraca_cli.program", "ostraca_cli.composition.embedded", "ostraca_cli.commands.serve.notify"],
    ids=lambda at: at[12:],
)
def test_a_signal_before_anything_has_begun_ends_a_fabric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: tuple[str, ...], at: str
) -> None:
    assert ended(tmp_path, monkeypatch, at, *by, *up_command(tmp_path / "f")) == (0, "", "")
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("daemon", ["agent", "admin", "enclosure"])
def test_a_signal_before_anything_has_begun_ends_a_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: tuple[str, ...], daemon: str
) -> None:
    command = (*by, sys.executable, "-m", "ostraca_cli", "serve", daemon)
    assert ended(tmp_path, monkeypatch, "ostraca_cli.program", *command) == (0, "", "")


def test_a_signal_while_a_fabric_starts_stops_it_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: tuple[str, ...]
) -> None:
    directory = tmp_path / "f"
    code, out, said = ended(tmp_path, monkeypatch, "drive-1.img.partial", *by, *up_command(directory))
    assert (code, out) == (0, ""), said
    assert said.splitlines()[-1] == f"Stopped before readiness. Blocks stay in {directory}."
    assert not (directory / "agent-0.sock").exists()


@pytest.mark.parametrize("before", ["SIG_DFL", "SIG_IGN"])
def test_a_terminal_that_closes_stops_a_fabric_unless_that_was_started_to_outlive_it(
    tmp_path: Path, before: str
) -> None:
    program = (
        f"import os, signal, sys; signal.signal(signal.SIGHUP, signal.{before}); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    with up(tmp_path, *SMALL, by=(sys.executable, "-c", program)) as (process, _):
        for _ in range(2):  # as a shell and the kernel do
            process.send_signal(signal.SIGHUP)
        if before == "SIG_IGN":  # after a hangup that counts, it would be the second, and leave at once
            process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said.splitlines()[-1][:8]) == (0, "Stopped.")
