"""Membership in etcd: implements ``ports.membership.Membership`` for agents that are processes of their own.

Each change is one transaction that compares what it was decided on (``store``). What is believed (``map``)
comes from a watch; a method returns when the watch has told what it did. Leases are renewed in a thread of
their own.

A claim is bound to the lease of its agent's record: both go at once, when the agent leaves, when its lease
runs out, or when another start of it joins and revokes that lease. It is made only while there is none, the
agent's record is as it was read, and the shard's grants are as they were read.

While etcd is away ``map`` stays as it was, the methods raise MembershipError in time, and ``trouble`` says
what is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Self

from ostraca_fabric.adapters.etcd import records
from ostraca_fabric.adapters.etcd.client import EtcdClient
from ostraca_fabric.adapters.etcd.follower import Follower
from ostraca_fabric.adapters.etcd.keys import Keys
from ostraca_fabric.adapters.etcd.lease import Lease, LeaseKeeper
from ostraca_fabric.adapters.etcd.store import EtcdStore, Read
from ostraca_fabric.adapters.etcd.transactions import delete, put
from ostraca_fabric.adapters.etcd.view import FIRST_PLACEMENT
from ostraca_fabric.adapters.membership_rules import Placements, ShardGrants, check_stands, enclosures_after
from ostraca_fabric.errors import LeaseEndedError, MembershipError
from ostraca_fabric.fabric_map import Claim, check_blocks_fit
from ostraca_fabric.ports.membership import Claimed
from ostraca_fabric.rulings import RULED
from ostraca_fabric.volume import check_erasable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from ostraca_fabric.adapters.etcd.backoff import Dice
    from ostraca_fabric.adapters.etcd.settings import EtcdSettings
    from ostraca_fabric.fabric_map import AgentRecord, EnclosureRecord, FabricMap
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
    from ostraca_fabric.ports.records import Hold
    from ostraca_fabric.rulings import Rulings
    from ostraca_fabric.volume import VolumeRecord

log = logging.getLogger(__name__)

LEASE_TTL_S = 5.0
VOLUMES_MAX = 4096


class EtcdMembership:
    """One fabric, seen from one process. Made by ``open``; close it."""

    def __init__(
        self,
        fabric: FabricId,
        settings: EtcdSettings,
        *,
        keys: Keys,
        dice: Dice,
        key_check: str,
        has_joined: bool,
        lease_ttl_s: float,
        volumes_max: int,
    ) -> None:
        """See ``open``."""
        self._keys = keys
        self._lease_ttl_s = lease_ttl_s
        self._volumes_max = volumes_max
        self._client = EtcdClient(settings, dice=dice)
        self._store = EtcdStore(self._client, keys, fabric, key_check, has_joined=has_joined)
        self._keeper = LeaseKeeper(settings, dice=dice)
        self._leases: dict[AgentId, tuple[StartId, Lease]] = {}
        self._follower = Follower(self._client, self._store, keys, fabric)

    @classmethod
    async def open(  # noqa: PLR0913 (what tells a fabric from others)
        cls,
        fabric: FabricId,
        settings: EtcdSettings,
        *,
        dice: Dice,
        keys: Keys,
        begin: bool = False,
        key_check: str = "",
        has_joined: bool = False,
        lease_ttl_s: float = LEASE_TTL_S,
        volumes_max: int = VOLUMES_MAX,
    ) -> Self:
        """Return the membership of the fabric that lies at *keys*; *begin* makes it if none does.
        *key_check* (``keys.fabric_key_check``) refuses a fabric that was begun with another key.
        *has_joined* says that it was there for this agent before, so that nobody is told to begin it.

        Agents' records live for *lease_ttl_s* after etcd last heard of them; etcd makes it no less than an
        election takes. Raises StoreAwayError when etcd can't be reached, and MembershipError that says what
        to do when there is no fabric or another one, or a newer release than this has made it.
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
            await self._follower.until_told(read.revision)
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Watch no more, and renew no lease. Agents that have not left are gone when theirs run out."""
        await self._follower.stop()
        await asyncio.to_thread(self._keeper.close)
        await self._client.close()

    @property
    def map(self) -> FabricMap:
        """The newest map seen."""
        return self._follower.view.map

    @property
    def rulings(self) -> Rulings:
        """The newest rulings seen."""
        return self._follower.view.rulings

    @property
    def heard_s_ago(self) -> float:
        """For how long the watch has heard nothing of etcd; a few seconds is the most while all is well."""
        return self._follower.heard_s_ago

    @property
    def trouble(self) -> str:
        """What is wrong with etcd, or with what lies there, in a sentence; empty when nothing is."""
        return self._follower.trouble

    async def changes(self) -> AsyncIterator[FabricMap]:
        """Yield the current map, then each newer one, the newest always."""
        seen = None
        while True:
            changed = self._follower.changed
            if self.map is not seen:
                seen = self.map
                yield seen
            else:
                await changed.wait()

    async def ruling_changes(self) -> AsyncIterator[Rulings]:
        """Yield the rulings, and again whenever one was changed or a volume erased."""
        seen = None
        while True:
            changed = self._follower.changed
            if self.rulings is not seen:
                seen = self.rulings
                yield seen
            else:
                await changed.wait()

    async def hear_rulings(self) -> int:
        """Ask etcd which ruling is the last, and wait for the watch to have told it."""
        read = await self._store.read(self._keys.ruled())
        revision = read.modified(self._keys.ruled())
        await self._follower.until_told(revision)
        return revision

    async def join(self, agent: AgentRecord) -> None:
        """Announce an agent, under a lease that is renewed until it leaves."""
        key, value = self._keys.agent(agent.id), records.encode_agent(agent)
        tries = self._store.tries(f"announce {agent.id}")
        while True:
            read = await self._store.read(key)
            lease = await self._lease_of(agent)
            known = read.entries.get(key)
            if known is not None and (known.lease, known.value) == (lease.number, value):
                return await self._follower.until_told(known.modified)
            if known is None or known.lease == lease.number:
                with contextlib.suppress(LeaseEndedError):  # then the next try begins another
                    done = await self._store.write(read, [put(key, value, lease.number)], unchanged=[key])
                    if done is not None:
                        return await self._follower.until_told(done)
            else:  # of another start, or of ours, when etcd was not heard for too long
                log.warning("%s joins anew: what it claimed under its lease before is given up", agent.id)
                await self._keeper.end(known.lease)
            await tries.again()

    async def leave(self, agent: AgentId, start: StartId) -> None:
        """Withdraw an agent with all its claims: end its lease."""
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
        under: Hold | None = None,
        force: bool = False,
    ) -> None:
        """Add, replace and remove enclosures; the placement epoch rises when shards or weights change."""
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
            known = {record.id: record for record in map(records.decode_enclosure, found.values())}
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
                return await self._follower.until_told(max(entry.modified for entry in read.entries.values()))
            if under is not None:
                check_stands(under, stands=read.modified(held[0]) == under.revision)
            touched = {*(each.id for each in enclosures), *removed, *(seen or ())}
            done = await self._store.write(
                read,
                changes,
                unchanged=[keys.placement(), *held, *map(keys.enclosure, sorted(touched))],
                unchanged_below=[keys.volumes()],
            )
            if done is not None:
                return await self._follower.until_told(done)
            await tries.again()

    async def retire_placement(self, epoch: PlacementEpoch) -> None:
        """Let an earlier placement epoch be asked no longer."""
        key = self._keys.earlier_placement(epoch)
        tries = self._store.tries(f"retire placement epoch {epoch}")
        while True:
            read = await self._store.read(key)
            if key not in read.entries or await self._store.write(read, [delete(key)], unchanged=[key]):
                break
            await tries.again()
        await self._follower.until(
            lambda: all(record.epoch != epoch for record in self.map.earlier_placements)
        )

    async def claim(
        self, shard: ShardId, agent: AgentId, start: StartId, *, epoch_at_least: OwnerEpoch
    ) -> Claimed | None:
        """Make the agent the shard's owner if it has none."""
        keys = self._keys
        at_agent, at_claim, at_grants = keys.agent(agent), keys.claim(shard), keys.grants(shard)
        tries = self._store.tries(f"claim {shard}")
        while True:
            read = await self._store.read(at_agent, at_claim, at_grants)
            if not _has(read, at_agent, start):
                return None
            before, held = _grants(read, at_grants), _claim(read, at_claim)
            if held is not None:
                if (held.agent, held.start) != (agent, start):
                    return None
                if before.of(held.epoch) is None:
                    raise MembershipError(
                        f"{at_grants.decode()} is gone from etcd while {agent} owns {shard}: restart that "
                        "agent, and delete nothing there by hand"
                    )
                await self._follower.until_told(read.modified(at_claim))
                return Claimed(held.epoch, before.unretired)
            after = before.claimed(agent, start, epoch_at_least=epoch_at_least)
            claim = Claim(agent, start, after.epoch)
            changes = [
                put(at_claim, records.encode_claim(shard, claim), read.entries[at_agent].lease),
                *([put(at_grants, records.encode_grants(after))] if after != before else []),
            ]
            try:
                done = await self._store.write(read, changes, unchanged=[at_agent, at_claim, at_grants])
            except LeaseEndedError:
                return None
            if done is not None:
                await self._follower.until_told(done)
                return Claimed(after.epoch, after.unretired)
            await tries.again()

    async def grant(
        self,
        shard: ShardId,
        claim: Claim,
        segments: Sequence[int],
        *,
        retired: frozenset[OwnerEpoch] = frozenset(),
    ) -> bool:
        """Make *segments* all that this owner epoch may write."""
        at_claim, at_grants = self._keys.claim(shard), self._keys.grants(shard)
        tries = self._store.tries(f"grant segments of {shard}")
        while True:
            read = await self._store.read(at_claim, at_grants)
            before = _grants(read, at_grants)
            after = before.granted(claim, segments, retired=retired)
            if _claim(read, at_claim) != claim or after is None:
                return False
            change = [put(at_grants, records.encode_grants(after))]
            if after == before or await self._store.write(read, change, unchanged=[at_claim, at_grants]):
                return True
            await tries.again()

    async def close_grant(self, shard: ShardId, claim: Claim, in_doubt: Sequence[int]) -> None:
        """Say that nothing is under way under this grant any more."""
        key = self._keys.grants(shard)
        tries = self._store.tries(f"close a grant of {shard}")
        while True:
            read = await self._store.read(key)
            before = _grants(read, key)
            after = before.closed(claim, in_doubt)
            change = [put(key, records.encode_grants(after))]
            if after == before or await self._store.write(read, change, unchanged=[key]):
                return
            await tries.again()

    async def release(self, shard: ShardId, agent: AgentId, start: StartId) -> None:
        """Give a claim back; not an error when it is not held."""
        key = self._keys.claim(shard)
        tries = self._store.tries(f"give {shard} back")
        while True:
            read = await self._store.read(key)
            held = _claim(read, key)
            if held is None or (held.agent, held.start) != (agent, start):
                break
            if await self._store.write(read, [delete(key)], unchanged=[key]):
                break
            await tries.again()
        await self._follower.until(
            lambda: (held := self.map.claims.get(shard)) is None or (held.agent, held.start) != (agent, start)
        )

    async def volume(self, tenant: TenantId, name: str) -> VolumeRecord | None:
        """Return a volume's record: as the watch told it, else as etcd has it."""
        for record in self._follower.view.volumes:
            if (record.tenant, record.name) == (tenant, name):
                return record
        key = self._keys.volume(tenant, name)
        found = (await self._store.read(key)).value(key)
        return None if found is None else records.decode_volume(found)

    async def volume_changes(self) -> AsyncIterator[tuple[VolumeRecord, ...]]:
        """Yield all volumes, the oldest first, and again whenever one was added or changed."""
        seen = None
        while True:
            changed = self._follower.changed
            if self._follower.view.volumes is not seen:
                seen = self._follower.view.volumes
                yield seen
            else:
                await changed.wait()

    async def create_volume(self, record: VolumeRecord) -> VolumeRecord:
        """Store the record unless the volume exists; return what is stored."""
        key, enclosures = self._keys.volume(record.tenant, record.name), self._keys.enclosures()
        tries = self._store.tries(f"make volume {record.name}")
        while True:
            read = await self._store.read(key, prefixes=[enclosures])
            if (entry := read.entries.get(key)) is not None:
                await self._follower.until_told(entry.modified)
                return records.decode_volume(entry.value)
            enclosed = records.decode_readable(read.below(enclosures), records.decode_enclosure)
            check_blocks_fit([record], enclosed)
            if len(self._follower.view.volumes) >= self._volumes_max:
                message = (
                    f"the fabric has {self._volumes_max} volumes, which is the most it keeps: use one of them"
                )
                raise MembershipError(message)
            done = await self._store.write(
                read,
                [put(key, records.encode_volume(record))],
                unchanged=[key],
                unchanged_below=[enclosures],
            )
            if done is not None:
                await self._follower.until_told(done)
                return record
            await tries.again()

    async def erase_volume(self, seen: VolumeRecord) -> int:
        """Give a volume its next incarnation, unless that was done before."""
        check_erasable(seen)
        keys = self._keys
        key, ruled = keys.volume(seen.tenant, seen.name), keys.ruled()
        tries = self._store.tries(f"erase volume {seen.name}")
        while True:
            read = await self._store.read(key, ruled)
            if (value := read.value(key)) is None:
                raise MembershipError(f"there is no volume {seen.name!r} of tenant {seen.tenant!r}")
            done: int | None = read.modified(ruled)
            if records.decode_volume(value) == seen:
                changes = [put(key, records.encode_volume(seen.erased())), put(ruled, RULED)]
                done = await self._store.write(read, changes, unchanged=[key, ruled])
            if done is not None:
                await self._follower.until_told(done)
                return done
            await tries.again()

    async def _lease_of(self, agent: AgentRecord) -> Lease:
        """Return the lease of this start of an agent: the one it has, or a new one."""
        if agent.id in self._leases:
            start, lease = self._leases[agent.id]
            if start == agent.start and not lease.is_lost:
                return lease
            await self._keeper.end(self._leases.pop(agent.id)[1].number)
        lease = await self._keeper.begin(self._lease_ttl_s, lambda: self._say_lost(agent.id))
        self._leases[agent.id] = agent.start, lease
        return lease

    def _say_lost(self, agent: AgentId) -> None:
        log.warning("%s has lost its lease, and all that it claimed: it must join again", agent)


def _has(read: Read, key: bytes, start: StartId) -> bool:
    value = read.value(key)
    return value is not None and records.decode_agent(value).start == start


def _claim(read: Read, key: bytes) -> Claim | None:
    value = read.value(key)
    return None if value is None else records.decode_claim(value)[1]


def _grants(read: Read, key: bytes) -> ShardGrants:
    value = read.value(key)
    return ShardGrants() if value is None else records.decode_grants(value)


def _placements(read: Read, keys: Keys) -> Placements:
    value = read.value(keys.placement())
    epoch = FIRST_PLACEMENT if value is None else records.decode_placement(value)
    earlier = [
        records.decode_earlier_placement(entry.value) for entry in read.below(keys.earlier_placements())
    ]
    return Placements(epoch, tuple(sorted(earlier, key=lambda each: each.epoch, reverse=True)))
