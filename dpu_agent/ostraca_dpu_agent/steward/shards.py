"""The shards that one agent serves, each from its claim until it is given back or left to another agent.

What is to be done with which of them is the steward's to say.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from ostraca_dpu_agent.owner.shard import OwnedShard, core_of
from ostraca_dpu_agent.steward.recover import read_superblock
from ostraca_dpu_agent.steward.serving import Serving
from ostraca_dpu_agent.steward.standing import Standing
from ostraca_fabric.errors import MembershipError, OstracaError, StoreAwayError, WrongStoreError
from ostraca_fabric.ids import OwnerEpoch
from ostraca_fabric.sentences import counted
from ostraca_fabric.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ostraca_dpu_agent.owner.service import OwnerService
    from ostraca_dpu_agent.settings import AgentSettings
    from ostraca_dpu_agent.steward.attaching import Opening
    from ostraca_fabric.adapters.guarded_drive import GuardedDrive
    from ostraca_fabric.fabric_map import AgentRecord, FabricMap, ShardRecord
    from ostraca_fabric.flash.superblock import Superblock
    from ostraca_fabric.ids import DriveId, ShardId
    from ostraca_fabric.ports.membership import Claimed, Membership

log = logging.getLogger(__name__)

_CRASHED = "a part of what serves it has crashed, and the log says where"


class ServedShards:
    """The shards of one agent. What they have begun ends in ``finish``."""

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
        on_claimed: Callable[[ShardId], None],
    ) -> None:
        """Serve none. Shards are put into ``owner.shards``, and lie on *drives*. *on_claimed* is told of each
        that ``serve`` has claimed.
        """
        self._agent = agent
        self._settings = settings
        self._membership = membership
        self._owner = owner
        self._drives = drives
        self._opening = opening
        self.standing = Standing(agent, membership, grant_s=settings.owner.grant_s, clock=clock)
        self._clock = clock
        self._on_claimed = on_claimed
        self._tasks = Tasks(f"shards of {agent.id}")
        self.serving: dict[ShardId, Serving] = {}
        self.recoveries: dict[ShardId, asyncio.Task[None]] = {}
        self.handing_over: set[ShardId] = set()
        self.leaving = asyncio.Event()
        """Set once this agent is about to end, and serves nothing new."""

        self._recovering = asyncio.Lock()
        self._epoch_least: dict[ShardId, OwnerEpoch] = {}
        """Above every epoch under which this process has handed out space: what is under way under an earlier
        one must be waited for like anybody's."""

        self._failed: dict[ShardId, tuple[int, float]] = {}
        """The placement epoch in which a shard could not be opened, and when to try again in it."""

        self._unended: list[Callable[[], bool]] = []
        """Those that were closed with I/O under way: what says whether it has ended."""

        self._why_failed: dict[ShardId, str] = {}
        """Why shards could not be opened when that was tried last, unless others have owned them since."""

        self._refused: dict[ShardId, str] = {}
        """Why the store did not let this agent claim a shard, where it said so."""

    @property
    def why_not(self) -> dict[ShardId, str]:
        """Why shards are not served that this agent has tried to serve."""
        return self._refused | self._why_failed

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, also of shards that are no longer served."""
        self._unended = [has_ended for has_ended in self._unended if not has_ended()]
        return not self._tasks and not self._unended

    def failed(self, fabric_map: FabricMap) -> frozenset[ShardId]:
        """Return the shards that could not be opened, and are not to be tried again yet under this map."""
        placement, now_s = fabric_map.placement_epoch, self._clock()
        self._failed = {
            shard: (epoch, again_at_s)
            for shard, (epoch, again_at_s) in self._failed.items()
            if epoch == placement and now_s < again_at_s
        }
        self._why_failed = {
            shard: why
            for shard, why in self._why_failed.items()
            if fabric_map.owner(shard) in (None, self._agent.id)
        }
        return frozenset(self._failed)

    def fence_superseded(self, fabric_map: FabricMap) -> None:
        """Write nothing any more to shards that somebody else owns now. What is being recovered writes
        nothing, and may be claimed anew.
        """
        for serving in self.serving.values():
            if not serving.owned.core.is_recovering:
                self._fence_if_superseded(serving, fabric_map)

    def begin_hand_over(self, shard: ShardId) -> None:
        """Hand a shard over, and do not wait for it."""
        self._tasks.spawn(self.hand_over(shard))

    async def finish(self, *, within_s: float) -> None:
        """Wait until what was begun has ended."""
        await self._tasks.finish(within_s=within_s)

    async def serve(self, record: ShardRecord) -> None:
        """Claim a shard and begin to recover it. Blocks can be got as soon as their summaries are read."""
        drive = self._drives.get(record.drive)
        if drive is None or drive.refuses_reads:  # the next turn looks again
            claim = self._membership.map.claims.get(record.id)
            if claim is not None and (claim.agent, claim.start) == (self._agent.id, self._agent.start):
                await self.release(record.id)
            return
        try:
            superblock = await read_superblock(drive, record, self._membership.map.fabric)
        except Exception as error:  # noqa: BLE001 (told there)
            self._tell_crash(record.id, error)
            self._fail(record, error)
            return
        if self.leaving.is_set():
            return
        asked_s = self._clock()
        least = self._epoch_least.get(record.id, OwnerEpoch(1))
        claimed = await self._claimed(record.id, least)
        if claimed is None:
            return
        self._on_claimed(record.id)
        has_pins = max(claimed.epoch, least) > 1  # of readers whom somebody before promised something
        try:
            owned = await self._made(record, drive, superblock, has_pins=has_pins)
        except Exception as error:  # noqa: BLE001 (told there)
            self._tell_crash(record.id, error)
            self._fail(record, error)
            await self.release(record.id)
            return
        if owned is None:
            await self.release(record.id)
            return
        self._owner.own(owned)
        self.serving[record.id] = serving = Serving(
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
        self.recoveries[record.id] = recovering
        recovering.add_done_callback(partial(self._recovered, record.id))

    async def _made(
        self, record: ShardRecord, drive: GuardedDrive, superblock: Superblock, *, has_pins: bool
    ) -> OwnedShard | None:
        """Return a shard that nothing is known of yet; None where this agent is about to end by now: it has
        left what it served, and would never leave this.
        """
        pins_end_s = self._clock() + self._settings.owner.pin_max_s if has_pins else 0.0
        core = await asyncio.to_thread(
            core_of, superblock, self._settings.owner, earlier_pins_end_s=pins_end_s
        )
        if self.leaving.is_set():
            return None
        return OwnedShard(
            record,
            drive,
            core,
            settings=self._settings.owner,
            clock=self._clock,
            events=self._owner.events,
            on_damage=drive.note_damage,
        )

    async def reclaim(self, shard: ShardId) -> None:
        """Claim again what is served here, under the same epoch; where somebody came between, or the store
        has lost what was granted, begin anew: also where it has lost who came between, with or without a
        claim of this agent's.
        """
        serving = self.serving.get(shard)
        if serving is None:  # its recovery has failed, or it was handed over, since the turn began
            return
        if shard in self.recoveries:  # it has handed nothing out: whatever epoch it gets will do
            await self.stop(shard)
            return
        asked_s = self._clock()
        is_stranded = serving.owned.is_stranded
        claimed = await self._claimed(shard, OwnerEpoch(serving.claim.epoch + is_stranded))
        if serving.owned.is_closed:
            return
        if claimed is not None and serving.goes_on_under(claimed):
            self.standing.claimed(serving.owned, asked_s=asked_s)
        elif claimed is not None:
            self.standing.lost(shard)
            await self.stop(shard)

    async def begin_anew(self, shard: ShardId) -> None:
        """Stop a shard that is written no more here. Where a part of it has crashed leave it alone for a
        while: others may fare better.
        """
        serving = self.serving.get(shard)
        if serving is None:
            return
        self.standing.lost(shard)
        if serving.owned.has_crashed:
            log.warning("%s leaves shard %s alone for a while: %s", self._agent.id, shard, _CRASHED)
            self._leave_alone(serving.owned.record, _CRASHED)
        await self.stop(shard)

    async def stop(self, shard: ShardId) -> bool:
        """Answer for a shard no more, and let it end."""
        serving = self.serving.pop(shard, None)
        if serving is None:  # its recovery has failed, or it was handed over, since the turn began
            return True
        self.standing.given_up(shard)
        self._owner.disown(shard)
        serving.owned.fence()
        has_ended = await self._ended(serving, serving.owned.close(within_s=self._settings.drain_s))
        if not has_ended and not serving.owned.has_crashed:
            log.warning("%s stops shard %s with I/O under way that does not end", self._agent.id, shard)
        return has_ended

    async def hand_over(self, shard: ShardId, *, stills: bool = True) -> bool:
        """Let what is under way end, and give the claim back; look-ups are answered for a while longer."""
        serving = self.serving.get(shard)
        if serving is None:  # it was stopped just before
            return True
        self.handing_over.add(shard)
        try:
            has_ended = await self._ended(
                serving, serving.close(within_s=self._settings.drain_s, stills=stills)
            )
            self.standing.given_up(shard)
            if has_ended:
                self.standing.counts.handed_over += 1
                await self.release(shard)
        finally:
            self.serving.pop(shard, None)
            self.handing_over.discard(shard)
        if self._owner.shards.get(shard) is serving.owned:
            self._owner.leave(shard, serving.claim.epoch)
        return has_ended

    async def release(self, shard: ShardId) -> None:
        """Give a claim back. Where the store does not answer, the lease will."""
        try:
            await self._membership.release(shard, self._agent.id, self._agent.start)
        except MembershipError as error:
            log.warning("%s can't give shard %s back, its lease will: %s", self._agent.id, shard, error)

    async def _ended(self, serving: Serving, closing: Awaitable[bool]) -> bool:
        """Wait until a shard is closed, and its recovery has ended; say whether all I/O has."""
        recovering, has_ended = self.recoveries.get(serving.owned.record.id), False
        try:
            has_ended = await closing
            if recovering is not None:  # it ends after what it reads just now
                await asyncio.wait([recovering], timeout=self._settings.drain_s)
                has_ended = has_ended and recovering.done()
        finally:  # also where this agent leaves, and waits no longer
            if not has_ended:
                unended = (each for each in self._unended if not each())
                self._unended = [*unended, serving.owned.left_over()]
        return has_ended

    def _fence_if_superseded(self, serving: Serving, fabric_map: FabricMap) -> None:
        claim = fabric_map.claims.get(serving.owned.record.id)
        if claim is not None and claim.epoch > serving.claim.epoch:
            serving.owned.fence()

    def _recovered(self, shard: ShardId, recovering: asyncio.Task[None]) -> None:
        """Forget a recovery that has ended, unless there is another one by now."""
        if self.recoveries.get(shard) is recovering:
            del self.recoveries[shard]

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
        except Exception as error:  # noqa: BLE001 (told there)
            self._tell_crash(shard, error)
            if serving.owned.is_closed:  # it was stopped, and the claim may be another recovery's
                return
            self._fail(serving.owned.record, error)
            await self.release(shard)
        if serving.owned.is_closed:
            return
        if is_good:
            self._begin(serving)
        else:
            self._owner.disown(shard)
            del self.serving[shard]
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
        serving.begin(partial(owned.spawn, is_vital=True))
        self._owner.begun(shard)
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

    def _tell_crash(self, shard: ShardId, error: Exception) -> None:
        """Log the traceback of what is not foreseen."""
        if not isinstance(error, OstracaError):
            words = "reading shard %s crashed; this is a bug in Ostraca, or a want of memory"
            log.error(words, shard, exc_info=error)

    def _fail(self, record: ShardRecord, error: Exception) -> None:
        """Leave a shard alone for a while, or until its drive answers again where that was the trouble; say
        why, once.
        """
        why = str(error) if isinstance(error, OstracaError) else _CRASHED
        is_known = self._why_failed.get(record.id) == why
        log.log(
            logging.DEBUG if is_known else logging.WARNING,
            "%s can't open shard %s, and will try again: %s",
            self._agent.id,
            record.id,
            why,
        )
        self._leave_alone(record, why)

    def _leave_alone(self, record: ShardRecord, why: str) -> None:
        if not self._drives[record.drive].refuses_reads:
            again_at_s = self._clock() + self._settings.open_again_s
            self._failed[record.id] = self._membership.map.placement_epoch, again_at_s
        self._why_failed[record.id] = why
