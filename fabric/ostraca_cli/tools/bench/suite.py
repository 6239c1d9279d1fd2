"""Measurements of ``ostraca bench``: gets and puts of a worker against the limits."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ostraca_cli.tools.bench.fabric import running_fabric
from ostraca_cli.tools.bench.limits import DirectFile, Memcpy
from ostraca_cli.tools.bench.raw_pair import RawPair, raw_pair
from ostraca_cli.tools.bench.series import Comparison, Measurement, Pacing, measure
from ostraca_cli.tools.bench.workload import MeasureError, Workload
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.chain import Chain
from ostraca_fabric.model.outcome import Ack

GIB = 1 << 30
FLASH_BATCHES = 8
"""Number of batches in the cycle of gets from flash, so that no cache below the drives holds all of them."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Parameters of the measurements.

    ``directory`` holds the fabric's drives and the file for the limits.
    """

    blocks: int
    block_bytes: int
    pace: Pacing
    directory: Path | None = None
    """None: a temporary directory."""

    @property
    def batch_bytes(self) -> int:
        """Return the bytes of a batch."""
        return self.blocks * self.block_bytes

    @property
    def flash_bytes(self) -> int:
        """Return the bytes in the cycle of gets from flash."""
        return FLASH_BATCHES * self.batch_bytes

    @property
    def capacity_bytes(self) -> int:
        """Return flash for a fabric of our own, large enough to avoid eviction."""
        return max(GIB // 2, 4 * self.flash_bytes)


Cases: TypeAlias = "Generator[Comparison, None, None]"
"""Cases to measure in order: the next case may free resources of the previous case. The caller closes the
generator."""


def cases_of_fabric(plan: BenchPlan, address: str) -> Cases:
    """Yield the cases for a running fabric.

    The fabric's settings decide whether gets come from DRAM or flash.
    """
    with ExitStack() as stack:
        work = stack.enter_context(contextlib.closing(workload(plan, address)))
        raw = stack.enter_context(contextlib.closing(start_raw_pair(plan, work)))
        memcpy = stack.enter_context(
            contextlib.closing(Memcpy(blocks=plan.blocks, block_bytes=plan.block_bytes))
        )
        chain = work.stored_chain()
        yield Comparison("get as views", lambda: work.get_views(chain), f"{raw.name} WRITE", raw.write)
        yield Comparison("get into memory", lambda: work.get_into(chain), f"{raw.name} WRITE", raw.write)
        yield from staged_cases(work, raw)
        yield Comparison("put committed", lambda: work.put(Ack.COMMITTED), "memcpy", memcpy.turn)


def cases_of_own(plan: BenchPlan) -> Cases:
    """Yield the cases for own fabrics: first without, then with a DRAM cache."""
    with ExitStack() as stack:
        directory = plan.directory or stack.enter_context(_temporary_directory())
        with (
            own_workload(plan, directory / "flash", dram_bytes=0) as work,
            direct_file(plan, directory) as file,
        ):
            yield from flash_cases(plan, work, file)
        with (
            own_workload(plan, directory / "dram", dram_bytes=dram_bytes(plan)) as work,
            contextlib.closing(start_raw_pair(plan, work)) as raw,
        ):
            yield from dram_cases(work, raw)
            yield from staged_cases(work, raw)


@contextlib.contextmanager
def _temporary_directory() -> Iterator[Path]:
    try:
        directory = tempfile.TemporaryDirectory(prefix="ostraca-bench-")
    except FileNotFoundError as error:
        raise UsageError(
            "no folder for temporary files can be written here: pass --dir DIR, or set TMPDIR"
        ) from error
    with directory as path:
        yield Path(path)


def flash_cases(plan: BenchPlan, work: Workload, file: DirectFile) -> Iterator[Comparison]:
    """Yield the cases bounded by flash; the fabric has no DRAM cache."""
    file.tune_writes()
    yield Comparison(
        "put committed, from arena", lambda: work.put_slots(Ack.COMMITTED), "O_DIRECT write", file.write
    )
    chains = itertools.cycle([work.stored_chain() for _ in range(plan.flash_bytes // plan.batch_bytes)])
    file.tune_reads()
    yield Comparison(
        "get from flash, views", lambda: work.get_views(next(chains)), "O_DIRECT read", file.read
    )


def dram_cases(work: Workload, raw: RawPair) -> Iterator[Comparison]:
    """Yield gets of a batch in the agent's DRAM cache."""
    chain = resident_chain(work)
    yield Comparison("get from DRAM, views", lambda: work.get_views(chain), f"{raw.name} WRITE", raw.write)
    yield Comparison("get from DRAM, copied", lambda: work.get_into(chain), f"{raw.name} WRITE", raw.write)


