"""S1: memory of a shard's index for each block, tags included, beside the bytes of key, tag and extent.

What the process holds more of once an index is full. Of the extent eight bytes count: the first page in the
shard and the length, four bytes each.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import psutil

from benchmarks.figure import Figure, Target
from benchmarks.indexed import filled
from ostraca.cli.bench.series import Finding, Series

if TYPE_CHECKING:
    from benchmarks.conditions import Conditions

_KEY_TAG_AND_EXTENT_BYTES = 16 + 16 + 8
_INDEXES = 3


def run(conditions: Conditions) -> list[Figure]:
    """Fill several indexes, one after another."""
    blocks = 1 << 15 if conditions.is_short else 1 << 22
    found = Series(tuple(_bytes_per_block(blocks) for _ in range(_INDEXES)))
    limit = Series((float(_KEY_TAG_AND_EXTENT_BYTES),) * _INDEXES)
    finding = Finding("resident", found, "key, tag and extent", limit)
    return [
        Figure("S1", f"index of {blocks:,} blocks, per block", "bytes", finding, Target(value_at_most=48.0))
    ]


def _bytes_per_block(blocks: int) -> float:
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    index = filled(blocks)
    gc.collect()
    held = process.memory_info().rss - before
    return held / len(index)
