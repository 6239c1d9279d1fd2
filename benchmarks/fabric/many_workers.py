"""D12: eight workers that get from one agent's DRAM at once, beside one worker alone.

D12m are workers that copy the blocks out of the agent's memory themselves.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from typing import TYPE_CHECKING

from benchmarks.support.conditions import batch_text
from benchmarks.support.figure import Figure, Target

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.fabric import running_fabric
from ostraca_cli.tools.bench.series import GB, Measurement, Pacing, Series
from ostraca_cli.tools.bench.workload import MeasureError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from benchmarks.support.conditions import Conditions

    from ostraca_cli.tools.bench.suite import BenchPlan

WORKERS = 8
_SPAWN = multiprocessing.get_context("spawn")
_START_S = 60.0


def run(conditions: Conditions) -> list[Figure]:
    """Measure rounds of one worker, then of eight."""
    return [*_figures("D12", "", conditions), *_figures("D12m", " that copy", conditions, direct_memory=True)]


def _figures(row: str, way: str, conditions: Conditions, *, direct_memory: bool = False) -> list[Figure]:
    plan = conditions.one_plan()
    round_s, rounds, count = (0.05, 2, 2) if conditions.is_short else (1.0, 10, WORKERS)
    room_bytes = 2 * count * plan.batch_bytes + suite.GIB // 2
    options = ("--capacity", str(room_bytes), "--dram", str(room_bytes))
    with running_fabric(conditions.new_directory(), *options) as fabric, contextlib.ExitStack() as stack:
        workers: list[_RemoteWorker] = []
        for _ in range(count):
            worker = _RemoteWorker(plan, fabric.address, direct_memory=direct_memory)
            workers.append(stack.enter_context(contextlib.closing(worker)))
            worker.wait_until_ready()
        alone = []
        together = []
        for _ in range(rounds):
            alone.append(_rates(workers[:1], round_s)[0])
            together.append(_rates(workers, round_s))
    batch, one = batch_text(plan), Series(tuple(alone))
    total = Measurement("sum", Series(tuple(map(sum, together))), "one worker", one)
    shares = Measurement(
        "worst share",
        Series(tuple(map(min, together))),
        "an equal share",
        Series(tuple(sum(rates) / count for rates in together)),
    )
    name = f"get {batch} from DRAM, {count} workers{way}"
    return [
        Figure(row, f"{name}, sum", "GB/s", total, Target(ratio_at_least=1.0)),
        Figure(row, f"{name}, slowest", "GB/s", shares, Target(ratio_at_least=0.7)),
    ]


def _rates(workers: list[_RemoteWorker], seconds: float) -> list[float]:
    """Let workers get at once; return the rate of each."""
    until_s = time.monotonic() + seconds
    for worker in workers:
        worker.start(until_s)
    return [worker.finish() for worker in workers]


class _RemoteWorker:
    """A worker in a process of its own."""

    def __init__(self, plan: BenchPlan, address: str, *, direct_memory: bool) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        shape = plan.blocks, plan.block_bytes
        named = {"direct_memory": direct_memory}
        self._process = _SPAWN.Process(
            target=_serve, args=(theirs, address, shape), kwargs=named, daemon=True
        )
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Wait until the worker's batch is in the agent's DRAM."""
        try:
            if self._pipe.poll(_START_S):
                self._pipe.recv()
                return
        except EOFError as error:
            raise MeasureError("a worker has ended: see the message above") from error
        raise MeasureError(f"a worker was not ready within {_START_S:.0f} s")

    def start(self, until_s: float) -> None:
        """Get until a time of the monotonic clock."""
        self._pipe.send(until_s)

    def finish(self) -> float:
        """Return the rate."""
        rate: float = self._pipe.recv()
        return rate

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, address: str, shape: tuple[int, int], *, direct_memory: bool) -> None:
    """Get batches for as long as told, until the pipe closes."""
    blocks, block_bytes = shape
    plan = suite.BenchPlan(blocks, block_bytes, Pacing(0.0))
    working = suite.workload(plan, address, direct_memory=direct_memory)
    with contextlib.closing(working) as work, contextlib.suppress(EOFError):
        chain = suite.resident_chain(work)
        pipe.send("ready")
        while True:
            until_s = pipe.recv()
            begun_s, batches = time.monotonic(), 0
            while time.monotonic() < until_s:
                work.get_views(chain)
                batches += 1
            pipe.send(batches * work.batch_bytes / GB / (time.monotonic() - begun_s))
