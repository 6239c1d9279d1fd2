"""D7: processor time of agent and worker per block, in batches of 256 blocks in the agent's DRAM.

D7m are gets of a worker that copies the blocks out of the agent's memory itself.
Blocks are small, so that moving and hashing cost little beside the handling of blocks. The figure includes
the remaining cost of moving and hashing. The comparison hashes the same batch twice, as both ends do.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import psutil
from benchmarks.support.figure import Figure, Target

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.fabric import running_fabric
from ostraca_cli.tools.bench.series import Measurement, Series
from ostraca_cli.tools.bench.workload import Workload
from ostraca_fabric.tables.digests import tags_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.support.conditions import Conditions

US = 1e6
BLOCKS = 256
BLOCK_BYTES = 4096
_BATCHES = 100
"""Batches between two readings of processor times, with ticks of 10 ms."""


def run(conditions: Conditions) -> list[Figure]:
    """Measure gets as views."""
    rounds, batches = (2, 5) if conditions.is_short else (20, _BATCHES)
    options = ("--capacity", str(suite.GIB // 2), "--dram", str(suite.GIB // 4))
    with (
        running_fabric(conditions.new_directory(), *options) as fabric,
        contextlib.closing(_worker(fabric.address)) as work,
        contextlib.closing(_worker(fabric.address, direct_memory=True)) as own,
    ):
        chain = suite.resident_chain(work)
        return [
            *_figures("D7", "", partial(work.get_views, chain), fabric.pid, rounds, batches),
            *_figures(
                "D7m", ", read by the worker", partial(own.get_views, chain), fabric.pid, rounds, batches
            ),
        ]


def _worker(address: str, *, direct_memory: bool = False) -> Workload:
    return Workload(address, blocks=BLOCKS, block_bytes=BLOCK_BYTES, direct_memory=direct_memory)


def _figures(
    row: str, way: str, get: Callable[[], float], agent_pid: int, rounds: int, batches: int
) -> list[Figure]:
    agent, worker = psutil.Process(agent_pid), psutil.Process(os.getpid())
    hashing = Series(tuple(_hashing_us() for _ in range(rounds)))
    spent = []
    for _ in range(rounds):
        before = _times(agent), _times(worker)
        for _ in range(batches):
            get()
        after = _times(agent), _times(worker)
        spent.append(
            [US * (end - begin) / (batches * BLOCKS) for begin, end in zip(before, after, strict=True)]
        )
    return [
        Figure(
            row,
            f"{who}'s processor time per block, {BLOCKS} × 4 KiB{way}",
            "µs",
            Measurement(who, Series(tuple(each[column] for each in spent)), "hashing it twice", hashing),
            Target(value_at_most=2.0),
        )
        for column, who in enumerate(("agent", "worker"))
    ]


def _times(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def _hashing_us() -> float:
    memory = np.ones(BLOCKS * BLOCK_BYTES, np.uint8)
    offsets = np.arange(BLOCKS, dtype=np.int64) * BLOCK_BYTES
    lengths, seeds = np.full(BLOCKS, BLOCK_BYTES, np.uint32), np.zeros(BLOCKS, np.uint64)
    started_s = time.perf_counter()
    for _ in range(2):
        tags_of(memory, offsets, lengths, seeds)
    return US * (time.perf_counter() - started_s) / BLOCKS