def staged_cases(work: Workload, raw: RawPair) -> Iterator[Comparison]:
    """Yield puts acknowledged once the agent has the bytes."""
    yield Comparison(
        "put staged, from arena", lambda: work.put_slots(Ack.STAGED), f"{raw.name} READ", raw.read
    )
    yield Comparison("put staged, from memory", lambda: work.put(Ack.STAGED), f"{raw.name} READ", raw.read)


def resident_chain(work: Workload) -> Chain:
    """Return a batch in the agent's DRAM cache; raises MeasureError without full hits."""
    chain = work.stored_chain()
    work.prefetch(chain)
    before = work.client.status().counters.get_hits_from_cache
    work.get_views(chain)
    from_cache = work.client.status().counters.get_hits_from_cache - before
    if from_cache < len(chain):
        raise MeasureError(
            f"{from_cache} of {len(chain)} blocks came from the agent's DRAM right after a prefetch"
        )
    return chain


def run(cases: Cases, pace: Pacing, on_progress: Callable[[str, float], None]) -> Iterator[Measurement]:
    """Measure all cases; *on_progress* receives the case and its completed part."""
    for case in cases:
        name = case.name
        on_progress(name, 0.0)
        yield measure(case, pace, lambda part, name=name: on_progress(name, part))  # type: ignore[misc]  # a default argument


def workload(
    plan: BenchPlan,
    address: str,
    *,
    batches: int = 2,
    direct_drives: Sequence[str] = (),
    direct_memory: bool = False,
) -> Workload:
    """Connect a worker with an arena for so many *batches*, which reads drives and memory itself."""
    return Workload(
        address,
        blocks=plan.blocks,
        block_bytes=plan.block_bytes,
        batches=batches,
        direct_drives=direct_drives,
        direct_memory=direct_memory,
    )


def start_raw_pair(plan: BenchPlan, work: Workload) -> RawPair:
    """Start the limit of the worker's transport."""
    return raw_pair(work.client.transport, blocks=plan.blocks, block_bytes=plan.block_bytes)


def dram_bytes(plan: BenchPlan) -> int:
    """Return a size of the DRAM cache with ample space for a batch beside other traffic."""
    return max(min(GIB // 2, 64 * plan.batch_bytes), 4 * plan.batch_bytes)


@contextlib.contextmanager
def own_workload(
    plan: BenchPlan,
    directory: Path,
    *,
    dram_bytes: int,
    transport: str | None = None,
    capacity_bytes: int | None = None,
    batches: int = 2,
    options: Sequence[str] = (),
    is_direct: bool = False,
) -> Iterator[Workload]:
    """Run a fabric in *directory*, with these *options* as well, and connect a worker meanwhile.

    The worker's arena has space for so many *batches*. With *is_direct*, the worker reads drives itself.
    """
    chosen = ["--capacity", str(capacity_bytes or plan.capacity_bytes), "--dram", str(dram_bytes), *options]
    if transport:
        chosen += ["--transport", transport]
    if is_direct:
        chosen += ["--direct-reads", "default"]
    drives = (f"{directory}/enclosure-*/drive-*.img",) if is_direct else ()
    with (
        running_fabric(directory, *chosen) as fabric,
        contextlib.closing(workload(plan, fabric.address, batches=batches, direct_drives=drives)) as work,
    ):
        work.agent_pid = fabric.pid
        yield work


@contextlib.contextmanager
def direct_file(plan: BenchPlan, directory: Path) -> Iterator[DirectFile]:
    """Create a file beside the drives, as large as the cycle of gets from flash."""
    with contextlib.closing(
        DirectFile(directory, file_bytes=plan.flash_bytes, batch_bytes=plan.batch_bytes)
    ) as file:
        yield file
