"""One segment of a shard, and where it is in its round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ostraca_fabric.extent import Generation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ostraca_fabric.flash.summary import SummaryLog

_NEVER_WRITTEN = Generation(0)


class SegmentState(Enum):
    """Where a segment is in its round."""

    FREE = "free"
    OPENING = "opening"
    """An empty summary page of its new generation is being written."""

    OPEN = "open"
    """Hands out space."""

    SEALED = "sealed"
    """Full; its blocks can be got. Commits of its last reservations still come in."""

    DRAINING = "draining"
    """Out of the index; waits for pins and reservations on it to end."""

    WITHHELD = "withheld"
    """Lies under the grant of an earlier owner epoch, which may write it until that is retired. Its blocks
    can be got."""


@dataclass(slots=True)
class Segment:
    """One segment in one generation."""

    number: int
    state: SegmentState = SegmentState.FREE
    generation: Generation = _NEVER_WRITTEN
    log: SummaryLog | None = None
    """Its summary, when this owner opened it."""

    pool: int = 0
    """The pool that it was given to in this generation, as its summary says."""

    bytes_used: int = 0
    """Of the data area, handed out in this generation."""

    entries_used: int = 0
    """Reservations handed out in this generation: each may become an entry."""

    held: int = 0
    """Reservations on it that are neither committed nor ended."""

    quiet_at_s: float = 0.0
    """From when on no write that was abandoned or has failed, and no reader of an earlier owner, is left."""

    touched_s: float = -math.inf
    """When a reservation on it, or a write of its summary, ended last."""

    queued: list[NDArray[np.intp]] = field(default_factory=list)
    """Committed reservations for the next summary write."""

    is_writing: bool = False
    is_broken: bool = False
    """Writing its summary failed: nothing more is listed in this generation."""

    is_aged: bool = False
    """It came to the middle of the ring, where reads so far are forgotten."""

    is_looked_through: bool = False
    """What is worth keeping of it was copied, or is being copied, to where new blocks go."""

    is_kept: bool = False
    """It went round again where it is, at least once."""

    is_short: bool = False
    """A block did not fit into what is left of it."""

    @property
    def is_busy(self) -> bool:
        """Whether space is held here, or something is to be listed."""
        return bool(self.held or self.queued or self.is_writing)
