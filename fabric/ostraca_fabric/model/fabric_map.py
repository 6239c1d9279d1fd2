"""Fabric map: immutable snapshot of agents, enclosures, shards and owners.

Agents use only the map for placement, routing and status reports. The map knows nothing of the content of
blocks. Grants are not in the map: only a shard's owner and its successor read grants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from ostraca_fabric.errors import BlocksTooLargeError
from ostraca_fabric.model.ids import (
    AgentId,
    DriveId,
    EnclosureId,
    FabricId,
    OwnerEpoch,
    PlacementEpoch,
    ShardId,
    StartId,
)
from ostraca_fabric.model.target import Target
from ostraca_fabric.model.volume import BLOCK_BYTES_MAX, VolumeRecord


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """Agent in the fabric."""

    id: AgentId
    start: StartId
    addresses: tuple[str, ...]
    """Addresses for workers and other agents: ``unix:///path`` or ``tcp://host:port``."""

    is_leaving: bool = False
    """The agent is handing its shards over before it ends: the other agents divide all shards among
    themselves."""


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """Shard and its weight in placement."""

    id: ShardId
    drive: DriveId
    offset: int
    """Position of the shard on the drive, in bytes."""

    size_bytes: int
    weight: int
    """Usable bytes; zero while draining."""

    block_bytes_max: int = BLOCK_BYTES_MAX
    """Largest block that fits a segment: the size of the data areas."""

    usable_bytes: int = 0
    """Weight while the shard accepts blocks; 0: equal to ``weight``."""


class EnclosureState(Enum):
    """State in the life of an enclosure."""

    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class DriveRecord:
    """Access to a drive: a path or a namespace.

    The path is the same on every agent's machine. The namespace belongs to the enclosure's target, under any
    device name.
    """

    id: DriveId
    path: str = ""
    """Empty: use the namespace with ``nguid``."""

    nguid: str = ""
    """32 hexadecimal digits. Stable, unlike device names, which change with each connection."""


@dataclass(frozen=True, slots=True)
class EnclosureRecord:
    """Enclosure: the failure domain of data."""

    id: EnclosureId
    drives: tuple[DriveRecord, ...]
    shards: tuple[ShardRecord, ...]
    state: EnclosureState = EnclosureState.READY
    target: Target | None = None
    """Target to connect to; None for drives with paths."""

    def drained(self) -> EnclosureRecord:
        """Return the record of the draining enclosure.

        A draining enclosure accepts no new blocks; gets of its blocks continue.
        """
        shards = tuple(
            replace(shard, weight=0, usable_bytes=shard.usable_bytes or shard.weight) for shard in self.shards
        )
        return replace(self, shards=shards, state=EnclosureState.DRAINING)

    def undrained(self) -> EnclosureRecord:
        """Return the record of the enclosure after the end of draining."""
        shards = tuple(replace(shard, weight=shard.usable_bytes or shard.weight) for shard in self.shards)
        return replace(self, shards=shards, state=EnclosureState.READY)


@dataclass(frozen=True, slots=True)
class Claim:
    """Owner of a shard, and the owner's epoch."""

    agent: AgentId
    start: StartId
    epoch: OwnerEpoch


@dataclass(frozen=True, slots=True)
class Grant:
    """Segments of a shard that an owner epoch may write.

    A grant outlives the claim and the process, because writes in progress may land after both are gone. A
    successor retires the grant once no write can land any more.
    """

    epoch: OwnerEpoch
    agent: AgentId
    start: StartId
    """Start id of the holder."""

    segments: tuple[int, ...] = ()
    """Segment numbers, rising."""

    is_closed: bool = False
    """The holder has handed the shard over in order: no new allocations, and all earlier ones have ended."""

    is_whole: bool = False
    """The grant covers all segments of the shard, because the granted segments are no longer known."""

    @property
    def is_empty(self) -> bool:
        """Whether the grant permits no writes."""
        return not self.segments and not self.is_whole

    def holds_any(self, segments: Iterable[int]) -> bool:
        """Tell whether the grant permits a write to any of these segments."""
        return any(self.is_whole or number in self.segments for number in segments)

    def of(self, segments: int) -> frozenset[int]:
        """Return the granted segments, for a shard with this number of segments."""
        return frozenset(range(segments) if self.is_whole else self.segments)


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """Weights of a placement epoch: the current epoch, or an earlier one still queried."""

    epoch: PlacementEpoch
    weights: Mapping[EnclosureId, Mapping[ShardId, int]]
    """Only enclosures and shards with weight."""


EARLIER_PLACEMENTS_MAX = 3
"""Placement epochs queried besides the current one. Each adds a place to query to a lookup."""


@dataclass(frozen=True)
class FabricMap:
    """State of the fabric at one revision."""

    fabric: FabricId
    revision: int
    placement_epoch: PlacementEpoch
    agents: Mapping[AgentId, AgentRecord] = field(default_factory=dict)
    enclosures: Mapping[EnclosureId, EnclosureRecord] = field(default_factory=dict)
    claims: Mapping[ShardId, Claim] = field(default_factory=dict)
    earlier_placements: tuple[PlacementRecord, ...] = ()
    """Earlier epochs still queried, the newest first, at most ``EARLIER_PLACEMENTS_MAX``. Some shards may be
    gone."""

    @cached_property
    def owner(self) -> Callable[[ShardId], AgentId | None]:
        """Function from a shard to the agent that owns the shard, or to None."""
        return {shard: each.agent for shard, each in self.claims.items() if each.agent in self.agents}.get

    def shards(self) -> tuple[ShardRecord, ...]:
        """Return every shard, sorted by id."""
        return _by_id.of(self.enclosures)


class _ShardsById:
    """Cache of the sorted shards of the last enclosures.

    Thousands of maps differ in a claim alone and share their enclosures.
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
    """Return the input of placement: each enclosure's shards with weight."""
    weights = {
        enclosure.id: {shard.id: shard.weight for shard in enclosure.shards if shard.weight > 0}
        for enclosure in enclosures
    }
    return {enclosure: shards for enclosure, shards in weights.items() if shards}


def check_blocks_fit(volumes: Iterable[VolumeRecord], enclosures: Iterable[EnclosureRecord]) -> None:
    """Raise BlocksTooLargeError if a volume's largest block fits no segment of some shard.

    Blocks placed on such a shard would be declined. Shards without weight do not count.
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
