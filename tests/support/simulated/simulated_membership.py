"""A membership store that is somewhere else: reached late, or not at all, with leases that run out.

``SimulatedStore`` is the store itself, one for all. A ``SimulatedMembership`` is one process's way to it:
requests, answers and what is watched take their time, and get lost. It works on the clock of the loop that
it is used on, virtual or real, and on a ``HostsLoop`` belongs to no process (``virtual_hosts``).

A lease is kept alive by what stands for a thread of its own: it goes on while the process's loop is paused,
until ``keeps_alive`` is taken from it, as when the whole machine stands still.
"""

from __future__ import annotations

import asyncio
import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from tests.support.simulated.futures import resolve
from tests.support.simulated.virtual_hosts import outside

from ostraca_fabric.errors import OstracaError, StoreAwayError
from ostraca_fabric.membership.memory_membership import MemoryStore

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

    from ostraca_fabric.membership.memory_membership import Seen
    from ostraca_fabric.model.fabric_map import AgentRecord, Claim, EnclosureRecord, FabricMap
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
    from ostraca_fabric.model.volume import VolumeRecord
    from ostraca_fabric.ports.membership import ClaimResult
    from ostraca_fabric.ports.records import RecordLock

    Volumes = Mapping[tuple[TenantId, str], VolumeRecord]

_T = TypeVar("_T")

_BEATS_PER_TTL = 3
_ASKED_AGAIN_S = (0.05, 1.0)


@dataclass(frozen=True, slots=True)
class StoreFaults:
    """How a process reaches the store. Chances are from 0 to 1, for each request. As it is made: well."""

    latency_s: tuple[float, float] = (0.0005, 0.002)
    """Each way: drawn between the two."""

    watch_s: tuple[float, float] = (0.0005, 0.005)
    """Until a change that somebody else made is seen."""

    timeout_s: float = 2.0
    """How long an answer is waited for."""

    lost_requests: float = 0.0
    lost_answers: float = 0.0
    """What was asked for is done, and nobody hears of it."""

    twice: float = 0.0
    """What was asked for is done, and done again a little later: its answer was lost, and the adapter that
    waits for one asked once more."""

    late_requests: float = 0.0
    """A request arrives up to ``late_s`` later: who asked may have given up, or be gone. It is compared with
    what was there when it was made, as stores' adapters have it, and changes nothing where that is different.
    """

    late_s: float = 6.0


