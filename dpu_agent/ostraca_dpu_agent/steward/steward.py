"""The steward's turns: observe, plan, apply."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from contextlib import aclosing
from typing import TYPE_CHECKING, assert_never

from ostraca_dpu_agent.owner.scrub import begin_scrub
from ostraca_dpu_agent.owner.shard import OwnedShard, core_of
from ostraca_dpu_agent.steward.plan import Attach, Observed, Serve, Stop, plan
from ostraca_dpu_agent.steward.recover import in_slices, read_summaries, read_superblock
from ostraca_fabric.drive_health import Condition
from ostraca_fabric.errors import DriveError, MembershipError, OstracaError
from ostraca_fabric.ids import OwnerEpoch
from ostraca_fabric.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_dpu_agent.owner.service import OwnerService
    from ostraca_dpu_agent.settings import AgentSettings
    from ostraca_dpu_agent.steward.plan import Step
    from ostraca_fabric.adapters.guarded_drive import GuardedDrive
    from ostraca_fabric.fabric_map import AgentRecord, DriveRecord, FabricMap, ShardRecord
    from ostraca_fabric.flash.superblock import Superblock
    from ostraca_fabric.ids import DriveId, ShardId
    from ostraca_fabric.ports.membership import Membership

log = logging.getLogger(__name__)

_RECOVERED_WITHIN_S = 0.25
"""How long a turn waits for recoveries that are under way."""


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
        open_drive: Callable[[DriveRecord], GuardedDrive],
        clock: Callable[[], float],
    ) -> None:
        """Fill *drives* and ``owner.shards``; *open_drive* opens the path to a drive and raises
        OstracaError.
        """
        self._agent = agent
        self._settings = settings
        self._membership = membership
        self._owner = owner
        self._drives = drives
        self._open_drive = open_drive
        self._clock = clock
        self._failed: dict[ShardId, tuple[int, float]] = {}
        """The placement epoch in which a shard could not be opened, and when to try again in it."""

        self._tasks = Tasks(f"steward of {agent.id}")
        self._recoveries: dict[ShardId, asyncio.Task[None]] = {}
        self._recovering = asyncio.Lock()
        self.sentence = "I have not looked yet."
        self.membership_trouble = ""
        """What the membership store failed with in the last turn that asked it."""

    async def run(self, on_map: Callable[[FabricMap], None]) -> None:
        """Take turns until cancelled: at every change of the map, and every ``turn_s``."""
        changes = self._membership.changes()
        change = asyncio.ensure_future(anext(changes))
        try:
            while True:
                await asyncio.wait([change], timeout=self._settings.turn_s)
                if change.done():
                    on_map(change.result())
                    change = asyncio.ensure_future(anext(changes))
                try:
                    await self.turn()
                    self.membership_trouble = ""
                except OstracaError as error:
                    self.membership_trouble = str(error) if isinstance(error, MembershipError) else ""
                    log.warning("%s ends its turn early, and will look again: %s", self._agent.id, error)
        finally:
            change.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await change

    async def turn(self) -> None:
        """Observe, plan, apply."""
        observed = self.observe()
        decided = plan(observed)
        if decided.sentence != self.sentence:
            log.info("%s: %s", self._agent.id, decided.sentence)
        self.sentence = decided.sentence
        for step in decided.steps:
            await self._apply(step)
        if self._recoveries:  # small shards are whole before anybody asks
            await asyncio.wait(self._recoveries.values(), timeout=_RECOVERED_WITHIN_S)

    def observe(self) -> Observed:
        """Return what this agent sees now."""
        fabric_map = self._membership.map
        placement = fabric_map.placement_epoch
        self._failed = {
            shard: (epoch, again_at_s)
            for shard, (epoch, again_at_s) in self._failed.items()
            if epoch == placement and self._clock() < again_at_s
        }
        return Observed(
            map=fabric_map,
            agent=self._agent.id,
            start=self._agent.start,
            attached=frozenset(self._drives),
            served=frozenset(self._owner.shards),
            failed=frozenset(self._failed),
            broken=frozenset(
                drive.id for drive in self._drives.values() if drive.health.condition is Condition.FAILED
            ),
        )

    async def close(self) -> bool:
        """Write what is committed, then give every claim back. The drives stay open.

        Says whether every I/O has ended within ``drain_s``. The claim of a shard whose writes have not is not
        given back here: another owner must not think that they have.
        """
        closing = {shard: self._stop(shard) for shard in list(self._owner.shards)}
        ends = await asyncio.gather(*closing.values())
        for shard, has_ended in zip(closing, ends, strict=True):
            if has_ended:
                await self._membership.release(shard, self._agent.id, self._agent.start)
        return all(ends)

    async def _stop(self, shard: ShardId) -> bool:
        """Answer for a shard no more, and let it end."""
        recovering = self._recoveries.get(shard)
        has_ended = await self._owner.shards.pop(shard).close(within_s=self._settings.drain_s)
        if recovering is not None:  # it ends after what it reads just now
            await asyncio.wait([recovering], timeout=self._settings.drain_s)
            has_ended = has_ended and recovering.done()
        if not has_ended:
            log.warning("%s stops shard %s with I/O under way that does not end", self._agent.id, shard)
        return has_ended

    async def _apply(self, step: Step) -> None:
        match step:
            case Attach(drive):
                self._attach(drive)
            case Serve(shard):
                await self._serve(shard)
            case Stop(shard_id, gives_back=gives_back):
                if await self._stop(shard_id) and gives_back:
                    await self._membership.release(shard_id, self._agent.id, self._agent.start)
            case _:
                assert_never(step)

    def _attach(self, drive: DriveRecord) -> None:
        try:
            self._drives[drive.id] = self._open_drive(drive)
        except OstracaError as error:
            log.warning("%s can't attach drive %s: %s", self._agent.id, drive.id, error)

    async def _serve(self, record: ShardRecord) -> None:
        """Claim a shard and begin to recover it. Blocks can be got as soon as their summaries are read."""
        drive = self._drives.get(record.drive)
        if drive is None or drive.refuses_reads:  # the next turn looks again
            return
        try:
            superblock = await read_superblock(drive, record, self._membership.map.fabric)
        except OstracaError as error:
            self._fail(record, error)
            return
        # Claimed before the summaries are read, so that no other owner lists anything more meanwhile.
        epoch = await self._claim(record, OwnerEpoch(1))
        if epoch is None:
            return
        core = await asyncio.to_thread(core_of, superblock, self._settings.owner)
        owned = OwnedShard(
            record,
            drive,
            core,
            settings=self._settings.owner,
            clock=self._clock,
            events=self._owner.events,
            on_damage=drive.note_damage,
        )
        self._owner.shards[record.id] = owned
        recovering = self._tasks.spawn(self._recover(owned, drive, superblock, epoch))
        self._recoveries[record.id] = recovering
        recovering.add_done_callback(lambda _: self._recoveries.pop(record.id, None))

    async def _recover(
        self, owned: OwnedShard, drive: GuardedDrive, superblock: Superblock, epoch: OwnerEpoch
    ) -> None:
        """Read what a shard holds, one shard at a time: memory and the drives' work are bounded."""
        record, claimed = owned.record, epoch
        try:
            async with self._recovering, aclosing(read_summaries(drive, record, superblock)) as parts:
                async for part in parts:
                    for some in in_slices(part):
                        if owned.is_closed:
                            return
                        owned.core.take_in(some)
                        await asyncio.sleep(0)
            if epoch <= owned.core.highest_epoch:  # the store began anew: it never knew of that one
                await self._membership.release(record.id, self._agent.id, self._agent.start)
                claimed = await self._claim(record, OwnerEpoch(owned.core.highest_epoch + 1)) or OwnerEpoch(0)
        except MembershipError as error:
            log.warning("%s can't claim shard %s, and will try again: %s", self._agent.id, record.id, error)
            claimed = OwnerEpoch(0)
        except OstracaError as error:
            self._fail(record, error)
            claimed = OwnerEpoch(0)
            with contextlib.suppress(MembershipError):
                await self._membership.release(record.id, self._agent.id, self._agent.start)
        if owned.is_closed:
            return
        if not claimed:
            del self._owner.shards[record.id]
            await owned.close(within_s=self._settings.drain_s)
            return
        owned.begin(claimed)
        owned.own_alone()
        begin_scrub(owned, drive, superblock, self._settings.owner.scrub, self._clock)
        counts = owned.core.counts()
        log.info(
            "%s serves shard %s under epoch %d: %d blocks found",
            self._agent.id,
            record.id,
            claimed,
            counts.blocks,
        )
        if counts.blocks_beyond_limit:
            log.warning(
                "shard %s holds %d blocks more, the oldest, than its index may list: they are misses, and go "
                "first. Raise owner.blocks_per_shard_max, %d now, to keep as many",
                record.id,
                counts.blocks_beyond_limit,
                self._settings.owner.blocks_per_shard_max,
            )

    async def _claim(self, record: ShardRecord, epoch_at_least: OwnerEpoch) -> OwnerEpoch | None:
        claimed = await self._membership.claim(
            record.id, self._agent.id, self._agent.start, epoch_at_least=epoch_at_least
        )
        return None if claimed is None else claimed.epoch

    def _fail(self, record: ShardRecord, error: OstracaError) -> None:
        """Leave a shard alone until the map changes; or only for a while, or until its drive answers again,
        where that was the trouble.
        """
        if not self._drives[record.drive].refuses_reads:
            waits_s = self._settings.open_again_s if isinstance(error, DriveError) else math.inf
            self._failed[record.id] = self._membership.map.placement_epoch, self._clock() + waits_s
        log.warning("%s can't open shard %s: %s", self._agent.id, record.id, error)
