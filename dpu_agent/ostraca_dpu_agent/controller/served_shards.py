"""Shards served by one agent, each from its claim until release or handover.

The controller decides on each action.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from ostraca_dpu_agent.controller.claim_validity import ClaimValidity
from ostraca_dpu_agent.controller.drive_attachments import DriveOpener
from ostraca_dpu_agent.controller.recovery import read_superblock
from ostraca_dpu_agent.controller.served_shard import ServedShard
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_dpu_agent.shards.service import OwnerService
from ostraca_dpu_agent.shards.shard import OwnedShard, core_of
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.errors import MembershipError, OstracaError, StoreAwayError, WrongStoreError
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.model.fabric_map import AgentRecord, FabricMap, ShardRecord
from ostraca_fabric.model.ids import DriveId, OwnerEpoch, ShardId
from ostraca_fabric.ports.membership import ClaimResult, Membership
from ostraca_fabric.runtime.sentences import counted
from ostraca_fabric.runtime.tasks import Tasks

log = logging.getLogger(__name__)

_CRASHED = "a task of this shard crashed: see the log"


class ServedShards:
    """Shards of one agent. Background work ends in ``finish``."""

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
        on_claimed: Callable[[ShardId], None],
    ) -> None:
        """Begin without shards. Add served shards to ``owner.shards``, on *drives*.

        *on_claimed* is called for each claim made by ``serve``.
        """
        self._agent = agent
        self._settings = settings
        self._membership = membership
        self._owner = owner
        self._drives = drives
        self._opener = opener
        self.claim_validity = ClaimValidity(agent, membership, grant_s=settings.owner.grant_s, clock=clock)
        self._clock = clock
        self._on_claimed = on_claimed
        self._tasks = Tasks(f"shards of {agent.id}")
        self.served: dict[ShardId, ServedShard] = {}
        self.recoveries: dict[ShardId, asyncio.Task[None]] = {}
        self.handing_over: set[ShardId] = set()
        self.is_ending = asyncio.Event()
        """Set once this agent is about to end; no shard is added then."""

        self._recovery_lock = asyncio.Lock()
        self._epoch_min: dict[ShardId, OwnerEpoch] = {}
        """Epochs above all those under which this process has granted space. Work under earlier epochs is
        awaited like work of other owners."""

        self._failed: dict[ShardId, tuple[int, float]] = {}
        """By shard that could not be opened: the placement epoch, and the time of the next attempt in this
        epoch."""

        self._io_checks: list[Callable[[], bool]] = []
        """Functions that tell whether I/O of a closed shard has ended."""

        self._failure_reasons: dict[ShardId, str] = {}
        """Reasons of the last failures to open shards, unless other agents have owned the shards since."""

        self._refused: dict[ShardId, str] = {}
        """Reasons of refused claims, if given by the store."""

    @property
    def failure_reasons(self) -> dict[ShardId, str]:
        """Reasons of failures to serve shards."""
        return self._refused | self._failure_reasons

    @property
    def is_idle(self) -> bool:
        """Whether no work is under way, also for shards no longer served."""
        self._io_checks = [has_ended for has_ended in self._io_checks if not has_ended()]
        return not self._tasks and not self._io_checks

    def failed(self, fabric_map: FabricMap) -> frozenset[ShardId]:
        """Return the shards with a failure to open and no new attempt due under this map."""
        placement, now_s = fabric_map.placement_epoch, self._clock()
        self._failed = {
            shard: (epoch, again_at_s)
            for shard, (epoch, again_at_s) in self._failed.items()
            if epoch == placement and now_s < again_at_s
        }
        self._failure_reasons = {
            shard: why
            for shard, why in self._failure_reasons.items()
            if fabric_map.owner(shard) in (None, self._agent.id)
        }
        return frozenset(self._failed)

    def fence_superseded(self, fabric_map: FabricMap) -> None:
        """Fence shards with a newer owner.

        A shard in recovery writes nothing, and may still be claimed under a higher epoch.
        """
        for served in self.served.values():
            if not served.owned.core.is_recovering:
                self._fence_if_superseded(served, fabric_map)

    def begin_hand_over(self, shard: ShardId) -> None:
        """Start to hand a shard over; return at once."""
        self._tasks.spawn(self.hand_over(shard))

    async def finish(self, *, within_s: float) -> None:
        """Wait for background work to end."""
        await self._tasks.finish(within_s=within_s)

    async def serve(self, record: ShardRecord) -> None:
        """Claim a shard and start its recovery. Blocks are readable as soon as their summaries are read."""
        drive = self._drives.get(record.drive)
        if drive is None or drive.refuses_reads or not drive.is_identified:  # left to the next turn
            claim = self._membership.map.claims.get(record.id)
            if claim is not None and (claim.agent, claim.start) == (self._agent.id, self._agent.start):
                await self.release(record.id)
            return
        try:
            superblock = await read_superblock(drive, record, self._membership.map.fabric)
        except Exception as error:  # noqa: BLE001 (logged there)
            self._fail(record, error)
            return
        if self.is_ending.is_set():
            return
        requested_s = self._clock()
        epoch_min = self._epoch_min.get(record.id, OwnerEpoch(1))
        claimed = await self._claim(record.id, epoch_min)
        if claimed is None:
            return
        self._on_claimed(record.id)
        has_pins = max(claimed.epoch, epoch_min) > 1  # readers may hold pins of an earlier owner
        owned = None
        try:
            owned = await self._new_shard(record, drive, superblock, has_pins=has_pins)
        except Exception as error:  # noqa: BLE001 (logged there)
            self._fail(record, error)
        if owned is None:
            await self.release(record.id)
            return
        self._owner.serve(owned)
        self.served[record.id] = served = ServedShard(
            owned,
            drive,
            superblock,
            claimed,
            agent=(self._agent.id, self._agent.start),
            claimed_s=requested_s,
            settings=self._settings.owner,
            membership=self._membership,
            clock=self._clock,
            preempt=partial(self._opener.preempt, record.drive),
        )
        recovery = self._tasks.spawn(self._recover(served))
        self.recoveries[record.id] = recovery
        recovery.add_done_callback(partial(self._forget_recovery, record.id))

    async def _new_shard(
        self, record: ShardRecord, drive: GuardedDrive, superblock: Superblock, *, has_pins: bool
    ) -> OwnedShard | None:
        """Return an empty shard; None if this agent is about to end.

        An ending agent has handed its shards over already, and would never hand over this shard.
        """
        pins_end_s = self._clock() + self._settings.owner.pin_max_s if has_pins else 0.0
        core = await asyncio.to_thread(
            core_of, superblock, self._settings.owner, earlier_pins_end_s=pins_end_s
        )
        if self.is_ending.is_set():
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
        """Renew the claim of a served shard under the same epoch, or else stop the shard.

        The shard stops after an intervention of another owner, even if the store has lost the other claim.
        The shard also stops if the store has lost grants of this owner.
        """
        served = self.served.get(shard)
        if served is None:  # failed recovery or handover since the turn began
            return
        if shard in self.recoveries:  # no space was granted yet, so any new epoch will do
            await self.stop(shard)
            return
        requested_s = self._clock()
        claimed = await self._claim(shard, OwnerEpoch(served.claim.epoch + served.owned.is_stranded))
        if served.owned.is_closed:
            return
        if claimed is not None and served.can_continue_under(claimed):
            self.claim_validity.add(served.owned, requested_s=requested_s)
        elif claimed is not None:
            self.claim_validity.remove_lost(shard)
            await self.stop(shard)

    async def restart(self, shard: ShardId) -> None:
        """Stop a shard that this process never writes again.

        After a crash of its tasks, this agent leaves the shard to other agents for a while.
        """
        served = self.served.get(shard)
        if served is None:
            return
        self.claim_validity.remove_lost(shard)
        if served.owned.has_crashed:
            log.warning("%s does not serve shard %s for a while: %s", self._agent.id, shard, _CRASHED)
            self._postpone(served.owned.record, _CRASHED)
        await self.stop(shard)

    async def stop(self, shard: ShardId) -> bool:
        """Stop answering for a shard, and close it. Returns whether all I/O has ended."""
        served = self.served.pop(shard, None)
        if served is None:  # failed recovery or handover since the turn began
            return True
        self.claim_validity.drop(shard)
        self._owner.disown(shard)
        served.owned.fence()
        has_ended = await self._close(served, served.owned.close(within_s=self._settings.drain_s))
        if not has_ended and not served.owned.has_crashed:
            log.warning("%s stopped shard %s with I/O still under way", self._agent.id, shard)
        return has_ended

    async def hand_over(self, shard: ShardId, *, stills: bool = True) -> bool:
        """Complete a shard's work, and release the claim. Lookups are answered for a while longer.

        With *stills*, outstanding reservations get time to end. Returns whether all I/O has ended.
        """
        served = self.served.get(shard)
        if served is None:  # stopped just before
            return True
        self.handing_over.add(shard)
        try:
            has_ended = await self._close(
                served, served.close(within_s=self._settings.drain_s, stills=stills)
            )
            self.claim_validity.drop(shard)
            if has_ended:
                self.claim_validity.counts.handed_over += 1
                await self.release(shard)
        finally:
            self.served.pop(shard, None)
            self.handing_over.discard(shard)
        if self._owner.shards.get(shard) is served.owned:
            self._owner.hand_over(shard, served.claim.epoch)
        return has_ended

    async def release(self, shard: ShardId) -> None:
        """Release a claim. If the store does not answer, the lease ends the claim."""
        try:
            await self._membership.release(shard, self._agent.id, self._agent.start)
        except MembershipError as error:
            log.warning(
                "%s can't release its claim of shard %s, which ends with the lease: %s",
                self._agent.id,
                shard,
                error,
            )

    async def _close(self, served: ServedShard, closing: Awaitable[bool]) -> bool:
        """Wait for the end of a shard and its recovery; return whether all I/O has ended."""
        recovery, has_ended = self.recoveries.get(served.owned.record.id), False
        try:
            has_ended = await closing
            if recovery is not None:  # ends after the present read
                await asyncio.wait([recovery], timeout=self._settings.drain_s)
                has_ended = has_ended and recovery.done()
        finally:  # also if the wait was cancelled at the end of this agent
            if not has_ended:
                unended = (each for each in self._io_checks if not each())
                self._io_checks = [*unended, served.owned.idle_check()]
        return has_ended

    def _fence_if_superseded(self, served: ServedShard, fabric_map: FabricMap) -> None:
        claim = fabric_map.claims.get(served.owned.record.id)
        if claim is not None and claim.epoch > served.claim.epoch:
            served.owned.fence()

    def _forget_recovery(self, shard: ShardId, recovery: asyncio.Task[None]) -> None:
        """Forget a finished recovery, unless a newer recovery runs."""
        if self.recoveries.get(shard) is recovery:
            del self.recoveries[shard]

    async def _recover(self, served: ServedShard) -> None:
        """Recover a shard. Shards recover one at a time, to bound memory and the load of drives."""
        shard, is_good = served.owned.record.id, False
        try:
            async with self._recovery_lock:
                is_wanted = await served.recover()
            if not is_wanted:
                return
            is_good = await self._is_newest(served)
        except MembershipError as error:
            log.warning("%s can't claim shard %s, trying again: %s", self._agent.id, shard, error)
        except Exception as error:  # noqa: BLE001 (logged there)
            if served.owned.is_closed:  # stopped; the claim may belong to a newer recovery
                self._log_crash(shard, error)
                return
            self._fail(served.owned.record, error)
            await self.release(shard)
        if served.owned.is_closed:
            return
        if is_good:
            self._begin(served)
        else:
            self._owner.disown(shard)
            del self.served[shard]
            await served.owned.close(within_s=self._settings.drain_s)

    async def _is_newest(self, served: ServedShard) -> bool:
        """Ensure an epoch above all that have written to the shard; return success.

        A new store does not know earlier epochs. If this process could not release an earlier claim, the
        store returns that claim again, with writes possibly under way, or with a closed grant.
        """
        core, shard = served.owned.core, served.owned.record.id
        epoch_min = max(OwnerEpoch(core.highest_epoch + 1), self._epoch_min.get(shard, OwnerEpoch(1)))
        if served.claim.epoch >= epoch_min:
            return True
        await self._membership.release(shard, self._agent.id, self._agent.start)
        requested_s = self._clock()
        claimed = await self._claim(shard, epoch_min)
        if claimed is None or claimed.epoch < epoch_min:
            return False
        served.renew_claim(claimed, requested_s)
        return True

    def _begin(self, served: ServedShard) -> None:
        """Start to grant space of a recovered shard."""
        owned, epoch = served.owned, served.claim.epoch
        shard = owned.record.id
        self._failure_reasons.pop(shard, None)
        self._epoch_min[shard] = OwnerEpoch(epoch + 1)
        served.begin(partial(owned.spawn, is_vital=True))
        self._owner.forget_former(shard)
        self._fence_if_superseded(served, self._membership.map)
        if self._membership.map.claims.get(shard) == served.claim:
            self.claim_validity.add(owned, requested_s=served.claimed_s)
        counts = owned.core.counts()
        log.info(
            "%s serves shard %s under epoch %d with %s",
            self._agent.id,
            shard,
            epoch,
            counted(counts.blocks, "block"),
        )
        if counts.blocks_beyond_limit:
            log.warning(
                "shard %s has %d blocks beyond the limit of its index; the oldest blocks are misses, and are "
                "evicted first: raise owner.blocks_per_shard_max, %d now",
                shard,
                counts.blocks_beyond_limit,
                self._settings.owner.blocks_per_shard_max,
            )

    async def _claim(self, shard: ShardId, epoch_at_least: OwnerEpoch) -> ClaimResult | None:
        """Claim a shard; return None if another agent owns the shard, or after an error of the store.

        Raises StoreAwayError and WrongStoreError: no other claim would succeed now.
        """
        try:
            claimed = await self._membership.claim(
                shard, self._agent.id, self._agent.start, epoch_at_least=epoch_at_least
            )
        except (StoreAwayError, WrongStoreError):
            raise
        except MembershipError as error:
            if self._refused.get(shard) != str(error):
                log.warning("%s can't claim shard %s, trying again: %s", self._agent.id, shard, error)
            self._refused[shard] = str(error)
            return None
        self._refused.pop(shard, None)
        return claimed

    def _log_crash(self, shard: ShardId, error: Exception) -> None:
        """Log the traceback of an unexpected error."""
        if not isinstance(error, OstracaError):
            message = "recovery of shard %s crashed: a bug in Ostraca, or lack of memory"
            log.error(message, shard, exc_info=error)

    def _fail(self, record: ShardRecord, error: Exception) -> None:
        """Postpone a shard, and log a new reason once.

        The next attempt comes after a while, or when an unresponsive drive answers again.
        """
        self._log_crash(record.id, error)
        why = str(error) if isinstance(error, OstracaError) else _CRASHED
        is_known = self._failure_reasons.get(record.id) == why
        log.log(
            logging.DEBUG if is_known else logging.WARNING,
            "%s can't open shard %s, trying again: %s",
            self._agent.id,
            record.id,
            why,
        )
        self._postpone(record, why)

    def _postpone(self, record: ShardRecord, why: str) -> None:
        if not self._drives[record.drive].refuses_reads:
            again_at_s = self._clock() + self._settings.reopen_backoff_s
            self._failed[record.id] = self._membership.map.placement_epoch, again_at_s
        self._failure_reasons[record.id] = why
