"""Processor time of each kind of thread, beside the limits of this machine's memory.

``python -m benchmarks.thread_time`` explains the figures of ``make bench`` without a profiler: the kernel
counts the time of each thread, and threads have names (``ostraca_fabric.runtime.threads``). Worker and agent
share the machine's cores, so a turn takes at least its whole processor time divided by the number of cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from benchmarks.support.conditions import MIB, Conditions
from benchmarks.support.operations import half_stored_chain, lookup_s
from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.fabric import running_fabric
from ostraca_cli.tools.bench.limits import Memcpy
from ostraca_cli.tools.bench.series import gb_per_s, machine
from ostraca_fabric.model.outcome import Ack
from ostraca_fabric.runtime.memory import HugeMemory
from ostraca_fabric.tables.digests import tags_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.synchronize import Event

    from ostraca_cli.tools.bench.suite import BenchPlan
    from ostraca_cli.tools.bench.workload import Workload

NS_PER_MS = 1e6
KINDS = ("worker", "loop", "nixl", "check", "drive")
"""The worker's process; then threads of the agent's process: event loop, NIXL, tag checks, and drives."""

_SPAWN = multiprocessing.get_context("spawn")
_WIDTH = 140


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """GB/s of one core, alone and beside the other load on the other core."""

    copy_alone: float
    copy_beside_hashing: float
    hash_alone: float


@dataclass(frozen=True, slots=True)
class TurnCost:
    """Milliseconds of a turn: median on the clock, and processor time by ``KINDS``."""

    name: str
    wall_ms: float
    cpu_ms: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print two tables, write JSON; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.thread_time", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--short", action="store_true", help="only show that everything runs")
    parser.add_argument(
        "--out", type=Path, help="the JSON file to write (default: benchmarks/results/thread_time.json)"
    )
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure (default: temporary)")
    options = parser.parse_args(argv)
    out: Path | None = options.out or (
        None if options.short else Path(__file__).parent / "results" / "thread_time.json"
    )
    with tempfile.TemporaryDirectory(prefix="ostraca-where-", dir=options.dir) as directory:
        conditions = Conditions(Path(directory), is_short=options.short)
        found = bandwidth(conditions.one_plan())
        spent = list(_turn_costs(conditions))
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    console.print(_bandwidth_table(found), _table(spent))
    if out is not None:
        parts = {"machine": machine(), "bandwidth": asdict(found), "spent": [asdict(each) for each in spent]}
        out.write_text(json.dumps(parts, indent=1) + "\n")
    return 0


def bandwidth(plan: BenchPlan) -> Bandwidth:
    """Copy memory, hash memory, then copy while another process hashes."""
    with contextlib.closing(Memcpy(blocks=plan.blocks, block_bytes=plan.block_bytes)) as memcpy:
        copy_alone = _median(memcpy.turn, plan)
        stop, ready = _SPAWN.Event(), _SPAWN.Event()
        other = _SPAWN.Process(
            target=_hash_on, args=(plan.blocks, plan.block_bytes, ready, stop), daemon=True
        )
        other.start()
        try:
            ready.wait()
            beside = _median(memcpy.turn, plan)
        finally:
            stop.set()
            other.join()
    with contextlib.closing(_Hashing(plan.blocks, plan.block_bytes)) as hashing:
        return Bandwidth(copy_alone, beside, _median(hashing.turn, plan))


class _Hashing:
    """Hashing of a batch larger than all caches."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self._memory = HugeMemory(blocks * block_bytes, prefault=True)
        self._array = self._memory.array[: blocks * block_bytes]
        self._array[:] = 1
        self._columns = (
            np.arange(blocks, dtype=np.int64) * block_bytes,
            np.full(blocks, block_bytes, np.uint32),
            np.zeros(blocks, np.uint64),
        )

    def turn(self) -> float:
        """Hash the batch; return GB/s."""
        return gb_per_s(self._array.nbytes, lambda: tags_of(self._array, *self._columns))

    def close(self) -> None:
        """Free the memory."""
        del self._array
        self._memory.close()


def _hash_on(blocks: int, block_bytes: int, ready: Event, stop: Event) -> None:
    """Hash in the other process until *stop*."""
    hashing = _Hashing(blocks, block_bytes)
    ready.set()
    while not stop.is_set():
        hashing.turn()


