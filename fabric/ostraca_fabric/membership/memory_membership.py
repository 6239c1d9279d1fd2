"""Membership in memory, for a fabric in a single process.

The rules are exactly the port's, so code tested here also works over etcd. No lease ever runs out: an agent
cannot crash separately from its process. The store ends with the process. Volume records must outlive the
process, so *keep* stores them before the caller gets an answer.

``MemoryStore`` has the rules over plain dictionaries. Each method is a transaction: complete, or an exception
without a change. No method waits, and no time passes: the caller reports the end of a lease by ``leave``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from ostraca_fabric.errors import MembershipError
from ostraca_fabric.membership.rules import (
    GRANTS_LOST,
    Placements,
    ShardGrants,
    check_lock,
    enclosures_after,
)
from ostraca_fabric.model.fabric_map import (
    AgentRecord,
    Claim,
    EnclosureRecord,
    FabricMap,
    check_blocks_fit,
)
from ostraca_fabric.model.ids import (
    AgentId,
    EnclosureId,
    FabricId,
    OwnerEpoch,
    PlacementEpoch,
    ShardId,
    StartId,
    TenantId,
)
from ostraca_fabric.model.overrides import Overrides
from ostraca_fabric.model.volume import VolumeRecord, check_erasable
from ostraca_fabric.ports.membership import ClaimResult
from ostraca_fabric.ports.records import RecordLock
from ostraca_fabric.runtime.tasks import changes_of

_Seen = TypeVar("_Seen")
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class Seen(NamedTuple):
    """State shown to watchers."""

    map: FabricMap
    volumes: Mapping[tuple[TenantId, str], VolumeRecord]
    overrides: Overrides


class MemoryStore:
    """Records of one fabric."""

    def __init__(
        self,
        fabric: FabricId,
        *,
        volumes: Iterable[VolumeRecord] = (),
        keep: Callable[[tuple[VolumeRecord, ...]], None] | None = None,
        volumes_max: int = 4096,
    ) -> None:
        """Start with *volumes* and no other record.

        *keep* stores all volume records after each addition or erasure, and may raise. At most *volumes_max*
        volumes are accepted: each uses memory permanently, and all are stored again with each new volume.
        """
        self.map = FabricMap(fabric, revision=1, placement_epoch=PlacementEpoch(1))
        self.volumes: Mapping[tuple[TenantId, str], VolumeRecord] = {
            (record.tenant, record.name): record for record in volumes
        }
        self.overrides = Overrides()
        self.stands: Callable[[RecordLock], bool] = lambda _: True
        """Predicate for holds, whose records are outside this store."""

        self._grants: dict[ShardId, ShardGrants] = {}
        self.keep = keep
        self.volumes_max = volumes_max

    @property
    def seen(self) -> Seen:
        """Current state shown to watchers."""
        return Seen(self.map, self.volumes, self.overrides)

    @property
    def grants(self) -> Mapping[ShardId, ShardGrants]:
        """Current grants of all shards ever claimed."""
        return dict(self._grants)

    def join(self, agent: AgentRecord) -> None:
        """Announce an agent; another start of the same id loses its claims."""
        known = self.map.agents.get(agent.id)
        is_restart = known is not None and known.start != agent.start
        claims = self._without_claims_of(agent.id) if is_restart else self.map.claims
        self._publish(agents={**self.map.agents, agent.id: agent}, claims=claims)

    def leave(self, agent: AgentId, start: StartId) -> None:
        """Withdraw an agent and its claims, on request or after the end of the lease."""
        if self.has(agent, start):
            agents = {name: record for name, record in self.map.agents.items() if name != agent}
            self._publish(agents=agents, claims=self._without_claims_of(agent))

    def has(self, agent: AgentId, start: StartId) -> bool:
        """Tell whether an agent's record stands."""
        known = self.map.agents.get(agent)
        return known is not None and known.start == start

    def put_enclosures(
        self,
        enclosures: Sequence[EnclosureRecord],
        *,
        removed: Collection[EnclosureId] = (),
        seen: Mapping[EnclosureId, EnclosureRecord | None] | None = None,
        under: RecordLock | None = None,
        force: bool = False,
    ) -> None:
        """Add, replace and remove enclosures."""
        before = self.map.enclosures
        after = enclosures_after(before, enclosures, removed=removed, seen=seen)
        if after != before and under is not None:
            check_lock(under, stands=self.stands(under))
        check_blocks_fit(self.volumes.values(), after.values())
        placements = Placements(self.map.placement_epoch, self.map.earlier_placements)
        placements = placements.after(before.values(), after.values(), force=force)
        self._publish(
            enclosures=after, placement_epoch=placements.epoch, earlier_placements=placements.earlier
        )

    def retire_placement(self, epoch: PlacementEpoch) -> None:
        """Stop lookups in an earlier placement epoch."""
        kept = tuple(record for record in self.map.earlier_placements if record.epoch != epoch)
        if kept != self.map.earlier_placements:
            self._publish(earlier_placements=kept)

    def claim(
        self, shard: ShardId, agent: AgentId, start: StartId, *, epoch_at_least: OwnerEpoch
    ) -> ClaimResult | None:
        """Make the agent the owner of an unowned shard."""
        held = self.map.claims.get(shard)
        if held is not None:
            is_ours = (held.agent, held.start) == (agent, start)
            return ClaimResult(held.epoch, self._grants[shard].unretired) if is_ours else None
        if not self.has(agent, start):
            return None
        kept = self._grants.get(shard, ShardGrants())
        kept = kept.claimed(agent, start, epoch_at_least=epoch_at_least)
        self._grants[shard] = kept
        self._publish(claims={**self.map.claims, shard: Claim(agent, start, kept.epoch)})
        return ClaimResult(kept.epoch, kept.unretired)

    def grant(
        self,
        shard: ShardId,
        claim: Claim,
        segments: Sequence[int],
        *,
        retired: frozenset[OwnerEpoch] = frozenset(),
    ) -> bool:
        """Set *segments* as the only segments that this epoch may write."""
        if self.map.claims.get(shard) != claim:
            return False
        granted = self._grants[shard].granted(claim, segments, retired=retired)
        if granted is not None:
            self._grants[shard] = granted
        return granted is not None

    def close_grant(self, shard: ShardId, claim: Claim, in_doubt: Sequence[int]) -> None:
        """Record that no transfer is under way under this grant."""
        if (kept := self._grants.get(shard)) is not None:
            self._grants[shard] = kept.closed(claim, in_doubt)

    def lose_grants(self, shards: Iterable[ShardId]) -> None:
        """Replace the grants of these shards by a grant over the whole shard, as after a loss."""
        self._grants.update(dict.fromkeys(shards, GRANTS_LOST))

    def release(self, shard: ShardId, agent: AgentId, start: StartId) -> None:
        """Give a claim back."""
        held = self.map.claims.get(shard)
        if held is not None and (held.agent, held.start) == (agent, start):
            self._publish(claims={name: claim for name, claim in self.map.claims.items() if name != shard})

    def create_volume(self, record: VolumeRecord) -> VolumeRecord:
        """Store the record unless the volume exists; return the stored record."""
        at = (record.tenant, record.name)
        if at not in self.volumes:
            if len(self.volumes) >= self.volumes_max:
                raise MembershipError(
                    f"the fabric has {self.volumes_max} volumes, the maximum: use an existing volume"
                )
            check_blocks_fit([record], self.map.enclosures.values())
            after = {**self.volumes, at: record}
            if self.keep is not None:
                self.keep(tuple(after.values()))
            self.volumes = after
        return self.volumes[at]

    def rule(self, overrides: Overrides) -> int:
        """Replace the overrides; return their revision."""
        self.overrides = replace(overrides, revision=self.overrides.revision + 1)
        return self.overrides.revision

    def erase_volume(self, seen: VolumeRecord) -> int:
        """Give a volume its next incarnation, unless the record differs from *seen*."""
        check_erasable(seen)
        at = (seen.tenant, seen.name)
        if at not in self.volumes:
            raise MembershipError(f"there is no volume {seen.name!r} of tenant {seen.tenant!r}")
        if self.volumes[at] != seen:
            return self.overrides.revision
        after = {**self.volumes, at: seen.erased()}
        if self.keep is not None:
            self.keep(tuple(after.values()))
        self.volumes = after
        return self.rule(self.overrides)

    def _without_claims_of(self, agent: AgentId) -> dict[ShardId, Claim]:
        return {shard: claim for shard, claim in self.map.claims.items() if claim.agent != agent}

    def _publish(self, **changed: Any) -> None:  # noqa: ANN401 (fields of the map)
        self.map = replace(self.map, revision=self.map.revision + 1, **changed)


