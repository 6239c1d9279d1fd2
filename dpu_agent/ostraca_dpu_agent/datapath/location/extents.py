"""Places of blocks for workers that read drives themselves.

The agent locates, admits and pins the blocks. The worker reads, checks the tags, and reports the end. The
worker asks for failed blocks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.location.routing import NO_POSITIONS, BlockLocations
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import ExtentsRead, GetExtents


@dataclass(frozen=True, slots=True)
class OfferedBlocks:
    """Located blocks for the worker to read, in columns: by drive, in order of their extents."""

    by_drive: Mapping[DriveId, NDArray[np.intp]]
    """Positions in the request, for each drive."""

    positions: NDArray[np.intp]
    """Positions in the request."""

    numbers: NDArray[np.uint32]
    """Numbers of the blocks' drives for the worker."""

    offsets: NDArray[np.int64]
    tags: NDArray[np.uint8]
    """Shape (n, 16)."""

    is_offered: NDArray[np.bool_]
    """For each block of the request."""

    @classmethod
    def of(
        cls, locations: BlockLocations, positions: NDArray[np.intp], numbers: Mapping[DriveId, int]
    ) -> OfferedBlocks:
        """Offer the located blocks at *positions* on drives with *numbers*."""
        offsets = locations.drive_offsets()
        by_drive = {
            drive: its[offsets[its].argsort(kind="stable")]
            for drive, its in locations.by_drive(positions)
            if drive in numbers
        }
        order = np.concatenate((NO_POSITIONS, *by_drive.values()))
        named = np.array([numbers[drive] for drive in by_drive], codec.U32)
        named = named.repeat([len(its) for its in by_drive.values()])
        is_offered = np.zeros(len(offsets), np.bool_)
        is_offered[order] = True
        return cls(by_drive, order, named, offsets[order], locations.tags[order], is_offered)

    def message(self, request: int) -> GetExtents:
        """Build the message to the worker."""
        return GetExtents(
            request,
            self.positions.astype(codec.U32).tobytes(),
            self.numbers.tobytes(),
            self.offsets.astype(codec.U64).tobytes(),
            self.tags.tobytes(),
        )

    def divide(self, report: ExtentsRead) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Tell which blocks of the request are verified and lost, by the worker's report.

        A read may still use the slots of lost blocks; those of failed blocks are free. Blocks never offered
        are ignored. Raises MalformedError.
        """
        blocks = len(self.is_offered)
        is_verified, is_lost = np.zeros(blocks, np.bool_), self.is_offered.copy()
        is_verified[codec.positions(report.verified, blocks)] = True
        is_lost[codec.positions(report.failed, blocks)] = False
        return self.is_offered & is_verified, is_lost & ~is_verified

    def hits_on(self, is_verified: NDArray[np.bool_]) -> dict[DriveId, int]:
        """Return the number of verified blocks on each drive."""
        return {drive: int(np.count_nonzero(is_verified[its])) for drive, its in self.by_drive.items()}