def _median(turn: Callable[[], float], plan: BenchPlan) -> float:
    return statistics.median(turn() for _ in range(plan.pace.rounds_min))


def _turn_costs(conditions: Conditions) -> Iterator[TurnCost]:
    plan = conditions.one_plan()
    batch = f"{plan.blocks} × {plan.block_bytes / MIB:g} MiB"
    with _fabric(plan, conditions, dram_bytes=suite.dram_bytes(plan)) as (pid, work):
        chain = suite.resident_chain(work)
        yield _turn_cost(f"get {batch} from DRAM, views", pid, lambda: work.get_views(chain), plan)
        yield _turn_cost(f"get {batch} from DRAM, copied", pid, lambda: work.get_into(chain), plan)
        yield _turn_cost("get 1 block from DRAM", pid, lambda: work.get_s(chain[:1]), plan, turns=20)
        half = half_stored_chain(work)
        yield _turn_cost(f"look-up of {len(half)} blocks", pid, lambda: lookup_s(work, half), plan, turns=20)
    with _fabric(plan, conditions, "--transport", "inline", dram_bytes=suite.dram_bytes(plan)) as (pid, work):
        chain = suite.resident_chain(work)
        yield _turn_cost(f"get {batch} from DRAM inline, views", pid, lambda: work.get_views(chain), plan)
    with _fabric(plan, conditions, dram_bytes=0) as (pid, work):
        chain = work.stored_chain()
        yield _turn_cost(f"get {batch} from flash, views", pid, lambda: work.get_views(chain), plan)
        yield _turn_cost(f"put {batch} committed, from memory", pid, lambda: work.put(Ack.COMMITTED), plan)


@contextlib.contextmanager
def _fabric(
    plan: BenchPlan, conditions: Conditions, *more: str, dram_bytes: int
) -> Iterator[tuple[int, Workload]]:
    options = ("--capacity", str(plan.capacity_bytes), "--dram", str(dram_bytes), *more)
    with (
        running_fabric(conditions.new_directory(), *options) as fabric,
        contextlib.closing(suite.workload(plan, fabric.address)) as work,
    ):
        yield fabric.pid, work


def _turn_cost(
    name: str, agent: int, turn: Callable[[], float], plan: BenchPlan, *, turns: int = 1
) -> TurnCost:
    """Measure repeated rounds of *turns* turns."""
    rounds = plan.pace.rounds_min
    for _ in range(plan.pace.warm_ups * turns):
        turn()
    walls: list[float] = []
    before = cpu_ns(agent)
    for _ in range(rounds * turns):
        begun_s = time.perf_counter()
        turn()
        walls.append(time.perf_counter() - begun_s)
    after = cpu_ns(agent)
    used = {kind: (after[kind] - before[kind]) / NS_PER_MS / (rounds * turns) for kind in KINDS}
    return TurnCost(name, 1e3 * statistics.median(walls), used)


def cpu_ns(agent: int) -> Counter[str]:
    """Return the processor time used so far, by ``KINDS``, in nanoseconds."""
    used: Counter[str] = Counter()
    for pid in (os.getpid(), agent):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                name = (thread / "comm").read_text().strip()
                nanoseconds = int((thread / "schedstat").read_text().split()[0])
                used["worker" if pid != agent else name if name in KINDS else "loop"] += nanoseconds
    return used


def _bandwidth_table(found: Bandwidth) -> Table:
    table = Table("GB/s of one core", Column("", justify="right"), box=None)
    table.add_row("copying memory, the other core idle", f"{found.copy_alone:.1f}")
    table.add_row("copying memory while the other core makes tags", f"{found.copy_beside_hashing:.1f}")
    table.add_row("making tags of memory, the other core idle", f"{found.hash_alone:.1f}")
    return table


def _table(spent: Sequence[TurnCost]) -> Table:
    columns = [Column(name, justify="right") for name in ("on the clock", *KINDS, "of all cores")]
    table = Table("ms per turn", *columns, box=None)
    for each in spent:
        share = sum(each.cpu_ms.values()) / each.wall_ms / (os.cpu_count() or 1)
        times = (f"{ms:.3g}" for ms in (each.wall_ms, *each.cpu_ms.values()))
        table.add_row(each.name, *times, f"{100 * share:.0f} %")
    return table


if __name__ == "__main__":
    sys.exit(main())
