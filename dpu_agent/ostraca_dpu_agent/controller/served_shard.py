"""A served shard, from its claim to the end of the claim.

The claim precedes the reading of summaries, so that no other owner grants space meanwhile. Blocks are
readable as soon as their summaries are read. Then the grant is kept large enough, and late commits of earlier
owners are adopted until their grants retire. A grant retires when its reservations have ended and no write
can land any more, counted from the claim. A grant closed in order contains only segments with failed or
abandoned writes, so the wait is shorter.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import aclosing
from typing import Any

from ostraca_dpu_agent.controller.recovery import read_slices
from ostraca_dpu_agent.settings import OwnerSettings
from ostraca_dpu_agent.shards.core.grants import AHEAD_MAX
from ostraca_dpu_agent.shards.shard import OwnedShard
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.errors import DriveError, MembershipError, StoreAwayError, WrongStoreError
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.model.fabric_map import Claim, Grant
from ostraca_fabric.model.ids import AgentId, OwnerEpoch, StartId
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.ports.membership import ClaimResult, Membership
from ostraca_fabric.telemetry.log_lines import LogDedup

log = logging.getLogger(__name__)

_RETRY_S = 1.0


class ServedShard:
    """Owned shard and its claim. ``recover`` once; background work ends when the shard is closed."""

    def __init__(  # noqa: PLR0913 (dependencies)
        self,
        owned: OwnedShard,
        drive: GuardedDrive,
        superblock: Superblock,
        claimed: ClaimResult,
        *,
        agent: tuple[AgentId, StartId],
        claimed_s: float,
        settings: OwnerSettings,
        membership: Membership,
        clock: Callable[[], float],
        preempt: Callable[[AgentId], Awaitable[None]],
    ) -> None:
        """Serve *owned* under the claim *claimed*, requested at *claimed_s*.

        *preempt* makes the drive refuse writes of a vanished agent, if supported.
        """
        self.owned = owned
        self.claimed_s = claimed_s
        self._drive = drive
        self._superblock = superblock
        self._claimed = claimed
        self._agent = agent
        self._settings = settings
        self._membership = membership
        self._clock = clock
        self._preempt = preempt
        self._earlier: dict[OwnerEpoch, Grant] = {}
        self._retire_at_s: dict[OwnerEpoch, float] = {}
        self._granting = asyncio.Lock()
        self._grant_trouble = LogDedup(log, clock)

    @property
    def claim(self) -> Claim:
        """Present claim of the shard."""
        return Claim(*self._agent, self._claimed.epoch)

    @property
    def retires_in_s(self) -> float | None:
        """Time until the last grant of earlier owners may be retired; None without any."""
        if not self._retire_at_s:
            return None
        return max(0.0, max(self._retire_at_s.values()) - self._clock())

    def renew_claim(self, claimed: ClaimResult, claimed_s: float) -> None:
        """Replace an ended claim; no space was granted under the old claim."""
        self._claimed, self.claimed_s = claimed, claimed_s

    def can_continue_under(self, claimed: ClaimResult) -> bool:
        """Return whether the shard can be served on under this renewed claim.

        The epoch must be the same, this owner's grant must still be recorded, and every earlier grant must be
        known here. An owner that never writes again can't continue, nor an owner still in recovery.
        """
        if self.owned.is_stranded or self.owned.core.is_recovering:
            return False
        is_on_record = self.owned.core.grants.segments <= set(claimed.own.segments)
        heeds_all = all(grant.epoch in self._earlier for grant in claimed.earlier)
        return claimed.epoch == self._claimed.epoch and is_on_record and heeds_all

    async def recover(self) -> bool:
        """Read the shard's summaries; return False if the shard was closed meanwhile. Raises DriveError."""
        owned = self.owned
        async with aclosing(read_slices(self._drive, owned.record, self._superblock)) as slices:
            async for areas in slices:
                if owned.is_closed:
                    return False
                owned.core.take_in(areas)
        return not owned.is_closed

    def begin(self, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Start to grant space, and to adopt commits of earlier owners, in tasks of *spawn*."""
        owned, now_s = self.owned, self._clock()
        self._earlier = {grant.epoch: grant for grant in self._claimed.earlier}
        self._retire_at_s = {
            epoch: now_s + self._late_write_wait_s(grant) for epoch, grant in self._earlier.items()
        }
        owned.begin(self._claimed.epoch, withheld=self._segments(self._earlier.values()))
        owned.begin_scrub(
            self._settings.scrub,
            is_suspended=lambda: self._membership.overrides.live.scrub is False,
        )
        spawn(self._keep_granted())
        if self._earlier:
            spawn(self._adopt())

    async def close(self, *, within_s: float, stills: bool) -> bool:
        """Write committed blocks, and close the grant in the store if no work is under way.

        The closed grant names the segments where a failed write may still land. Returns whether every I/O has
        ended within *within_s*. With *stills*, reservations get half of this time to end.

        Lookups are still answered from the index. The caller releases the claim.
        """
        owned, until_s = self.owned, self._clock() + within_s
        is_still = await owned.quiesce(within_s=within_s / 2 if stills else 0.0)
        has_ended = await owned.close(within_s=max(0.0, until_s - self._clock()))
        owned.fence()
        if is_still and has_ended:
            try:
                await self._membership.close_grant(owned.record.id, self.claim, owned.segments_in_doubt())
            except MembershipError as error:
                log.warning(
                    "the grant of shard %s stays open, so its next owner waits longer: %s",
                    owned.record.id,
                    error,
                )
        return has_ended

    def _late_write_wait_s(self, grant: Grant) -> float:
        """Return the time after the claim in which a write under an earlier grant may land."""
        settings = self._settings
        if grant.is_closed:
            return settings.late_write_s
        return settings.grant_s + settings.hold_s + settings.late_write_s

    async def _keep_granted(self) -> None:
        """Extend the recorded grant whenever the shard needs more segments."""
        owned = self.owned
        while not owned.is_closed:
            await owned.grant_due.wait()
            async with self._granting:
                wanted = owned.wanted_grant()
                if wanted is None or not await self._record_grant(wanted, frozenset()):
                    await owned.closed_within(_RETRY_S)

    async def _record_grant(self, segments: tuple[int, ...], retired: frozenset[OwnerEpoch]) -> bool:
        """Record a grant, in place of the grant before; return success. The caller holds the lock."""
        shard = self.owned.record.id
        try:
            is_done = await self._membership.grant(shard, self.claim, segments, retired=retired)
        except (StoreAwayError, WrongStoreError) as error:  # ``ClaimValidity`` logs a warning for all shards
            log.debug("shard %s waits for a grant: %s", shard, error)
            return False
        except MembershipError as error:
            self._grant_trouble.report("shard %s waits for a grant: %s", shard, error)
            return False
        self._grant_trouble.resolve("shard %s has its grant", shard)
        if is_done:
            self.owned.apply_grant(segments)
        return is_done

    async def _adopt(self) -> None:
        """Adopt commits of earlier owners until the last of their grants is retired.

        A read that began after a grant was due finds all commits ever listed under the grant. If the store
        fails to record the retirement then, only the retirement is repeated.
        """
        owned = self.owned
        while self._earlier and not owned.is_closed:
            await owned.closed_within(self._next_adoption_s(self._earlier) - self._clock())
            now_s = self._clock()
            due = frozenset(epoch for epoch, at_s in self._retire_at_s.items() if at_s <= now_s)
            try:
                await adopt_late_commits(owned, self._drive, self._superblock)
            except DriveError as error:
                log.warning(
                    "summaries of earlier owners of shard %s can't be read, trying again: %s",
                    owned.record.id,
                    error,
                )
                await owned.closed_within(_RETRY_S)
                continue
            if due:
                await self._retire(due, until_s=self._next_adoption_s(self._earlier.keys() - due))

    def _next_adoption_s(self, epochs: Collection[OwnerEpoch]) -> float:
        """Return the time of the next read for grants of these *epochs*.

        Reads repeat at an interval, and once more when the first grant is due. A grant covers at most
        ``AHEAD_MAX`` segments. If more are withheld, the interval grows to keep the load of the drive.
        """
        if not epochs:
            return math.inf
        every_s = self._settings.adopt_every_s * max(1.0, len(self.owned.withheld) / AHEAD_MAX)
        return min(self._clock() + every_s, *(self._retire_at_s[epoch] for epoch in epochs))

    async def _retire(self, due: frozenset[OwnerEpoch], *, until_s: float) -> None:
        """Retire earlier grants, with retries until *until_s*."""
        while not self.owned.is_closed and not await self._try_retire(due):
            await self.owned.closed_within(_RETRY_S)
            if self._clock() >= until_s:
                return

    async def _try_retire(self, due: frozenset[OwnerEpoch]) -> bool:
        """Retire earlier grants, which frees their segments; return success."""
        async with self._granting:
            if not await self._record_grant(tuple(sorted(self.owned.core.grants.segments)), due):
                return False
        # The store has just confirmed the claim. No withheld segment is used before the preemption.
        for agent in sorted({self._earlier[epoch].agent for epoch in due}):
            await self._preempt(agent)
        grants = [self._earlier.pop(epoch) for epoch in sorted(due)]
        for epoch in due:
            del self._retire_at_s[epoch]
        self.owned.retire(self._segments(grants) - self._segments(self._earlier.values()))
        log.info("shard %s retired the grants of owner epochs up to %d", self.owned.record.id, max(due))
        return True

    def _segments(self, grants: Iterable[Grant]) -> frozenset[int]:
        segments = self._superblock.geometry.segments
        return frozenset(number for grant in grants for number in grant.of(segments))


async def adopt_late_commits(owned: OwnedShard, drive: Drive, superblock: Superblock) -> int:
    """Adopt the listed blocks of a shard's withheld segments; return the number of new blocks.

    Before a grant retires, call once more, after the last possible write. Raises DriveError if the summaries
    can't be read or made durable.
    """
    new, withheld = 0, owned.withheld
    if not withheld:
        return 0
    async with aclosing(read_slices(drive, owned.record, superblock, withheld)) as slices:
        async for areas in slices:
            if owned.is_closed:
                break
            new += owned.adopt(areas)
    return new
