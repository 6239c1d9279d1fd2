"""One shard served: from its claim to the end of the claim.

It is claimed before its summaries are read, so that no other owner hands out anything more meanwhile. Blocks
can be got as soon as their summaries are read. Then its grant is kept large enough, and what earlier owners
may still list is adopted until their grants can be retired: when the space they handed out has ended and no
write to it can land any more, counted from the claim. Of an owner that closed its grant in order, only those
segments are left in it on which a write has failed or was abandoned, and those are waited for.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import aclosing
from typing import TYPE_CHECKING

from ostraca_dpu_agent.owner.core.granting import AHEAD_MAX
from ostraca_dpu_agent.owner.scrub import begin_scrub
from ostraca_dpu_agent.steward.adopt import adopt_again
from ostraca_dpu_agent.steward.recover import in_slices, read_summaries
from ostraca_fabric.errors import DriveError, MembershipError, StoreAwayError, WrongStoreError
from ostraca_fabric.fabric_map import Claim
from ostraca_fabric.spells import Spell

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
    from typing import Any

    from ostraca_dpu_agent.owner.shard import OwnedShard
    from ostraca_dpu_agent.settings import OwnerSettings
    from ostraca_fabric.adapters.guarded_drive import GuardedDrive
    from ostraca_fabric.fabric_map import Grant
    from ostraca_fabric.flash.superblock import Superblock
    from ostraca_fabric.ids import AgentId, OwnerEpoch, StartId
    from ostraca_fabric.ports.membership import Claimed, Membership

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 1.0


class Serving:
    """One owned shard and its claim. ``recover`` it once; what it begins ends when the shard is closed."""

    def __init__(  # noqa: PLR0913 (what serving a shard takes)
        self,
        owned: OwnedShard,
        drive: GuardedDrive,
        superblock: Superblock,
        claimed: Claimed,
        *,
        agent: tuple[AgentId, StartId],
        claimed_s: float,
        settings: OwnerSettings,
        membership: Membership,
        clock: Callable[[], float],
        bar: Callable[[AgentId], Awaitable[None]],
    ) -> None:
        """Serve what was *claimed*; it was asked for by *claimed_s*, and stood some time after that. *bar*
        has the drive refuse what an agent that is gone still writes, where it can.
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
        self._bar = bar
        self._earlier: dict[OwnerEpoch, Grant] = {}
        self._retire_at_s: dict[OwnerEpoch, float] = {}
        self._granting = asyncio.Lock()
        self._waiting = Spell(log, clock)

    @property
    def claim(self) -> Claim:
        """The claim it is served under."""
        return Claim(*self._agent, self._claimed.epoch)

    @property
    def retires_in_s(self) -> float | None:
        """How long until the last grant of an earlier owner may be retired; None when there is none."""
        if not self._retire_at_s:
            return None
        return max(0.0, max(self._retire_at_s.values()) - self._clock())

    def claimed_anew(self, claimed: Claimed, claimed_s: float) -> None:
        """Go by this claim in place of the one before, which ended: nothing was handed out yet."""
        self._claimed, self.claimed_s = claimed, claimed_s

    def goes_on_under(self, claimed: Claimed) -> bool:
        """Say whether this claim, made anew, is the one that it is served under: of the same epoch, what this
        owner may write is still on record there, and no grant before it that is not heeded here. An owner
        that never writes again goes on under none, nor one whose recovery ended before it had begun.
        """
        if self.owned.is_stranded or self.owned.core.is_recovering:
            return False
        granted = self.owned.core.grants.own
        is_on_record = granted <= set(claimed.own.segments)
        heeds_all = all(grant.epoch in self._earlier for grant in claimed.earlier)
        return claimed.epoch == self._claimed.epoch and is_on_record and heeds_all

    async def recover(self) -> bool:
        """Read what the shard holds; say whether it is still wanted. Raises DriveError."""
        owned = self.owned
        summaries = read_summaries(self._drive, owned.record, self._superblock)
        async with aclosing(summaries) as parts:
            async for part in parts:
                for some in in_slices(part):
                    if owned.is_closed:
                        return False
                    owned.core.take_in(some)
                    await asyncio.sleep(0)
        return not owned.is_closed

    def begin(self, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Hand out space, in what is granted, and see to what earlier owners left. *spawn* what goes on."""
        owned, now_s = self.owned, self._clock()
        self._earlier = {grant.epoch: grant for grant in self._claimed.earlier}
        self._retire_at_s = {epoch: now_s + self._wait_s(grant) for epoch, grant in self._earlier.items()}
        owned.begin(self._claimed.epoch, withheld=self._segments(self._earlier.values()))
        begin_scrub(
            owned,
            self._drive,
            self._superblock,
            self._settings.scrub,
            self._clock,
            is_ruled_out=lambda: self._membership.rulings.live.scrub is False,
        )
        spawn(self._keep_granted())
        if self._earlier:
            spawn(self._adopt())

    async def close(self, *, within_s: float, stills: bool) -> bool:
        """Write what is committed, and say in the store that nothing is under way any more, where that is so,
        and where a write that has failed may land yet.

        Says whether every I/O has ended within *within_s*. With *stills* what was handed out is given half of
        that time to end.

        Look-ups are still answered from what is known. The claim is the caller's to give back.
        """
        owned, until_s = self.owned, self._clock() + within_s
        is_still = await owned.stilled(within_s=within_s / 2 if stills else 0.0)
        has_ended = await owned.close(within_s=max(0.0, until_s - self._clock()))
        owned.fence()
        if is_still and has_ended:
            try:
                await self._membership.close_grant(owned.record.id, self.claim, owned.in_doubt())
            except MembershipError as error:
                log.warning("the grant of shard %s stays open: %s", owned.record.id, error)
        return has_ended

    def _wait_s(self, grant: Grant) -> float:
        """How long after the claim a write under an earlier grant may still land."""
        settings = self._settings
        if grant.is_closed:
            return settings.late_write_s
        return settings.grant_s + settings.hold_s + settings.late_write_s

    async def _keep_granted(self) -> None:
        """Have recorded what the shard wants to write, whenever it wants more."""
        owned = self.owned
        while not owned.is_closed:
            await owned.grant_due.wait()
            async with self._granting:
                wanted = owned.grant_wanted()
                if wanted is None or not await self._granted(wanted, frozenset()):
                    await owned.closed_within(_ASK_AGAIN_S)

    async def _granted(self, segments: tuple[int, ...], retired: frozenset[OwnerEpoch]) -> bool:
        """Have a grant recorded. The lock is held: each replaces the one before."""
        shard = self.owned.record.id
        try:
            is_done = await self._membership.grant(shard, self.claim, segments, retired=retired)
        except (StoreAwayError, WrongStoreError) as error:  # ``Standing`` says it for all shards
            log.debug("shard %s waits for a grant: %s", shard, error)
            return False
        except MembershipError as error:
            self._waiting.goes_on("shard %s waits for a grant: %s", shard, error)
            return False
        self._waiting.over("shard %s waits for no grant any more", shard)
        if is_done:
            self.owned.granted(segments)
        return is_done

    async def _adopt(self) -> None:
        """Adopt what earlier owners list, until the last of their grants is retired.

        A read that began once a grant was due has found all that is ever listed under it. Where the store
        does not record then that the grant is retired, that alone is asked for again.
        """
        owned = self.owned
        while self._earlier and not owned.is_closed:
            await owned.closed_within(self._adopts_at_s(self._earlier) - self._clock())
            now_s = self._clock()
            due = frozenset(epoch for epoch, at_s in self._retire_at_s.items() if at_s <= now_s)
            try:
                await adopt_again(owned, self._drive, self._superblock)
            except DriveError as error:
                log.warning("shard %s can't be read for what others listed: %s", owned.record.id, error)
                await owned.closed_within(_ASK_AGAIN_S)
                continue
            if due:
                await self._retire(due, until_s=self._adopts_at_s(self._earlier.keys() - due))

    def _adopts_at_s(self, epochs: Collection[OwnerEpoch]) -> float:
        """Say when to read next what is listed under grants of these earlier epochs: once more when the first
        of them is due; and until then every so often.

        No owner is granted more than ``AHEAD_MAX`` segments ahead; of a shard that is withheld whole, the
        summaries are read again so much less often that no more is read.
        """
        if not epochs:
            return math.inf
        every_s = self._settings.adopt_every_s * max(1.0, len(self.owned.withheld) / AHEAD_MAX)
        return min(self._clock() + every_s, *(self._retire_at_s[epoch] for epoch in epochs))

    async def _retire(self, due: frozenset[OwnerEpoch], *, until_s: float) -> None:
        """Have earlier grants retired, however often the store has to be asked, or until then."""
        while not self.owned.is_closed and not await self._retired(due):
            await self.owned.closed_within(_ASK_AGAIN_S)
            if self._clock() >= until_s:
                return

    async def _retired(self, due: frozenset[OwnerEpoch]) -> bool:
        """Have earlier grants forgotten; their segments are like any other then."""
        async with self._granting:
            own = tuple(sorted(self.owned.core.grants.own))
            if not await self._granted(own, due):
                return False
        # The store has just said that the claim stands; no segment of theirs is used before this.
        for agent in sorted({self._earlier[epoch].agent for epoch in due}):
            await self._bar(agent)
        grants = [self._earlier.pop(epoch) for epoch in sorted(due)]
        for epoch in due:
            del self._retire_at_s[epoch]
        self.owned.retire(self._segments(grants) - self._segments(self._earlier.values()))
        log.info(
            "shard %s has nothing under way from owner epoch %d any more", self.owned.record.id, max(due)
        )
        return True

    def _segments(self, grants: Iterable[Grant]) -> frozenset[int]:
        there_are = self._superblock.geometry.segments
        return frozenset(number for grant in grants for number in grant.of(there_are))
