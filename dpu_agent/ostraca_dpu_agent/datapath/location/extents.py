"""Extents of blocks for workers with direct reads of drives.

The agent locates, admits and pins the blocks. The worker reads the extents, checks the tags, and reports the
end. The worker asks for failed blocks again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.location.routing import NO_POSITIONS, BlockLocations
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import ExtentsRead, GetExtents


@dataclass(frozen=True, slots=True)
class BlocksRead:
    """Blocks of an offer after the reads, as positions in the request."""

    verified: NDArray[np.intp]
    failed: NDArray[np.intp]
    lost: NDArray[np.intp]
    """Blocks whose slots a read may still use."""


@dataclass(frozen=True, slots=True)
class ExtentOffer:
    """Located blocks of one or more drives for the worker to read, in columns."""

    positions: NDArray[np.intp]
    """Positions in the request."""

    drive_offsets: NDArray[np.int64]
    tags: NDArray[np.uint8]
    """Shape (n, 16)."""

    drives: list[tuple[DriveId, int]]
    """Each drive with the number of its blocks, in the order of the columns."""

    @classmethod
    def of(
        cls, locations: BlockLocations, positions: NDArray[np.intp], drives: Collection[DriveId]
    ) -> ExtentOffer | None:
        """Offer the located blocks at *positions* that lie on *drives*, if any, in order of their extents."""
        taken = [(drive, its) for drive, its in locations.by_drive(positions) if drive in drives]
        if not taken:
            return None
        offsets = locations.drive_offsets()
        order = np.concatenate([its[np.argsort(offsets[its])] for _, its in taken])
        counts = [(drive, len(its)) for drive, its in taken]
        return cls(order, offsets[order], locations.tags[order], counts)

    def message(self, request: int, numbers: Mapping[DriveId, int]) -> GetExtents:
        """Build the message to a worker with drives of these *numbers*."""
        counts = [blocks for _, blocks in self.drives]
        drives = np.repeat(np.array([numbers[drive] for drive, _ in self.drives], codec.U32), counts)
        return GetExtents(
            request,
            self.positions.astype(codec.U32).tobytes(),
            drives.tobytes(),
            self.drive_offsets.astype(codec.U64).tobytes(),
            self.tags.tobytes(),
        )

    def divide(self, report: ExtentsRead, blocks: int) -> BlocksRead:
        """Divide the offered blocks by the worker's report on a request of so many *blocks*.

        Blocks never offered are ignored. Raises MalformedError.
        """
        left = np.zeros(blocks, np.bool_)
        left[self.positions] = True
        verified = _taken(left, report.verified)
        if len(verified) == len(self.positions):
            return BlocksRead(verified, NO_POSITIONS, NO_POSITIONS)
        return BlocksRead(verified, _taken(left, report.failed), np.flatnonzero(left))

    def hits(self, verified: NDArray[np.intp]) -> list[tuple[DriveId, int]]:
        """Count verified blocks for each drive."""
        if len(self.drives) == 1:
            return [(self.drives[0][0], len(verified))]
        is_hit = np.isin(self.positions, verified)
        ends = np.cumsum([blocks for _, blocks in self.drives]).tolist()
        return [
            (drive, int(np.count_nonzero(is_hit[end - blocks : end])))
            for (drive, blocks), end in zip(self.drives, ends, strict=True)
        ]


def _taken(left: NDArray[np.bool_], column: bytes) -> NDArray[np.intp]:
    """Remove the named positions from *left*; return the removed positions."""
    named = np.zeros(len(left), np.bool_)
    named[codec.positions(column, len(left))] = True
    named &= left
    left ^= named
    return np.flatnonzero(named)
