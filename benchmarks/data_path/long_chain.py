"""D11: get of a chain of 65,536 blocks from flash in one call, beside the best O_DIRECT read there.

A million tokens in blocks of 16 are such a chain. The first wave has arrived when the first block's first
byte is in the caller's memory: a thread watches that byte.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
from benchmarks.support.conditions import KIB
from benchmarks.support.figure import Figure, Target

import ostraca
from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.fabric import running_fabric
from ostraca_cli.tools.bench.limits import DirectFile
from ostraca_cli.tools.bench.series import GB, Measurement, Series, timed
from ostraca_cli.tools.bench.workload import DEADLINE_S, MeasureError
from ostraca_fabric.runtime.memory import HugeMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.support.conditions import Conditions
    from numpy.typing import NDArray

BLOCKS = 65_536
BLOCK_BYTES = 32 * KIB
_PUT_BLOCKS = 4096
_WATCH_S = 200e-6


def run(conditions: Conditions) -> list[Figure]:
    """Measure whole gets, in turns with reads of as many bytes."""
    blocks, rounds = (_PUT_BLOCKS, 1) if conditions.is_short else (BLOCKS, 5)
    chain_bytes, directory = blocks * BLOCK_BYTES, conditions.new_directory()
    options = ("--capacity", str(2 * chain_bytes + suite.GIB // 2), "--dram", "0")
    plan = conditions.one_plan()
    with (
        running_fabric(directory, *options) as fabric,
        ostraca.connect(fabric.address) as client,
        contextlib.closing(HugeMemory(chain_bytes, prefault=True)) as memory,
        contextlib.closing(
            DirectFile(directory, file_bytes=min(chain_bytes, plan.flash_bytes), batch_bytes=plan.batch_bytes)
        ) as file,
    ):
        file.tune_reads()
        rows = memory.array[:chain_bytes].reshape(blocks, BLOCK_BYTES)
        rows[:] = np.random.default_rng(1).integers(1, 256, BLOCK_BYTES, np.uint8)
        get = _stored(client, rows)
        found = [_turn(get, rows, file) for _ in range(rounds + 1)][1:]
        del rows, get
    whole, limit, first_ms = (Series(tuple(each[column] for each in found)) for column in range(3))
    total = Measurement("long chain", whole, "O_DIRECT read", limit)
    whole_ms = Series(tuple(1e3 * chain_bytes / GB / rate for rate in whole.values))
    name = f"get {blocks} × {BLOCK_BYTES // KIB} KiB from flash in one call"
    return [
        Figure("D11", name, "GB/s", total, Target(ratio_at_least=0.85)),
        Figure(
            "D11",
            f"{name}, first block",
            "ms",
            Measurement("first block", first_ms, "whole get", whole_ms),
            Target(value_at_most=20.0),
        ),
    ]


def _stored(client: ostraca.Client, rows: NDArray[np.uint8]) -> Callable[[], None]:
    """Store the chain; return a get of the chain into *rows*."""
    layout = ostraca.Layout(model="long-chain@1", dtype="bytes", page_tokens=16, hash_bytes=32)
    volume = client.volume("long-chain", layout, block_bytes=BLOCK_BYTES, create=True)
    chain = volume.chain(secrets.token_bytes(32) for _ in range(len(rows)))
    for at in range(0, len(rows), _PUT_BLOCKS):
        part = slice(at, at + _PUT_BLOCKS)
        stored = volume.put(chain[part], source=rows[part], deadline_s=DEADLINE_S, ack=ostraca.Ack.COMMITTED)
        if stored.accepted < _PUT_BLOCKS:
            raise MeasureError(f"the fabric did not take {_PUT_BLOCKS} blocks: {stored}")

    def get() -> None:
        found = volume.get(chain, into=rows, deadline_s=DEADLINE_S)
        if found.hits < len(rows):
            raise MeasureError(f"the fabric did not return a stored chain: {found}")

    return get


def _turn(get: Callable[[], None], rows: NDArray[np.uint8], file: DirectFile) -> tuple[float, float, float]:
    """Return the rate of a get, the rate of reads, and milliseconds until the first block."""
    rows[0] = 0
    begun_s = time.perf_counter()
    arrived_s: list[float] = []

    def watch() -> None:
        while not rows[0, 0]:
            time.sleep(_WATCH_S)
        arrived_s.append(time.perf_counter())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    spent_s, _ = timed(get)
    watcher.join()
    reads = [file.read() for _ in range(5)]
    return rows.nbytes / GB / spent_s, float(np.median(reads)), 1e3 * (arrived_s[0] - begun_s)
