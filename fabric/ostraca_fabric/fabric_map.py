"""The fabric map: an immutable snapshot of who and what is in the fabric.

Agents place blocks, route requests and report status from it alone. Nothing in it says what a block holds.
Grants are not in it: only a shard's owner and its successor look at those.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from ostraca_fabric.errors import BlocksTooLargeError
from ostraca_fabric.volume import BLOCK_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ostraca_fabric.ids import (
        AgentId,
        DriveId,
        EnclosureId,
        FabricId,
        OwnerEpoch,
        PlacementEpoch,
        ShardId,
        StartId,
    )
    from ostraca_fabric.target import Target
    from ostraca_fabric.volume import VolumeRecord


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """An agent that is in the fabric."""

    id: AgentId
    start: StartId
    addresses: tuple[str, ...]
    """Where workers and other agents reach it: ``unix:///path`` or ``tcp://host:port``."""

    is_leaving: bool = False
    """It hands its shards over and is about to end: others divide all shards among themselves."""


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard and its weight in placement."""

    id: ShardId
    drive: DriveId
    offset: int
    """Where on the drive the shard begins, in bytes."""

    size_bytes: int
    weight: int
    """Usable bytes; zero while draining."""

    block_bytes_max: int = BLOCK_BYTES_MAX
    """The largest block that its segments hold: the size of their data areas."""

    usable_bytes: int = 0
    """What its weight is while it takes blocks; 0: as its weight."""


class EnclosureState(Enum):
    """Where an enclosure is in its life."""

    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class DriveRecord:
    """How to reach a drive: by the same path on every agent's machine, or as a namespace of its enclosure's
    target, wherever that turns up.
    """

    id: DriveId
    path: str = ""
    """Empty: the namespace with ``nguid``."""

    nguid: str = ""
    """32 hexadecimal digits. Devices' names change with each connection; this does not."""


@dataclass(frozen=True, slots=True)
class EnclosureRecord:
    """An enclosure: the failure domain of data."""

    id: EnclosureId
    drives: tuple[DriveRecord, ...]
    shards: tuple[ShardRecord, ...]
    state: EnclosureState = EnclosureState.READY
    target: Target | None = None
    """What to connect to; None where its drives have paths."""

    def drained(self) -> EnclosureRecord:
        """Return it as it takes no new blocks; those it has are still got."""
        shards = tuple(
            replace(shard, weight=0, usable_bytes=shard.usable_bytes or shard.weight) for shard in self.shards
        )
        return replace(self, shards=shards, state=EnclosureState.DRAINING)

    def undrained(self) -> EnclosureRecord:
        """Return it as it takes blocks again."""
        shards = tuple(replace(shard, weight=shard.usable_bytes or shard.weight) for shard in self.shards)
        return replace(self, shards=shards, state=EnclosureState.READY)


@dataclass(frozen=True, slots=True)
class Claim:
    """Who owns a shard, and under which epoch."""

    agent: AgentId
    start: StartId
    epoch: OwnerEpoch


@dataclass(frozen=True, slots=True)
class Grant:
    """The segments of a shard that an owner epoch may write.

    It outlives the claim, and the process: what its holder has begun to write may land after both are gone.
    A successor retires it when nothing can land any more.
    """

    epoch: OwnerEpoch
    agent: AgentId
    start: StartId
    """Who holds it."""

    segments: tuple[int, ...] = ()
    """Numbers of segments, rising."""

    is_closed: bool = False
    """The holder has handed the shard over in order: it hands out nothing any more, and all that it handed
    out has ended."""

    is_whole: bool = False
    """It holds all segments of the shard, however many there are: what was granted is not known any more."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing may be written under it."""
        return not self.segments and not self.is_whole

    def holds_any(self, segments: Iterable[int]) -> bool:
        """Say whether one of these may be written under it."""
        return any(self.is_whole or number in self.segments for number in segments)

    def of(self, segments: int) -> frozenset[int]:
        """Return the segments that it holds, of a shard that has so many."""
        return frozenset(range(segments) if self.is_whole else self.segments)


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """The weights of a placement epoch: of one that is over, and whose blocks are still looked up, or of the
    current one.
    """

    epoch: PlacementEpoch
    weights: Mapping[EnclosureId, Mapping[ShardId, int]]
    """Of enclosures and shards with weight; the others had none."""


EARLIER_PLACEMENTS_MAX = 3
"""Placement epochs that are asked beside the current one. Each costs a look-up another place to ask."""


@dataclass(frozen=True, slots=True)
class FabricMap:
    """One state of the fabric."""

    fabric: FabricId
    revision: int
    placement_epoch: PlacementEpoch
    agents: Mapping[AgentId, AgentRecord] = field(default_factory=dict)
    enclosures: Mapping[EnclosureId, EnclosureRecord] = field(default_factory=dict)
    claims: Mapping[ShardId, Claim] = field(default_factory=dict)
    earlier_placements: tuple[PlacementRecord, ...] = ()
    """Those still asked, the newest first: ``EARLIER_PLACEMENTS_MAX`` at most. Their shards may be gone."""

    def owner(self, shard: ShardId) -> AgentId | None:
        """Return the agent that owns a shard."""
        claim = self.claims.get(shard)
        return claim.agent if claim and claim.agent in self.agents else None

    def shards(self) -> tuple[ShardRecord, ...]:
        """Return every shard, by id."""
        return _by_id.of(self.enclosures)


class _ShardsById:
    """The shards of the enclosures asked for last: maps come by the thousand that differ in a claim alone,
    and share their enclosures.
    """

    def __init__(self) -> None:
        self._last: tuple[Mapping[EnclosureId, EnclosureRecord], tuple[ShardRecord, ...]] = ({}, ())

    def of(self, enclosures: Mapping[EnclosureId, EnclosureRecord]) -> tuple[ShardRecord, ...]:
        last, shards = self._last
        if last is not enclosures:
            found = (shard for enclosure in enclosures.values() for shard in enclosure.shards)
            shards = tuple(sorted(found, key=lambda shard: shard.id))
            self._last = enclosures, shards
        return shards


_by_id = _ShardsById()


def weights_of(enclosures: Iterable[EnclosureRecord]) -> dict[EnclosureId, dict[ShardId, int]]:
    """Return what placement among these depends on: each enclosure's shards that have weight."""
    weights = {
        enclosure.id: {shard.id: shard.weight for shard in enclosure.shards if shard.weight > 0}
        for enclosure in enclosures
    }
    return {enclosure: shards for enclosure, shards in weights.items() if shards}


def check_blocks_fit(volumes: Iterable[VolumeRecord], enclosures: Iterable[EnclosureRecord]) -> None:
    """Raise BlocksTooLargeError where a volume's largest block fits no segment of some shard: whatever is
    placed there would be declined. Shards that nothing is placed on do not count.
    """
    largest = max(volumes, key=lambda volume: volume.block_bytes, default=None)
    placed = (shard for enclosure in enclosures for shard in enclosure.shards if shard.weight)
    least = min(placed, key=lambda shard: shard.block_bytes_max, default=None)
    if largest is not None and least is not None and largest.block_bytes > least.block_bytes_max:
        raise BlocksTooLargeError(
            f"volume {largest.name!r} of tenant {largest.tenant!r} has blocks of up to {largest.block_bytes} "
            f"bytes, and the segments of shard {least.id} hold none above {least.block_bytes_max}: take "
            "smaller blocks, or drives that are larger or formatted with larger segments"
        )
