"""The steward's turns: observe, plan, apply."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from ostraca_dpu_agent.steward.attaching import Attaching, Opening
from ostraca_dpu_agent.steward.in_vain import InVain
from ostraca_dpu_agent.steward.plan import (
    PATIENCE_S,
    Attach,
    BeginAnew,
    Detach,
    GiveBack,
    HandOver,
    Join,
    Observed,
    Reclaim,
    Serve,
    Stop,
    plan,
    rejoin_wait_s,
)
from ostraca_dpu_agent.steward.shards import ServedShards
from ostraca_dpu_agent.unserved import unserved
from ostraca_fabric.drive_health import Condition
from ostraca_fabric.errors import MembershipError, OstracaError, StoreAwayError, WrongStoreError
from ostraca_fabric.spells import Spell
from ostraca_fabric.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostraca_dpu_agent.owner.service import OwnerService
    from ostraca_dpu_agent.settings import AgentSettings
    from ostraca_dpu_agent.steward.plan import Step
    from ostraca_fabric.adapters.guarded_drive import GuardedDrive
    from ostraca_fabric.fabric_map import AgentRecord, FabricMap
    from ostraca_fabric.ids import DriveId, ShardId
    from ostraca_fabric.ports.membership import Membership
    from ostraca_fabric.unserved import Unserved

log = logging.getLogger(__name__)

_RECOVERED_WITHIN_S = 0.25
"""How long a turn waits for recoveries that are under way."""

_LOOK_FOR_SUCCESSORS_S = 0.05

_READ_BY_NEXT_S = 2.0
"""How long an agent that ends goes on answering when all its shards are claimed: reading the summaries of a
terabyte takes as long. What is not read by then is a miss for a moment."""

_TURNS_APART_S = 0.02
"""When agents start together, every claim of every shard is a new map: one turn does for those of so long."""


class Steward:
    """Keeps an agent's drives and shards as the map says."""

    def __init__(
        self,
        agent: AgentRecord,
        settings: AgentSettings,
        *,
        membership: Membership,
        owner: OwnerService,
        drives: dict[DriveId, GuardedDrive],
        opening: Opening,
        clock: Callable[[], float],
        on_crash: Callable[[], None] | None = None,
    ) -> None:
        """Fill *drives* and ``owner.shards``. *on_crash* is called when something has ended that must not."""
        self._agent = agent
        self._settings = settings
        self._membership = membership
        self._owner = owner
        self._drives = drives
        self._attaching = Attaching(agent.id, drives, opening, clock=clock, again_s=settings.open_again_s)
        self._clock = clock
        self._loops = Tasks(f"steward of {agent.id}", on_crash=on_crash)
        self.shards = ServedShards(
            agent,
            settings,
            membership=membership,
            owner=owner,
            drives=drives,
            opening=opening,
            clock=clock,
            on_claimed=lambda shard: self._in_vain.taken_back(shard, clock()),
        )
        self.standing = self.shards.standing
        self._unowned_since_s: dict[ShardId, float] = {}
        self._in_vain = InVain(agent.id)
        self._joins_at_s: float | None = None
        """When to join again; None while this agent is in the map."""

        self._had_others = False
        self._early = Spell(log, clock)
        """Turns that end early, one after the other."""

        self.sentence = "I have not looked yet."

    def retires_in_s(self, shard: ShardId) -> float | None:
        """Return how long an earlier owner's grant of a shard is waited for; None when none is."""
        serving = self.shards.serving.get(shard)
        return None if serving is None else serving.retires_in_s

    def unserved(self) -> Unserved:
        """Return what nobody serves, and what this agent can't, as its last turn found it."""
        fabric_map, now_s = self._membership.map, self._clock()
        return unserved(
            fabric_map,
            {shard: now_s - since_s for shard, since_s in self._unowned_since_s.items()},
            why_shards=self.shards.why_not,
            why_drives=self._attaching.unattached(fabric_map),
            in_trouble={
                drive.id: f"drive {drive.id} {why}"
                for drive in self._drives.values()
                if (why := drive.health.why)
            },
        )

    async def run(self, on_map: Callable[[FabricMap], None]) -> None:
        """Take turns until cancelled: at every change of the map, and every ``turn_s``. *on_map* is told of
        each map at once, also while a turn is under way: one that takes many shards over is long.
        """
        self._loops.spawn(self.standing.run())
        changed = asyncio.Event()
        following = self._loops.spawn(self._follow(on_map, changed))
        soonest_s, due_s = -math.inf, self._clock() + self._until_next_turn_s()
        try:
            while not following.done():  # or it has crashed
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, due_s - self._clock())):
                        await changed.wait()
                if changed.is_set():
                    changed.clear()
                    due_s = min(due_s, soonest_s)
                    if self._clock() < due_s:
                        continue
                await self.turn()
                self._see_successors(self._membership.map)
                self._owner.prune()
                soonest_s = self._clock() + _TURNS_APART_S
                due_s = self._clock() + self._until_next_turn_s()
        finally:
            following.cancel()

    async def _follow(self, on_map: Callable[[FabricMap], None], changed: asyncio.Event) -> None:
        async for fabric_map in self._membership.changes():
            self._see_owners(fabric_map)
            on_map(fabric_map)
            changed.set()

    async def turn(self) -> None:
        """Observe, plan, apply. What can't be done is told, and looked at again in the next turn."""
        observed = self.observe()
        decided = plan(observed)
        if decided.sentence != self.sentence:
            log.info("%s: %s", self._agent.id, decided.sentence)
        self.sentence = decided.sentence
        stops = [step for step in decided.steps if isinstance(step, Stop)]  # the first ones
        try:
            await asyncio.gather(*map(self._apply, stops))  # each may wait long for I/O that does not end
            for step in decided.steps[len(stops) :]:
                await self._apply(step)
        except (StoreAwayError, WrongStoreError) as error:  # ``Standing`` says it
            log.debug("%s ends its turn early, and will look again: %s", self._agent.id, error)
        except OstracaError as error:
            self._early.goes_on("%s ends its turn early, and will look again: %s", self._agent.id, error)
        else:
            self._early.over("%s takes whole turns again", self._agent.id)
        if self.shards.recoveries:  # small shards are whole before anybody asks
            await asyncio.wait(self.shards.recoveries.values(), timeout=_RECOVERED_WITHIN_S)

    def observe(self) -> Observed:
        """Return what this agent sees now."""
        fabric_map, now_s = self._membership.map, self._clock()
        unowned = [shard.id for shard in fabric_map.shards() if fabric_map.owner(shard.id) is None]
        self._unowned_since_s = {shard: self._unowned_since_s.get(shard, now_s) for shard in unowned}
        shards = self.shards
        return Observed(
            map=fabric_map,
            agent=self._agent.id,
            start=self._agent.start,
            addresses=self._agent.addresses,
            joins_in_s=self._joins_in_s(fabric_map, now_s),
            attached=frozenset(self._drives),
            served=frozenset(shards.serving) - shards.handing_over,
            failed=shards.failed(fabric_map),
            unsure=frozenset(shards.serving) - shards.recoveries.keys() - self.standing.shards,
            stranded=frozenset(shard for shard, each in shards.serving.items() if each.owned.is_stranded),
            leaving=frozenset(shards.handing_over),
            is_leaving=shards.leaving.is_set(),
            broken=frozenset(
                drive.id for drive in self._drives.values() if drive.health.condition is Condition.FAILED
            ),
            held_off=frozenset(drive.id for drive in self._drives.values() if drive.refuses_reads),
            waiting=self._attaching.waiting(fabric_map),
            moved=self._attaching.moved(fabric_map),
            unowned_s={shard: now_s - since_s for shard, since_s in self._unowned_since_s.items()},
            is_busy=bool(shards.recoveries or shards.handing_over),
            is_in_vain=self._in_vain.holds_back(fabric_map, now_s),
        )

    async def hand_over_all(self) -> None:
        """Leave every shard to the other agents, without a gap for who reads: each is answered for until its
        next owner has claimed it, and some time after that; for ``drain_s`` at most, and not while the store
        is away, of which the others would hear. ``close`` comes next.
        """
        self.shards.leaving.set()
        await self._say_leaving()
        shards = list(self.shards.serving)
        await asyncio.gather(*(self.shards.hand_over(shard) for shard in shards))
        until_s = self._clock() + self._settings.drain_s
        while self._clock() < until_s and not self._are_owned_by_others(shards):
            if self.standing.status().trouble:
                return
            await asyncio.sleep(_LOOK_FOR_SUCCESSORS_S)
        await asyncio.sleep(max(0.0, min(_READ_BY_NEXT_S, until_s - self._clock())))

    async def _say_leaving(self) -> None:
        counted = self.standing.suspend()
        try:
            await self._membership.join(replace(self._agent, is_leaving=True))
        except MembershipError as error:
            log.warning(
                "%s can't say that it leaves: others take its shards when it has (%s)", self._agent.id, error
            )
            return
        claims = self._membership.map.claims
        self.standing.resume(
            {
                shard: owned
                for shard, owned in counted.items()
                if shard in self.shards.serving and claims.get(shard) == self.shards.serving[shard].claim
            }
        )

    async def close(self) -> bool:
        """Write what is committed, then give every claim back. The drives stay open.

        Says whether every I/O has ended within ``drain_s``. The claim of a shard whose writes have not is not
        given back here: another owner must not think that they have.
        """
        await self.shards.finish(within_s=self._settings.drain_s)
        left = list(self.shards.serving)
        ends = await asyncio.gather(*(self.shards.hand_over(shard, stills=False) for shard in left))
        await self._loops.stop()
        self._owner.forget()
        return all(ends) and self.shards.is_idle

    def _are_owned_by_others(self, shards: Sequence[ShardId]) -> bool:
        """Say whether every one of these has its next owner, or there is nobody who could be."""
        fabric_map = self._membership.map
        others = set(fabric_map.agents) - {self._agent.id}
        return not others or all(fabric_map.owner(shard) in others for shard in shards)

    async def _stop_as(self, step: Stop) -> None:
        if not step.gives_back:
            self.standing.lost(step.shard)
        if await self.shards.stop(step.shard) and step.gives_back:
            await self.shards.release(step.shard)

    def _joins_in_s(self, fabric_map: FabricMap, now_s: float) -> float:
        """Say how long to wait before joining again. Where others have stayed, only our own lease was lost,
        and it is done at once; where all are gone, each waits for a time of its own, so that the store is not
        asked by all of them together.
        """
        others = len(fabric_map.agents.keys() - {self._agent.id})
        if self._agent.id in fabric_map.agents:
            self._joins_at_s, self._had_others = None, others > 0
            return 0.0
        if self._joins_at_s is None:
            are_all_gone = self._had_others and not others
            self._joins_at_s = now_s + (rejoin_wait_s(self._agent.start) if are_all_gone else 0.0)
        return max(0.0, self._joins_at_s - now_s)

    def _until_next_turn_s(self) -> float:
        """Look sooner while it may soon be our turn to claim what nobody owns, or to join again."""
        waits_s, now_s = self._settings.turn_s, self._clock()
        if self._joins_at_s is not None and self._joins_at_s > now_s:
            waits_s = min(waits_s, self._joins_at_s - now_s)
        return min(waits_s, PATIENCE_S / 2) if self._unowned_since_s else waits_s

    def _see_owners(self, fabric_map: FabricMap) -> None:
        """Write nothing any more to shards that somebody else owns now, and answer for those that were left
        no longer than their next owners take to read them. What is being recovered writes nothing, and may be
        claimed anew.
        """
        self._see_successors(fabric_map)
        self.shards.fence_superseded(fabric_map)

    def _see_successors(self, fabric_map: FabricMap) -> None:
        """Answer for shards that were left for a while longer where they have their next owner, and no longer
        where there are none of them in the map.
        """
        if not self._owner.left:
            return
        known, now_s = {shard.id for shard in fabric_map.shards()}, self._clock()
        for shard in self._owner.left:
            if shard not in known:
                self._owner.succeeded(shard, until_s=now_s)
            elif fabric_map.owner(shard) is not None:
                self._owner.succeeded(shard, until_s=now_s + self._settings.drain_s)

    async def _apply(self, step: Step) -> None:
        match step:
            case Join():
                self.standing.joining()
                await self._membership.join(self._agent)
            case Attach(drive):
                await self._attaching.attach(drive, self._membership.map)
            case Detach(drive_id):
                self._attaching.detach(drive_id)
            case Serve(shard):
                await self.shards.serve(shard)
            case Reclaim(shard_id):
                await self.shards.reclaim(shard_id)
            case Stop():
                await self._stop_as(step)
            case BeginAnew(shard_id):
                await self.shards.begin_anew(shard_id)
            case GiveBack(shard_id):
                await self.shards.release(shard_id)
            case HandOver(shard_id):
                self._in_vain.handed_over(shard_id)
                self.shards.begin_hand_over(shard_id)
            case _:
                assert_never(step)
