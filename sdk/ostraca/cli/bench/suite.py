"""The measurements of ``ostraca bench``: gets and puts of one worker, each beside its limit here."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ostraca.cli.bench.fabric import running_fabric
from ostraca.cli.bench.limits import DirectFile, Memcpy
from ostraca.cli.bench.raw_pair import raw_pair
from ostraca.cli.bench.series import Case, measure
from ostraca.cli.bench.workload import MeasureError, Workload
from ostraca_fabric.outcome import Ack

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from ostraca.cli.bench.raw_pair import RawPair
    from ostraca.cli.bench.series import Finding, Pace
    from ostraca_fabric.chain import Chain

GIB = 1 << 30
FLASH_BATCHES = 8
"""Batches that gets from flash go through in turn, so that no cache below the drives holds them all."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. ``directory`` holds the fabric's drives and the file that is measured beside them."""

    blocks: int
    block_bytes: int
    pace: Pace
    directory: Path | None = None
    """None: a temporary one."""

    @property
    def batch_bytes(self) -> int:
        """The bytes of one batch."""
        return self.blocks * self.block_bytes

    @property
    def flash_bytes(self) -> int:
        """What gets from flash go through."""
        return FLASH_BATCHES * self.batch_bytes

    @property
    def capacity_bytes(self) -> int:
        """Flash for a fabric of our own: nothing that is measured may be evicted under us."""
        return max(GIB // 2, 4 * self.flash_bytes)


Cases: TypeAlias = "Generator[Case, None, None]"
"""Cases to be measured as they come: what a case needs may be gone with the next one. Close it."""


def cases_of_fabric(plan: Plan, address: str) -> Cases:
    """Yield the cases for a fabric that runs; its settings decide whether gets come from DRAM or flash."""
    with ExitStack() as stack:
        work = stack.enter_context(contextlib.closing(workload(plan, address)))
        raw = stack.enter_context(contextlib.closing(raw_of(plan, work)))
        memcpy = stack.enter_context(
            contextlib.closing(Memcpy(blocks=plan.blocks, block_bytes=plan.block_bytes))
        )
        chain = work.stored_chain()
        yield Case("get as views", lambda: work.get_views(chain), f"{raw.name} WRITE", raw.write)
        yield Case("get into memory", lambda: work.get_into(chain), f"{raw.name} WRITE", raw.write)
        yield from staged_cases(work, raw)
        yield Case("put committed", lambda: work.put(Ack.COMMITTED), "memcpy", memcpy.turn)


def cases_of_own(plan: Plan) -> Cases:
    """Yield the cases for fabrics of our own: one that reads from flash alone, then one with a DRAM cache."""
    with ExitStack() as stack:
        directory = plan.directory or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="ostraca-bench-"))
        )
        with (
            own_workload(plan, directory / "flash", dram_bytes=0) as work,
            direct_file(plan, directory) as file,
        ):
            yield from flash_cases(plan, work, file)
        with (
            own_workload(plan, directory / "dram", dram_bytes=dram_bytes(plan)) as work,
            contextlib.closing(raw_of(plan, work)) as raw,
        ):
            yield from dram_cases(work, raw)
            yield from staged_cases(work, raw)


def flash_cases(plan: Plan, work: Workload, file: DirectFile) -> Iterator[Case]:
    """Yield what flash bounds. The fabric has no DRAM cache."""
    file.tune_writes()
    yield Case(
        "put committed, from arena", lambda: work.put_slots(Ack.COMMITTED), "O_DIRECT write", file.write
    )
    chains = itertools.cycle([work.stored_chain() for _ in range(plan.flash_bytes // plan.batch_bytes)])
    file.tune_reads()
    yield Case("get from flash, views", lambda: work.get_views(next(chains)), "O_DIRECT read", file.read)


def dram_cases(work: Workload, raw: RawPair) -> Iterator[Case]:
    """Yield gets of a batch that the agent's DRAM holds."""
    chain = resident_chain(work)
    yield Case("get from DRAM, views", lambda: work.get_views(chain), f"{raw.name} WRITE", raw.write)
    yield Case("get from DRAM, copied", lambda: work.get_into(chain), f"{raw.name} WRITE", raw.write)


def staged_cases(work: Workload, raw: RawPair) -> Iterator[Case]:
    """Yield puts that are acknowledged once the agent has the bytes."""
    yield Case("put staged, from arena", lambda: work.put_slots(Ack.STAGED), f"{raw.name} READ", raw.read)
    yield Case("put staged, from memory", lambda: work.put(Ack.STAGED), f"{raw.name} READ", raw.read)


def resident_chain(work: Workload) -> Chain:
    """Return a batch that the agent's DRAM cache holds."""
    chain = work.stored_chain()
    work.prefetch(chain)
    before = work.counters().get_hits_from_cache
    work.get_views(chain)
    from_cache = work.counters().get_hits_from_cache - before
    if from_cache < len(chain):
        raise MeasureError(
            f"{from_cache} of {len(chain)} blocks came from the agent's DRAM right after a prefetch"
        )
    return chain


def run(cases: Cases, pace: Pace, on_progress: Callable[[str, float], None]) -> Iterator[Finding]:
    """Measure case after case; *on_progress* is told which one, and how much of it is done."""
    for case in cases:
        what = case.what
        on_progress(what, 0.0)
        yield measure(case, pace, lambda part, what=what: on_progress(what, part))  # type: ignore[misc]  # a default argument


def workload(plan: Plan, address: str, *, batches: int = 2) -> Workload:
    """Connect a worker whose arena holds so many *batches*."""
    return Workload(address, blocks=plan.blocks, block_bytes=plan.block_bytes, batches=batches)


def raw_of(plan: Plan, work: Workload) -> RawPair:
    """Start the limit of the transport that the worker got."""
    return raw_pair(work.transport, blocks=plan.blocks, block_bytes=plan.block_bytes)


def dram_bytes(plan: Plan) -> int:
    """Return how much DRAM cache holds a batch well, whatever else passes through."""
    return max(min(GIB // 2, 64 * plan.batch_bytes), 4 * plan.batch_bytes)


@contextlib.contextmanager
def own_workload(
    plan: Plan,
    directory: Path,
    *,
    dram_bytes: int,
    transport: str | None = None,
    capacity_bytes: int | None = None,
    batches: int = 2,
) -> Iterator[Workload]:
    """Run a fabric in *directory* and connect a worker meanwhile, whose arena holds so many *batches*."""
    options = ["--capacity", str(capacity_bytes or plan.capacity_bytes), "--dram", str(dram_bytes)]
    if transport:
        options += ["--transport", transport]
    with (
        running_fabric(directory, *options) as fabric,
        contextlib.closing(workload(plan, fabric.address, batches=batches)) as work,
    ):
        yield work


@contextlib.contextmanager
def direct_file(plan: Plan, directory: Path) -> Iterator[DirectFile]:
    """Have a file beside the drives, as large as what is got from flash."""
    with contextlib.closing(
        DirectFile(directory, file_bytes=plan.flash_bytes, batch_bytes=plan.batch_bytes)
    ) as file:
        yield file
