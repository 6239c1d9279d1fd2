"""Whether this agent's claims stand: asked of the store again and again, for all of them at once.

All claims of an agent live and end with one lease, and nobody but the agent gives one back; so while the
store itself says that the agent's record stands, every claim made under it does. What was claimed before the
lease ran out and the agent joined again is not covered: it must be claimed again first.

It is asked at once where somebody names a higher epoch to one of its owners.

A store that is silent, or that answers and can't be believed, changes nothing here: the fence of every shard
passes by itself, ``grant_s`` after the last good answer was asked for. The two are told apart for people. The
log has it here for all who ask the store, so they say no more of it than what is theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from ostraca_fabric.errors import MembershipError, StoreAwayError
from ostraca_fabric.spells import Spell
from ostraca_fabric.status import ClaimCounters, MembershipStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_dpu_agent.owner.shard import OwnedShard
    from ostraca_fabric.fabric_map import AgentRecord
    from ostraca_fabric.ids import ShardId
    from ostraca_fabric.ports.membership import Membership

log = logging.getLogger(__name__)

_ASKED_PER_GRANT = 3
"""So two answers in a row may be lost before writing stops."""

_WAITS = "gets go on, puts %s; claims, grants, joins and new volumes wait (%s)"
_SILENT = f"%s hears nothing from the membership store: {_WAITS}"
_NOT_BELIEVED = f"%s can't go by what the membership store answers: {_WAITS}"


class Standing:
    """Puts off the fences of the shards whose claims stand."""

    def __init__(
        self, agent: AgentRecord, membership: Membership, *, grant_s: float, clock: Callable[[], float]
    ) -> None:
        """Know of no claim."""
        self._agent = agent
        self._membership = membership
        self._grant_s = grant_s
        self._clock = clock
        self._claimed: dict[ShardId, OwnedShard] = {}
        self._doubted = asyncio.Event()
        self._silent_since_s: float | None = None
        self._failing = Spell(log, clock)
        self._trouble = ""
        self.counts = ClaimCounters()
        """What became of claims so far."""

    def status(self) -> MembershipStatus:
        """Return whether the store answers, and whether the map is as it should be."""
        return MembershipStatus(self._silent_s, self._trouble, self._membership.trouble)

    @property
    def _silent_s(self) -> float:
        return 0.0 if self._silent_since_s is None else self._clock() - self._silent_since_s

    @property
    def shards(self) -> frozenset[ShardId]:
        """Whose claims are counted on."""
        return frozenset(self._claimed)

    def claimed(self, owned: OwnedShard, *, asked_s: float) -> None:
        """Count on a claim that was asked for then, and stands."""
        self._claimed[owned.record.id] = owned
        self.counts.made += 1
        owned.when_doubted = self._doubted.set
        owned.confirm(asked_s + self._grant_s, asked_s=asked_s)

    def given_up(self, shard: ShardId) -> None:
        """Count on this claim no more: it is to be given back."""
        self._claimed.pop(shard, None)

    def lost(self, shard: ShardId) -> None:
        """Count on this claim no more: another agent has one."""
        self.counts.lost += self._claimed.pop(shard, None) is not None

    def joining(self) -> None:
        """Count on no claim made so far: the lease ran out. To be called before joining again."""
        self.counts.lost += len(self._claimed)
        self._claimed.clear()

    def suspend(self) -> dict[ShardId, OwnedShard]:
        """Count on no claim until ``resume``, and return those counted on so far.

        For who writes the agent's record: should the lease have run out unnoticed, it stands again then, and
        the claims do not.
        """
        counted, self._claimed = self._claimed, {}
        return counted

    def resume(self, counted: dict[ShardId, OwnedShard]) -> None:
        """Count on these again, which the store has shown to stand since."""
        self._claimed.update(counted)

    async def run(self) -> None:
        """Ask until cancelled."""
        every_s = self._grant_s / _ASKED_PER_GRANT
        while True:
            begun_s = self._clock()
            self._doubted.clear()
            await self._ask()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, begun_s + every_s - self._clock())):
                    await self._doubted.wait()

    async def _ask(self) -> None:
        asked_s = self._clock()
        try:
            async with asyncio.timeout(self._grant_s):
                stands = await self._membership.confirm(self._agent.id, self._agent.start)
        except (MembershipError, TimeoutError) as error:
            self._fail(error, asked_s)
            return
        self._trouble, self._silent_since_s = "", None
        self._failing.over("%s can go by the membership store again", self._agent.id)
        if stands:
            for owned in self._claimed.values():
                owned.confirm(asked_s + self._grant_s, asked_s=asked_s)

    def _fail(self, error: MembershipError | TimeoutError, asked_s: float) -> None:
        """Note what was asked in vain. Who asks for something else need not say it, too."""
        self._trouble = str(error) or f"no answer within {self._grant_s:.1f} s"
        is_silent = isinstance(error, StoreAwayError | TimeoutError)
        if not is_silent:
            self._silent_since_s = None
        elif self._silent_since_s is None:
            self._silent_since_s = asked_s
        puts_s = self._grant_s - (self._failing.lasts_s or self._clock() - asked_s)
        self._failing.goes_on(
            _SILENT if is_silent else _NOT_BELIEVED,
            self._agent.id,
            f"for {puts_s:.1f} s more" if puts_s > 0 else "no longer",
            self._trouble,
            since_s=asked_s,
        )
