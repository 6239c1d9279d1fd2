"""The steward's turns: observe, plan, apply."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, assert_never

from ostraca_dpu_agent.owner.shard import OwnedShard, core_of
from ostraca_dpu_agent.steward.attaching import Attaching, Opening
from ostraca_dpu_agent.steward.in_vain import InVain
from ostraca_dpu_agent.steward.plan import (
    PATIENCE_S,
    Attach,
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
from ostraca_dpu_agent.steward.recover import read_superblock
from ostraca_dpu_agent.steward.serving import Serving
from ostraca_dpu_agent.steward.standing import Standing
from ostraca_dpu_agent.unserved import unserved
from ostraca_fabric.drive_health import Condition
from ostraca_fabric.errors import DriveError, MembershipError, OstracaError, StoreAwayError, WrongStoreError
from ostraca_fabric.ids import OwnerEpoch
from ostraca_fabric.sentences import counted
from ostraca_fabric.spells import Spell
from ostraca_fabric.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ostraca_dpu_agent.owner.service import OwnerService
    from ostraca_dpu_agent.settings import AgentSettings
    from ostraca_dpu_agent.steward.plan import Step
    from ostraca_fabric.adapters.guarded_drive import GuardedDrive
    from ostraca_fabric.fabric_map import AgentRecord, FabricMap, ShardRecord
    from ostraca_fabric.ids import DriveId, ShardId
    from ostraca_fabric.ports.membership import Claimed, Membership
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
    ) -> None:
        """Fill *drives* and ``owner.shards``."""
        self._agent = agent
        self._settings = settings
        self._membership = membership
        self._owner = owner
        self._drives = drives
        self._opening = opening
        self._attaching = Attaching(agent.id, drives, opening, clock=clock, again_s=settings.open_again_s)
        self._clock = clock
        self._failed: dict[ShardId, tuple[int, float]] = {}
        """The placement epoch in which a shard could not be opened, and when to try again in it."""

        self._tasks = Tasks(f"steward of {agent.id}")
        self._loops = Tasks(f"standing of {agent.id}")
        self._serving: dict[ShardId, Serving] = {}
        self._recoveries: dict[ShardId, asyncio.Task[None]] = {}
        self._recovering = asyncio.Lock()
        self._epoch_least: dict[ShardId, OwnerEpoch] = {}
        """Above every epoch under which this process has handed out space: what is under way under an earlier
        one must be waited for like anybody's."""

        self._unowned_since_s: dict[ShardId, float] = {}
        self._why_failed: dict[ShardId, str] = {}
        """Why shards could not be opened when that was tried last, unless others have owned them since."""

        self._in_vain = InVain(agent.id)
        self._refused: dict[ShardId, str] = {}
        """Why the store did not let this agent claim a shard, where it said so."""

        self._handing_over: set[ShardId] = set()
        self._joins_at_s: float | None = None
        """When to join again; None while this agent is in the map."""

        self._had_others = False
        self._early = Spell(log, clock)
        """Turns that end early, one after the other."""

        self._leaving = asyncio.Event()
        self.standing = Standing(agent, membership, grant_s=settings.owner.grant_s, clock=clock)
        self.sentence = "I have not looked yet."

    def retires_in_s(self, shard: ShardId) -> float | None:
        """Return how long an earlier owner's grant of a shard is waited for; None when none is."""
        serving = self._serving.get(shard)
        return None if serving is None else serving.retires_in_s

    def unserved(self) -> Unserved:
        """Return what nobody serves, and what this agent can't, as its last turn found it."""
        fabric_map, now_s = self._membership.map, self._clock()
        return unserved(
            fabric_map,
            {shard: now_s - since_s for shard, since_s in self._unowned_since_s.items()},
            why_shards=self._refused | self._why_failed,
            why_drives=self._attaching.unattached(fabric_map),
            in_trouble={
                drive.id: f"drive {drive.id} {why}"
                for drive in self._drives.values()
                if (why := drive.health.why)
            },
        )

    async def run(self, on_map: Callable[[FabricMap], None]) -> None:
        """Take turns until cancelled: at every change of the map, and every ``turn_s``."""
        self._loops.spawn(self.standing.run())
        changes = self._membership.changes()
        change = asyncio.ensure_future(anext(changes))
        soonest_s, due_s = -math.inf, self._clock() + self._until_next_turn_s()
        try:
            while True:
                await asyncio.wait([change], timeout=max(0.0, due_s - self._clock()))
                if change.done():
                    self._see_owners(change.result())
                    on_map(change.result())
                    change = asyncio.ensure_future(anext(changes))
                    due_s = min(due_s, soonest_s)
                    if self._clock() < due_s:
                        continue
                await self.turn()
                self._owner.prune()
                soonest_s = self._clock() + _TURNS_APART_S
                due_s = self._clock() + self._until_next_turn_s()
        finally:
            change.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await change

    async def turn(self) -> None:
        """Observe, plan, apply. What can't be done is told, and looked at again in the next turn."""
        observed = self.observe()
        decided = plan(observed)
        if decided.sentence != self.sentence:
            log.info("%s: %s", self._agent.id, decided.sentence)
        self.sentence = decided.sentence
        try:
            for step in decided.steps:
                await self._apply(step)
        except (StoreAwayError, WrongStoreError) as error:  # ``Standing`` says it
            log.debug("%s ends its turn early, and will look again: %s", self._agent.id, error)
        except OstracaError as error:
            self._early.goes_on("%s ends its turn early, and will look again: %s", self._agent.id, error)
        else:
            self._early.over("%s takes whole turns again", self._agent.id)
        if self._recoveries:  # small shards are whole before anybody asks
            await asyncio.wait(self._recoveries.values(), timeout=_RECOVERED_WITHIN_S)

    def observe(self) -> Observed:
        """Return what this agent sees now."""
        fabric_map, now_s = self._membership.map, self._clock()
        placement = fabric_map.placement_epoch
        self._failed = {
            shard: (epoch, again_at_s)
            for shard, (epoch, again_at_s) in self._failed.items()
            if epoch == placement and now_s < again_at_s
        }
        unowned = [shard.id for shard in fabric_map.shards() if fabric_map.owner(shard.id) is None]
        self._unowned_since_s = {shard: self._unowned_since_s.get(shard, now_s) for shard in unowned}
        self._why_failed = {
            shard: why
            for shard, why in self._why_failed.items()
            if fabric_map.owner(shard) in (None, self._agent.id)
        }
        return Observed(
            map=fabric_map,
            agent=self._agent.id,
            start=self._agent.start,
            addresses=self._agent.addresses,
            joins_in_s=self._joins_in_s(fabric_map, now_s),
            attached=frozenset(self._drives),
            served=frozenset(self._serving) - self._handing_over,
            failed=frozenset(self._failed),
            unsure=frozenset(self._serving) - self._recoveries.keys() - self.standing.shards,
            leaving=frozenset(self._handing_over),
            is_leaving=self._leaving.is_set(),
            broken=frozenset(
                drive.id for drive in self._drives.values() if drive.health.condition is Condition.FAILED
            ),
            held_off=frozenset(drive.id for drive in self._drives.values() if drive.refuses_reads),
            waiting=self._attaching.waiting(fabric_map),
            moved=self._attaching.moved(fabric_map),
            unowned_s={shard: now_s - since_s for shard, since_s in self._unowned_since_s.items()},
            is_busy=bool(self._recoveries or self._handing_over),
            is_in_vain=self._in_vain.holds_back(fabric_map, now_s),
        )

    async def hand_over_all(self) -> None:
        """Leave every shard to the other agents, without a gap for who reads: each is answered for until its
        next owner has claimed it, and some time after that; for ``drain_s`` at most. ``close`` comes next.
        """
        self._leaving.set()
        await self._say_leaving()
        shards = list(self._serving)
        await asyncio.gather(*(self._hand_over(shard) for shard in shards))
        until_s = self._clock() + self._settings.drain_s
        while self._clock() < until_s and not self._are_owned_by_others(shards):  # noqa: ASYNC110 (maps come to ``run``)
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
                if shard in self._serving and claims.get(shard) == self._serving[shard].claim
            }
        )

    async def close(self) -> bool:
        """Write what is committed, then give every claim back. The drives stay open.

        Says whether every I/O has ended within ``drain_s``. The claim of a shard whose writes have not is not
        given back here: another owner must not think that they have.
        """
        await self._tasks.finish(within_s=self._settings.drain_s)
        ends = await asyncio.gather(*(self._hand_over(shard, stills=False) for shard in list(self._serving)))
        await self._loops.stop()
        self._owner.forget()
        return all(ends) and not self._tasks

    def _are_owned_by_others(self, shards: Sequence[ShardId]) -> bool:
        """Say whether every one of these has its next owner, or there is nobody who could be."""
        fabric_map = self._membership.map
        others = set(fabric_map.agents) - {self._agent.id}
        return not others or all(fabric_map.owner(shard) in others for shard in shards)

    async def _stop_as(self, step: Stop) -> None:
        if not step.gives_back:
            self.standing.lost(step.shard)
        if await self._stop(step.shard) and step.gives_back:
            await self._released(step.shard)

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
        for shard in self._owner.left:
            if fabric_map.owner(shard) is not None:
                self._owner.succeeded(shard, until_s=self._clock() + self._settings.drain_s)
        for serving in self._serving.values():
            if not serving.owned.core.is_recovering:
                self._fence_if_superseded(serving, fabric_map)

    def _fence_if_superseded(self, serving: Serving, fabric_map: FabricMap) -> None:
        claim = fabric_map.claims.get(serving.owned.record.id)
        if claim is not None and claim.epoch > serving.claim.epoch:
            serving.owned.fence()

    async def _stop(self, shard: ShardId) -> bool:
        """Answer for a shard no more, and let it end."""
        serving = self._serving.pop(shard, None)
        if serving is None:  # its recovery has failed, or it was handed over, since the turn began
            return True
        self.standing.given_up(shard)
        self._owner.shards.pop(shard, None)
        serving.owned.fence()
        has_ended = await self._ended(serving, serving.owned.close(within_s=self._settings.drain_s))
        if not has_ended:
            log.warning("%s stops shard %s with I/O under way that does not end", self._agent.id, shard)
        return has_ended

    async def _hand_over(self, shard: ShardId, *, stills: bool = True) -> bool:
        """Let what is under way end, and give the claim back; look-ups are answered for a while longer."""
        serving = self._serving.get(shard)
        if serving is None:  # it was stopped just before
            return True
        self._handing_over.add(shard)
        try:
            has_ended = await self._ended(
                serving, serving.close(within_s=self._settings.drain_s, stills=stills)
            )
            self.standing.given_up(shard)
            if has_ended:
                self.standing.counts.handed_over += 1
                await self._released(shard)
        finally:
            self._serving.pop(shard, None)
            self._handing_over.discard(shard)
        if self._owner.shards.get(shard) is serving.owned:
            self._owner.leave(shard)
        return has_ended

    async def _ended(self, serving: Serving, closing: Awaitable[bool]) -> bool:
        """Wait until a shard is closed, and its recovery has ended; say whether all I/O has."""
        recovering = self._recoveries.get(serving.owned.record.id)
        has_ended = await closing
        if recovering is not None:  # it ends after what it reads just now
            await asyncio.wait([recovering], timeout=self._settings.drain_s)
            has_ended = has_ended and recovering.done()
        return has_ended

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
                await self._serve(shard)
            case Reclaim(shard_id):
                await self._reclaim(shard_id)
            case Stop():
                await self._stop_as(step)
            case GiveBack(shard_id):
                await self._released(shard_id)
            case HandOver(shard_id):
                self._in_vain.handed_over(shard_id)
                self._tasks.spawn(self._hand_over(shard_id))
            case _:
                assert_never(step)

    async def _serve(self, record: ShardRecord) -> None:
        """Claim a shard and begin to recover it. Blocks can be got as soon as their summaries are read."""
        drive = self._drives.get(record.drive)
        if drive is None or drive.refuses_reads:  # the next turn looks again
            claim = self._membership.map.claims.get(record.id)
            if claim is not None and (claim.agent, claim.start) == (self._agent.id, self._agent.start):
                await self._released(record.id)
            return
        try:
            superblock = await read_superblock(drive, record, self._membership.map.fabric)
        except OstracaError as error:
            self._fail(record, error)
            return
        if self._leaving.is_set():
            return
        asked_s = self._clock()
        least = self._epoch_least.get(record.id, OwnerEpoch(1))
        claimed = await self._claimed(record.id, least)
        if claimed is None:
            return
        self._in_vain.taken_back(record.id, self._clock())
        has_pins = max(claimed.epoch, least) > 1  # of readers whom somebody before promised something
        pins_end_s = self._clock() + self._settings.owner.pin_max_s if has_pins else 0.0
        core = await asyncio.to_thread(
            core_of, superblock, self._settings.owner, earlier_pins_end_s=pins_end_s
        )
        if self._leaving.is_set():  # it has left what it served by now, and would never leave this
            await self._released(record.id)
            return
        owned = OwnedShard(
            record,
            drive,
            core,
            settings=self._settings.owner,
            clock=self._clock,
            events=self._owner.events,
            on_damage=drive.note_damage,
        )
        self._owner.own(owned)
        self._serving[record.id] = serving = Serving(
            owned,
            drive,
            superblock,
            claimed,
            agent=(self._agent.id, self._agent.start),
            claimed_s=asked_s,
            settings=self._settings.owner,
            membership=self._membership,
            clock=self._clock,
            bar=partial(self._opening.bar, record.drive),
        )
        recovering = self._tasks.spawn(self._recover(serving))
        self._recoveries[record.id] = recovering
        recovering.add_done_callback(partial(self._recovered, record.id))

    def _recovered(self, shard: ShardId, recovering: asyncio.Task[None]) -> None:
        """Forget a recovery that has ended, unless there is another one by now."""
        if self._recoveries.get(shard) is recovering:
            del self._recoveries[shard]

    async def _recover(self, serving: Serving) -> None:
        """Read what a shard holds, one shard at a time: memory and the drives' work are bounded."""
        shard, is_good = serving.owned.record.id, False
        try:
            async with self._recovering:
                is_wanted = await serving.recover()
            if not is_wanted:
                return
            is_good = await self._is_newest(serving)
        except MembershipError as error:
            log.warning("%s can't claim shard %s, and will try again: %s", self._agent.id, shard, error)
        except OstracaError as error:
            if serving.owned.is_closed:  # it was stopped, and the claim may be another recovery's
                return
            self._fail(serving.owned.record, error)
            await self._released(shard)
        if serving.owned.is_closed:
            return
        if is_good:
            self._begin(serving)
        else:
            del self._owner.shards[shard], self._serving[shard]
            await serving.owned.close(within_s=self._settings.drain_s)

    async def _is_newest(self, serving: Serving) -> bool:
        """See to it that the claim's epoch is above all that have written there; say whether it is.

        A store that began anew never knew of them. Where this process could not give its claim back it finds
        that one again, under which something may be on its way yet, or whose grant is closed.
        """
        core, shard = serving.owned.core, serving.owned.record.id
        least = max(OwnerEpoch(core.highest_epoch + 1), self._epoch_least.get(shard, OwnerEpoch(1)))
        if serving.claim.epoch >= least:
            return True
        await self._membership.release(shard, self._agent.id, self._agent.start)
        asked_s = self._clock()
        claimed = await self._claimed(shard, least)
        if claimed is None or claimed.epoch < least:
            return False
        serving.claimed_anew(claimed, asked_s)
        return True

    def _begin(self, serving: Serving) -> None:
        """Hand out space of a shard that is recovered."""
        owned, epoch = serving.owned, serving.claim.epoch
        shard = owned.record.id
        self._why_failed.pop(shard, None)
        self._epoch_least[shard] = OwnerEpoch(epoch + 1)
        serving.begin(owned.spawn)
        self._fence_if_superseded(serving, self._membership.map)
        claim = self._membership.map.claims.get(shard)
        if claim == serving.claim:
            self.standing.claimed(owned, asked_s=serving.claimed_s)
        counts = owned.core.counts()
        log.info(
            "%s serves shard %s under epoch %d: %s found",
            self._agent.id,
            shard,
            epoch,
            counted(counts.blocks, "block"),
        )
        if counts.blocks_beyond_limit:
            log.warning(
                "shard %s holds %d blocks more, the oldest, than its index may list: they are misses, and go "
                "first. Raise owner.blocks_per_shard_max, %d now, to keep as many",
                shard,
                counts.blocks_beyond_limit,
                self._settings.owner.blocks_per_shard_max,
            )

    async def _reclaim(self, shard: ShardId) -> None:
        """Claim again what is served here, under the same epoch; where somebody came between, or the store
        has lost what was granted, begin anew.
        """
        serving = self._serving.get(shard)
        if serving is None:  # its recovery has failed, or it was handed over, since the turn began
            return
        if shard in self._recoveries:  # it has handed nothing out: whatever epoch it gets will do
            await self._stop(shard)
            return
        asked_s = self._clock()
        claimed = await self._claimed(shard, serving.claim.epoch)
        if serving.owned.is_closed:
            return
        if claimed is not None and serving.goes_on_under(claimed):
            self.standing.claimed(serving.owned, asked_s=asked_s)
        elif claimed is not None:
            self.standing.lost(shard)
            await self._stop(shard)

    async def _claimed(self, shard: ShardId, epoch_at_least: OwnerEpoch) -> Claimed | None:
        """Claim a shard; None where another agent has it, or the store can't say. Raises StoreAwayError and
        WrongStoreError: then there is no use in asking for others.
        """
        try:
            claimed = await self._membership.claim(
                shard, self._agent.id, self._agent.start, epoch_at_least=epoch_at_least
            )
        except (StoreAwayError, WrongStoreError):
            raise
        except MembershipError as error:
            if self._refused.get(shard) != str(error):
                log.warning("%s can't claim shard %s, and will try again: %s", self._agent.id, shard, error)
            self._refused[shard] = str(error)
            return None
        self._refused.pop(shard, None)
        return claimed

    async def _released(self, shard: ShardId) -> None:
        try:
            await self._membership.release(shard, self._agent.id, self._agent.start)
        except MembershipError as error:
            log.warning("%s can't give shard %s back, its lease will: %s", self._agent.id, shard, error)

    def _fail(self, record: ShardRecord, error: OstracaError) -> None:
        """Leave a shard alone until the map changes; or only for a while, or until its drive answers again,
        where that was the trouble.
        """
        if not self._drives[record.drive].refuses_reads:
            waits_s = self._settings.open_again_s if isinstance(error, DriveError) else math.inf
            self._failed[record.id] = self._membership.map.placement_epoch, self._clock() + waits_s
        self._why_failed[record.id] = str(error)
        log.warning("%s can't open shard %s: %s", self._agent.id, record.id, error)
