"""A worker that does everything right, while others do not: it must not notice.

``python -m tests.scenarios.fuzz.healthy_worker ADDRESS`` puts blocks, looks them up and gets them until
its standard
input ends. It exits with 1, and says why, at the first wrong byte, at a block that was put and is not there,
and at an operation that took longer than its deadline allows. A put may be declined for want of a free
segment, because others may pin what lies in them (for ``pin_max_s`` each); how many were, it reports.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from tests.support.fabric.fabric_host import MIB, content, empty, hashes
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import Ack, BlockState, PutState, Reason

T = TypeVar("T")

BLOCK_BYTES = 16 << 10
BLOCKS = 16
DEADLINE_S = 2.0
SLACK_S = 0.25
PAUSE_S = 0.03
READY = "ready\n"
LAYOUT = ostraca.Layout(model="healthy", dtype="bf16", page_tokens=16)
SETTINGS = ostraca.ClientSettings(arena_bytes=4 * MIB, chunk_bytes=2 * MIB, transports=("inline",))


class HealthyWorker:
    """The worker as a process, started by ``with``; leaving raises what it found."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.report = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.scenarios.fuzz.healthy_worker", self._address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == READY, self._process.communicate()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        said, _ = self._process.communicate("")
        self.report = said.strip()
        if error is None:
            assert self._process.returncode == 0, f"the healthy worker was harmed: {said}"

    def check(self) -> None:
        """Assert that it is still content."""
        if self._process.poll() is not None:
            assert self._process.stdout is not None
            raise AssertionError(f"the healthy worker was harmed: {self._process.stdout.read()}")


class _Rounds:
    """What one worker does over and over."""

    def __init__(self, client: ostraca.Client) -> None:
        self._client = client
        self._volume = client.volume("healthy", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        self.took_s: list[float] = []
        self.blocks = 0
        self.declined = 0

    def once(self, number: int) -> None:
        """Put, look up and get a few blocks that are there, and a few that are not."""
        volume = self._volume
        chain = volume.chain(hashes(BLOCKS, seed=number))
        blocks = content(BLOCKS, number, BLOCK_BYTES)
        put = self._timed(lambda: volume.put(chain, source=blocks, deadline_s=DEADLINE_S, ack=Ack.COMMITTED))
        is_put = [state in (PutState.COMMITTED, PutState.EXISTS) for state in put.states]
        reasons = {reason for reason, is_there in zip(put.reasons, is_put, strict=True) if not is_there}
        assert reasons <= {Reason.NO_SPACE}, put
        self.blocks += BLOCKS
        self.declined += is_put.count(False)
        expected = [BlockState.HIT if each else BlockState.MISS for each in is_put]
        found = self._timed(lambda: volume.lookup(chain, deadline_s=DEADLINE_S))
        assert list(found.states) == expected, found
        into = empty(BLOCKS, BLOCK_BYTES)
        got = self._timed(lambda: volume.get(chain, into=into, deadline_s=DEADLINE_S))
        assert list(got.states) == expected, got
        assert np.array_equal(into[is_put], blocks[is_put]), "wrong bytes"
        absent = volume.chain(hashes(2, seed=-1 - number % 7 + (1 << 40)))
        missed = self._timed(lambda: volume.get(absent, into=empty(2, BLOCK_BYTES), deadline_s=DEADLINE_S))
        assert set(missed.states) == {BlockState.MISS}, missed
        assert self._client.status().workers >= 1

    def _timed(self, operation: Callable[[], T]) -> T:
        watch = Stopwatch()
        result = operation()
        self.took_s.append(watch.passed_s)
        assert watch.took_s < DEADLINE_S + SLACK_S, f"{self.took_s[-1]:.3f} s for {result}"
        return result


def main() -> int:
    """Work until standard input ends."""
    with ostraca.connect(sys.argv[1], settings=SETTINGS) as client:
        rounds, number = _Rounds(client), 0
        print(READY, end="", flush=True)
        while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
            rounds.once(number)
            number += 1
    took_ms = np.array(rounds.took_s or [0.0]) * 1000
    print(
        f"{len(took_ms)} operations of a healthy worker, p50 {np.median(took_ms):.1f} ms, "
        f"longest {took_ms.max():.0f} ms; {rounds.declined} of {rounds.blocks} blocks found no space"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
