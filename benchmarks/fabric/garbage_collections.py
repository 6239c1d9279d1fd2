"""S11: stops of an agent by Python's garbage collections while a worker puts single blocks.

The agent runs in this process, first with Python's defaults, then as a daemon runs. The worker has 16
threads in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import multiprocessing
import threading
import time
from typing import TYPE_CHECKING

from benchmarks.support.figure import Figure, Target

from ostraca_cli.composition.embedded import EmbeddedFabric, FabricPlan
from ostraca_cli.composition.transports import loop_factory
from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.series import Measurement, Pacing, Series
from ostraca_cli.tools.bench.workload import MeasureError
from ostraca_fabric.runtime.garbage import keep_present_objects

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from benchmarks.support.conditions import Conditions

MS = 1e3
_THREADS = 16
_SECONDS = 10.0
_SPAWN = multiprocessing.get_context("spawn")


def run(conditions: Conditions) -> list[Figure]:
    """Measure the longest stop, and the time of all stops."""
    plan, seconds = conditions.one_plan(), 1.0 if conditions.is_short else _SECONDS
    fabric_plan = FabricPlan(conditions.new_directory(), capacity_bytes=plan.capacity_bytes, dram_bytes=0)
    threshold = gc.get_threshold()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        fabric = EmbeddedFabric(fabric_plan)
        runner.run(fabric.start())
        try:
            shape = plan.blocks, plan.block_bytes
            defaults = runner.run(_stops_s(fabric.addresses[0], shape, seconds))
            keep_present_objects()
            kept = runner.run(_stops_s(fabric.addresses[0], shape, seconds))
        finally:
            runner.run(fabric.stop())
            gc.unfreeze()
            gc.set_threshold(*threshold)
    what, beside = f"puts of 1 block by {_THREADS} threads", "Python's defaults"

    def measurement(of_kept: float, of_defaults: float) -> Measurement:
        return Measurement("daemon", Series((MS * of_kept,)), beside, Series((MS * of_defaults,)))

    longest = measurement(max(kept, default=0.0), max(defaults, default=0.0))
    share = measurement(sum(kept) / seconds, sum(defaults) / seconds)
    most = Target(ratio_at_most=0.25)
    return [
        Figure("S11", f"longest garbage collection, {what}", "ms", longest, most),
        Figure("S11", f"garbage collections per second, {what}", "ms", share, most),
    ]


async def _stops_s(address: str, shape: tuple[int, int], seconds: float) -> list[float]:
    """Return the duration of each collection while a worker puts blocks."""
    stops_s: list[float] = []
    worker = _SPAWN.Process(target=_put, args=(address, shape, seconds), daemon=True)
    with _collections(stops_s):
        worker.start()
        await asyncio.to_thread(worker.join)
    if worker.exitcode:
        raise MeasureError("the worker has failed: see the message above")
    return stops_s


@contextlib.contextmanager
def _collections(stops_s: list[float]) -> Iterator[None]:
    """Note the duration of each collection."""
    begun_s = 0.0

    def note(phase: str, _: Mapping[str, int]) -> None:
        nonlocal begun_s
        if phase == "start":
            begun_s = time.perf_counter()
        else:
            stops_s.append(time.perf_counter() - begun_s)

    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)


def _put(address: str, shape: tuple[int, int], seconds: float) -> None:
    """Put single blocks in many threads."""
    plan = suite.BenchPlan(*shape, Pacing(0.0))
    with contextlib.closing(suite.workload(plan, address, direct_memory=True)) as work:
        numbers, until_s = itertools.count(), time.monotonic() + seconds

        def put() -> None:
            while time.monotonic() < until_s:
                work.put_one_s(next(numbers) % plan.blocks)

        threads = [threading.Thread(target=put) for _ in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
