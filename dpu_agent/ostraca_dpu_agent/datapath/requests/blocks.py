"""Blocks of a request, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.staging.cache import CacheOffer
from ostraca_dpu_agent.volumes import ServedVolume
from ostraca_fabric.model.chain import Span
from ostraca_fabric.tables.digests import derive_keys, tag_seeds
from ostraca_fabric.wire import codec


class RequestBlocks:
    """Blocks of a request, as columns."""

    def __init__(
        self, volume: ServedVolume, spans: Sequence[Span], lengths: NDArray[np.uint32], equal_bytes: int = 0
    ) -> None:
        """Derive the keys; *lengths* has one value per block."""
        self.spans = spans
        self.lengths = lengths
        self.equal_bytes = equal_bytes
        """Length of every block, 0 if lengths differ or are unknown: the usual request needs no sums."""

        self.keys = derive_keys(volume.secret, spans)
        """Shape (n, 16)."""
        self.tenant = volume.record.tenant
        self._identity = volume.identity

    @classmethod
    def of(cls, volume: ServedVolume, spans: Sequence[Span], lengths: bytes) -> RequestBlocks:
        """Parse a request's columns. Raises MalformedError for a mismatch."""
        column = codec.u32(lengths, sum(map(len, spans)))
        first = lengths[: codec.U32.itemsize]
        equal_bytes = int(column[0]) if len(column) and lengths == first * len(column) else 0
        return cls(volume, spans, column, equal_bytes)

    def total_bytes(self, positions: NDArray[np.intp]) -> int:
        """Return the bytes of blocks."""
        return len(positions) * self.equal_bytes or int(self.lengths[positions].sum())

    @property
    def longest_bytes(self) -> int:
        """Largest length; 1 without blocks."""
        return self.equal_bytes or int(self.lengths.max(initial=1))

    @property
    def shortest_bytes(self) -> int:
        """Smallest length; 1 without blocks."""
        return self.equal_bytes or int(self.lengths.min(initial=self.longest_bytes))

    @cached_property
    def seeds(self) -> NDArray[np.uint64]:
        """Tag seeds of the blocks, made on first use: cached blocks need none here."""
        return tag_seeds(self._identity, self.spans, self.lengths)

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.keys)

    def cache_offer(
        self,
        positions: NDArray[np.intp],
        tags: NDArray[np.uint8],
        is_kept: NDArray[np.bool_],
        *,
        uses: int = 1,
    ) -> CacheOffer:
        """Offer the blocks of a wave to the DRAM cache, for ``Staging.release``.

        *positions* are the wave's blocks in the request, and *tags* (n, 16) those of the wave. *is_kept* has
        a value per block of the wave and is read only at the release.
        """
        return CacheOffer(self.keys[positions], tags, self.lengths[positions], is_kept, uses, self.tenant)
