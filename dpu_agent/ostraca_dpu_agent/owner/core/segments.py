"""A shard's segments and the states they pass through."""

from __future__ import annotations

from enum import Enum


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
