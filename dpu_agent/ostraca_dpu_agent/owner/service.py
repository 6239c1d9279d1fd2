"""What movers may ask of this agent's shards, and the answers."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, assert_never

import numpy as np

from ostraca_fabric.ids import OwnerEpoch, ShardId
from ostraca_fabric.outcome import PutState, Reason
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import (
    Commit,
    Committed,
    Damage,
    Release,
    Reserve,
    Reserved,
    Resolve,
    Resolved,
    ShardCommitted,
    ShardExtents,
    ShardReservations,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_dpu_agent.owner.shard import OwnedShard
    from ostraca_fabric.wire.messages import (
        OwnerAnswer,
        OwnerNotice,
        OwnerRequest,
        ShardCommit,
        ShardKeys,
        ShardWants,
    )

log = logging.getLogger(__name__)


class OwnerService:
    """The shards this agent owns, by id."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin owning nothing; *clock* is the agent's own, in seconds."""
        self._clock = clock
        self.shards: dict[ShardId, OwnedShard] = {}

    async def answer(self, request: OwnerRequest) -> OwnerAnswer:
        """Answer a mover. Raises MalformedError when its columns don't fit each other."""
        match request:
            case Resolve():
                return Resolved(
                    request.request, tuple(self._resolve(part, request.pin_s) for part in request.shards)
                )
            case Reserve():
                made = await asyncio.gather(*(self._reserve(part, request) for part in request.shards))
                return Reserved(request.request, tuple(made))
            case Commit():
                listed = await asyncio.gather(*(self._commit(part) for part in request.shards))
                return Committed(request.request, tuple(listed))
            case _:
                assert_never(request)

    def notice(self, notice: OwnerNotice) -> None:
        """Take word of what needs no answer."""
        match notice:
            case Release():
                for part in notice.shards:
                    owned = self.shards.get(ShardId(part.shard))
                    if owned is not None:
                        numbers = columns.u64(
                            part.reservations, len(part.reservations) // columns.U64.itemsize
                        )
                        owned.core.release(self._clock(), part.pins, numbers)
                        owned.wake()
            case Damage():
                owned = self.shards.get(ShardId(notice.shard))
                if owned is not None:
                    owned.check_damage(notice)
            case _:
                assert_never(notice)

    def _resolve(self, part: ShardKeys, pin_s: float) -> ShardExtents:
        owned = self.shards.get(ShardId(part.shard))
        if owned is None:
            return ShardExtents(part.shard, is_owner=False, owner_epoch=0)
        keys = columns.rows16(part.keys, len(part.keys) // columns.KEY_BYTES)
        found = owned.core.resolve(self._clock(), keys, pin_s=pin_s)
        return ShardExtents(
            part.shard,
            is_owner=True,
            owner_epoch=owned.epoch,
            found=found.found.astype(columns.U8).tobytes(),
            offsets=found.offsets.tobytes(),
            lengths=found.lengths.tobytes(),
            generations=found.generations.tobytes(),
            tags=found.tags.tobytes(),
            pin=found.pin,
        )

    async def _reserve(self, part: ShardWants, request: Reserve) -> ShardReservations:
        owned = self.shards.get(ShardId(part.shard))
        if owned is None:
            return ShardReservations(part.shard, is_owner=False, owner_epoch=0)
        count = len(part.keys) // columns.KEY_BYTES
        made = await owned.reserve(
            columns.rows16(part.keys, count),
            columns.u32(part.lengths, count),
            hold_s=request.hold_s,
            within_s=request.deadline_s,
        )
        return ShardReservations(
            part.shard,
            is_owner=True,
            owner_epoch=owned.epoch,
            states=made.states.tobytes(),
            reasons=made.reasons.tobytes(),
            reservations=made.reservations.tobytes(),
            offsets=made.offsets.tobytes(),
        )

    async def _commit(self, part: ShardCommit) -> ShardCommitted:
        owned = self.shards.get(ShardId(part.shard))
        count = len(part.reservations) // columns.U64.itemsize
        if owned is None:
            declined = np.full(count, PutState.DECLINED, np.uint8)
            return ShardCommitted(
                part.shard, declined.tobytes(), np.full(count, Reason.NO_OWNER, np.uint8).tobytes()
            )
        states, reasons = await owned.commit(
            columns.u64(part.reservations, count),
            columns.rows16(part.tags, count),
            epoch=OwnerEpoch(part.owner_epoch),
        )
        return ShardCommitted(part.shard, states.tobytes(), reasons.tobytes())
