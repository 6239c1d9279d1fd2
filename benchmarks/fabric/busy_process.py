"""D13: operations in a process with a busy thread of Python, beside the interpreter's switch interval.

An engine's scheduler is such a thread. A thread of the client that gives the GIL up gets it back after the
switch interval, 5 ms. Operations follow each other after pauses, so that the client's threads wait again.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.support.figure import Figure, Target

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.series import GB, Measurement, Series, seconds_of
from ostraca_cli.tools.bench.workload import DEADLINE_S
from ostraca_fabric.model.outcome import Ack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.support.conditions import Conditions

MS = 1e3
_BLOCKS, _BLOCK_BYTES = 32, 128 << 10
_PAUSE_S = 0.03
_TURNS = 40


def run(conditions: Conditions) -> list[Figure]:
    """Measure a look-up, a get from flash and a staged put of 32 blocks."""
    plan = replace(conditions.one_plan(), blocks=_BLOCKS, block_bytes=_BLOCK_BYTES)
    with suite.own_workload(plan, conditions.new_directory(), dram_bytes=0) as server:
        work = suite.workload(plan, server.address, direct_memory=True)
        try:
            chain = work.stored_chain()
            operations: dict[str, Callable[[], float]] = {
                "look-up": lambda: seconds_of(lambda: work.volume.lookup(chain, deadline_s=DEADLINE_S)),
                "get from flash": lambda: work.get_s(chain),
                "put staged": lambda: plan.batch_bytes / GB / work.put(Ack.STAGED),
            }
            turns = 4 if conditions.is_short else _TURNS
            with _busy_thread():
                found = {name: _durations(operation, turns) for name, operation in operations.items()}
        finally:
            work.close()
    interval = Series((sys.getswitchinterval() * MS,) * turns)
    return [
        Figure(
            "D13",
            f"{name} beside a busy thread, {_BLOCKS} × {_BLOCK_BYTES >> 10} KiB",
            "ms",
            Measurement(name, took, "switch interval", interval),
            Target(ratio_at_most=3),
        )
        for name, took in found.items()
    ]


def _durations(operation: Callable[[], float], turns: int) -> Series:
    took_ms = []
    for _ in range(turns):
        time.sleep(_PAUSE_S)
        took_ms.append(operation() * MS)
    return Series(tuple(took_ms))


@contextmanager
def _busy_thread() -> Iterator[None]:
    """Compute in another thread."""
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
