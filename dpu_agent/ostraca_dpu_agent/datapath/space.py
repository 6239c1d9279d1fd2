"""Space for the blocks of a put: reserved, then committed or given back.

Blocks of chains below break-even get no space.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import zip_longest

import msgspec
import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.commits import ReservedShard
from ostraca_dpu_agent.datapath.location.routing import (
    GroupedBlocks,
    Routes,
    ShardPart,
    by_place,
    restrict,
)
from ostraca_dpu_agent.datapath.requests.blocks import RequestBlocks
from ostraca_dpu_agent.datapath.requests.context import RequestContext
from ostraca_fabric.errors import ConnectError, MalformedError
from ostraca_fabric.model.chain import DEPTH_UNKNOWN, Span
from ostraca_fabric.model.fabric_map import FabricMap
from ostraca_fabric.model.ids import AgentId, DriveId
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.ports.owners import GivenSpace, WantedSpace
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

_DECLINED, _STAGED = int(PutState.DECLINED), int(PutState.STAGED)  # numpy takes thrice as long with members

_IS_RETRYABLE = np.isin(np.arange(256), (Reason.BUSY, Reason.INDEX_FULL))
"""Reasons of an owner that may accept the block a moment later."""


class Space:
    """Space for the blocks of a put.

    *end* receives final outcomes: positions, states, reasons.
    """

    def __init__(
        self,
        context: RequestContext,
        blocks: RequestBlocks,
        end: End,
        *,
        ttl_s: float,
        pool: int,
    ) -> None:
        """Begin without space. *ttl_s* is the put's, and *pool* the flash pool of its blocks."""
        self._context = context
        self._blocks = blocks
        self._end = end
        self._ttl_s = ttl_s
        self._pool = pool
        self._targets: list[ReservedShard] = []
        count = len(blocks)
        self.is_busy = np.zeros(count, np.bool_)
        """Blocks without space from the last attempt, which may succeed later."""

        self._target = np.full(count, -1, np.intp)
        self._numbers = np.zeros(count, np.uint64)
        self._offsets = np.zeros(count, np.uint64)

    @property
    def is_reserved(self) -> NDArray[np.bool_]:
        """Blocks with space."""
        return self._target >= 0

    def has_expired(self, positions: Positions) -> bool:
        """Return whether reservations of these blocks have ended."""
        numbers, now_s = distinct(self._target[positions]).tolist(), self._context.clock()
        return any(now_s >= self._targets[number].until_s for number in numbers)

    def are_standing(self, positions: Positions, fabric_map: FabricMap) -> NDArray[np.bool_]:
        """Return which of these blocks have a reservation that excludes other puts."""
        targets, now_s = self._target[positions], self._context.clock()
        numbers = distinct(targets).tolist()
        standing = [number for number in numbers if self._targets[number].stands(fabric_map, now_s)]
        return np.isin(targets, standing)

    async def reserve(
        self,
        routes: Routes,
        grouped: GroupedBlocks,
        wanted: NDArray[np.bool_],
        *,
        within_s: float,
        is_again: bool = False,
    ) -> None:
        """Reserve space for the wanted blocks at all owners at once.

        *grouped* are all blocks, as ``Routes.by_owner``. Blocks without space get their final outcome.
        *is_again*: the blocks' shards were busy before.
        """
        parts, unowned = grouped
        self.is_busy[wanted] = False
        if len(unowned):
            self._end(unowned[wanted[unowned]], PutState.DECLINED, Reason.NO_OWNER)
        by_owner = restrict(parts, wanted)
        await gathered(
            [self._ask(routes, owner, its, within_s, is_again=is_again) for owner, its in by_owner.items()]
        )

    def by_target(self, positions: Positions) -> list[tuple[ReservedShard, Positions]]:
        """Group reserved blocks by target shard, in order."""
        return by_place(self._targets, self._target, positions)

    def by_drive(self, positions: Positions) -> list[tuple[DriveId, Positions]]:
        """Group reserved blocks by target drive, in order."""
        return by_place([target.drive for target in self._targets], self._target, positions)

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
            (its, self._context.commits.submit(target, self._numbers[its], tags[its], seeds[its]))
            for target, its in self.by_target(positions)
        ]
        for its, committed in begun:
            outcomes = await committed
            self._end(its, outcomes.states, outcomes.reasons)

    def release(self, positions: Positions, *, may_land: bool = False) -> None:
        """Give back reservations without unfinished writes.

        *may_land*: a write into the space has failed, and a path may still deliver the write.
        """
        for target, its in self.by_target(positions):
            release = ShardRelease(target.shard, (), self._numbers[its].tobytes(), may_land)
            self._context.owners.tell(target.owner, Release((release,)))

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
        now_s = self._context.clock()
        until_s, held_until_s = now_s + within_s, now_s + self._context.hold_s
        keys, lengths, depths = self._blocks.keys, self._blocks.lengths, depths_of(self._blocks.spans)
        wanted = [
            WantedSpace(part.shard, keys[part.positions], lengths[part.positions], depths[part.positions])
            for part in parts
        ]
        terms = Reserve(
            0,
            within_s,
            self._context.hold_s,
            (),
            ttl_s=self._ttl_s,
            placement_epoch=routes.map.placement_epoch,
            pool=self._pool,
            waits=True,
            is_again=is_again,
        )
        given: Sequence[GivenSpace | None]
        if owner == self._context.locator.agent:
            giving = self._context.locator.here.reserve(wanted, terms)
            given = giving if isinstance(giving, list) else await giving
        else:
            try:
                given = await self._ask_by_message(owner, wanted, terms)
            except TimeoutError:
                if is_again:  # the put is over: its blocks' shards were busy until now, and had an owner
                    return
                given = ()
        forwarded: dict[AgentId, list[ShardPart]] = {}
        for part, space in zip_longest(parts, given[: len(parts)]):
            named = AgentId("" if space is None or space.is_owner else space.known_owner)
            if named not in ("", owner) and not is_forwarded and self._context.clock() < until_s:
                forwarded.setdefault(named, []).append(part)
            elif space is not None and space.is_owner:
                self._record(routes, owner, part, space, held_until_s)
            else:
                self._end(part.positions, PutState.DECLINED, Reason.NO_OWNER)
        if forwarded:
            left_s = until_s - self._context.clock()
            await gathered(
                [
                    self._ask(routes, other, its, left_s, is_again=is_again, is_forwarded=True)
                    for other, its in forwarded.items()
                ]
            )

    async def _ask_by_message(
        self, owner: AgentId, wanted: Sequence[WantedSpace], terms: Reserve
    ) -> list[GivenSpace | None]:
        """Ask an agent; None stands for an answer of no use. Raises TimeoutError."""
        wants = tuple(
            ShardWants(each.shard, each.keys.tobytes(), each.lengths.tobytes(), each.depths.tobytes())
            for each in wanted
        )
        try:
            answer = await self._context.owners.ask(owner, msgspec.structs.replace(terms, shards=wants))
        except ConnectError:
            return []
        shards = answer.shards if isinstance(answer, Reserved) else ()
        return [_parsed(owner, part, len(each.keys)) for each, part in zip(wanted, shards, strict=False)]

    def _record(
        self, routes: Routes, owner: AgentId, part: ShardPart, given: GivenSpace, until_s: float
    ) -> None:
        positions, is_reserved = part.positions, given.states == _STAGED
        self._numbers[positions] = given.reservations
        self._offsets[positions] = given.offsets
        reserved = positions[is_reserved]
        if len(reserved):  # a waiting put asks often
            drive, base = routes.place(part.shard)
            self._targets.append(ReservedShard(owner, part.shard, drive, base, given.owner_epoch, until_s))
            self._target[reserved] = len(self._targets) - 1
        if len(reserved) < len(positions):
            self.is_busy[positions] = (given.states == _DECLINED) & _IS_RETRYABLE[given.reasons]
            self._end(positions[~is_reserved], given.states[~is_reserved], given.reasons[~is_reserved])


def _parsed(owner: AgentId, given: ShardReservations, count: int) -> GivenSpace | None:
    """Parse an answer for *count* blocks; return None for columns that do not fit them."""
    if not given.is_owner:
        return GivenSpace(is_owner=False, known_owner=given.known_owner)
    try:
        return GivenSpace(
            is_owner=True,
            owner_epoch=given.owner_epoch,
            states=codec.u8(given.states, count),
            reasons=codec.u8(given.reasons, count),
            reservations=codec.u64(given.reservations, count),
            offsets=codec.u64(given.offsets, count),
        )
    except MalformedError:
        log.exception("Owner %s gave a reservation that does not fit its request", owner)
        return None


def depths_of(spans: Sequence[Span]) -> NDArray[np.uint32]:
    """Return the number of preceding blocks in the chain, or DEPTH_UNKNOWN."""
    depths = [
        np.full(len(span), DEPTH_UNKNOWN, np.uint32)
        if span.depth == DEPTH_UNKNOWN
        else np.arange(span.depth, span.depth + len(span), dtype=np.uint32)
        for span in spans
    ]
    return depths[0] if len(depths) == 1 else np.concatenate((np.empty(0, np.uint32), *depths))
