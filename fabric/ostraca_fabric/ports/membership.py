"""Membership store: agents, enclosures, shards, volumes, claims, overrides.

The store is etcd in a pod, and memory in ``ostraca up``. The store is never on the data path: agents work
from the last map.

An agent's record is bound to a *lease*, kept alive by the adapter until ``leave``. Every claim of the agent
is bound to the same lease, so record and claims end together. Only the holder or the end of the lease deletes
a claim. Therefore a single check of the agent's record (``confirm``) shows that all claims stand. Grants are
bound to no lease: they outlive their holders until a successor retires them.

No clock is compared through the store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ostraca_fabric.model.fabric_map import AgentRecord, Claim, EnclosureRecord, FabricMap, Grant
from ostraca_fabric.model.ids import (
    AgentId,
    EnclosureId,
    OwnerEpoch,
    PlacementEpoch,
    ShardId,
    StartId,
    TenantId,
)
from ostraca_fabric.model.overrides import Overrides
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.ports.records import RecordLock


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """Claim just made, or already standing."""

    epoch: OwnerEpoch
    grants: tuple[Grant, ...]
    """Unretired grants of the shard, by epoch. The last is the claimer's own, for this epoch."""

    @property
    def own(self) -> Grant:
        """Grant of the claimer."""
        return self.grants[-1]

    @property
    def earlier(self) -> tuple[Grant, ...]:
        """Grants of earlier owners, whose writes may still land."""
        return self.grants[:-1]


class Membership(Protocol):
    """Membership store.

    Every method, but no property, may raise MembershipError. The requested change may then be complete, may
    complete later, or may never happen. The effect of a completed method is visible in ``map`` on return.
    """

    @property
    def map(self) -> FabricMap:
        """Newest map seen."""

    @property
    def overrides(self) -> Overrides:
        """Newest overrides seen."""

    @property
    def volumes(self) -> tuple[VolumeRecord, ...]:
        """Newest volumes seen, the oldest first: a new tuple only after a change, as with ``overrides``."""

    @property
    def trouble(self) -> str:
        """Reason why the map may be incomplete or old, as a sentence without a full stop.

        Empty while the map is known to be complete and current. Never raises.
        """

    def changes(self) -> AsyncIterator[FabricMap]:
        """Yield the current map, then newer maps. Maps may be skipped, but never the newest."""

    def override_changes(self) -> AsyncIterator[Overrides]:
        """Yield the current overrides, then all overrides again after a change or an erasure.

        States may be skipped, but never the newest.
        """

    async def refresh_overrides(self) -> int:
        """Ask the store for the revision of the last override or erasure.

        On return, ``overrides`` and ``volume`` reflect all changes up to that revision.
        """

    async def refresh(self) -> None:
        """Ask the store for changes of enclosures, placements and volumes.

        On return, ``map`` and ``volumes`` reflect all earlier changes, except deletions that leave the
        placement unchanged.
        """

    async def join(self, agent: AgentRecord) -> None:
        """Announce an agent, or change its record.

        A record of the same id with another start id is replaced, and its claims end. Call again when the
        agent is missing from the map because its lease ran out. A changed record leaves the claims in place.
        """

    async def leave(self, agent: AgentId, start: StartId) -> None:
        """Withdraw an agent with all claims. No error if the agent is already gone."""

    async def confirm(self, agent: AgentId, start: StartId) -> bool:
        """Ask the store, without cached state, whether the agent's record stands.

        If so, every claim not given back by the agent stands as well.
        """

    async def put_enclosures(
        self,
        enclosures: Sequence[EnclosureRecord],
        *,
        removed: Collection[EnclosureId] = (),
        seen: Mapping[EnclosureId, EnclosureRecord | None] | None = None,
        under: RecordLock | None = None,
        force: bool = False,
    ) -> None:
        """Add or replace enclosures with their shards, and delete *removed*, in one step.

        A change of shards or weights makes one new placement epoch; the previous epoch is still looked up for
        a while. Owners give back claims of removed shards; grants stay.

        *seen* has the enclosures as read when the change was decided, None for absent. Raises ChangedError if
        any differs now, unless the store already has the wanted state. *under* is a hold (``ports.records``)
        required for the change: raises ChangedError if the hold has ended.

        Raises PlacementBusyError if the maximum number of placement epochs is still looked up; with *force*,
        the oldest epoch is dropped instead. Raises BlocksTooLargeError if a shard open to placement could not
        hold the largest block of some volume.
        """

    async def retire_placement(self, epoch: PlacementEpoch) -> None:
        """Stop lookups in an earlier placement epoch. No error if already retired."""

    async def claim(
        self, shard: ShardId, agent: AgentId, start: StartId, *, epoch_at_least: OwnerEpoch
    ) -> ClaimResult | None:
        """Make the agent the owner of an unowned shard.

        Return None if another agent owns the shard, or if the agent is not in the fabric.

        The epoch is above every earlier epoch of the shard and at least *epoch_at_least*. A process that
        claims its own shard again, with no owner in between, keeps epoch and grant. Exceptions: the epoch is
        below *epoch_at_least*, or the grant was closed. A new epoch begins with a grant of no segment.
        """

    async def grant(
        self,
        shard: ShardId,
        claim: Claim,
        segments: Sequence[int],
        *,
        retired: frozenset[OwnerEpoch] = frozenset(),
    ) -> bool:
        """Set *segments* as the only segments that this epoch may write.

        Grants of *retired* epochs are deleted. Return False, without a change, if *claim* does not stand, or
        if an unretired grant of another epoch has one of the segments.
        """

    async def close_grant(self, shard: ShardId, claim: Claim, in_doubt: Sequence[int]) -> None:
        """Record that the owner of this claim allocates no more space.

        All its transfers have ended. The grant keeps only the segments *in doubt*, where a failed or
        abandoned write may still land. No error if the grant or the claim is gone.
        """

    async def release(self, shard: ShardId, agent: AgentId, start: StartId) -> None:
        """Give a claim back. No error if the claim is not held."""

    async def volume(self, tenant: TenantId, name: str) -> VolumeRecord | None:
        """Return a volume's record, or None."""

    def volume_changes(self) -> AsyncIterator[tuple[VolumeRecord, ...]]:
        """Yield all volumes, the oldest first, and again after an addition or a change.

        States may be skipped, but never the newest.
        """

    async def create_volume(self, record: VolumeRecord) -> VolumeRecord:
        """Store the record unless the volume exists; return the stored record.

        Raises BlocksTooLargeError if a shard open to placement could not hold the volume's largest block.
        """

    async def erase_volume(self, seen: VolumeRecord) -> int:
        """Give a volume its next incarnation, unless the record differs from *seen*.

        Return the revision of the overrides after the erasure, which may be an earlier call's. Raises
        UsageError for a volume that is not erasable, and MembershipError for an absent volume.
        """
