"""Progress of a shard's ring since the beginning of each placement epoch.

Blocks placed by an ended epoch lie in segments opened before its end. Once as many segments were opened as
the ring has, and none of the old ones is left, the shard has *turned over*. An empty ring has to go round
too: in an enclosure without new puts, only the turnover of all other shards tells the age of blocks.

While earlier epochs are still asked, no segment from before an epoch stays for another round: the shard would
turn over later, and blocks that belong elsewhere now would stay.

Known only since this owner began: a new owner takes every segment for older.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostraca_dpu_agent.shards.core.ring.ring import Ring
from ostraca_dpu_agent.shards.core.ring.segments import SegmentState
from ostraca_fabric.model.fabric_map import EARLIER_PLACEMENTS_MAX
from ostraca_fabric.model.ids import PlacementEpoch

_EMPTY = (SegmentState.FREE, SegmentState.DRAINING)


@dataclass(frozen=True, slots=True)
class _Mark:
    """State of the ring when the owner learned of an epoch."""

    epoch: PlacementEpoch
    newest: int
    """Newest generation."""

    count: int
    """Count of generations."""


class RingProgress:
    """Placement epochs known to a ring."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._marks: list[_Mark] = []
        """By epoch."""

    def begin_epoch(self, epoch: PlacementEpoch) -> int | None:
        """Note the current placement epoch; return the newest generation, or None for a known epoch."""
        if self._marks and epoch <= self._marks[-1].epoch:
            return None
        mark = _Mark(epoch, int(self._ring.generations.max()), self._ring.generations_made)
        self._marks = [*self._marks[-EARLIER_PLACEMENTS_MAX:], mark]
        return mark.newest

    def turned_over(self) -> PlacementEpoch:
        """Return the newest epoch since whose beginning the ring has gone round; 0 without any."""
        ring = self._ring
        used = [segment.generation for segment in ring.segments if segment.state not in _EMPTY]
        for mark in reversed(self._marks):
            has_turned = ring.generations_made - mark.count >= len(ring.segments)
            if has_turned and min(used, default=mark.newest + 1) > mark.newest:
                return mark.epoch
        return PlacementEpoch(0)
