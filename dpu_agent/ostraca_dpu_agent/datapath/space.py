"""Space for the blocks of a put: reserved, then committed or given back.

Blocks of chains below break-even get no space.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.commits import Commits, ReservedShard
from ostraca_dpu_agent.datapath.location.routing import (
    Routes,
    ShardPart,
    group_by_drive,
    restrict,
)
from ostraca_dpu_agent.datapath.request import RequestBlocks
from ostraca_dpu_agent.volumes import ServedVolume
from ostraca_fabric.errors import ConnectError, MalformedError
from ostraca_fabric.model.chain import DEPTH_UNKNOWN, Span
from ostraca_fabric.model.fabric_map import FabricMap
from ostraca_fabric.model.ids import AgentId, DriveId
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.ports.owners import Owners
from ostraca_fabric.runtime.tasks import gathered
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.codec import distinct
from ostraca_fabric.wire.messages import (
    Release,
    Reserve,
    Reserved,
    ShardRelease,
    ShardReservations,
    ShardWants,
)

Positions = NDArray[np.intp]
End = Callable[[Positions, PutState | NDArray[np.uint8], Reason | NDArray[np.uint8]], None]


log = logging.getLogger(__name__)

_IS_RETRYABLE = np.isin(np.arange(256), (Reason.BUSY, Reason.INDEX_FULL))
"""Reasons of an owner that may accept the block a moment later."""


class Space:
    """Space for the blocks of a put.

    *end* receives final outcomes: positions, states, reasons.
    """

    def __init__(
        self,
        owners: Owners,
        commits: Commits,
        blocks: RequestBlocks,
        end: End,
        *,
        clock: Callable[[], float],
        hold_s: float,
        ttl_s: float,
        pool: int,
    ) -> None:
        """Begin without space.

        *ttl_s* is the put's, and *pool* the flash pool of its blocks.
        """
        self._owners = owners
        self._commits = commits
        self._blocks = blocks
        self._end = end
        self._clock = clock
        self._hold_s = hold_s
        self._ttl_s = ttl_s
        self._pool = pool
        self._targets: list[ReservedShard] = []
        self.is_busy = np.zeros(len(blocks), np.bool_)
        """Blocks without space from the last attempt, which may succeed later."""

        self._target = np.full(len(blocks), -1, np.intp)
        self._numbers = np.zeros(len(blocks), np.uint64)
        self._offsets = np.zeros(len(blocks), np.uint64)

    @property
    def is_reserved(self) -> NDArray[np.bool_]:
        """Blocks with space."""
        return self._target >= 0

    def until_s(self, positions: Positions) -> float:
        """Return when the first reservation of these blocks ends.

        Infinite without blocks.
        """
        targets = distinct(self._target[positions]).tolist()
        return min((self._targets[number].until_s for number in targets), default=math.inf)

    def has_expired(self, positions: Positions) -> bool:
        """Return whether reservations of these blocks have ended."""
        return self._clock() >= self.until_s(positions)

    def are_standing(self, positions: Positions, fabric_map: FabricMap) -> NDArray[np.bool_]:
        """Return which of these blocks have a reservation that excludes other puts."""
        targets, now_s = self._target[positions], self._clock()
        numbers = distinct(targets).tolist()
        standing = [number for number in numbers if self._targets[number].stands(fabric_map, now_s)]
        return np.isin(targets, standing)

    async def reserve(
        self,
        routes: Routes,
        placement_secret: bytes,
        wanted: NDArray[np.bool_],
        *,
        within_s: float,
        is_again: bool = False,
    ) -> None:
        """Reserve space for the wanted blocks at all owners at once.

        Blocks without space get their final outcome. *is_again*: the blocks' shards were busy before.
        """
        parts, unowned = routes.by_owner(placement_secret, self._blocks.spans)
        self.is_busy[wanted] = False
        if len(unowned):
            self._end(unowned[wanted[unowned]], PutState.DECLINED, Reason.NO_OWNER)
        by_owner = restrict(parts, wanted)
        await gathered(
            [self._ask(routes, owner, its, within_s, is_again=is_again) for owner, its in by_owner.items()]
        )

    def by_target(self, positions: Positions) -> list[tuple[ReservedShard, Positions]]:
        """Group reserved blocks by target shard.

        Each group has indexes into *positions*, in the order of the blocks' offsets.
        """
        targets, groups = self._target[positions], []
        for number in distinct(targets).tolist():
            rows = np.flatnonzero(targets == number)
            groups.append((self._targets[number], rows[np.argsort(self._offsets[positions[rows]])]))
        return groups

    def by_drive(self, positions: Positions) -> list[tuple[DriveId, Positions]]:
        """Group reserved blocks by target drive, in order."""
        return group_by_drive([target.drive for target in self._targets], self._target, positions)

    def drive_offsets(self, positions: Positions) -> NDArray[np.int64]:
        """Return offsets of reserved blocks on their drives, in bytes."""
        bases = np.array([target.base for target in self._targets], np.int64)
        return bases[self._target[positions]] + self._offsets[positions].astype(np.int64)

    async def commit(self, positions: Positions, tags: NDArray[np.uint8]) -> None:
        """Commit blocks that are on flash, and set their final outcome.

        *tags*: those of the whole put, (n, 16).
        """
        seeds = self._blocks.seeds
        begun = [
            (its := positions[rows], self._commits.submit(target, self._numbers[its], tags[its], seeds[its]))
            for target, rows in self.by_target(positions)
        ]
        for its, committed in begun:
            outcomes = await committed
            self._end(its, outcomes.states, outcomes.reasons)

    def release(self, positions: Positions, *, may_land: bool = False) -> None:
        """Give back reservations without unfinished writes.

        *may_land*: a write into the space has failed, and a path may still deliver the write.
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
        is_again: bool,
        is_forwarded: bool = False,
    ) -> None:
        """Ask an agent, then any owner named instead.

        An agent named by another agent's answer is not followed further.
        """
        until_s, held_until_s = self._clock() + within_s, self._clock() + self._hold_s
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
                    waits=True,
                    is_again=is_again,
                ),
            )
        except TimeoutError:
            if is_again:  # the put is over: its blocks' shards were busy until now, and had an owner
                return
            answer = None
        except ConnectError:
            answer = None
        given = answer.shards if isinstance(answer, Reserved) else ()
        forwarded: dict[AgentId, list[ShardPart]] = {}
        for number, part in enumerate(parts):
            if number < len(given) and not given[number].is_owner:
                named = AgentId(given[number].known_owner)
                if named not in ("", owner) and not is_forwarded and self._clock() < until_s:
                    forwarded.setdefault(named, []).append(part)
                    continue
            if number >= len(given) or not self._accept(routes, owner, part, given[number], held_until_s):
                self._end(part.positions, PutState.DECLINED, Reason.NO_OWNER)
        if forwarded:
            left_s = until_s - self._clock()
            await gathered(
                [
                    self._ask(routes, other, its, left_s, is_again=is_again, is_forwarded=True)
                    for other, its in forwarded.items()
                ]
            )

    def _accept(
        self, routes: Routes, owner: AgentId, part: ShardPart, given: ShardReservations, until_s: float
    ) -> bool:
        """Accept the space granted by an owner; return success."""
        try:
            if given.is_owner:
                self._record(routes, owner, part, given, until_s)
        except MalformedError:
            log.exception("Owner %s gave a reservation that does not fit its request", owner)
            return False
        return given.is_owner

    def _record(
        self, routes: Routes, owner: AgentId, part: ShardPart, given: ShardReservations, until_s: float
    ) -> None:
        drive, base = routes.place(part.shard)
        count = len(part.positions)
        states, reasons = codec.u8(given.states, count), codec.u8(given.reasons, count)
        numbers, offsets = codec.u64(given.reservations, count), codec.u64(given.offsets, count)
        self._numbers[part.positions] = numbers
        self._offsets[part.positions] = offsets
        is_reserved = states == PutState.STAGED
        if is_reserved.any():  # a waiting put asks often
            self._targets.append(ReservedShard(owner, part.shard, drive, base, given.owner_epoch, until_s))
        self._target[part.positions[is_reserved]] = len(self._targets) - 1
        self.is_busy[part.positions] = (states == PutState.DECLINED) & _IS_RETRYABLE[reasons]
        self._end(part.positions[~is_reserved], states[~is_reserved], reasons[~is_reserved])


def depths_of(spans: Sequence[Span]) -> NDArray[np.uint32]:
    """Return the number of preceding blocks in the chain, or DEPTH_UNKNOWN."""
    depths = np.full(sum(map(len, spans)), DEPTH_UNKNOWN, np.uint32)
    begin = 0
    for span in spans:
        if span.depth != DEPTH_UNKNOWN:
            depths[begin : begin + len(span)] = np.arange(span.depth, span.depth + len(span))
        begin += len(span)
    return depths


def is_too_short(volume: ServedVolume, spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return whether each block's whole chain is below break-even.

    The chain's length as known to the writer counts, not the block's depth: a long chain is loaded at
    once, including its first blocks. Blocks without a chain are never too short.
    """
    page_tokens = volume.record.layout.page_tokens
    short = [0 < span.chain_blocks * page_tokens < volume.break_even_tokens for span in spans]
    return np.repeat(np.array(short, np.bool_), [len(span) for span in spans])
