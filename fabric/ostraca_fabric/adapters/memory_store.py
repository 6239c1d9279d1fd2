"""The rules of a membership store, over plain dictionaries: what every store of the port must keep.

Each method is one transaction: it is done whole, or raises with nothing done. Nothing here waits, and no time
passes: whether a lease has run out is somebody else's business, and said by ``leave``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ostraca_fabric.adapters.membership_rules import (
    GRANTS_LOST,
    Placements,
    ShardGrants,
    check_stands,
    enclosures_after,
)
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.fabric_map import Claim, FabricMap, PlacementRecord, check_blocks_fit
from ostraca_fabric.ids import PlacementEpoch
from ostraca_fabric.ports.membership import Claimed
from ostraca_fabric.rulings import Rulings
from ostraca_fabric.volume import check_erasable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ostraca_fabric.fabric_map import AgentRecord, EnclosureRecord
    from ostraca_fabric.ids import AgentId, EnclosureId, FabricId, OwnerEpoch, ShardId, StartId, TenantId
    from ostraca_fabric.ports.records import Hold
    from ostraca_fabric.volume import VolumeRecord


class Seen(NamedTuple):
    """What somebody who watches is told."""

    map: FabricMap
    volumes: Mapping[tuple[TenantId, str], VolumeRecord]
    rulings: Rulings


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
        self.rulings = Rulings()
        self.stands: Callable[[Hold], bool] = lambda _: True
        """Whether a hold stands, of whose records this store knows nothing."""

        self._grants: dict[ShardId, ShardGrants] = {}
        self.keep = keep
        self.volumes_max = volumes_max

    @property
    def seen(self) -> Seen:
        """All that is told of it, as it is now."""
        return Seen(self.map, self.volumes, self.rulings)

    @property
    def grants(self) -> Mapping[ShardId, ShardGrants]:
        """What is kept of shards that were ever claimed, as it is now."""
        return dict(self._grants)

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

    def put_enclosures(
        self,
        enclosures: Sequence[EnclosureRecord],
        *,
        removed: Collection[EnclosureId] = (),
        seen: Mapping[EnclosureId, EnclosureRecord | None] | None = None,
        under: Hold | None = None,
        force: bool = False,
    ) -> None:
        """Add, replace and remove enclosures."""
        before = self.map.enclosures
        after = enclosures_after(before, enclosures, removed=removed, seen=seen)
        if after != before and under is not None:
            check_stands(under, stands=self.stands(under))
        check_blocks_fit(self.volumes.values(), after.values())
        placements = Placements(self.map.placement_epoch, self.map.earlier_placements)
        placements = placements.after(before.values(), after.values(), force=force)
        self._publish(
            enclosures=after, placement_epoch=placements.epoch, earlier_placements=placements.earlier
        )

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
        kept = self._grants.get(shard, ShardGrants())
        kept = kept.claimed(agent, start, epoch_at_least=epoch_at_least)
        self._grants[shard] = kept
        self._publish(claims={**self.map.claims, shard: Claim(agent, start, kept.epoch)})
        return Claimed(kept.epoch, kept.unretired)

    def grant(
        self, shard: ShardId, claim: Claim, segments: Sequence[int], *, retired: frozenset[OwnerEpoch]
    ) -> bool:
        """Make *segments* all that this owner epoch may write."""
        if self.map.claims.get(shard) != claim:
            return False
        granted = self._grants[shard].granted(claim, segments, retired=retired)
        if granted is not None:
            self._grants[shard] = granted
        return granted is not None

    def close_grant(self, shard: ShardId, claim: Claim, in_doubt: Sequence[int]) -> None:
        """Say that nothing is under way under this grant any more."""
        if (kept := self._grants.get(shard)) is not None:
            self._grants[shard] = kept.closed(claim, in_doubt)

    def lose_grants(self, shards: Iterable[ShardId]) -> None:
        """Know of these shards only that others have owned them."""
        self._grants.update(dict.fromkeys(shards, GRANTS_LOST))

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
            check_blocks_fit([record], self.map.enclosures.values())
            after = {**self.volumes, at: record}
            if self.keep is not None:
                self.keep(tuple(after.values()))
            self.volumes = after
        return self.volumes[at]

    def rule(self, rulings: Rulings) -> int:
        """Let these be the rulings; return their revision."""
        self.rulings = replace(rulings, revision=self.rulings.revision + 1)
        return self.rulings.revision

    def erase_volume(self, seen: VolumeRecord) -> int:
        """Give a volume its next incarnation, unless that was done before."""
        check_erasable(seen)
        at = (seen.tenant, seen.name)
        if at not in self.volumes:
            raise MembershipError(f"there is no volume {seen.name!r} of tenant {seen.tenant!r}")
        if self.volumes[at] != seen:
            return self.rulings.revision
        after = {**self.volumes, at: seen.erased()}
        if self.keep is not None:
            self.keep(tuple(after.values()))
        self.volumes = after
        return self.rule(self.rulings)

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
