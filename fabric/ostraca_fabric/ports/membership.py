"""Who is in the fabric: agents, enclosures with their shards, volumes, which agent owns which shard, and what
operators have decided.

The store is etcd in a pod and memory in ``ostraca up``. It is never on the data path: agents work from the
last map.

An agent's record is bound to a *lease*, which its adapter keeps alive until ``leave``, and every claim of the
agent to the same lease: they live and end together. A claim is deleted by its holder or with the lease, and
by nobody else; so one look at the agent's own record (``confirm``) tells that all of its claims stand. Grants
are bound to nothing: they outlive their holders until a successor retires them.

Times are not part of it: nobody compares clocks through the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from ostraca_fabric.fabric_map import AgentRecord, Claim, EnclosureRecord, FabricMap, Grant
    from ostraca_fabric.ids import (
        AgentId,
        EnclosureId,
        OwnerEpoch,
        PlacementEpoch,
        ShardId,
        StartId,
        TenantId,
    )
    from ostraca_fabric.ports.records import Hold
    from ostraca_fabric.rulings import Rulings
    from ostraca_fabric.volume import VolumeRecord


@dataclass(frozen=True, slots=True)
class Claimed:
    """A claim that was made, or stood already."""

    epoch: OwnerEpoch
    grants: tuple[Grant, ...]
    """The shard's unretired grants, by epoch. The last is the claimer's own, of this epoch."""

    @property
    def own(self) -> Grant:
        """The claimer's own grant."""
        return self.grants[-1]

    @property
    def earlier(self) -> tuple[Grant, ...]:
        """Grants of owners before, under which something may still land."""
        return self.grants[:-1]


class Membership(Protocol):
    """The membership store. Every method, and no property, may raise MembershipError: then what was asked for
    may have been done, or be done yet, or not at all. What a method has done shows in ``map`` when it
    returns.
    """

    @property
    def map(self) -> FabricMap:
        """The newest map seen."""

    @property
    def rulings(self) -> Rulings:
        """The newest rulings seen."""

    @property
    def trouble(self) -> str:
        """Why the map may lack something, or be old, in a sentence without its end; empty while it is known
        to be whole and new. Never raises.
        """

    def changes(self) -> AsyncIterator[FabricMap]:
        """Yield the current map, then each newer one. Maps may be skipped, the newest never is."""

    def ruling_changes(self) -> AsyncIterator[Rulings]:
        """Yield the current rulings, then all again when one has changed, or a volume was erased. States may
        be skipped, the newest never is.
        """

    async def hear_rulings(self) -> int:
        """Ask the store itself for what was ruled and erased last: return its revision, once all up to it
        shows in ``rulings`` and in what ``volume`` says.
        """

    async def join(self, agent: AgentRecord) -> None:
        """Announce an agent; a record of the same id with another start id is replaced, and its claims
        end. Call it again when the agent is no longer in the map: its lease has run out; or to say something
        else of itself, which leaves its claims as they are.
        """

    async def leave(self, agent: AgentId, start: StartId) -> None:
        """Withdraw an agent with all its claims. Not an error when it is gone."""

    async def confirm(self, agent: AgentId, start: StartId) -> bool:
        """Ask the store itself, and not what it said earlier, whether the agent's record stands, and with it
        every claim that the agent has not given back.
        """

    async def put_enclosures(
        self,
        enclosures: Sequence[EnclosureRecord],
        *,
        removed: Collection[EnclosureId] = (),
        seen: Mapping[EnclosureId, EnclosureRecord | None] | None = None,
        under: Hold | None = None,
        force: bool = False,
    ) -> None:
        """Add or replace enclosures with their shards, and take those *removed* out of the map, all at once.
        A change of shards or weights makes one new placement epoch; the one before is asked for a while
        longer. Claims of shards that are gone are given back by who holds them; grants stay.

        *seen* says what enclosures were when the change was decided, None of one that was not there: raises
        ChangedError when one of them is not so any more, unless all is as it is to be. *under* is a hold
        (``ports.records``) that must stand for anything to change: raises ChangedError when it does not.

        Raises PlacementBusyError when as many epochs as may be are still asked, and this would be one more;
        with *force* the oldest is asked no longer. Raises BlocksTooLargeError when a shard that something is
        to be placed on could not hold the largest block of some volume.
        """

    async def retire_placement(self, epoch: PlacementEpoch) -> None:
        """Let an earlier placement epoch be asked no longer. Not an error when it is not."""

    async def claim(
        self, shard: ShardId, agent: AgentId, start: StartId, *, epoch_at_least: OwnerEpoch
    ) -> Claimed | None:
        """Make the agent the shard's owner if it has none. None when another has it, or the agent is not in
        the fabric.

        The epoch is above every earlier epoch of the shard and at least *epoch_at_least*. The same process
        claiming what it owns, or what it owned last and nobody since, keeps its epoch and its grant, unless
        that is below *epoch_at_least* or was closed. Otherwise it begins with a grant of no segment.
        """

    async def grant(
        self,
        shard: ShardId,
        claim: Claim,
        segments: Sequence[int],
        *,
        retired: frozenset[OwnerEpoch] = frozenset(),
    ) -> bool:
        """Make *segments* all that this owner epoch may write, and forget the grants of *retired* epochs.

        Say whether it was done: not when *claim* does not stand, and not when one of the segments is in an
        unretired grant of another epoch.
        """

    async def close_grant(self, shard: ShardId, claim: Claim, in_doubt: Sequence[int]) -> None:
        """Say that the owner of this claim hands out nothing any more, and that all it handed out has ended.
        Of its grant the segments *in doubt* are left: a write that has failed or was abandoned may land there
        yet. Not an error when the grant is gone, or the claim.
        """

    async def release(self, shard: ShardId, agent: AgentId, start: StartId) -> None:
        """Give a claim back. Not an error when it is not held."""

    async def volume(self, tenant: TenantId, name: str) -> VolumeRecord | None:
        """Return a volume's record."""

    def volume_changes(self) -> AsyncIterator[tuple[VolumeRecord, ...]]:
        """Yield all volumes, the oldest first; then all again when one has been added or changed. States may
        be skipped, the newest never is.
        """

    async def create_volume(self, record: VolumeRecord) -> VolumeRecord:
        """Store the record unless the volume exists; return what is stored.

        Raises BlocksTooLargeError when a shard that something is placed on could not hold its largest block.
        """

    async def erase_volume(self, seen: VolumeRecord) -> int:
        """Give a volume its next incarnation, unless its record is not as it was *seen* any more. Return the
        revision of the rulings by which that was done: not this call's where it was done before.

        Raises UsageError for a volume that is not erasable, and MembershipError for one that is not there.
        """
