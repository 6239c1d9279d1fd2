"""How far is explored, and with which measures."""

from __future__ import annotations

from dataclasses import dataclass

from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.model.extent import MIB, PAGE_BYTES, Geometry
from ostraca_fabric.model.ids import DriveId, EnclosureId, FabricId, ShardId

SEGMENTS = 3
GRANT, HOLD, LATE = 1, 1, 1
GEOMETRY = Geometry.planned(MIB * (1 + SEGMENTS), segment_bytes=MIB, block_bytes=MIB - 4 * PAGE_BYTES)
SUPERBLOCK = Superblock(
    FabricId(bytes(16)), bytes(16), EnclosureId("e"), DriveId("e/d"), ShardId("e/d/0"), 0, GEOMETRY
)
PREDECESSOR, SUCCESSOR = 1, 2

FILLERS = 100
"""Keys of blocks that are there already."""

Action = tuple[str, int, int, int]


class WrongError(AssertionError):
    """Something came about that must never be."""


@dataclass(frozen=True)
class Scope:
    """How far to explore."""

    puts: int = 3
    keys: int = 2
    ticks: int = 4
    claim_until: int = 1
    """The last tick at which the successor may claim."""

    blocks_per_segment: int = 1
    is_full: bool = False
    """Whether the predecessor has gone round the ring before."""

    is_apart: bool = False
    """Whether a grant is asked for, recorded and heard of one after another, and a write of data submitted
    before it lands: each at any time, with anything between."""

    uses_what_it_asks: bool = False
    """Whether owners take for granted what etcd has not recorded yet, as they must not."""

    retires_after: int = GRANT + HOLD + LATE
    late_write_s: int = LATE
    """What owners wait; writes may be ``LATE`` whatever they do."""


@dataclass
class Put:
    """One block on its way."""

    epoch: int
    key: int
    tag: int
    number: int
    offset: int
    generation: int
    until: int
    is_submitted: bool = False
    is_written: bool = False

    def digest(self) -> tuple[int, ...]:
        """Return all that its future goes by; its number is its owner's."""
        where = self.epoch, self.key, self.tag, self.offset, self.generation
        return *where, self.until, self.is_submitted, self.is_written
