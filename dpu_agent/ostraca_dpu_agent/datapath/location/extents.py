"""Places of blocks for workers that read drives themselves.

The agent locates, admits and pins the blocks. The worker reads, checks the tags, and reports the end. The
worker asks for failed blocks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.location.routing import BlockLocations
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

    @classmethod
    def of(
        cls, locations: BlockLocations, positions: NDArray[np.intp], numbers: Mapping[DriveId, int]
    ) -> OfferedBlocks | None:
        """Offer the located blocks at *positions* on drives with *numbers*; None without any."""
        offsets = locations.drive_offsets()
        by_drive = {
            drive: its[np.argsort(offsets[its])]
            for drive, its in locations.by_drive(positions)
            if drive in numbers
        }
        if not by_drive:
            return None
        order = np.concatenate([*by_drive.values()])
        named = np.array([numbers[drive] for drive in by_drive], codec.U32)
        named = named.repeat([len(its) for its in by_drive.values()])
        return cls(by_drive, order, named, offsets[order], locations.tags[order])

    def message(self, request: int) -> GetExtents:
        """Build the message to the worker."""
        return GetExtents(
            request,
            self.positions.astype(codec.U32).tobytes(),
            self.numbers.tobytes(),
            self.offsets.astype(codec.U64).tobytes(),
            self.tags.tobytes(),
        )

    def divide(self, report: ExtentsRead, blocks: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the verified and the lost blocks, by the worker's report on a request of so many *blocks*.

        A read may still use the slots of lost blocks; those of failed blocks are free. Blocks never offered
        are ignored. Raises MalformedError.
        """
        offered = self.positions
        is_verified = np.isin(offered, codec.positions(report.verified, blocks))
        is_failed = np.isin(offered, codec.positions(report.failed, blocks))
        return offered[is_verified], offered[~(is_verified | is_failed)]

    def hits_on(self, verified: NDArray[np.intp]) -> dict[DriveId, int]:
        """Return the number of verified blocks on each drive."""
        return {drive: int(np.isin(its, verified).sum()) for drive, its in self.by_drive.items()}
