"""Membership in memory: the whole fabric is one process.

It keeps the rules of the port exactly, so that what works over it works over etcd. A process that ends takes
it along; what must outlive it (volume records) is handed to a keeper before it is answered.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from ostraca_fabric.errors import MembershipError
from ostraca_fabric.fabric_map import Claim, FabricMap
from ostraca_fabric.ids import OwnerEpoch, PlacementEpoch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

    from ostraca_fabric.fabric_map import AgentRecord, EnclosureRecord
    from ostraca_fabric.ids import AgentId, EnclosureId, FabricId, ShardId, StartId, TenantId
    from ostraca_fabric.volume import VolumeRecord


class MemoryMembership:
    """Implements ``ports.membership.Membership`` for agents that share one event loop."""

    def __init__(
        self,
        fabric: FabricId,
        *,
        volumes: Iterable[VolumeRecord] = (),
        keep: Callable[[tuple[VolumeRecord, ...]], None] | None = None,
        volumes_max: int = 4096,
    ) -> None:
        """Begin empty but for *volumes*; *keep* stores all volume records whenever one is added, and may
        raise.

        Beyond *volumes_max* none is added: each costs memory for good, and all are stored with each new one.
        """
        self._map = FabricMap(fabric, revision=1, placement_epoch=PlacementEpoch(1))
        self._volumes = {(record.tenant, record.name): record for record in volumes}
        self._keep = keep
        self._volumes_max = volumes_max
        self._epochs: dict[ShardId, OwnerEpoch] = {}
        self._changed = asyncio.Event()

    @property
    def map(self) -> FabricMap:
        """The current map."""
        return self._map

    async def changes(self) -> AsyncIterator[FabricMap]:
        """Yield the current map, then each newer one, the newest always."""
        seen = -1
        while True:
            changed = self._changed
            if self._map.revision != seen:
                seen = self._map.revision
                yield self._map
            else:
                await changed.wait()

    async def join(self, agent: AgentRecord) -> None:
        """Announce an agent; one of the same id with another start id loses its claims."""
        known = self._map.agents.get(agent.id)
        claims = self._map.claims
        if known is not None and known.start != agent.start:
            claims = self._without_claims_of(agent.id)
        self._publish(agents={**self._map.agents, agent.id: agent}, claims=claims)

    async def leave(self, agent: AgentId, start: StartId) -> None:
        """Withdraw an agent and its claims."""
        known = self._map.agents.get(agent)
        if known is None or known.start != start:
            return
        agents = {name: record for name, record in self._map.agents.items() if name != agent}
        self._publish(agents=agents, claims=self._without_claims_of(agent))

    async def put_enclosure(self, enclosure: EnclosureRecord) -> None:
        """Add or replace an enclosure; the placement epoch rises when shards or weights change."""
        before = self._map.enclosures.get(enclosure.id)
        rises = before is None or _weights(before) != _weights(enclosure)
        self._publish(
            enclosures={**self._map.enclosures, enclosure.id: enclosure},
            placement_epoch=PlacementEpoch(self._map.placement_epoch + rises),
        )

    async def claim(
        self, shard: ShardId, agent: AgentId, start: StartId, *, epoch_at_least: OwnerEpoch
    ) -> OwnerEpoch | None:
        """Make the agent the shard's owner if it has none."""
        held = self._map.claims.get(shard)
        if held is not None:
            return held.epoch if (held.agent, held.start) == (agent, start) else None
        joined = self._map.agents.get(agent)
        if joined is None or joined.start != start:
            return None
        epoch = OwnerEpoch(max(self._epochs.get(shard, 0) + 1, epoch_at_least))
        self._epochs[shard] = epoch
        self._publish(claims={**self._map.claims, shard: Claim(agent, start, epoch)})
        return epoch

    async def release(self, shard: ShardId, agent: AgentId, start: StartId) -> None:
        """Give a claim back; not an error when it is not held."""
        held = self._map.claims.get(shard)
        if held is not None and (held.agent, held.start) == (agent, start):
            self._publish(claims={name: claim for name, claim in self._map.claims.items() if name != shard})

    async def volume(self, tenant: TenantId, name: str) -> VolumeRecord | None:
        """Return a volume's record."""
        return self._volumes.get((tenant, name))

    async def volume_changes(self) -> AsyncIterator[tuple[VolumeRecord, ...]]:
        """Yield all volumes, the oldest first, and again whenever one was added."""
        seen = None
        while True:
            changed = self._changed
            if self._volumes is not seen:
                seen = self._volumes
                yield tuple(seen.values())
            else:
                await changed.wait()

    async def create_volume(self, record: VolumeRecord) -> VolumeRecord:
        """Store the record unless the volume exists; return what is stored."""
        at = (record.tenant, record.name)
        if at not in self._volumes:
            if len(self._volumes) >= self._volumes_max:
                message = (
                    f"the fabric has {self._volumes_max} volumes, which is the most it keeps: use one of them"
                )
                raise MembershipError(message)
            after = {**self._volumes, at: record}
            if self._keep is not None:
                self._keep(tuple(after.values()))
            self._volumes = after
            self._say_changed()
        return self._volumes[at]

    def _without_claims_of(self, agent: AgentId) -> dict[ShardId, Claim]:
        return {shard: claim for shard, claim in self._map.claims.items() if claim.agent != agent}

    def _publish(
        self,
        *,
        agents: Mapping[AgentId, AgentRecord] | None = None,
        enclosures: Mapping[EnclosureId, EnclosureRecord] | None = None,
        claims: Mapping[ShardId, Claim] | None = None,
        placement_epoch: PlacementEpoch | None = None,
    ) -> None:
        before = self._map
        self._map = replace(
            before,
            revision=before.revision + 1,
            agents=before.agents if agents is None else agents,
            enclosures=before.enclosures if enclosures is None else enclosures,
            claims=before.claims if claims is None else claims,
            placement_epoch=before.placement_epoch if placement_epoch is None else placement_epoch,
        )
        self._say_changed()

    def _say_changed(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _weights(enclosure: EnclosureRecord) -> dict[ShardId, int]:
    return {shard.id: shard.weight for shard in enclosure.shards}
