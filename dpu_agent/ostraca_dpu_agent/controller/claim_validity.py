"""Validity of an agent's claims, confirmed by the store at intervals, for all claims at once.

All claims of an agent end with one lease, and only the agent releases a claim. So while the store confirms
the agent's record, every claim under this lease is valid. Claims from before a lost lease are not covered,
and must be renewed first. The store is asked at once if a request names a higher epoch to one of the owners.

An unreachable or implausible store changes nothing here: the fence of every shard acts by itself, ``grant_s``
after the request of the last good answer. This module logs the store's state for the whole agent, so other
callers of the store need not repeat the warning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ostraca_dpu_agent.shards.shard import OwnedShard
from ostraca_fabric.errors import MembershipError, StoreAwayError
from ostraca_fabric.model.fabric_map import AgentRecord
from ostraca_fabric.model.ids import ShardId
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.runtime.tasks import set_within
from ostraca_fabric.telemetry.log_lines import LogDedup
from ostraca_fabric.telemetry.status import ClaimCounters, MembershipStatus

log = logging.getLogger(__name__)

_CONFIRMATIONS_PER_GRANT = 3
"""Two answers in a row may be lost before writing stops."""

_EFFECT = "gets continue, puts %s; claims, grants, joins and new volumes wait (%s)"
_UNREACHABLE = f"%s: the membership store does not answer: {_EFFECT}"
_IMPLAUSIBLE = f"%s: answers of the membership store are not usable: {_EFFECT}"


class ClaimValidity:
    """Extends the fences of shards with valid claims."""

    def __init__(
        self, agent: AgentRecord, membership: Membership, *, grant_s: float, clock: Callable[[], float]
    ) -> None:
        """Begin without claims."""
        self._agent = agent
        self._membership = membership
        self._grant_s = grant_s
        self._clock = clock
        self._owned: dict[ShardId, OwnedShard] = {}
        self._doubted = asyncio.Event()
        self._silent_since_s: float | None = None
        self._failing = LogDedup(log, clock)
        self._trouble = ""
        self.counts = ClaimCounters()
        """Counts of claims by outcome."""

    def status(self) -> MembershipStatus:
        """Return the state of the store and of the map."""
        silent_s = 0.0 if self._silent_since_s is None else self._clock() - self._silent_since_s
        return MembershipStatus(silent_s, self._trouble, self._membership.trouble)

    @property
    def shards(self) -> frozenset[ShardId]:
        """Shards with claims considered valid."""
        return frozenset(self._owned)

    def add(self, owned: OwnedShard, *, requested_s: float) -> None:
        """Add a valid claim, requested at *requested_s*."""
        self._owned[owned.record.id] = owned
        self.counts.made += 1
        owned.on_doubt = self._doubted.set
        owned.confirm(requested_s + self._grant_s, asked_s=requested_s)

    def drop(self, shard: ShardId) -> None:
        """Remove a claim before its release."""
        self._owned.pop(shard, None)

    def remove_lost(self, shard: ShardId) -> None:
        """Remove a claim that another agent's claim replaced."""
        self.counts.lost += self._owned.pop(shard, None) is not None

    def clear(self) -> None:
        """Remove all claims, since the lease expired. Call before joining again."""
        self.counts.lost += len(self._owned)
        self._owned.clear()

    def suspend(self) -> dict[ShardId, OwnedShard]:
        """Remove and return all claims, until ``resume``.

        Call before a write of the agent's record. After an unnoticed loss of the lease, the write makes the
        record valid again, but not the claims.
        """
        claims, self._owned = self._owned, {}
        return claims

    def resume(self, confirmed: dict[ShardId, OwnedShard]) -> None:
        """Add claims again that the store has confirmed since ``suspend``."""
        self._owned.update(confirmed)

    async def run(self) -> None:
        """Confirm claims until cancelled."""
        every_s = self._grant_s / _CONFIRMATIONS_PER_GRANT
        while True:
            began_s = self._clock()
            self._doubted.clear()
            await self._confirm()
            await set_within(self._doubted, max(0.0, began_s + every_s - self._clock()))

    async def _confirm(self) -> None:
        asked_s = self._clock()
        try:
            async with asyncio.timeout(self._grant_s):
                is_valid = await self._membership.confirm(self._agent.id, self._agent.start)
        except (MembershipError, TimeoutError) as error:
            self._fail(error, asked_s)
            return
        self._trouble, self._silent_since_s = "", None
        self._failing.resolve("%s: the membership store answers again", self._agent.id)
        if is_valid:
            for owned in self._owned.values():
                owned.confirm(asked_s + self._grant_s, asked_s=asked_s)

    def _fail(self, error: MembershipError | TimeoutError, asked_s: float) -> None:
        """Note and log a failed confirmation."""
        self._trouble = str(error) or f"no answer within {self._grant_s:.1f} s"
        is_silent = isinstance(error, StoreAwayError | TimeoutError)
        if not is_silent:
            self._silent_since_s = None
        elif self._silent_since_s is None:
            self._silent_since_s = asked_s
        puts_s = self._grant_s - (self._failing.lasts_s or self._clock() - asked_s)
        self._failing.report(
            _UNREACHABLE if is_silent else _IMPLAUSIBLE,
            self._agent.id,
            f"for {puts_s:.1f} s more" if puts_s > 0 else "no longer",
            self._trouble,
            since_s=asked_s,
        )
