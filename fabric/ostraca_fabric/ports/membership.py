"""Who is in the fabric: agents, enclosures with their shards, volumes, and which agent owns which shard.

The store is etcd in a pod and memory in ``ostraca up``. It is never on the data path: agents work from the
last map.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ostraca_fabric.fabric_map import AgentRecord, EnclosureRecord, FabricMap
    from ostraca_fabric.ids import AgentId, OwnerEpoch, ShardId, StartId, TenantId
    from ostraca_fabric.volume import VolumeRecord


class Membership(Protocol):
    """The membership store. Every method but ``map`` may raise MembershipError."""

    @property
    def map(self) -> FabricMap:
        """The newest map seen."""

    def changes(self) -> AsyncIterator[FabricMap]:
        """Yield the current map, then each newer one. Maps may be skipped, the newest never is."""

    async def join(self, agent: AgentRecord) -> None:
        """Announce an agent; a record of the same id with another start id is replaced, and its claims
        end.
        """

    async def leave(self, agent: AgentId, start: StartId) -> None:
        """Withdraw an agent with all its claims. Not an error when it is gone."""

    async def put_enclosure(self, enclosure: EnclosureRecord) -> None:
        """Add or replace an enclosure with its shards. A change of shards or weights raises the placement
        epoch.
        """

    async def claim(
        self, shard: ShardId, agent: AgentId, start: StartId, *, epoch_at_least: OwnerEpoch
    ) -> OwnerEpoch | None:
        """Make the agent the shard's owner if it has none. Return the new owner epoch, or None when another
        has it.

        The epoch is above every earlier epoch of the shard and at least *epoch_at_least*; the same process
        claiming what it already owns keeps its epoch.
        """

    async def release(self, shard: ShardId, agent: AgentId, start: StartId) -> None:
        """Give a claim back."""

    async def volume(self, tenant: TenantId, name: str) -> VolumeRecord | None:
        """Return a volume's record."""

    def volume_changes(self) -> AsyncIterator[tuple[VolumeRecord, ...]]:
        """Yield all volumes, the oldest first; then all again when one has been added or changed. States may
        be skipped, the newest never is.
        """

    async def create_volume(self, record: VolumeRecord) -> VolumeRecord:
        """Store the record unless the volume exists; return what is stored."""
