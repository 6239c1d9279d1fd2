"""Controller of an agent: attaches drives and claims shards, in turns of observe, plan, apply.

A failed step is logged, and the next turn observes again. Each turn reports one sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

from ostraca_dpu_agent.controller.drive_attachments import DriveAttachments, DriveOpener
from ostraca_dpu_agent.controller.plan import (
    CLAIM_STAGGER_S,
    Attach,
    Detach,
    HandOver,
    Join,
    ObservedState,
    Reclaim,
    ReleaseClaim,
    RestartShard,
    Serve,
    Step,
    Stop,
    plan,
    rejoin_wait_s,
)
from ostraca_dpu_agent.controller.served_shards import ServedShards
from ostraca_dpu_agent.controller.unavailable import find_unavailable
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_dpu_agent.shards.service import OwnerService
from ostraca_fabric.drives.drive_health import DriveCondition
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.errors import MembershipError, OstracaError, StoreAwayError, WrongStoreError
from ostraca_fabric.model.fabric_map import AgentRecord, FabricMap
from ostraca_fabric.model.ids import AgentId, DriveId, ShardId, StartId
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.runtime.tasks import Tasks, set_within
from ostraca_fabric.telemetry.log_lines import LogDedup
from ostraca_fabric.telemetry.unavailable import Unavailable

_FIRST_S = 60.0
_LONGEST_S = 3600.0


class HandoverBackoff:
    """Handovers of one agent. Times are in seconds, on the caller's clock.

    An agent with too many shards hands one over to agents with room. If no other agent can open the shard,
    for example without a path to the drive, this agent claims the shard again. Further handovers would fail
    alike, and each costs readers a moment. So handovers pause, longer after each failure. The pause ends when
    an agent joins, restarts or leaves, or when an agent takes a shard.
    """

    def __init__(self, agent: AgentId) -> None:
        """Begin without handovers."""
        self._agent = agent
        self._handed_over: set[ShardId] = set()
        self._others: frozenset[tuple[AgentId, StartId]] = frozenset()
        self._waits_s = 0.0
        self._until_s = -math.inf

    def note_handover(self, shard: ShardId) -> None:
        """Note the handover of a shard."""
        self._handed_over.add(shard)

    def note_claim(self, shard: ShardId, now_s: float) -> None:
        """Note a claim by this agent; a handover of the same shard has then failed."""
        if shard in self._handed_over:
            self._handed_over.discard(shard)
            self._waits_s = min(max(_FIRST_S, 2 * self._waits_s), _LONGEST_S)
            self._until_s = now_s + self._waits_s

    def is_active(self, fabric_map: FabricMap, now_s: float) -> bool:
        """Return whether handovers pause now, under this map."""
        others = frozenset((each.id, each.start) for each in fabric_map.agents.values())
        accepted = {
            shard for shard in self._handed_over if fabric_map.owner(shard) not in (None, self._agent)
        }
        self._handed_over -= accepted
        if accepted or others != self._others:
            self._others, self._waits_s, self._until_s = others, 0.0, -math.inf
        return now_s < self._until_s


log = logging.getLogger(__name__)

_RECOVERY_WAIT_S = 0.25
"""Wait of a turn for recoveries under way."""

_SUCCESSOR_POLL_S = 0.05

_SUCCESSOR_RECOVERY_S = 2.0
"""Time for which an ending agent still answers after all its shards are claimed. Reading the summaries of a
terabyte takes about as long; blocks not read by then are misses for a moment."""

_FINAL_CHECK_S = 0.5
"""Time limit of the last check of file drives: an answer takes microseconds, or forever."""

_FILES_AT_ONCE = 4
"""File drives checked in a turn. Each check starts a thread, which costs half a millisecond, so most of a
thousand drives wait for later turns."""

_TURN_GAP_S = 0.02
"""Least time between turns. When agents start together, each claim is a new map, and one turn handles
many."""


class AgentController:
    """Controller of one agent's drives and shards."""

    def __init__(
        self,
        agent: AgentRecord,
        settings: AgentSettings,
        *,
        membership: Membership,
        owner: OwnerService,
        drives: dict[DriveId, GuardedDrive],
        opener: DriveOpener,
        clock: Callable[[], float],
        on_crash: Callable[[], None] | None = None,
    ) -> None:
        """Manage *drives* and ``owner.shards``. *on_crash* is called if a background task crashes."""
        self._agent = agent
        self._settings = settings
        self._membership = membership
        self._owner = owner
        self._drives = drives
        self._attachments = DriveAttachments(
            agent.id, drives, opener, clock=clock, again_s=settings.reopen_backoff_s
        )
        self._clock = clock
        self._loops = Tasks(f"controller of {agent.id}", on_crash=on_crash)
        self.shards = ServedShards(
            agent,
            settings,
            membership=membership,
            owner=owner,
            drives=drives,
            opener=opener,
            clock=clock,
            on_claimed=lambda shard: self._handover_backoff.note_claim(shard, clock()),
        )
        self.claim_validity = self.shards.claim_validity
        self._unowned_since_s: dict[ShardId, float] = {}
        self._handover_backoff = HandoverBackoff(agent.id)
        self._rejoin_at_s: float | None = None
        """Time to join again; None while this agent is in the map."""

        self._had_others = False
        self._incomplete_turns = LogDedup(log, clock)
        """Successive incomplete turns."""

        self.sentence = "starting"

    def retires_in_s(self, shard: ShardId) -> float | None:
        """Return the time until earlier owners' grants of a shard are retired; None without any."""
        served = self.shards.served.get(shard)
        return None if served is None else served.retires_in_s

    def unavailable(self) -> Unavailable:
        """Return unowned shards and drives not usable here, as of the last turn."""
        fabric_map, now_s = self._membership.map, self._clock()
        return find_unavailable(
            fabric_map,
            {shard: now_s - since_s for shard, since_s in self._unowned_since_s.items()},
            why_shards=self.shards.failure_reasons,
            why_drives=self._attachments.unusable(fabric_map),
            in_trouble={
                drive.id: f"drive {drive.id} {why}" for drive in self._drives.values() if (why := drive.why)
            },
        )

    async def run(self, on_map: Callable[[FabricMap], None]) -> None:
        """Run turns until cancelled: at every change of the map, and every ``turn_s``.

        *on_map* receives each map at once, even during a turn: a takeover of many shards is long.
        """
        self._loops.spawn(self.claim_validity.run())
        self._loops.spawn(self._check_files())
        changed = asyncio.Event()
        following = self._loops.spawn(self._follow(on_map, changed))
        earliest_s, due_s = -math.inf, self._clock() + self._until_next_turn_s()
        try:
            while not following.done():  # done after a crash
                if await set_within(changed, max(0.0, due_s - self._clock())):
                    changed.clear()
                    due_s = min(due_s, earliest_s)
                    if self._clock() < due_s:
                        continue
                await self.turn()
                self._note_successors(self._membership.map)
                self._owner.prune()
                earliest_s = self._clock() + _TURN_GAP_S
                due_s = self._clock() + self._until_next_turn_s()
        finally:
            following.cancel()

    async def _check_files(self) -> None:
        """Check file drives. A task apart from turns, because a file system may hang."""
        while True:
            await asyncio.sleep(self._settings.turn_s)
            await self._attachments.check_files(at_once=_FILES_AT_ONCE)

    async def _follow(self, on_map: Callable[[FabricMap], None], changed: asyncio.Event) -> None:
        async for fabric_map in self._membership.changes():
            self._note_owners(fabric_map)
            on_map(fabric_map)
            changed.set()

    async def turn(self) -> None:
        """Observe, plan, apply. The next turn tries failed steps again."""
        await self._attachments.identify(self._membership.map)
        turn_plan = plan(self.observe())
        if turn_plan.sentence != self.sentence:
            log.info("%s: %s", self._agent.id, turn_plan.sentence)
        self.sentence = turn_plan.sentence
        stops = [step for step in turn_plan.steps if isinstance(step, Stop)]  # always first
        try:
            await asyncio.gather(*map(self._apply, stops))  # each may wait long for hanging I/O
            for step in turn_plan.steps[len(stops) :]:
                await self._apply(step)
        except (StoreAwayError, WrongStoreError) as error:  # ``ClaimValidity`` logs a warning
            log.debug("%s: incomplete turn, trying again: %s", self._agent.id, error)
        except OstracaError as error:
            self._incomplete_turns.report("%s: incomplete turn, trying again: %s", self._agent.id, error)
        else:
            self._incomplete_turns.resolve("%s: turns are complete again", self._agent.id)
        if self.shards.recoveries:  # small shards are recovered before the first lookup
            await asyncio.wait(self.shards.recoveries.values(), timeout=_RECOVERY_WAIT_S)

    def observe(self) -> ObservedState:
        """Return the present state of the fabric and of this agent."""
        fabric_map, now_s = self._membership.map, self._clock()
        unowned = [shard.id for shard in fabric_map.shards() if fabric_map.owner(shard.id) is None]
        self._unowned_since_s = {shard: self._unowned_since_s.get(shard, now_s) for shard in unowned}
        shards = self.shards
        return ObservedState(
            map=fabric_map,
            agent=self._agent.id,
            start=self._agent.start,
            addresses=self._agent.addresses,
            rejoin_delay_s=self._rejoin_delay_s(fabric_map, now_s),
            attached=frozenset(self._drives),
            served=frozenset(shards.served) - shards.handing_over,
            failed=shards.failed(fabric_map),
            unconfirmed=frozenset(shards.served) - shards.recoveries.keys() - self.claim_validity.shards,
            stranded=frozenset(shard for shard, each in shards.served.items() if each.owned.is_stranded),
            handing_over=frozenset(shards.handing_over),
            is_leaving=shards.is_ending.is_set(),
            failed_drives=frozenset(
                drive.id for drive in self._drives.values() if drive.health.condition is DriveCondition.FAILED
            ),
            unresponsive=frozenset(
                drive.id for drive in self._drives.values() if drive.refuses_reads or not drive.is_identified
            ),
            unattachable=self._attachments.unattachable(fabric_map),
            obsolete=self._attachments.obsolete(fabric_map),
            unowned_s={shard: now_s - since_s for shard, since_s in self._unowned_since_s.items()},
            is_busy=bool(shards.recoveries or shards.handing_over),
            is_backing_off=self._handover_backoff.is_active(fabric_map, now_s),
        )

    async def hand_over_all(self) -> None:
        """Leave every shard to the other agents, without misses for readers. Then call ``close``.

        This agent answers for each shard until the next owner has claimed and read the shard, for at most
        ``drain_s``. The wait ends early if the store is unreachable: no other agent would learn of the
        change.
        """
        self.shards.is_ending.set()
        await self._announce_leaving()
        shards = list(self.shards.served)
        await asyncio.gather(*(self.shards.hand_over(shard) for shard in shards))
        until_s = self._clock() + self._settings.drain_s
        while self._clock() < until_s and not self._have_successors(shards):
            if self.claim_validity.status().trouble:
                return
            await asyncio.sleep(_SUCCESSOR_POLL_S)
        await asyncio.sleep(max(0.0, min(_SUCCESSOR_RECOVERY_S, until_s - self._clock())))

    async def _announce_leaving(self) -> None:
        claims_before = self.claim_validity.suspend()
        try:
            await self._membership.join(replace(self._agent, is_leaving=True))
        except MembershipError as error:
            log.warning(
                "%s can't announce its end: other agents take over its shards afterwards (%s)",
                self._agent.id,
                error,
            )
            return
        claims = self._membership.map.claims
        self.claim_validity.resume(
            {
                shard: owned
                for shard, owned in claims_before.items()
                if shard in self.shards.served and claims.get(shard) == self.shards.served[shard].claim
            }
        )

    async def close(self) -> bool:
        """Write committed blocks, then release every claim. The drives stay open.

        Returns whether every I/O has ended within ``drain_s``. A shard with unfinished writes keeps its
        claim: no other owner may assume the end of those writes.
        """
        with contextlib.suppress(TimeoutError):  # report a deleted drive before its blocks are lost
            async with asyncio.timeout(_FINAL_CHECK_S):
                await self._attachments.check_files()
        await self.shards.finish(within_s=self._settings.drain_s)
        left = list(self.shards.served)
        ends = await asyncio.gather(*(self.shards.hand_over(shard, stills=False) for shard in left))
        await self._loops.stop()
        self._owner.clear()
        return all(ends) and self.shards.is_idle

    def _have_successors(self, shards: Sequence[ShardId]) -> bool:
        """Return whether every shard has its next owner, or no other agent exists."""
        fabric_map = self._membership.map
        others = set(fabric_map.agents) - {self._agent.id}
        return not others or all(fabric_map.owner(shard) in others for shard in shards)

    async def _stop(self, step: Stop) -> None:
        if not step.gives_back:
            self.claim_validity.remove_lost(step.shard)
        if await self.shards.stop(step.shard) and step.gives_back:
            await self.shards.release(step.shard)

    def _rejoin_delay_s(self, fabric_map: FabricMap, now_s: float) -> float:
        """Return the delay before joining again.

        If only this agent's lease was lost, there is none. If all agents are gone, each has a delay of its
        own, to spread the load on the store.
        """
        others = len(fabric_map.agents.keys() - {self._agent.id})
        if self._agent.id in fabric_map.agents:
            self._rejoin_at_s, self._had_others = None, others > 0
            return 0.0
        if self._rejoin_at_s is None:
            are_all_gone = self._had_others and not others
            self._rejoin_at_s = now_s + (rejoin_wait_s(self._agent.start) if are_all_gone else 0.0)
        return max(0.0, self._rejoin_at_s - now_s)

    def _until_next_turn_s(self) -> float:
        """Return the time until the next turn: shorter while a claim or a join may be due soon."""
        waits_s, now_s = self._settings.turn_s, self._clock()
        if self._rejoin_at_s is not None and self._rejoin_at_s > now_s:
            waits_s = min(waits_s, self._rejoin_at_s - now_s)
        return min(waits_s, CLAIM_STAGGER_S / 2) if self._unowned_since_s else waits_s

    def _note_owners(self, fabric_map: FabricMap) -> None:
        """Fence shards with a newer owner, and limit the answers for shards handed over."""
        self._note_successors(fabric_map)
        self.shards.fence_superseded(fabric_map)

    def _note_successors(self, fabric_map: FabricMap) -> None:
        """Limit the answers for shards handed over: ``drain_s`` after the next owner's claim.

        Shards no longer in the map are forgotten at once.
        """
        if not self._owner.handed_over:
            return
        known, now_s = {shard.id for shard in fabric_map.shards()}, self._clock()
        for shard in self._owner.handed_over:
            if shard not in known:
                self._owner.end_lookups(shard, until_s=now_s)
            elif fabric_map.owner(shard) is not None:
                self._owner.end_lookups(shard, until_s=now_s + self._settings.drain_s)

    async def _apply(self, step: Step) -> None:
        match step:
            case Join():
                self.claim_validity.clear()
                await self._membership.join(self._agent)
            case Attach(drive):
                await self._attachments.attach(drive, self._membership.map)
            case Detach(drive_id):
                self._attachments.detach(drive_id)
            case Serve(shard):
                await self.shards.serve(shard)
            case Reclaim(shard_id):
                await self.shards.reclaim(shard_id)
            case Stop():
                await self._stop(step)
            case RestartShard(shard_id):
                await self.shards.restart(shard_id)
            case ReleaseClaim(shard_id):
                await self.shards.release(shard_id)
            case HandOver(shard_id):
                self._handover_backoff.note_handover(shard_id)
                self.shards.begin_hand_over(shard_id)
            case _:
                assert_never(step)
