"""How far round a shard's ring has gone since each placement epoch began.

What an epoch that is over placed in a shard lies in segments that were opened before it ended. Once as many
have been opened as there are, and none of those before is left, the shard is *passed over*. An empty ring is
not: it has to go round like any other. For of blocks in an enclosure that takes no more puts, nothing tells
how old is too old but how long everybody else took to turn over all they had.

No segment from before an epoch stays where it is for another round when earlier ones are asked along with
it. The shard would not be passed over for as long, and what belongs elsewhere would stay with the rest.

Known for as long as this owner has watched: one that has just begun takes everything for older.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_dpu_agent.owner.core.segments import SegmentState
from ostraca_fabric.fabric_map import EARLIER_PLACEMENTS_MAX
from ostraca_fabric.ids import PlacementEpoch

if TYPE_CHECKING:
    from ostraca_dpu_agent.owner.core.shard import ShardCore

_EMPTY = (SegmentState.FREE, SegmentState.DRAINING)


@dataclass(frozen=True, slots=True)
class _Mark:
    """How things were when the owner learned that an epoch had begun."""

    epoch: PlacementEpoch
    newest: int
    """The newest generation."""

    made: int
    """How many there had been."""


class Passing:
    """One shard's."""

    def __init__(self, core: ShardCore) -> None:
        """Know of no placement epoch."""
        self._core = core
        self._marks: list[_Mark] = []
        """By epoch."""

    def began(self, epoch: PlacementEpoch, *, has_earlier: bool = True) -> None:
        """Say which epoch is the current one, and whether earlier ones are asked along with it.

        Again, or while recovering: does nothing.
        """
        ring = self._core.ring
        if self._core.is_recovering or (self._marks and epoch <= self._marks[-1].epoch):
            return
        mark = _Mark(epoch, int(ring.generations.max()), ring.generations_made)
        self._marks = [*self._marks[-EARLIER_PLACEMENTS_MAX:], mark]
        if has_earlier:
            self._core.eviction.end_stays(mark.newest)

    def over(self) -> PlacementEpoch:
        """Return the newest epoch since whose beginning the ring has gone round; 0 if there is none."""
        ring = self._core.ring
        used = [segment.generation for segment in ring.segments if segment.state not in _EMPTY]
        for mark in reversed(self._marks):
            has_turned = ring.generations_made - mark.made >= len(ring.segments)
            if has_turned and min(used, default=mark.newest + 1) > mark.newest:
                return mark.epoch
        return PlacementEpoch(0)
