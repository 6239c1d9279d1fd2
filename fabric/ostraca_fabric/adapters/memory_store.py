"""The rules of a membership store, over plain dictionaries: what every store of the port must keep.

Each method is one transaction: it is done whole, or raises with nothing done. Nothing here waits, and no time
passes: whether a lease has run out is somebody else's business, and said by ``leave``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ostraca_fabric.errors import MembershipError, PlacementBusyError
from ostraca_fabric.fabric_map import (
    EARLIER_PLACEMENTS_MAX,
    Claim,
    FabricMap,
    Grant,
    PlacementRecord,
    weights_of,
)
from ostraca_fabric.ids import OwnerEpoch, PlacementEpoch
from ostraca_fabric.ports.membership import Claimed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ostraca_fabric.fabric_map import AgentRecord, EnclosureRecord
    from ostraca_fabric.ids import AgentId, EnclosureId, FabricId, ShardId, StartId, TenantId
    from ostraca_fabric.volume import VolumeRecord


@dataclass(frozen=True, slots=True)
class _Grants:
    """What is kept of a shard while nobody owns it, too."""

    epoch: OwnerEpoch = OwnerEpoch(0)  # noqa: RUF009 (a NewType of int)
    """The highest that was ever given."""

    unretired: tuple[Grant, ...] = ()
    """By epoch."""

    def of(self, claim: Claim) -> Grant | None:
        """Return the grant of an owner epoch, which may be gone."""
        return next((grant for grant in self.unretired if grant.epoch == claim.epoch), None)


class MemoryStore:
    """One fabric's records."""

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
        self.map = FabricMap(fabric, revision=1, placement_epoch=PlacementEpoch(1))
        self.volumes: Mapping[tuple[TenantId, str], VolumeRecord] = {
            (record.tenant, record.name): record for record in volumes
        }
        self._grants: dict[ShardId, _Grants] = {}
        self.keep = keep
        self.volumes_max = volumes_max

    def join(self, agent: AgentRecord) -> None:
        """Announce an agent; one of the same id with another start id loses its claims."""
        known = self.map.agents.get(agent.id)
        claims = self.map.claims
        if known is not None and known.start != agent.start:
            claims = self._without_claims_of(agent.id)
        self._publish(agents={**self.map.agents, agent.id: agent}, claims=claims)

    def leave(self, agent: AgentId, start: StartId) -> None:
        """Withdraw an agent and its claims, as it asks for or as its lease has run out."""
        if self.has(agent, start):
            agents = {name: record for name, record in self.map.agents.items() if name != agent}
            self._publish(agents=agents, claims=self._without_claims_of(agent))

    def has(self, agent: AgentId, start: StartId) -> bool:
        """Say whether an agent's record stands."""
        known = self.map.agents.get(agent)
        return known is not None and known.start == start

    def put_enclosures(self, enclosures: Sequence[EnclosureRecord], *, force: bool = False) -> None:
        """Add or replace enclosures."""
        before = self.map.enclosures
        after = {**before, **{enclosure.id: enclosure for enclosure in enclosures}}
        weights = weights_of(before.values())
        epoch, earlier = self.map.placement_epoch, self.map.earlier_placements
        if weights != weights_of(after.values()):
            if weights:
                earlier = (PlacementRecord(epoch, weights), *earlier)
            if len(earlier) > EARLIER_PLACEMENTS_MAX and not force:
                raise PlacementBusyError(
                    f"blocks of {len(earlier)} placement epochs are still looked up, which is the most: wait "
                    f"until epoch {earlier[-1].epoch} is passed over, or force it, and its blocks are lost"
                )
            epoch, earlier = PlacementEpoch(epoch + 1), earlier[:EARLIER_PLACEMENTS_MAX]
        self._publish(enclosures=after, placement_epoch=epoch, earlier_placements=earlier)

    def retire_placement(self, epoch: PlacementEpoch) -> None:
        """Let an earlier placement epoch be asked no longer."""
        kept = tuple(record for record in self.map.earlier_placements if record.epoch != epoch)
        if kept != self.map.earlier_placements:
            self._publish(earlier_placements=kept)

    def claim(
        self, shard: ShardId, agent: AgentId, start: StartId, *, epoch_at_least: OwnerEpoch
    ) -> Claimed | None:
        """Make the agent the shard's owner if it has none."""
        held = self.map.claims.get(shard)
        if held is not None:
            is_ours = (held.agent, held.start) == (agent, start)
            return Claimed(held.epoch, self._grants[shard].unretired) if is_ours else None
        if not self.has(agent, start):
            return None
        kept = self._grants.get(shard, _Grants())
        own = kept.unretired[-1] if kept.unretired else None
        if own is None or not _may_go_on(own, kept.epoch, agent, start, epoch_at_least):
            epoch = OwnerEpoch(max(kept.epoch + 1, epoch_at_least))
            earlier = tuple(grant for grant in kept.unretired if grant.segments)
            kept = _Grants(epoch, (*earlier, Grant(epoch, agent, start)))
            self._grants[shard] = kept
        self._publish(claims={**self.map.claims, shard: Claim(agent, start, kept.epoch)})
        return Claimed(kept.epoch, kept.unretired)

    def grant(
        self, shard: ShardId, claim: Claim, segments: Sequence[int], *, retired: frozenset[OwnerEpoch]
    ) -> bool:
        """Make *segments* all that this owner epoch may write."""
        kept = self._grants.get(shard, _Grants())
        own = kept.of(claim)
        if self.map.claims.get(shard) != claim or own is None:
            return False
        others = tuple(
            grant for grant in kept.unretired if grant.epoch != claim.epoch and grant.epoch not in retired
        )
        if any(not set(segments).isdisjoint(grant.segments) for grant in others):
            return False
        granted = replace(own, segments=tuple(sorted(segments)))
        self._grants[shard] = replace(kept, unretired=(*others, granted))
        return True

    def close_grant(self, shard: ShardId, claim: Claim) -> None:
        """Say that nothing is under way under this grant any more."""
        kept = self._grants.get(shard, _Grants())
        own = kept.of(claim)
        if own is not None and (own.agent, own.start) == (claim.agent, claim.start):
            grants = (replace(each, is_closed=True) if each is own else each for each in kept.unretired)
            self._grants[shard] = replace(kept, unretired=tuple(grants))

    def release(self, shard: ShardId, agent: AgentId, start: StartId) -> None:
        """Give a claim back."""
        held = self.map.claims.get(shard)
        if held is not None and (held.agent, held.start) == (agent, start):
            self._publish(claims={name: claim for name, claim in self.map.claims.items() if name != shard})

    def create_volume(self, record: VolumeRecord) -> VolumeRecord:
        """Store the record unless the volume exists; return what is stored."""
        at = (record.tenant, record.name)
        if at not in self.volumes:
            if len(self.volumes) >= self.volumes_max:
                message = (
                    f"the fabric has {self.volumes_max} volumes, which is the most it keeps: use one of them"
                )
                raise MembershipError(message)
            after = {**self.volumes, at: record}
            if self.keep is not None:
                self.keep(tuple(after.values()))
            self.volumes = after
        return self.volumes[at]

    def _without_claims_of(self, agent: AgentId) -> dict[ShardId, Claim]:
        return {shard: claim for shard, claim in self.map.claims.items() if claim.agent != agent}

    def _publish(
        self,
        *,
        agents: Mapping[AgentId, AgentRecord] | None = None,
        enclosures: Mapping[EnclosureId, EnclosureRecord] | None = None,
        claims: Mapping[ShardId, Claim] | None = None,
        placement_epoch: PlacementEpoch | None = None,
        earlier_placements: tuple[PlacementRecord, ...] | None = None,
    ) -> None:
        before = self.map
        self.map = replace(
            before,
            revision=before.revision + 1,
            agents=before.agents if agents is None else agents,
            enclosures=before.enclosures if enclosures is None else enclosures,
            claims=before.claims if claims is None else claims,
            placement_epoch=before.placement_epoch if placement_epoch is None else placement_epoch,
            earlier_placements=before.earlier_placements
            if earlier_placements is None
            else earlier_placements,
        )


def _may_go_on(
    grant: Grant, newest: OwnerEpoch, agent: AgentId, start: StartId, epoch_at_least: OwnerEpoch
) -> bool:
    """Say whether a process that claims a shard had it last, and goes on where it was."""
    is_last = grant.epoch == newest and (grant.agent, grant.start) == (agent, start)
    return is_last and not grant.is_closed and grant.epoch >= epoch_at_least
