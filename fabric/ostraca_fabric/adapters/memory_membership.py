"""Membership in memory: the whole fabric is one process.

It keeps the rules of the port exactly, so that what works over it works over etcd. No lease ever runs out: an
agent that shares the process cannot die alone. A process that ends takes the store along; what must outlive
it (volume records) is handed to a keeper before it is answered.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ostraca_fabric.adapters.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence

    from ostraca_fabric.fabric_map import AgentRecord, Claim, EnclosureRecord, FabricMap
    from ostraca_fabric.ids import (
        AgentId,
        EnclosureId,
        FabricId,
        OwnerEpoch,
        PlacementEpoch,
        ShardId,
        StartId,
        TenantId,
    )
    from ostraca_fabric.ports.membership import Claimed
    from ostraca_fabric.ports.records import Hold
    from ostraca_fabric.rulings import Rulings
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
        """Begin as ``MemoryStore`` does."""
        self.store = MemoryStore(fabric, volumes=volumes, keep=keep, volumes_max=volumes_max)
        self._changed = asyncio.Event()

    @property
    def map(self) -> FabricMap:
        """The current map."""
        return self.store.map

    @property
    def rulings(self) -> Rulings:
        """The current rulings."""
        return self.store.rulings

    @property
    def trouble(self) -> str:
        """Nothing: the map is the store's own."""
        return ""

    async def ruling_changes(self) -> AsyncIterator[Rulings]:
        """Yield the rulings, and again whenever one was changed or a volume erased."""
        seen = None
        while True:
            changed = self._changed
            if self.store.rulings is not seen:
                seen = self.store.rulings
                yield seen
            else:
                await changed.wait()

    async def hear_rulings(self) -> int:
        """Return the revision of the rulings: all of them show at once."""
        return self.store.rulings.revision

    def rule(self, rulings: Rulings) -> int:
        """Let these be the rulings; return their revision."""
        revision = self.store.rule(rulings)
        self._say_changed()
        return revision

    async def changes(self) -> AsyncIterator[FabricMap]:
        """Yield the current map, then each newer one, the newest always."""
        seen = -1
        while True:
            changed = self._changed
            if self.map.revision != seen:
                seen = self.map.revision
                yield self.map
            else:
                await changed.wait()

    async def join(self, agent: AgentRecord) -> None:
        """Announce an agent; one of the same id with another start id loses its claims."""
        self.store.join(agent)
        self._say_changed()

    async def leave(self, agent: AgentId, start: StartId) -> None:
        """Withdraw an agent and its claims."""
        self.store.leave(agent, start)
        self._say_changed()

    async def confirm(self, agent: AgentId, start: StartId) -> bool:
        """Say whether an agent's record stands."""
        return self.store.has(agent, start)

    async def put_enclosures(
        self,
        enclosures: Sequence[EnclosureRecord],
        *,
        removed: Collection[EnclosureId] = (),
        seen: Mapping[EnclosureId, EnclosureRecord | None] | None = None,
        under: Hold | None = None,
        force: bool = False,
    ) -> None:
        """Add, replace and remove enclosures; the placement epoch rises when shards or weights change."""
        self.store.put_enclosures(enclosures, removed=removed, seen=seen, under=under, force=force)
        self._say_changed()

    async def retire_placement(self, epoch: PlacementEpoch) -> None:
        """Let an earlier placement epoch be asked no longer."""
        self.store.retire_placement(epoch)
        self._say_changed()

    async def claim(
        self, shard: ShardId, agent: AgentId, start: StartId, *, epoch_at_least: OwnerEpoch
    ) -> Claimed | None:
        """Make the agent the shard's owner if it has none."""
        claimed = self.store.claim(shard, agent, start, epoch_at_least=epoch_at_least)
        self._say_changed()
        return claimed

    async def grant(
        self,
        shard: ShardId,
        claim: Claim,
        segments: Sequence[int],
        *,
        retired: frozenset[OwnerEpoch] = frozenset(),
    ) -> bool:
        """Make *segments* all that this owner epoch may write."""
        return self.store.grant(shard, claim, segments, retired=retired)

    async def close_grant(self, shard: ShardId, claim: Claim, in_doubt: Sequence[int]) -> None:
        """Say that nothing is under way under this grant any more."""
        self.store.close_grant(shard, claim, in_doubt)

    async def release(self, shard: ShardId, agent: AgentId, start: StartId) -> None:
        """Give a claim back; not an error when it is not held."""
        self.store.release(shard, agent, start)
        self._say_changed()

    async def volume(self, tenant: TenantId, name: str) -> VolumeRecord | None:
        """Return a volume's record."""
        return self.store.volumes.get((tenant, name))

    async def volume_changes(self) -> AsyncIterator[tuple[VolumeRecord, ...]]:
        """Yield all volumes, the oldest first, and again whenever one was added."""
        seen = None
        while True:
            changed = self._changed
            if self.store.volumes is not seen:
                seen = self.store.volumes
                yield tuple(seen.values())
            else:
                await changed.wait()

    async def create_volume(self, record: VolumeRecord) -> VolumeRecord:
        """Store the record unless the volume exists; return what is stored."""
        stored = self.store.create_volume(record)
        self._say_changed()
        return stored

    async def erase_volume(self, seen: VolumeRecord) -> int:
        """Give a volume its next incarnation, unless that was done before."""
        revision = self.store.erase_volume(seen)
        self._say_changed()
        return revision

    def _say_changed(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
