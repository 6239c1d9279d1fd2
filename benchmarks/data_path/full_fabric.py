"""Full: gets from flash and committed puts on a full fabric, beside a fabric with free space.

Two fabrics on the same disk take the same batches in turns. The full fabric has filled its ring before:
each new batch evicts a batch, and repeatedly read blocks are reinserted again and again. The other fabric is
large enough to avoid eviction.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from benchmarks.support.conditions import KIB, MIB
from benchmarks.support.figure import Figure, Target

from ostraca_cli.tools.bench.fabric import running_fabric
from ostraca_cli.tools.bench.series import Comparison, measure, seconds_of
from ostraca_cli.tools.bench.workload import MeasureError, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.support.conditions import Conditions

MS = 1e3
_BLOCKS = 16
_FULL_BYTES = 1 << 30
_NEVER_FULL_BYTES = 16 << 30
_SHORT_BYTES = 256 << 20
_BATCHES_SHORT = 4
"""Too few to fill the fabric: a short run is a smoke test."""


def run(conditions: Conditions) -> list[Figure]:
    """Measure gets and puts in turns."""
    block_bytes = 64 * KIB if conditions.is_short else MIB
    full_bytes = _SHORT_BYTES if conditions.is_short else _FULL_BYTES
    other_bytes = 2 * _SHORT_BYTES if conditions.is_short else _NEVER_FULL_BYTES
    with (
        _worker(conditions, full_bytes, block_bytes) as full,
        _worker(conditions, other_bytes, block_bytes) as other,
    ):
        kept = [work.stored_chain() for work in (full, other)]
        for _ in range(_BATCHES_SHORT if conditions.is_short else 2 * full_bytes // full.batch_bytes):
            full.stored_chain()
            full.get_views(kept[0])
        if not conditions.is_short and not _evicted(full):
            raise MeasureError("the fabric that should be full has evicted nothing")

        def get_ms(work: Workload, number: int) -> float:
            work.stored_chain()
            return MS * seconds_of(lambda: work.get_views(kept[number]))

        gets = Comparison("full", lambda: get_ms(full, 0), "not full", lambda: get_ms(other, 1))
        puts = Comparison(
            "full",
            lambda: MS * seconds_of(full.stored_chain),
            "not full",
            lambda: MS * seconds_of(other.stored_chain),
        )
        got, put = measure(gets, conditions.pace), measure(puts, conditions.pace)
        if _evicted(other):
            raise MeasureError("the fabric that should never be full has evicted blocks")
    size = f"{_BLOCKS} × {block_bytes // KIB} KiB"
    return [
        Figure("full", f"get {size} from flash after a put", "ms", got, Target(ratio_at_most=1.1)),
        Figure("full", f"put {size}, committed", "ms", put, Target(ratio_at_most=1.1)),
    ]


@contextlib.contextmanager
def _worker(conditions: Conditions, capacity_bytes: int, block_bytes: int) -> Iterator[Workload]:
    """Run a fabric without a DRAM cache, and connect a worker meanwhile."""
    options = ("--capacity", str(capacity_bytes), "--dram", "0")
    with (
        running_fabric(conditions.new_directory(), *options) as fabric,
        contextlib.closing(Workload(fabric.address, blocks=_BLOCKS, block_bytes=block_bytes)) as work,
    ):
        yield work


def _evicted(work: Workload) -> int:
    return sum(shard.evicted_blocks for shard in work.client.status().shards)