def _applied(
    method: Callable[Concatenate[MemoryStore, _Arguments], _Result],
) -> Callable[Concatenate[MemoryMembership, _Arguments], Coroutine[Any, Any, _Result]]:
    """Return a method that calls the store's, and wakes watchers."""

    async def apply(self: MemoryMembership, /, *args: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        result = method(self.store, *args, **named)
        self._say_changed()
        return result

    return apply


class MemoryMembership:
    """Implementation of ``ports.membership.Membership`` for agents on one event loop."""

    def __init__(
        self,
        fabric: FabricId,
        *,
        volumes: Iterable[VolumeRecord] = (),
        keep: Callable[[tuple[VolumeRecord, ...]], None] | None = None,
        volumes_max: int = 4096,
    ) -> None:
        """Start with a new ``MemoryStore``; same arguments."""
        self.store = MemoryStore(fabric, volumes=volumes, keep=keep, volumes_max=volumes_max)
        self._changed = asyncio.Event()
        self._listed: tuple[object, tuple[VolumeRecord, ...]] = None, ()
        """Volumes of the store when ``volumes`` was last read, and the tuple returned."""

    @property
    def map(self) -> FabricMap:
        """The current map."""
        return self.store.map

    @property
    def overrides(self) -> Overrides:
        """The current overrides."""
        return self.store.overrides

    @property
    def volumes(self) -> tuple[VolumeRecord, ...]:
        """All volumes, the oldest first."""
        if self._listed[0] is not self.store.volumes:
            self._listed = self.store.volumes, tuple(self.store.volumes.values())
        return self._listed[1]

    @property
    def trouble(self) -> str:
        """Always empty: the map is the store's own."""
        return ""

    def changes(self) -> AsyncIterator[FabricMap]:
        """Yield the current map, then newer maps, never skipping the newest."""
        return self._changes_of(lambda: self.map)

    def override_changes(self) -> AsyncIterator[Overrides]:
        """Yield the overrides, and again after a change or an erasure."""
        return self._changes_of(lambda: self.overrides)

    async def volume_changes(self) -> AsyncIterator[tuple[VolumeRecord, ...]]:
        """Yield all volumes, the oldest first, and again after a change."""
        async for volumes in self._changes_of(lambda: self.volumes):
            yield volumes

    async def refresh_overrides(self) -> int:
        """Return the revision of the overrides; all are visible at once."""
        return self.store.overrides.revision

    async def refresh(self) -> None:
        """Return at once: all changes are visible."""

    async def volume(self, tenant: TenantId, name: str) -> VolumeRecord | None:
        """Return a volume's record."""
        return self.store.volumes.get((tenant, name))

    def rule(self, overrides: Overrides) -> int:
        """Replace the overrides; return their revision."""
        revision = self.store.rule(overrides)
        self._say_changed()
        return revision

    join = _applied(MemoryStore.join)
    leave = _applied(MemoryStore.leave)
    confirm = _applied(MemoryStore.has)
    put_enclosures = _applied(MemoryStore.put_enclosures)
    retire_placement = _applied(MemoryStore.retire_placement)
    claim = _applied(MemoryStore.claim)
    grant = _applied(MemoryStore.grant)
    close_grant = _applied(MemoryStore.close_grant)
    release = _applied(MemoryStore.release)
    create_volume = _applied(MemoryStore.create_volume)
    erase_volume = _applied(MemoryStore.erase_volume)

    def _changes_of(self, newest: Callable[[], _Seen]) -> AsyncIterator[_Seen]:
        return changes_of(newest, lambda: self._changed)

    def _say_changed(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
