"""Implementation of ``ports.membership.Membership`` in etcd.

Each change is a transaction that compares the records of its decision (``store``). The map comes from a
watch; a method returns once the watch has reported its change. A separate thread renews leases.

A claim is bound to the lease of its agent's record. Both end when the agent leaves, when the lease runs out,
or when another start of the agent joins and revokes the lease. A claim requires that the shard is unclaimed,
and that the agent's record and the grants are unchanged since the read.

While etcd is away, ``map`` stays unchanged, methods raise MembershipError after the timeout, and ``trouble``
describes the problem.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Self, TypeVar

from ostraca_fabric.errors import LeaseEndedError, MembershipError
from ostraca_fabric.membership.etcd.client.client import EtcdClient, delete, put
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.follower import Follower
from ostraca_fabric.membership.etcd.lease import EtcdLease, LeaseKeeper
from ostraca_fabric.membership.etcd.schema import records
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys
from ostraca_fabric.membership.etcd.schema.view import FIRST_PLACEMENT, View
from ostraca_fabric.membership.etcd.store import Decision, EtcdStore, Read
from ostraca_fabric.membership.rules import Placements, ShardGrants, check_lock, enclosures_after
from ostraca_fabric.model.fabric_map import AgentRecord, Claim, EnclosureRecord, FabricMap, check_blocks_fit
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
from ostraca_fabric.model.overrides import OVERRIDES_MARKER, Overrides
from ostraca_fabric.model.volume import VolumeRecord, check_erasable
from ostraca_fabric.policies.backoff import Dice
from ostraca_fabric.ports.membership import ClaimResult
from ostraca_fabric.ports.records import RecordLock
from ostraca_fabric.runtime.tasks import changes_of

_Seen = TypeVar("_Seen")

log = logging.getLogger(__name__)

LEASE_TTL_S = 5.0
VOLUMES_MAX = 4096


class EtcdMembership:
    """Fabric as seen from one process. Create with ``open``, then ``close``."""

    def __init__(
        self,
        fabric: FabricId,
        settings: EtcdSettings,
        *,
        keys: EtcdKeys,
        dice: Dice,
        key_check: str,
        has_joined: bool,
        lease_ttl_s: float,
        volumes_max: int,
    ) -> None:
        """Set all members; call ``open`` instead."""
        self._keys = keys
        self._lease_ttl_s = lease_ttl_s
        self._volumes_max = volumes_max
        self._client = EtcdClient(settings, dice=dice)
        self._store = EtcdStore(self._client, keys, fabric, key_check, has_joined=has_joined)
        self._keeper = LeaseKeeper(settings, dice=dice, shutdown_budget=self._client.shutdown_budget)
        self._leases: dict[AgentId, tuple[StartId, EtcdLease]] = {}
        self.addresses: dict[AgentId, tuple[str, ...]] = {}
        """Addresses of each agent in the newest map, always in this dictionary."""

        self._follower = Follower(self._client, self._store, keys, fabric, self._publish)
        self._publish(self._follower.view)

    @classmethod
    async def open(  # noqa: PLR0913 (what tells a fabric from others)
        cls,
        fabric: FabricId,
        settings: EtcdSettings,
        *,
        dice: Dice,
        keys: EtcdKeys,
        begin: bool = False,
        key_check: str = "",
        has_joined: bool = False,
        lease_ttl_s: float = LEASE_TTL_S,
        volumes_max: int = VOLUMES_MAX,
    ) -> Self:
        """Return the membership of the fabric at *keys*; *begin* creates a missing fabric.

        *key_check* (``keys.fabric_key_check``) refuses a fabric created with another key. *has_joined* tells
        that the fabric existed for this agent before, so that errors do not suggest to create it.

        Agents' records live for *lease_ttl_s* after etcd last heard from the agents; etcd raises the time to
        that of an election. Raises StoreAwayError if etcd is unreachable. Raises MembershipError, with the
        remedy, for an absent fabric, another fabric, or a newer release's.
        """
        self = cls(
            fabric,
            settings,
            keys=keys,
            dice=dice,
            key_check=key_check,
            has_joined=has_joined,
            lease_ttl_s=lease_ttl_s,
            volumes_max=volumes_max,
        )
        try:
            if begin:
                await self._store.begin()
            read = await self._store.read()
            self._follower.start()
            await self._follower.until_seen(read.revision)
        except BaseException:
            await self.close()
            raise
        return self

    def hurry(self) -> None:
        """Limit waiting for an unreachable etcd to a single operation, before shutdown.

        Later operations fail at once with StoreAwayError.
        """
        self._client.shutdown_budget.shorten()

    async def close(self) -> None:
        """Stop the watch and the renewals. Agents that have not left end with their leases."""
        await self._follower.stop()
        await asyncio.to_thread(self._keeper.close)
        await self._client.close()

    @property
    def heard_s_ago(self) -> float:
        """Seconds since the watch last heard from etcd; normally a few at most."""
        return self._follower.heard_s_ago

    @property
    def trouble(self) -> str:
        """Problem with etcd or its content, as a sentence; empty without a problem."""
        return self._follower.trouble

    def changes(self) -> AsyncIterator[FabricMap]:
        """Yield the current map, then newer maps, never skipping the newest."""
        return self._changes_of(lambda: self.map)

    def override_changes(self) -> AsyncIterator[Overrides]:
        """Yield the overrides, and again after a change or an erasure."""
        return self._changes_of(lambda: self.overrides)

    async def refresh_overrides(self) -> int:
        """Ask etcd for the last override, and wait until the watch has reported the change."""
        read = await self._store.read(self._keys.overrides_marker())
        revision = read.modified(self._keys.overrides_marker())
        await self._follower.until_seen(revision)
        return revision

    async def refresh(self) -> None:
        """Ask etcd for the last changes, and wait until the watch has reported them."""
        keys = self._keys
        prefixes = [keys.enclosures(), keys.earlier_placements(), keys.volumes()]
        read = await self._store.read(keys.placement(), prefixes=prefixes)
        await self._follower.until_seen(max(entry.modified for entry in read.entries.values()))

    async def join(self, agent: AgentRecord) -> None:
        """Announce an agent, under a lease renewed until the agent leaves."""
        key, value = self._keys.agent(agent.id), records.encode_agent(agent)
        tries = self._store.tries(f"announce {agent.id}")
        while True:
            read = await self._store.read(key)
            lease = await self._lease_of(agent)
            known = read.entries.get(key)
            if known is not None and (known.lease, known.value) == (lease.number, value):
                return await self._follower.until_seen(known.modified)
            if known is None or known.lease == lease.number:
                with contextlib.suppress(LeaseEndedError):  # the next attempt begins a new lease
                    done = await self._store.write(read, [put(key, value, lease.number)], unchanged=[key])
                    if done is not None:
                        return await self._follower.until_seen(done)
            else:  # another start's record, or ours under a lease lost meanwhile
                log.warning("%s joins again: claims under the previous lease are given up", agent.id)
                await self._keeper.end(known.lease)
            await tries.again()

    async def leave(self, agent: AgentId, start: StartId) -> None:
        """Withdraw an agent with all claims, by ending its lease."""
        key = self._keys.agent(agent)
        read = await self._store.read(key)
        if _has(read, key, start):
            await self._keeper.end(read.entries[key].lease)
        if agent in self._leases and self._leases[agent][0] == start:
            await self._keeper.end(self._leases.pop(agent)[1].number)
        await self._follower.until(
            lambda: (known := self.map.agents.get(agent)) is None or known.start != start
        )

    async def confirm(self, agent: AgentId, start: StartId) -> bool:
        """Ask etcd whether an agent's record stands."""
        return _has(await self._store.read(self._keys.agent(agent)), self._keys.agent(agent), start)

    async def put_enclosures(
        self,
        enclosures: Sequence[EnclosureRecord],
        *,
        removed: Collection[EnclosureId] = (),
        seen: Mapping[EnclosureId, EnclosureRecord | None] | None = None,
        under: RecordLock | None = None,
        force: bool = False,
    ) -> None:
        """Add, replace and remove enclosures.

        The placement epoch rises if shards or weights change.
        """
        keys = self._keys
        tries = self._store.tries("put enclosures")
        while True:
            held = [] if under is None else [keys.record(under.key)]
            read = await self._store.read(
                keys.placement(),
                *held,
                prefixes=[keys.enclosures(), keys.earlier_placements(), keys.volumes()],
            )
            before = _placements(read, keys)
            found = {entry.key: entry.value for entry in read.below(keys.enclosures())}
            known = {
                record.id: record
                for key, value in found.items()
                for record in [records.decode_at(key, value, records.decode_enclosure)]
            }
            wanted = enclosures_after(known, enclosures, removed=removed, seen=seen)
            volumes = records.decode_readable(read.below(keys.volumes()), records.decode_volume)
            check_blocks_fit(volumes, wanted.values())
            after = before.after(known.values(), wanted.values(), force=force)
            changes = [
                put(keys.enclosure(each.id), records.encode_enclosure(each))
                for each in enclosures
                if known.get(each.id) != each and each.id in wanted
            ]
            changes += [delete(keys.enclosure(each)) for each in known if each not in wanted]
            if after != before:
                changes.append(put(keys.placement(), records.encode_placement(after.epoch)))
            changes += [
                put(keys.earlier_placement(each.epoch), records.encode_earlier_placement(each))
                for each in after.earlier
                if each not in before.earlier
            ]
            changes += [
                delete(keys.earlier_placement(each.epoch))
                for each in before.earlier
                if each not in after.earlier
            ]
            if not changes:
                return await self._follower.until_seen(max(entry.modified for entry in read.entries.values()))
            if under is not None:
                check_lock(under, stands=read.modified(held[0]) == under.revision)
            touched = {*(each.id for each in enclosures), *removed, *(seen or ())}
            done = await self._store.write(
                read,
                changes,
                unchanged=[keys.placement(), *held, *map(keys.enclosure, sorted(touched))],
                unchanged_below=[keys.volumes()],
            )
            if done is not None:
                return await self._follower.until_seen(done)
            await tries.again()

    async def retire_placement(self, epoch: PlacementEpoch) -> None:
        """Stop lookups in an earlier placement epoch."""
        key = self._keys.earlier_placement(epoch)
        await self._store.change(
            f"retire placement epoch {epoch}",
            lambda read: (None, [delete(key)] if key in read.entries else []),
            key,
        )
        await self._follower.until(
            lambda: all(record.epoch != epoch for record in self.map.earlier_placements)
        )

    async def claim(
        self, shard: ShardId, agent: AgentId, start: StartId, *, epoch_at_least: OwnerEpoch
    ) -> ClaimResult | None:
        """Make the agent the owner of an unowned shard."""
        keys = self._keys
        at_agent, at_claim, at_grants = keys.agent(agent), keys.claim(shard), keys.grants(shard)

        def decide(read: Read) -> Decision[ClaimResult | None]:
            if not _has(read, at_agent, start):
                return None, []
            before, held = _grants(read, at_grants), _claim(read, at_claim)
            if held is not None and (held.agent, held.start) != (agent, start):
                return None, []
            if held is not None:
                if before.of(held.epoch) is None:
                    raise MembershipError(
                        f"{at_grants.decode()} is missing in etcd while {agent} owns {shard}: restart the "
                        "agent, and never delete keys there by hand"
                    )
                return ClaimResult(held.epoch, before.unretired), []
            after = before.claimed(agent, start, epoch_at_least=epoch_at_least)
            claim = records.encode_claim(shard, Claim(agent, start, after.epoch))
            changes = [put(at_claim, claim, read.entries[at_agent].lease)]
            if after != before:
                changes.append(put(at_grants, records.encode_grants(after)))
            return ClaimResult(after.epoch, after.unretired), changes

        try:
            return await self._change(f"claim {shard}", decide, at_agent, at_claim, at_grants)
        except LeaseEndedError:
            return None

    async def grant(
        self,
        shard: ShardId,
        claim: Claim,
        segments: Sequence[int],
        *,
        retired: frozenset[OwnerEpoch] = frozenset(),
    ) -> bool:
        """Set *segments* as the only segments that this epoch may write."""
        at_claim, at_grants = self._keys.claim(shard), self._keys.grants(shard)

        def decide(read: Read) -> Decision[bool]:
            before = _grants(read, at_grants)
            after = before.granted(claim, segments, retired=retired)
            if _claim(read, at_claim) != claim or after is None:
                return False, []
            return True, [put(at_grants, records.encode_grants(after))] if after != before else []

        return (await self._store.change(f"grant segments of {shard}", decide, at_claim, at_grants))[0]

    async def close_grant(self, shard: ShardId, claim: Claim, in_doubt: Sequence[int]) -> None:
        """Record that no transfer is under way under this grant."""
        key = self._keys.grants(shard)

        def decide(read: Read) -> Decision[None]:
            before = _grants(read, key)
            after = before.closed(claim, in_doubt)
            return None, [put(key, records.encode_grants(after))] if after != before else []

        await self._store.change(f"close a grant of {shard}", decide, key)

    async def release(self, shard: ShardId, agent: AgentId, start: StartId) -> None:
        """Give a claim back; no error if the claim is not held."""
        key = self._keys.claim(shard)

        def decide(read: Read) -> Decision[None]:
            held = _claim(read, key)
            is_held = held is not None and (held.agent, held.start) == (agent, start)
            return None, [delete(key)] if is_held else []

        await self._store.change(f"give {shard} back", decide, key)
        await self._follower.until(
            lambda: (held := self.map.claims.get(shard)) is None or (held.agent, held.start) != (agent, start)
        )

    async def volume(self, tenant: TenantId, name: str) -> VolumeRecord | None:
        """Return a volume's record from the watch, or else from etcd."""
        for record in self._follower.view.volumes:
            if (record.tenant, record.name) == (tenant, name):
                return record
        key = self._keys.volume(tenant, name)
        found = (await self._store.read(key)).value(key)
        return None if found is None else records.decode_at(key, found, records.decode_volume)

    def volume_changes(self) -> AsyncIterator[tuple[VolumeRecord, ...]]:
        """Yield all volumes, the oldest first, and again after an addition or a change."""
        return self._changes_of(lambda: self._follower.view.volumes)

    async def create_volume(self, record: VolumeRecord) -> VolumeRecord:
        """Store the record unless the volume exists; return the stored record."""
        key, enclosures = self._keys.volume(record.tenant, record.name), self._keys.enclosures()

        def decide(read: Read) -> Decision[VolumeRecord]:
            if (value := read.value(key)) is not None:
                return records.decode_at(key, value, records.decode_volume), []
            enclosed = records.decode_readable(read.below(enclosures), records.decode_enclosure)
            check_blocks_fit([record], enclosed)
            if len(self._follower.view.volumes) >= self._volumes_max:
                raise MembershipError(
                    f"the fabric has {self._volumes_max} volumes, the maximum: use an existing volume"
                )
            return record, [put(key, records.encode_volume(record))]

        return await self._change(f"make volume {record.name}", decide, key, prefixes=[enclosures])

    async def erase_volume(self, seen: VolumeRecord) -> int:
        """Give a volume its next incarnation, unless the record differs from *seen*."""
        check_erasable(seen)
        key, marker = self._keys.volume(seen.tenant, seen.name), self._keys.overrides_marker()

        def decide(read: Read) -> Decision[int]:
            if (value := read.value(key)) is None:
                raise MembershipError(f"there is no volume {seen.name!r} of tenant {seen.tenant!r}")
            if records.decode_at(key, value, records.decode_volume) != seen:
                return read.modified(marker), []
            return 0, [put(key, records.encode_volume(seen.erased())), put(marker, OVERRIDES_MARKER)]

        known, done = await self._store.change(f"erase volume {seen.name}", decide, key, marker)
        await self._follower.until_seen(known or done)
        return known or done

    def _publish(self, view: View) -> None:
        """Take the newest map, overrides, volumes and addresses, so that reads cost a request nothing."""
        self.map, self.overrides, self.volumes = view.map, view.overrides, view.volumes
        self.addresses.clear()
        self.addresses.update({agent.id: agent.addresses for agent in view.map.agents.values()})

    async def _change(
        self,
        what: str,
        decide: Callable[[Read], Decision[_Seen]],
        *keys: bytes,
        prefixes: Sequence[bytes] = (),
    ) -> _Seen:
        """Apply a change, and wait until the watch has reported the change."""
        result, revision = await self._store.change(what, decide, *keys, prefixes=prefixes)
        await self._follower.until_seen(revision)
        return result

    def _changes_of(self, newest: Callable[[], _Seen]) -> AsyncIterator[_Seen]:
        return changes_of(newest, lambda: self._follower.changed)

    async def _lease_of(self, agent: AgentRecord) -> EtcdLease:
        """Return the lease of this start of an agent, new if necessary."""
        if agent.id in self._leases:
            start, lease = self._leases[agent.id]
            if start == agent.start and not lease.is_lost:
                return lease
            await self._keeper.end(self._leases.pop(agent.id)[1].number)
        lease = await self._keeper.begin(
            self._lease_ttl_s,
            partial(log.warning, "%s has lost its lease and all claims: the agent must join again", agent.id),
        )
        self._leases[agent.id] = agent.start, lease
        return lease


def _has(read: Read, key: bytes, start: StartId) -> bool:
    value = read.value(key)
    return value is not None and records.decode_at(key, value, records.decode_agent).start == start


def _claim(read: Read, key: bytes) -> Claim | None:
    value = read.value(key)
    return None if value is None else records.decode_at(key, value, records.decode_claim)[1]


def _grants(read: Read, key: bytes) -> ShardGrants:
    value = read.value(key)
    return ShardGrants() if value is None else records.decode_at(key, value, records.decode_grants)


def _placements(read: Read, keys: EtcdKeys) -> Placements:
    key, epoch = keys.placement(), FIRST_PLACEMENT
    if (value := read.value(key)) is not None:
        epoch = records.decode_at(key, value, records.decode_placement)
    earlier = [
        records.decode_at(entry.key, entry.value, records.decode_earlier_placement)
        for entry in read.below(keys.earlier_placements())
    ]
    return Placements(epoch, tuple(sorted(earlier, key=lambda each: each.epoch, reverse=True)))
