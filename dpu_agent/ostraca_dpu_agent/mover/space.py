"""The space that owners hand out for the blocks of one put: reserved, then committed or given back."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.mover.depths import depths_of
from ostraca_dpu_agent.mover.routes import narrowed
from ostraca_fabric.errors import ConnectError, MalformedError
from ostraca_fabric.ids import AgentId
from ostraca_fabric.outcome import PutState, Reason
from ostraca_fabric.rows import distinct
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import (
    Commit,
    Committed,
    Release,
    Reserve,
    Reserved,
    ShardCommit,
    ShardRelease,
    ShardWants,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ostraca_dpu_agent.mover.request import Blocks
    from ostraca_dpu_agent.mover.routes import Routes, ShardPart
    from ostraca_fabric.ids import DriveId, ShardId
    from ostraca_fabric.ports.owners import Owners
    from ostraca_fabric.wire.messages import ShardReservations

    Positions = NDArray[np.intp]
    End = Callable[[Positions, PutState | NDArray[np.uint8], Reason | NDArray[np.uint8]], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """A shard that takes some of a put's blocks."""

    owner: AgentId
    shard: ShardId
    drive: DriveId
    base: int
    """The shard's first byte on the drive."""

    owner_epoch: int


class Space:
    """Where the blocks of one put go. *end* is told what becomes of blocks: positions, states, reasons."""

    def __init__(
        self,
        owners: Owners,
        blocks: Blocks,
        end: End,
        *,
        clock: Callable[[], float],
        hold_s: float,
        ttl_s: float,
        pool: int,
    ) -> None:
        """Hold nothing yet. *ttl_s* is the put's, and *pool* whose share of the flash its blocks take."""
        self._owners = owners
        self._blocks = blocks
        self._end = end
        self._clock = clock
        self._hold_s = hold_s
        self._ttl_s = ttl_s
        self._pool = pool
        self._until_s = 0.0
        self._targets: list[Target] = []
        self._target = np.full(len(blocks), -1, np.intp)
        self._numbers = np.zeros(len(blocks), np.uint64)
        self._offsets = np.zeros(len(blocks), np.uint64)

    @property
    def is_reserved(self) -> NDArray[np.bool_]:
        """Which blocks got space."""
        return self._target >= 0

    @property
    def has_run_out(self) -> bool:
        """Whether the reservations have ended, counted from before they were asked for."""
        return self._clock() >= self._until_s

    async def reserve(
        self, routes: Routes, placement_secret: bytes, wanted: NDArray[np.bool_], *, within_s: float
    ) -> None:
        """Ask owners for space for the blocks wanted, all at once. Those that get none are ended."""
        self._until_s = self._clock() + self._hold_s
        parts, unowned = routes.by_owner(placement_secret, self._blocks.spans)
        self._end(unowned[wanted[unowned]], PutState.DECLINED, Reason.NO_OWNER)
        asked = narrowed(parts, wanted)
        await asyncio.gather(*(self._ask(routes, owner, its, within_s) for owner, its in asked.items()))

    def by_target(self, positions: Positions) -> list[tuple[Target, Positions]]:
        """Group reserved blocks by the shard they go to: for each, indexes into *positions*, in the order
        the blocks lie there.
        """
        targets, groups = self._target[positions], []
        for number in distinct(targets).tolist():
            rows = np.flatnonzero(targets == number)
            order = np.argsort(self._offsets[positions[rows]])
            groups.append((self._targets[number], rows[order]))
        return groups

    def by_drive(self, positions: Positions) -> list[tuple[DriveId, Positions]]:
        """Sort out reserved blocks by the drives they go to, each drive's in their order."""
        numbers: dict[DriveId, int] = {}
        of_target = [numbers.setdefault(target.drive, len(numbers)) for target in self._targets]
        if not len(positions):
            return []
        drives = np.array(of_target, np.intp)[self._target[positions]]
        sorted_out = [(drive, positions[drives == number]) for drive, number in numbers.items()]
        return [(drive, its) for drive, its in sorted_out if len(its)]

    def drive_offsets(self, positions: Positions) -> NDArray[np.int64]:
        """Return where on their drives reserved blocks go, in bytes."""
        bases = np.array([target.base for target in self._targets], np.int64)
        return bases[self._target[positions]] + self._offsets[positions].astype(np.int64)

    async def commit(self, positions: Positions, tags: NDArray[np.uint8]) -> None:
        """Have blocks that are on flash listed, and end them. *tags*: those of the whole put, (n, 16)."""
        by_owner: dict[AgentId, list[tuple[Target, Positions]]] = {}
        for target, rows in self.by_target(positions):
            by_owner.setdefault(target.owner, []).append((target, positions[rows]))
        await asyncio.gather(*(self._tell(owner, parts, tags) for owner, parts in by_owner.items()))

    def release(self, positions: Positions, *, may_land: bool = False) -> None:
        """Give reservations back under which no write was begun, or every write has ended.

        *may_land*: a write under them has failed, and a path may deliver it yet.
        """
        for target, rows in self.by_target(positions):
            numbers = self._numbers[positions[rows]].tobytes()
            self._owners.tell(target.owner, Release((ShardRelease(target.shard, (), numbers, may_land),)))

    async def _ask(
        self,
        routes: Routes,
        owner: AgentId,
        parts: list[ShardPart],
        within_s: float,
        *,
        is_told: bool = False,
    ) -> None:
        """Ask one agent, and whom it names as the owner instead, unless somebody named this one already."""
        until_s = self._clock() + within_s
        keys, lengths, depths = self._blocks.keys, self._blocks.lengths, depths_of(self._blocks.spans)
        wants = tuple(
            ShardWants(
                part.shard,
                keys[part.positions].tobytes(),
                lengths[part.positions].tobytes(),
                depths[part.positions].tobytes(),
            )
            for part in parts
        )
        try:
            answer = await self._owners.ask(
                owner,
                Reserve(
                    0,
                    within_s,
                    self._hold_s,
                    wants,
                    ttl_s=self._ttl_s,
                    placement_epoch=routes.map.placement_epoch,
                    pool=self._pool,
                ),
            )
        except (TimeoutError, ConnectError):
            answer = None
        given = answer.shards if isinstance(answer, Reserved) else ()
        elsewhere: dict[AgentId, list[ShardPart]] = {}
        for number, part in enumerate(parts):
            if number < len(given) and not given[number].is_owner:
                named = AgentId(given[number].known_owner)
                if named not in ("", owner) and not is_told and self._clock() < until_s:
                    elsewhere.setdefault(named, []).append(part)
                    continue
            if number >= len(given) or not self._took(routes, owner, part, given[number]):
                self._end(part.positions, PutState.DECLINED, Reason.NO_OWNER)
        if elsewhere:
            left_s = until_s - self._clock()
            await asyncio.gather(
                *(self._ask(routes, other, its, left_s, is_told=True) for other, its in elsewhere.items())
            )

    def _took(self, routes: Routes, owner: AgentId, part: ShardPart, given: ShardReservations) -> bool:
        """Take what an owner handed out; tell whether it could be taken."""
        try:
            if given.is_owner:
                self._take(routes, owner, part, given)
        except MalformedError:
            log.exception("Owner %s gave a reservation that does not fit its request", owner)
            return False
        return given.is_owner

    def _take(self, routes: Routes, owner: AgentId, part: ShardPart, given: ShardReservations) -> None:
        drive, base = routes.place(part.shard)
        count = len(part.positions)
        states, reasons = columns.u8(given.states, count), columns.u8(given.reasons, count)
        numbers, offsets = columns.u64(given.reservations, count), columns.u64(given.offsets, count)
        self._targets.append(Target(owner, part.shard, drive, base, given.owner_epoch))
        self._numbers[part.positions] = numbers
        self._offsets[part.positions] = offsets
        is_reserved = states == PutState.STAGED
        self._target[part.positions[is_reserved]] = len(self._targets) - 1
        self._end(part.positions[~is_reserved], states[~is_reserved], reasons[~is_reserved])

    async def _tell(
        self, owner: AgentId, parts: list[tuple[Target, Positions]], tags: NDArray[np.uint8]
    ) -> None:
        commits = tuple(
            ShardCommit(
                target.shard,
                target.owner_epoch,
                self._numbers[positions].tobytes(),
                tags[positions].tobytes(),
                self._blocks.seeds[positions].tobytes(),
            )
            for target, positions in parts
        )
        try:
            answer = await self._owners.ask(owner, Commit(0, self._until_s - self._clock(), commits))
        except (TimeoutError, ConnectError):
            answer = None
        told = answer.shards if isinstance(answer, Committed) else ()
        for number, (_, positions) in enumerate(parts):
            # Without an answer nobody knows: the owner may have listed them, or may yet.
            self._end(positions, PutState.LATE, Reason.NO_OWNER)
            if number < len(told):
                with suppress(MalformedError):
                    states = columns.u8(told[number].states, len(positions))
                    self._end(positions, states, columns.u8(told[number].reasons, len(positions)))
