"""What ``ShardCore`` answers. Columns hold one value per block, in the order asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.outcome import PutState, Reason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca_fabric.extent import Generation


@dataclass(frozen=True, slots=True, eq=False)
class Resolution:
    """Where blocks lie. Values of keys not found are zero."""

    found: NDArray[np.bool_]
    offsets: NDArray[np.uint64]
    """In the shard, in bytes."""

    lengths: NDArray[np.uint32]
    """The blocks' own bytes; on flash they take whole pages."""

    generations: NDArray[np.uint64]
    tags: NDArray[np.uint8]
    """Shape (n, 16)."""

    pin: int
    """To release early; 0 when nothing was found or no pin was asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Reservations:
    """Space handed out."""

    states: NDArray[np.uint8]
    """A PutState each: STAGED stands for "reserved"; EXISTS; DECLINED."""

    reasons: NDArray[np.uint8]
    """A Reason each where declined: IN_FLIGHT, ADMISSION, BUDGET, NO_SPACE, OVERLOADED, BAD_LENGTH,
    RECOVERING, DRIVE_ERROR, INDEX_FULL, FENCED."""

    reservations: NDArray[np.uint64]
    """Zero where nothing was reserved."""

    offsets: NDArray[np.uint64]
    """In the shard, in bytes; zero where nothing was reserved."""

    @classmethod
    def none(cls, exists: NDArray[np.bool_], reason: Reason) -> Reservations:
        """Hand out nothing: what is there already EXISTS, and the rest is declined for one reason."""
        states = np.where(exists, PutState.EXISTS, PutState.DECLINED).astype(np.uint8)
        reasons = np.where(exists, Reason.NONE, reason).astype(np.uint8)
        zeros = np.zeros(len(exists), np.uint64)
        return cls(states, reasons, zeros, zeros.copy())


@dataclass(frozen=True, slots=True, eq=False)
class CommitAnswer:
    """What a commit says at once."""

    states: NDArray[np.uint8]
    """A PutState each: STAGED stands for "in the next summary write", whose end a ``CommitsDone`` will tell;
    DECLINED is final."""

    reasons: NDArray[np.uint8]
    """EXPIRED where the reservation had ended, was unknown, or is of another owner epoch; IN_FLIGHT where it
    was committed already; FENCED where the owner may not write now."""


@dataclass(frozen=True, slots=True)
class SummaryWrite:
    """Summary pages to write: all pieces before ``ShardCore.written`` is called, in any order."""

    number: int
    segment: int
    generation: Generation
    pieces: tuple[tuple[int, bytes], ...]
    """Offset in the shard and whole pages, each."""


@dataclass(frozen=True, slots=True, eq=False)
class CommitsDone:
    """Commits that have ended."""

    reservations: NDArray[np.uint64]
    states: NDArray[np.uint8]
    """COMMITTED, or DECLINED when the summary could not be written, or may not be any more."""

    reasons: NDArray[np.uint8]
