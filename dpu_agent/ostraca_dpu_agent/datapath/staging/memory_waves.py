"""Blocks of a get in the agent's memory: staged, or in the DRAM cache.

A search returns waves: blocks in slots of one size. A wave waits for a lease, and blocks may leave memory
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.staging.cache import BlockCache
from ostraca_dpu_agent.datapath.staging.leases import StagingLease
from ostraca_dpu_agent.datapath.staging.staged import StagedBlocks, StagedWave
from ostraca_dpu_agent.datapath.staging.staging import Staging
from ostraca_fabric.tables.slots import cut_into_waves

IN_CACHE = "cache"
"""Key of ``DataPathCounters.hits_on`` for blocks of the DRAM cache."""


@dataclass(frozen=True, slots=True)
class CachedWave:
    """Blocks found in the DRAM cache, in slots of one size."""

    positions: NDArray[np.intp]
    """Positions in the get."""

    rows: NDArray[np.int64]
    """Rows of the cache."""

    slot_bytes: int
    cache: BlockCache
    as_of: int
    """The cache's ``removed`` at the time of the search."""

    source: ClassVar = IN_CACHE

    @property
    def tags(self) -> NDArray[np.uint8]:
        """Tags of the blocks, shape (n, 16)."""
        return self.cache.tags(self.rows)

    def use(self) -> NDArray[np.int64]:
        """Use the blocks without a hold; return the offsets in memory."""
        self.cache.use(self.rows)
        return self.cache.offsets[self.rows]

    def left(self, keys: NDArray[np.uint8], lengths: NDArray[np.uint32]) -> CachedWave:
        """Return the part still in the cache; *keys* and *lengths* are columns of the get."""
        cache = self.cache
        if cache.removed == self.as_of:
            return self
        found, rows = cache.find(keys[self.positions], lengths[self.positions])
        is_of_size = cache.slot_bytes[rows] == self.slot_bytes
        positions = self.positions[found[is_of_size]]
        return replace(self, positions=positions, rows=rows[is_of_size], as_of=cache.removed)

    def hold(self, staging: Staging, lease: StagingLease) -> None:
        """Hold the blocks under a CACHED lease, until its release."""
        staging.hold(lease, self.rows)


MemoryWave = StagedWave | CachedWave


def find_in_memory(
    staged: StagedBlocks,
    cache: BlockCache,
    keys: NDArray[np.uint8],
    lengths: NDArray[np.uint32],
    per_wave: Callable[[int], int],
) -> tuple[list[MemoryWave], NDArray[np.bool_]]:
    """Find readable staged blocks, then cached blocks; return waves, and a flag per block for found blocks.

    *per_wave* returns the largest number of slots of a size in a wave.
    """
    waves, is_here = list[MemoryWave](), np.zeros(len(keys), np.bool_)
    if staged.groups:
        for found in staged.find(keys, lengths):
            is_here[found.positions] = True
            cuts = cut_into_waves(np.arange(len(found.rows)), per_wave(found.slot_bytes))
            waves += [found.some(at) for at in cuts]
    if cache.limit_bytes:
        positions, rows = cache.find(keys, lengths)
        if waves:
            is_other = ~is_here[positions]
            positions, rows = positions[is_other], rows[is_other]
        if len(rows):
            is_here[positions] = True
            sizes = cache.slot_bytes[rows]
            waves += [
                CachedWave(positions[at], rows[at], int(sizes[at[0]]), cache, cache.removed)
                for at in _waves_of_one_size(sizes, per_wave)
            ]
    return waves, is_here


def _waves_of_one_size(
    slot_bytes: NDArray[np.int64], per_wave: Callable[[int], int]
) -> list[NDArray[np.intp]]:
    """Cut one or more blocks into waves with slots of one size.

    *per_wave* returns the number of slots of a size in a wave. Each wave is indexes into *slot_bytes*.
    """
    everything, size = np.arange(len(slot_bytes)), int(slot_bytes[0])
    if len(everything) == 1:
        return [everything]
    if (slot_bytes == size).all():
        return cut_into_waves(everything, per_wave(size))
    sizes = np.unique(slot_bytes).tolist()
    return [wave for size in sizes for wave in cut_into_waves(everything[slot_bytes == size], per_wave(size))]
