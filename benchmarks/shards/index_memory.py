"""S1: memory of a shard's index per block, with tags, beside the bytes of key, tag and extent.

The measured memory is the growth of the process by a full index. An extent counts eight bytes: four for the
first page in the shard, four for the length.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import psutil
from benchmarks.support.figure import Figure, Target
from benchmarks.support.full_index import full_index

from ostraca_cli.tools.bench.series import Measurement, Series

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

_KEY_TAG_AND_EXTENT_BYTES = 16 + 16 + 8
_INDEXES = 3


def run(conditions: Conditions) -> list[Figure]:
    """Fill several indexes, one after another."""
    blocks = 1 << 15 if conditions.is_short else 1 << 22
    found = Series(tuple(_bytes_per_block(blocks) for _ in range(_INDEXES)))
    limit = Series((float(_KEY_TAG_AND_EXTENT_BYTES),) * _INDEXES)
    finding = Measurement("resident", found, "key, tag and extent", limit)
    return [
        Figure("S1", f"index of {blocks:,} blocks, per block", "bytes", finding, Target(value_at_most=48.0))
    ]


def _bytes_per_block(blocks: int) -> float:
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    index = full_index(blocks)
    gc.collect()
    held = process.memory_info().rss - before
    return held / len(index)
