"""What is known of where the blocks of one request lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.outcome import Reason
from ostraca_fabric.wire import columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca_fabric.ids import AgentId, DriveId, ShardId
    from ostraca_fabric.wire.messages import ShardRelease


@dataclass(frozen=True, slots=True)
class Source:
    """A shard that some of a request's blocks lie in."""

    owner: AgentId
    shard: ShardId
    drive: DriveId
    base: int
    """The shard's first byte on the drive."""


@dataclass(slots=True)
class Located:
    """Where the blocks of one request lie: a row per block of the request."""

    is_found: NDArray[np.bool_]
    reasons: NDArray[np.uint8]
    """Why a block isn't found."""

    sources: list[Source]
    source: NDArray[np.intp]
    """Which of ``sources`` a block lies in."""

    offsets: NDArray[np.uint64]
    """In the shard, bytes."""

    lengths: NDArray[np.uint32]
    generations: NDArray[np.uint64]
    tags: NDArray[np.uint8]
    """Shape (n, 16)."""

    pins: list[tuple[AgentId, ShardRelease]] = field(default_factory=list)

    def by_drive(self, positions: NDArray[np.intp]) -> list[tuple[DriveId, NDArray[np.intp]]]:
        """Sort out found blocks by the drives they lie on, each drive's in their order."""
        numbers: dict[DriveId, int] = {}
        of_source = [numbers.setdefault(source.drive, len(numbers)) for source in self.sources]
        if len(numbers) == 1:
            return [(drive, positions) for drive in numbers if len(positions)]
        drives = np.array(of_source, np.intp)[self.source[positions]]
        sorted_out = [(drive, positions[drives == number]) for drive, number in numbers.items()]
        return [(drive, its) for drive, its in sorted_out if len(its)]

    def bytes_by_drive(self, positions: NDArray[np.intp]) -> dict[DriveId, int]:
        """Add up the lengths of found blocks on each drive."""
        sizes = np.bincount(self.source[positions], self.lengths[positions], len(self.sources))
        found: dict[DriveId, int] = {}
        for source, size in zip(self.sources, sizes.tolist(), strict=True):
            if size:
                found[source.drive] = found.get(source.drive, 0) + int(size)
        return found

    @classmethod
    def nothing(cls, blocks: int, *, is_brief: bool = False) -> Located:
        """Begin with no block found. What *is_brief* has no room for where blocks lie."""
        offsets, lengths, generations, tags = _NOWHERE if is_brief else _places(blocks)
        return cls(
            is_found=np.zeros(blocks, np.bool_),
            reasons=columns.filled(blocks, Reason.NOT_FOUND),
            sources=[],
            source=np.zeros(blocks, np.intp),
            offsets=offsets,
            lengths=lengths,
            generations=generations,
            tags=tags,
        )


def _places(
    blocks: int,
) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint8]]:
    return (
        np.zeros(blocks, np.uint64),
        np.zeros(blocks, np.uint32),
        np.zeros(blocks, np.uint64),
        np.zeros((blocks, columns.TAG_BYTES), np.uint8),
    )


_NOWHERE = _places(0)
