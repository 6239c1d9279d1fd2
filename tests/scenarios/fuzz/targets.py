"""What can be fuzzed, each by itself: a name, cases by number, and what must hold when they are over."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.scenarios.fuzz.agent_end import AgentEnd
from tests.scenarios.fuzz.decoding import decoding_case
from tests.scenarios.fuzz.fabric_process import FabricProcess, resident_bytes
from tests.scenarios.fuzz.healthy_worker import HealthyWorker
from tests.scenarios.fuzz.sdk_end import SdkEnd

MIB = 1 << 20
GROWTH_BYTES_MAX = 32 * MIB
"""How much more memory may be held at a run's end than after its first quarter."""

WARM_UP = 0.25
CHECK_EVERY = 200
PROGRESS_S = 10.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Running:
    """A target that is ready: one case after another, and what to look at now and then."""

    case: Callable[[random.Random], int]
    resident_bytes: Callable[[], int]
    check: Callable[[], None]


@dataclass
class Finding(Exception):  # noqa: N818 (it is what a fuzzer is for)
    """A case that failed."""

    target: str
    seed: int
    case: int
    what: str

    def __str__(self) -> str:
        """Say how to see it again."""
        return (
            f"{self.what}\n{self.target}: case {self.case} of seed {self.seed}\n"
            f"again: python -m tests.scenarios.fuzz --target {self.target} --seed {self.seed}"
            f" --case {self.case}"
        )


def _own_bytes() -> int:
    return resident_bytes(0)


@contextmanager
def _decoding(directory: Path, say: Say) -> Iterator[Running]:
    yield Running(decoding_case, _own_bytes, lambda: None)


@contextmanager
def _agent(directory: Path, say: Say) -> Iterator[Running]:
    with FabricProcess(directory) as fabric, HealthyWorker(fabric.address) as worker:
        end = AgentEnd(fabric.address.removeprefix("unix://"))

        def check() -> None:
            fabric.check()
            worker.check()

        try:
            yield Running(end.case, lambda: fabric.resident_bytes, check)
        finally:
            end.close()
    say(worker.report)


@contextmanager
def _sdk(directory: Path, say: Say) -> Iterator[Running]:
    directory.mkdir()
    with SdkEnd(directory) as end:
        yield Running(end.case, _own_bytes, lambda: None)


TARGETS: dict[str, Callable[[Path, Say], AbstractContextManager[Running]]] = {
    "decoding": _decoding,
    "agent": _agent,
    "sdk": _sdk,
}
SHARES = {"decoding": 0.5, "agent": 0.35, "sdk": 0.15}
"""Which part of a run's frames each target takes."""


def run_target(name: str, directory: Path, *, seed: int, frames: int, seconds: float, say: Say) -> int:
    """Run cases until *frames* were taken or *seconds* are over; return how many frames it was.

    Raises Finding.
    """
    with TARGETS[name](directory / name, say) as running:
        began_s = said_s = time.monotonic()
        taken, number, warm_bytes = 0, 0, 0
        while taken < frames and time.monotonic() - began_s < seconds:
            taken += run_case(name, running, seed=seed, case=number)
            number += 1
            if not warm_bytes and taken >= WARM_UP * frames:
                warm_bytes = running.resident_bytes()
            if number % CHECK_EVERY == 0:
                running.check()
            if time.monotonic() - said_s > PROGRESS_S:
                said_s = time.monotonic()
                rate = taken / (said_s - began_s)
                say(
                    f"{name}: {taken} frames, {rate:.0f}/s, {running.resident_bytes() / MIB:.0f} MiB resident"
                )
        running.check()
        took_s = time.monotonic() - began_s
        held_bytes = running.resident_bytes()
    say(
        f"{name}: {taken} frames in {number} cases, {took_s:.1f} s, {taken / took_s:.0f} frames/s, "
        f"{warm_bytes / MIB:.0f} MiB resident after a quarter, {held_bytes / MIB:.0f} at the end"
    )
    assert not warm_bytes or held_bytes - warm_bytes < GROWTH_BYTES_MAX, f"{name}: memory grows"
    return taken


def run_case(name: str, running: Running, *, seed: int, case: int) -> int:
    """Run one case; return how many frames were taken. Raises Finding."""
    try:
        return running.case(random.Random(f"{seed}/{name}/{case}"))
    except Exception as error:
        raise Finding(name, seed, case, "".join(traceback.format_exception(error))) from error