class SimulatedStore:
    """The store: the rules of ``MemoryStore``, and leases."""

    def __init__(self, fabric: FabricId, *, lease_ttl_s: float = 5.0) -> None:
        """Begin empty and up. ``go_down`` and ``go_up`` are what befalls it."""
        self.memory = MemoryStore(fabric)
        self.lease_ttl_s = lease_ttl_s
        self.is_up = True
        self.version = 0
        """Rises with whatever changes."""

        self._leases: dict[tuple[AgentId, StartId], asyncio.TimerHandle | None] = {}
        self._watchers: list[Callable[[], None]] = []

    def watch(self, changed: Callable[[], None]) -> None:
        """Call *changed* after every transaction that changed anything."""
        self._watchers.append(changed)

    def transact(self, act: Callable[[SimulatedStore], _T]) -> _T:
        """Do something whole, and tell who watches."""
        before, grants = self.memory.seen, self.memory.grants
        result = act(self)
        is_told = before != self.memory.seen
        self.version += is_told or grants != self.memory.grants
        if is_told:
            for changed in self._watchers:
                changed()
        return result

    def join(self, agent: AgentRecord) -> None:
        """Announce an agent under a new lease."""
        self.memory.join(agent)
        self._begin_lease(agent.id, agent.start)

    def leave(self, agent: AgentId, start: StartId) -> None:
        """Withdraw an agent, and let go of its lease."""
        self._end_lease(agent, start)
        self.memory.leave(agent, start)

    def keep_alive(self, agent: AgentId, start: StartId) -> bool:
        """Let a lease last for another ``lease_ttl_s``; say whether there is one."""
        if (agent, start) not in self._leases:
            return False
        self._begin_lease(agent, start)
        return True

    def go_down(self) -> None:
        """Answer nothing. Time does not run out for leases."""
        self.is_up = False
        for lease, timer in self._leases.items():
            if timer is not None:
                timer.cancel()
            self._leases[lease] = None

    def go_up(self) -> None:
        """Answer again. Leases begin anew, as those of etcd do under a new leader."""
        self.is_up = True
        for agent, start in list(self._leases):
            self._begin_lease(agent, start)

    def lose_leases(self) -> None:
        """Let all leases have run out, as after an outage that outlasts them: every agent is gone at once."""
        for agent, start in list(self._leases):
            self._run_out(agent, start)

    def begin_anew(self, enclosures: Sequence[EnclosureRecord], volumes: Sequence[VolumeRecord]) -> None:
        """Forget everything but these, as a store that was emptied and filled from what drives say.

        What was granted of their shards is not known.
        """
        for agent, start in list(self._leases):
            self._end_lease(agent, start)
        before = self.memory.map
        self.memory = MemoryStore(before.fabric, volumes=volumes)
        self.memory.map = replace(self.memory.map, revision=before.revision + 1)  # who watches is told anew
        self.memory.lose_grants(shard.id for enclosure in enclosures for shard in enclosure.shards)
        self.memory.put_enclosures(enclosures)

    def lease_left_s(self, agent: AgentId, start: StartId) -> float:
        """Return how long a lease lasts yet: 0 where there is none, without end while the store is down."""
        if (agent, start) not in self._leases:
            return 0.0
        timer = self._leases[agent, start]
        return math.inf if timer is None else timer.when() - asyncio.get_running_loop().time()

    def _begin_lease(self, agent: AgentId, start: StartId) -> None:
        self._end_lease(agent, start)
        loop = asyncio.get_running_loop()
        self._leases[agent, start] = loop.call_later(self.lease_ttl_s, self._run_out, agent, start)

    def _end_lease(self, agent: AgentId, start: StartId) -> None:
        timer = self._leases.pop((agent, start), None)
        if timer is not None:
            timer.cancel()

    def _run_out(self, agent: AgentId, start: StartId) -> None:
        self.transact(lambda store: store.leave(agent, start))


