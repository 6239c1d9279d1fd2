"""The fabric map: an immutable snapshot of who and what is in the fabric.

Agents place blocks, route requests and report status from it alone. Nothing in it says what a block holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ostraca_fabric.volume import BLOCK_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

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


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """An agent that is in the fabric."""

    id: AgentId
    start: StartId
    addresses: tuple[str, ...]
    """Where workers and other agents reach it: ``unix:///path`` or ``tcp://host:port``."""


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


class EnclosureState(Enum):
    """Where an enclosure is in its life."""

    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class DriveRecord:
    """How to reach a drive: for a file-backed enclosure, the file's path."""

    id: DriveId
    path: str


@dataclass(frozen=True, slots=True)
class EnclosureRecord:
    """An enclosure: the failure domain of data."""

    id: EnclosureId
    drives: tuple[DriveRecord, ...]
    shards: tuple[ShardRecord, ...]
    state: EnclosureState = EnclosureState.READY


@dataclass(frozen=True, slots=True)
class Claim:
    """Who owns a shard, and under which epoch."""

    agent: AgentId
    start: StartId
    epoch: OwnerEpoch


@dataclass(frozen=True, slots=True)
class FabricMap:
    """One state of the fabric."""

    fabric: FabricId
    revision: int
    placement_epoch: PlacementEpoch
    agents: Mapping[AgentId, AgentRecord] = field(default_factory=dict)
    enclosures: Mapping[EnclosureId, EnclosureRecord] = field(default_factory=dict)
    claims: Mapping[ShardId, Claim] = field(default_factory=dict)

    def owner(self, shard: ShardId) -> AgentId | None:
        """Return the agent that owns a shard."""
        claim = self.claims.get(shard)
        return claim.agent if claim and claim.agent in self.agents else None

    def shards(self) -> tuple[ShardRecord, ...]:
        """Return every shard, by id."""
        found = [shard for enclosure in self.enclosures.values() for shard in enclosure.shards]
        return tuple(sorted(found, key=lambda shard: shard.id))
