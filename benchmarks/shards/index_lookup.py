"""S2: look-up of 512 keys in an index of eight million blocks, with extents and tags.

Each look-up has other keys, half of them listed. The comparison is numpy's search for the same keys in a
sorted column of their first eight bytes, without reading any value.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from benchmarks.support.figure import Figure, Target
from benchmarks.support.full_index import full_index, keys_from

from ostraca_cli.tools.bench.series import Comparison, measure, seconds_of

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions
    from numpy.typing import NDArray

    from ostraca_fabric.flash.index import BlockIndex

US = 1e6
KEYS = 512
_BATCHES = 512


def run(conditions: Conditions) -> list[Figure]:
    """Look up in turns."""
    blocks = 1 << 16 if conditions.is_short else 8_000_000
    index, keys = full_index(blocks), keys_from(0, 2 * blocks)
    column = np.sort(keys[:blocks].view(np.uint64).reshape(-1, 2)[:, 0])
    chosen = np.random.default_rng(2).integers(0, 2 * blocks, (_BATCHES, KEYS))
    batches = [np.ascontiguousarray(keys[rows]) for rows in chosen]
    mine, others = itertools.cycle(batches), itertools.cycle(batches[::-1])
    case = Comparison(
        "look-up",
        lambda: US * _look_up_s(index, next(mine)),
        "numpy searchsorted",
        lambda: US * _search_s(column, next(others)),
    )
    what = f"{KEYS} keys in an index of {blocks:,} blocks"
    return [Figure("S2", what, "µs", measure(case, conditions.pace), Target(value_at_most=150.0))]


def _look_up_s(index: BlockIndex, keys: NDArray[np.uint8]) -> float:
    return seconds_of(lambda: index.read(index.find(keys)))


def _search_s(column: NDArray[np.uint64], keys: NDArray[np.uint8]) -> float:
    wanted = keys.view(np.uint64).reshape(-1, 2)[:, 0].copy()
    return seconds_of(lambda: np.searchsorted(column, wanted))