class SimulatedMembership:
    """Implements ``ports.membership.Membership`` for one process. Every delay and fate is from *dice*."""

    def __init__(self, store: SimulatedStore, dice: random.Random, faults: StoreFaults | None = None) -> None:
        """Begin with what the store says now, as after a first read."""
        self.faults = faults or StoreFaults()
        self.keeps_alive = True
        """Whether leases are kept alive."""

        self._store = store
        self._dice = dice
        self._is_heard = True
        self._hears = True
        self._is_closed = False
        self._held: list[Callable[[], None]] = []
        self._beating: set[tuple[AgentId, StartId]] = set()
        self._map = store.memory.map
        self._volumes = store.memory.volumes
        self._overrides = store.memory.overrides
        self._listed: tuple[object, tuple[VolumeRecord, ...]] = None, ()
        self._changed = asyncio.Event()
        store.watch(self._on_store_changed)

    # What befalls the way.

    def cut(self, *, requests: bool = True, answers: bool = True) -> None:
        """Let nothing pass to the store, or from it, or both. Some requests are held back until ``heal``."""
        self._is_heard = self._is_heard and not requests
        self._hears = self._hears and not answers

    def heal(self) -> None:
        """Let everything pass again."""
        self._is_heard = self._hears = True
        held, self._held = self._held, []
        for arrive in held:
            outside(arrive)
        self._on_store_changed()

    def close(self) -> None:
        """End the process: its leases run out, and its sent requests may still arrive."""
        self._is_closed = True

    # What the port says.

    @property
    def map(self) -> FabricMap:
        """The newest map seen."""
        return self._map

    @property
    def overrides(self) -> Overrides:
        """The newest overrides seen."""
        return self._overrides

    @property
    def volumes(self) -> tuple[VolumeRecord, ...]:
        """The newest volumes seen, the oldest first."""
        if self._listed[0] is not self._volumes:
            self._listed = self._volumes, tuple(self._volumes.values())
        return self._listed[1]

    @property
    def trouble(self) -> str:
        """What keeps changes from being seen."""
        can_hear = self._store.is_up and self._is_heard and self._hears
        return "" if can_hear else "the store has not been heard: the map stays as it was"

    async def override_changes(self) -> AsyncIterator[Overrides]:
        """Yield the overrides, and again whenever one was changed or a volume erased."""
        seen = None
        while True:
            changed = self._changed
            if self._overrides is not seen:
                seen = self._overrides
                yield seen
            else:
                await changed.wait()

    async def refresh_overrides(self) -> int:
        """Ask the store for the revision of the overrides; they show once it has answered."""
        return await self._ask(lambda store: store.memory.overrides.revision)

    async def refresh(self) -> None:
        """Ask the store; what it has shows once it has answered."""
        await self._ask(lambda store: store.memory.map.revision)

    async def changes(self) -> AsyncIterator[FabricMap]:
        """Yield the newest map seen, then each newer one."""
        seen = -1
        while True:
            changed = self._changed
            if self._map.revision != seen:
                seen = self._map.revision
                yield self._map
            else:
                await changed.wait()

    async def join(self, agent: AgentRecord) -> None:
        """Announce an agent, and keep its lease alive from then on."""
        await self._ask(lambda store: store.join(agent))
        outside(self._begin_beating, agent.id, agent.start)

    async def leave(self, agent: AgentId, start: StartId) -> None:
        """Withdraw an agent."""
        await self._ask(lambda store: store.leave(agent, start))

    async def confirm(self, agent: AgentId, start: StartId) -> bool:
        """Ask whether an agent's record stands."""
        return await self._ask(lambda store: store.memory.has(agent, start))

    async def put_enclosures(
        self,
        enclosures: Sequence[EnclosureRecord],
        *,
        removed: Collection[EnclosureId] = (),
        seen: Mapping[EnclosureId, EnclosureRecord | None] | None = None,
        under: RecordLock | None = None,
        force: bool = False,
    ) -> None:
        """Add or replace enclosures."""
        await self._ask(
            lambda store: store.memory.put_enclosures(
                enclosures, removed=removed, seen=seen, under=under, force=force
            )
        )

    async def retire_placement(self, epoch: PlacementEpoch) -> None:
        """Let an earlier placement epoch be asked no longer."""
        await self._ask(lambda store: store.memory.retire_placement(epoch))

    async def claim(
        self, shard: ShardId, agent: AgentId, start: StartId, *, epoch_at_least: OwnerEpoch
    ) -> ClaimResult | None:
        """Make the agent the shard's owner if it has none."""
        return await self._ask(
            lambda store: store.memory.claim(shard, agent, start, epoch_at_least=epoch_at_least)
        )

    async def grant(
        self,
        shard: ShardId,
        claim: Claim,
        segments: Sequence[int],
        *,
        retired: frozenset[OwnerEpoch] = frozenset(),
    ) -> bool:
        """Make *segments* all that this owner epoch may write."""
        return await self._ask(lambda store: store.memory.grant(shard, claim, segments, retired=retired))

    async def close_grant(self, shard: ShardId, claim: Claim, in_doubt: Sequence[int]) -> None:
        """Say that nothing is under way under this grant any more."""
        await self._ask(lambda store: store.memory.close_grant(shard, claim, in_doubt))

    async def release(self, shard: ShardId, agent: AgentId, start: StartId) -> None:
        """Give a claim back."""
        await self._ask(lambda store: store.memory.release(shard, agent, start))

    async def volume(self, tenant: TenantId, name: str) -> VolumeRecord | None:
        """Return a volume's record."""
        return await self._ask(lambda store: store.memory.volumes.get((tenant, name)))

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
        return await self._ask(lambda store: store.memory.create_volume(record))

    async def erase_volume(self, seen: VolumeRecord) -> int:
        """Give a volume its next incarnation, unless that was done before."""
        return await self._ask(lambda store: store.memory.erase_volume(seen))

    # The way there and back.

    async def _ask(self, act: Callable[[SimulatedStore], _T]) -> _T:
        answer: asyncio.Future[Callable[[], _T]] = asyncio.get_running_loop().create_future()
        outside(self._send, act, answer)
        try:
            async with asyncio.timeout(self.faults.timeout_s):
                take = await answer
        except TimeoutError:
            message = f"the membership store did not answer within {self.faults.timeout_s} s"
            raise StoreAwayError(message) from None
        return take()

    def _send(self, act: Callable[[SimulatedStore], _T], answer: asyncio.Future[Callable[[], _T]]) -> None:
        dice, faults = self._dice, self.faults
        arrive: Callable[[], None] = functools.partial(self._arrive, act, answer)
        arrive_late = functools.partial(self._arrive_late, arrive, self._store.version)
        if not self._is_heard:
            if dice.random() < 0.5:
                self._held.append(arrive_late)
            return
        if _chance(dice, faults.lost_requests):
            return
        late_s = 0.0
        if _chance(dice, faults.late_requests):
            late_s, arrive = dice.uniform(0, faults.late_s), arrive_late
        asyncio.get_running_loop().call_later(dice.uniform(*faults.latency_s) + late_s, arrive)

    def _arrive_late(self, arrive: Callable[[], None], version: int) -> None:
        if self._store.version == version:
            arrive()

    def _arrive(self, act: Callable[[SimulatedStore], _T], answer: asyncio.Future[Callable[[], _T]]) -> None:
        if not self._store.is_up:
            return
        if _chance(self._dice, self.faults.twice) and not (answer.done() or self._is_closed):
            _tried(functools.partial(self._store.transact, act))
            again_s = self._dice.uniform(*_ASKED_AGAIN_S)
            asyncio.get_running_loop().call_later(again_s, self._arrive, act, answer)
            return
        take = _tried(functools.partial(self._store.transact, act))
        if self._hears and not _chance(self._dice, self.faults.lost_answers):
            seen = self._store.memory.seen
            delay_s = self._dice.uniform(*self.faults.latency_s)
            asyncio.get_running_loop().call_later(delay_s, self._answered, answer, take, seen)

    def _answered(
        self,
        answer: asyncio.Future[Callable[[], _T]],
        take: Callable[[], _T],
        seen: Seen,
    ) -> None:
        self._see(seen)
        resolve(answer, take)

    def _on_store_changed(self) -> None:
        if self._hears:
            delay_s = self._dice.uniform(*self.faults.watch_s)
            seen = self._store.memory.seen
            outside(asyncio.get_running_loop().call_later, delay_s, self._see_if_heard, seen)

    def _see_if_heard(self, seen: Seen) -> None:
        if self._hears:
            self._see(seen)

    def _see(self, seen: Seen) -> None:
        """Take what is newer; what comes out of order is old."""
        is_newer = seen.map.revision > self._map.revision
        if is_newer:
            self._map = seen.map
        if _age(seen.volumes) > _age(self._volumes):
            self._volumes, is_newer = seen.volumes, True
        if seen.overrides.revision > self._overrides.revision:
            self._overrides, is_newer = seen.overrides, True
        if is_newer:
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def _begin_beating(self, agent: AgentId, start: StartId) -> None:
        if (agent, start) not in self._beating:
            self._beating.add((agent, start))
            self._beat_later(agent, start)

    def _beat_later(self, agent: AgentId, start: StartId) -> None:
        beat_s = self._store.lease_ttl_s / _BEATS_PER_TTL
        asyncio.get_running_loop().call_later(beat_s, self._beat, agent, start)

    def _beat(self, agent: AgentId, start: StartId) -> None:
        """Keep a lease alive until it is known to be gone."""

        def arrive() -> None:
            if self._store.is_up and not self._store.keep_alive(agent, start) and self._hears:
                self._beating.discard((agent, start))
            else:
                self._beat_later(agent, start)

        if self._is_closed:
            return
        if self.keeps_alive and self._is_heard:
            asyncio.get_running_loop().call_later(self._dice.uniform(*self.faults.latency_s), arrive)
        else:
            self._beat_later(agent, start)


def _age(volumes: Volumes) -> int:
    """Return what rises with every volume that is made, and with every one that is erased."""
    return sum(volume.incarnation for volume in volumes.values())


def _tried(act: Callable[[], _T]) -> Callable[[], _T]:
    """Do something now; return what gives its result, or raises what it raised."""
    try:
        result = act()
    except OstracaError as error:
        refusal = error

        def fail() -> _T:
            raise refusal

        return fail
    return lambda: result


def _chance(dice: random.Random, of: float) -> bool:
    return of > 0 and dice.random() < of
