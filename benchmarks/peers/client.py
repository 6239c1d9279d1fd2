"""Client process of a store, seen from the harness: requests and answers as lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import Surroundings
from benchmarks.peers.stores.turns import Order
from ostraca_fabric.errors import OstracaError

_ANSWER_S = 120.0
_END_S = 45.0
_ROOT = Path(__file__).parents[2]


class StoreFailedError(OstracaError):
    """A store's client has failed, ended, or not answered in time."""


class StoreClient:
    """Client process; from ``running_client``."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer. Raises StoreFailedError."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        line = self._line()
        if not line:
            raise StoreFailedError(f"the client ended; {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "failure" in answer:
            raise StoreFailedError(answer["failure"])
        return answer

    def turn(self, operation: str) -> list[float]:
        """Run an operation; return the seconds of its repetitions. Raises StoreFailedError."""
        spent_s: list[float] = self.ask({"operation": operation})["seconds"]
        return spent_s

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        said, until_s = b"", time.monotonic() + _ANSWER_S
        while not said.endswith(b"\n"):
            left_s = max(0.0, until_s - time.monotonic())
            if not select.select([self._process.stdout], [], [], left_s)[0]:
                raise StoreFailedError(f"no answer within {_ANSWER_S:.0f} s; {self._last_words()}")
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                return b""
            said += part
        return said

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"its log ends: {lines[-1]}" if lines else "its log is empty"


@contextlib.contextmanager
def running_client(
    module: str, surroundings: Surroundings, order: Order, log: Path
) -> Iterator[tuple[StoreClient, str]]:
    """Run the client in a process group of its own meanwhile; yield the client and the store's version.

    Stores' servers are the client's children, and end with the client. Raises StoreFailedError.
    """
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*surroundings.command, "-m", f"benchmarks.peers.stores.{module}"],
            bufsize=0,
            cwd=_ROOT,
            env=os.environ | surroundings.variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        client = StoreClient(process, log)
        yield client, client.ask(asdict(order))["version"]
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the client in order, then whatever is left of its group."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
