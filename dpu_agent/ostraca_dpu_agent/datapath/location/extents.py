"""Places of blocks for workers that read drives themselves.

The agent locates, admits and pins the blocks. The worker reads, checks the tags, and reports the end. The
worker asks for failed blocks again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Blocks of one drive for the worker to read, in columns."""

    drive: DriveId
    number: int
    """Number of the drive for the worker."""

    positions: NDArray[np.intp]
    """Positions in the request."""

    offsets: NDArray[np.int64]
    tags: NDArray[np.uint8]
    """Shape (n, 16)."""


def offers_of_drives(
    locations: BlockLocations,
    positions: NDArray[np.intp],
    numbers: Mapping[DriveId, int],
) -> list[ExtentOffer]:
    """Offer the located blocks at *positions* on drives with *numbers*, in order of their extents."""
    offsets = locations.drive_offsets()
    return [
        ExtentOffer(drive, numbers[drive], order, offsets[order], locations.tags[order])
        for drive, its in locations.by_drive(positions)
        if drive in numbers
        for order in (its[np.argsort(offsets[its])],)
    ]


@dataclass(frozen=True, slots=True)
class OfferedBlocks:
    """Blocks of all offers of a request."""

    offers: Sequence[ExtentOffer]
    positions: NDArray[np.intp]
    """Positions in the request."""

    @classmethod
    def of(cls, offers: Sequence[ExtentOffer]) -> OfferedBlocks:
        """Join one or more offers."""
        return cls(offers, np.concatenate([offer.positions for offer in offers]))

    def message(self, request: int) -> GetExtents:
        """Build the message to the worker."""
        counts = [len(offer.positions) for offer in self.offers]
        numbers = np.array([offer.number for offer in self.offers], codec.U32)
        return GetExtents(
            request,
            self.positions.astype(codec.U32).tobytes(),
            np.repeat(numbers, counts).tobytes(),
            np.concatenate([offer.offsets for offer in self.offers]).astype(codec.U64).tobytes(),
            np.concatenate([offer.tags for offer in self.offers]).tobytes(),
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

    def hits_on(self, verified: NDArray[np.intp]) -> dict[DriveId, int]:
        """Return the number of verified blocks on each drive."""
        is_all = len(verified) == len(self.positions)
        return {
            offer.drive: len(offer.positions) if is_all else int(np.isin(offer.positions, verified).sum())
            for offer in self.offers
        }


def _taken(left: NDArray[np.bool_], column: bytes) -> NDArray[np.intp]:
    """Remove the named positions from *left*; return the removed positions."""
    named = np.zeros(len(left), np.bool_)
    named[codec.positions(column, len(left))] = True
    named &= left
    left ^= named
    return np.flatnonzero(named)
