"""Segment of a shard, and its state in the cycle."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.flash.summary import SummaryLog
from ostraca_fabric.model.extent import Generation

_NEVER_WRITTEN = Generation(0)


class SegmentState(Enum):
    """State of a segment in the cycle."""

    FREE = "free"
    OPENING = "opening"
    """An empty summary page of the new generation is being written."""

    OPEN = "open"
    """The segment has space for new blocks."""

    SEALED = "sealed"
    """The segment is full, and its blocks are readable. Its last reservations may still be committed."""

    DRAINING = "draining"
    """The segment left the index, and waits for the end of its pins and reservations."""

    WITHHELD = "withheld"
    """The grant of an earlier owner epoch covers the segment, and is not retired. Its blocks are readable."""


@dataclass(slots=True)
class Segment:
    """Segment in one generation."""

    number: int
    state: SegmentState = SegmentState.FREE
    generation: Generation = _NEVER_WRITTEN
    log: SummaryLog | None = None
    """Summary, if this owner opened the segment."""

    pool: int = 0
    """Pool of this generation, as the summary records."""

    bytes_used: int = 0
    """Bytes of the data area allocated in this generation."""

    entries_used: int = 0
    """Reservations made in this generation: each may become an entry."""

    held: int = 0
    """Reservations neither committed nor ended."""

    quiet_at_s: float = 0.0
    """Time when failed or abandoned writes, and readers of an earlier owner, have ended."""

    touched_s: float = -math.inf
    """Time of the last end of a reservation or a summary write."""

    queued: list[NDArray[np.intp]] = field(default_factory=list)
    """Committed reservations for the next summary write."""

    is_writing: bool = False
    is_broken: bool = False
    """A summary write failed: nothing more is listed in this generation."""

    is_aged: bool = False
    """Reads of its blocks so far are forgotten."""

    is_examined: bool = False
    """Reinsertion has chosen the blocks to keep."""

    is_kept: bool = False
    """The segment stayed in place for another round at least once."""

    is_short: bool = False
    """A block did not fit into the rest of the segment."""

    @property
    def is_busy(self) -> bool:
        """Whether the segment has reservations, or blocks to list."""
        return bool(self.held or self.queued or self.is_writing)
