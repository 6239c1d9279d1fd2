"""Signals, as a process of its own hears them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio
from ostraca.cli.serve.signals import stop_on_signals
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
