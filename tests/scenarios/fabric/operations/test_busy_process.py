"""Operations beside a thread of Python that is always busy, as in the scheduler of an engine.

A thread that gives the GIL up gets it back after the switch interval. So an operation takes about as many
intervals as the client's threads give the GIL up one after another.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.scenarios.fabric.operations.test_memory_reads import DEADLINE_S, fabric_process
from tests.support.fabric.fabric_host import SMALL, content, empty, hashes, volume_of

import ostraca
from ostraca import Ack

INTERVAL_S = 0.1
GAP_S = 0.03
"""Time between operations, after which the client's threads wait again."""

LOOKUP_MAX = 2.4
"""Intervals of a look-up: the driver's wait for the answer, and the caller's for the driver, at most."""

ALL_MAX = 13.0
"""Intervals of a look-up, a get and a put. A client that gives the GIL up in short calls takes 14 to 24."""

BLOCKS = 8
ROUNDS = 5


@contextmanager
def busy_thread() -> Iterator[None]:
    """Compute in another thread, and switch between threads seldom."""
    is_over, before_s = threading.Event(), sys.getswitchinterval()

    def compute() -> None:
        while not is_over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    sys.setswitchinterval(INTERVAL_S)
    try:
        thread.start()
        yield
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(before_s)


def intervals(operation: Callable[[], object]) -> float:
    """Return the usual duration, in switch intervals."""
    took_s = []
    for _ in range(ROUNDS):
        time.sleep(GAP_S)
        begun_s = time.perf_counter()
        operation()
        took_s.append(time.perf_counter() - begun_s)
    return statistics.median(took_s) / INTERVAL_S


@pytest.mark.parametrize("direct_memory", [True, False], ids=["reads memory", "reads no memory"])
def test_an_operation_gives_the_gil_up_a_few_times(tmp_path: Path, *, direct_memory: bool) -> None:
    settings = replace(SMALL, transports=("inline",), direct_memory=direct_memory)
    with (
        fabric_process(tmp_path, "inline") as fabric,
        ostraca.connect(fabric.address, settings=settings) as client,
    ):
        volume, into, seeds = volume_of(client), empty(BLOCKS), iter(range(2, 100))
        chain = volume.chain(hashes(BLOCKS, 1))

        def put(seed: int) -> None:
            blocks = volume.chain(hashes(BLOCKS, seed))
            found = volume.put(blocks, source=content(BLOCKS, seed), deadline_s=DEADLINE_S, ack=Ack.STAGED)
            assert found.accepted == BLOCKS

        put(1)
        callers, until_s = client._runtime.connections.callers, time.monotonic() + DEADLINE_S
        while not callers._idle:  # opened here, not beside the busy thread
            volume.lookup(chain, deadline_s=DEADLINE_S)
            assert time.monotonic() < until_s, "no connection of a caller"
        with busy_thread():
            found = {
                "look-up": intervals(lambda: volume.lookup(chain, deadline_s=DEADLINE_S)),
                "get": intervals(lambda: volume.get(chain, into=into, deadline_s=DEADLINE_S)),
                "put": intervals(lambda: put(next(seeds))),
            }
        assert found["look-up"] < LOOKUP_MAX, found
        assert sum(found.values()) < ALL_MAX, found
        assert (into == content(BLOCKS, 1)).all()
