"""What movers may ask of this agent's shards, and the answers."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, assert_never

import msgspec
import numpy as np

from ostraca_dpu_agent.owner.core import Reservations
from ostraca_dpu_agent.owner.inspect import inspect
from ostraca_fabric.errors import MalformedError
from ostraca_fabric.explain import EventKind
from ostraca_fabric.ids import OwnerEpoch, PlacementEpoch, ShardId
from ostraca_fabric.labels import labelled
from ostraca_fabric.outcome import PutState, Reason
from ostraca_fabric.tallies import tally_text
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import (
    Commit,
    Committed,
    Damage,
    Inspect,
    Inspected,
    PassedOver,
    Release,
    Reserve,
    Reserved,
    Resolve,
    Resolved,
    SessionEnded,
    ShardCommitted,
    ShardExtents,
    ShardPassed,
    ShardReservations,
    ShardsPassed,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from ostraca_dpu_agent.events import EventRing
    from ostraca_dpu_agent.owner.shard import OwnedShard
    from ostraca_fabric.fabric_map import Claim
    from ostraca_fabric.wire.messages import (
        OwnerAnswer,
        OwnerNotice,
        OwnerRequest,
        ShardCommit,
        ShardKeys,
        ShardRelease,
        ShardWants,
    )

log = logging.getLogger(__name__)

_ANSWER_MARGIN_S = 0.002
"""A mover that hears nothing by its deadline takes its blocks for lost: the owner stops waiting before."""


_POOLS = 1 << 64

_CHANGES_BEHIND_MAX = 1
"""How many placement changes a put's agent may not have heard of. One: a change reaches agents one after the
other, and no put is declined for that. What an agent that is further behind writes is wasted: the placement
it goes by will soon be asked no longer, and it looks in none of the newer ones whether a block exists."""


@dataclass(frozen=True, slots=True)
class _Left:
    """A shard that was left."""

    owned: OwnedShard
    epoch: OwnerEpoch
    """Under which it was claimed: what is being read still has none of its own."""

    until_s: float = math.inf
    """Until when look-ups are answered."""


class OwnerService:
    """The shards this agent owns, by id."""

    def __init__(
        self,
        clock: Callable[[], float],
        events: EventRing,
        claim_of: Callable[[ShardId], Claim | None] = lambda _: None,
    ) -> None:
        """Begin owning nothing; *clock* is the agent's own, in seconds.

        *claim_of* says who owns a shard as far as this agent knows: told to who asks for one that it does not
        own.
        """
        self._clock = clock
        self._claim_of = claim_of
        self.events = events
        self.shards: dict[ShardId, OwnedShard] = {}
        self._placement, self._has_earlier = PlacementEpoch(0), False
        self._left: dict[ShardId, _Left] = {}
        self._shares: Mapping[int, float] = {}

    def own(self, owned: OwnedShard) -> None:
        """Answer for a shard, whose recovery begins only now."""
        self.shards[owned.record.id] = owned
        owned.share_out(self._shares)

    def share_out(self, shares: Mapping[int, float]) -> None:
        """Say which part of each shard each pool may take, of those owned now and of those owned later."""
        if shares != self._shares:
            self._shares = dict(shares)
            for owned in self.shards.values():
                owned.share_out(self._shares)

    def placed(self, epoch: PlacementEpoch, *, has_earlier: bool) -> None:
        """Know which placement epoch is the current one, and whether earlier ones are asked along with it.

        When it changes, what was read so far is forgotten: much of it belongs elsewhere now, and is not
        carried forward unless it is read here again.
        """
        if self._placement != epoch:
            for owned in self.shards.values():
                owned.core.index.forget_all_reads()
        self._placement, self._has_earlier = epoch, has_earlier
        for owned in self.shards.values():
            owned.passing.began(epoch, has_earlier=has_earlier)

    def disown(self, shard: ShardId) -> None:
        """Answer for a shard no more."""
        self.shards.pop(shard, None)

    def leave(self, shard: ShardId, epoch: OwnerEpoch) -> None:
        """Own a shard no more that was claimed under *epoch*, but answer look-ups from what is known of it
        until ``succeeded``, and a while longer: its next owner has to read first.
        """
        self._left[shard] = _Left(self.shards.pop(shard), epoch)

    def begun(self, shard: ShardId) -> None:
        """Know of a shard that space is handed out here: what was known when it was left is not all now."""
        self._left.pop(shard, None)

    @property
    def left(self) -> frozenset[ShardId]:
        """The shards that were left and that nobody has succeeded to yet."""
        return frozenset(shard for shard, left in self._left.items() if left.until_s == math.inf)

    def succeeded(self, shard: ShardId, *, until_s: float) -> None:
        """Answer for a shard that was left until then: somebody else owns it."""
        self._left[shard] = replace(self._left[shard], until_s=until_s)

    def prune(self) -> None:
        """Let go of shards that were left, and are answered for no longer: each keeps its index in memory."""
        now_s = self._clock()
        self._left = {shard: left for shard, left in self._left.items() if now_s < left.until_s}

    def forget(self) -> None:
        """Answer for no shard any more."""
        self.shards.clear()
        self._left.clear()

    def answer(self, request: OwnerRequest) -> OwnerAnswer | Awaitable[OwnerAnswer]:
        """Answer a mover: a look-up at once, and what changes a shard when that is done.

        Raises MalformedError when its columns don't fit each other; then nothing was done.
        """
        match request:
            case Resolve():
                return self._resolved(request)
            case Reserve():
                return self._reserved(request)
            case Commit():
                return self._committed(request)
            case Inspect():
                if len(request.key) != columns.KEY_BYTES:
                    raise MalformedError(f"a key of {len(request.key)} bytes")
                view = inspect(self.shards.get(ShardId(request.shard)), request.key, self.events)
                return Inspected(request.request, msgspec.msgpack.encode(view))
            case PassedOver():
                return self._passed(request)
            case _:
                assert_never(request)

    def _resolved(self, request: Resolve) -> Resolved:
        asked = [(part, _rows(part.keys)) for part in request.shards]
        pin_s = _seconds(request.pin_s)
        with labelled(request.label):
            return Resolved(
                request.request,
                tuple(
                    self._resolve(part, keys, pin_s, promises=request.promises, is_brief=request.is_brief)
                    for part, keys in asked
                ),
            )

    def _passed(self, request: PassedOver) -> ShardsPassed:
        # Shards that were recovered since begin to count.
        self.placed(self._placement, has_earlier=self._has_earlier)
        passed = (ShardPassed(shard, owned.passing.over()) for shard, owned in self._recovered())
        return ShardsPassed(request.request, tuple(passed))

    def _recovered(self) -> Iterator[tuple[ShardId, OwnedShard]]:
        return ((shard, owned) for shard, owned in self.shards.items() if not owned.core.is_recovering)

    async def _reserved(self, request: Reserve) -> Reserved:
        if not 0 <= request.pool < _POOLS:
            raise MalformedError(f"pool {request.pool} is not a number of 64 bits")
        wanted = [(part, _rows(part.keys), *_lengths_and_depths(part)) for part in request.shards]
        with labelled(request.label):
            made = await asyncio.gather(*(self._reserve(*each, request) for each in wanted))
        return Reserved(request.request, tuple(made))

    async def _committed(self, request: Commit) -> Committed:
        written = [(part, _numbers(part), _rows(part.tags), _seeds(part)) for part in request.shards]
        for _, numbers, tags, seeds in written:
            if not len(numbers) == len(tags) == len(seeds) or _has_repeats(numbers):
                raise MalformedError("a commit names each reservation once, with one tag and its seed")
        with labelled(request.label):
            listed = await asyncio.gather(*(self._commit(*each) for each in written))
        return Committed(request.request, tuple(listed))

    def notice(self, notice: OwnerNotice) -> None:
        """Take word of what needs no answer."""
        match notice:
            case Release():
                for part in notice.shards:
                    owned = self.shards.get(ShardId(part.shard))
                    if owned is not None:
                        numbers = _numbers(part)
                        owned.core.release(self._clock(), part.pins, numbers, may_land=part.may_land)
                        owned.wake()
            case SessionEnded():
                for named in notice.shards:
                    owned = self.shards.get(ShardId(named.shard))
                    if owned is not None:
                        owned.core.eviction.session_ended(_rows(named.keys))
            case Damage():
                owned = self.shards.get(ShardId(notice.shard))
                if owned is not None:
                    owned.check_damage(notice)
            case _:
                assert_never(notice)

    def _resolve(
        self, part: ShardKeys, keys: NDArray[np.uint8], pin_s: float, *, promises: bool, is_brief: bool
    ) -> ShardExtents:
        owned = self.shards.get(ShardId(part.shard)) or self._left_lately(ShardId(part.shard))
        if owned is None:
            known_owner, known_epoch = self._known(part.shard)
            return ShardExtents(
                part.shard, is_owner=False, owner_epoch=0, known_owner=known_owner, known_epoch=known_epoch
            )
        is_current = not 0 < part.placement_epoch < self._placement
        offsets = lengths = generations = tags = b""
        pin = 0
        if is_brief and pin_s <= 0:
            found = owned.core.has(keys, is_counted=is_current)
        else:
            where = owned.core.resolve(
                self._clock(), keys, pin_s=pin_s, promises=promises, is_counted=is_current
            )
            owned.wake()
            found, pin = where.found, where.pin
            if not is_brief:
                offsets, lengths = where.offsets.tobytes(), where.lengths.tobytes()
                generations, tags = where.generations.tobytes(), where.tags.tobytes()
        if log.isEnabledFor(logging.DEBUG):
            log.debug("shard %s: %d of %d blocks found", part.shard, np.count_nonzero(found), len(keys))
        return ShardExtents(
            part.shard,
            is_owner=True,
            owner_epoch=owned.epoch,
            found=found.tobytes(),
            offsets=offsets,
            lengths=lengths,
            generations=generations,
            tags=tags,
            pin=pin,
            is_recovering=owned.core.is_recovering,
        )

    def _left_lately(self, shard: ShardId) -> OwnedShard | None:
        """Return a shard that was left, unless it has had another owner since, and yet another one, as far as
        this agent knows. That may be this agent, with the shard to be read again: what was put in between is
        not known here until then.
        """
        left = self._left.get(shard)
        if left is None:
            return None
        if self._clock() >= left.until_s:
            del self._left[shard]
            return None
        claim = self._claim_of(shard)
        return left.owned if claim is None or claim.epoch <= left.epoch + 1 else None

    async def _reserve(
        self,
        part: ShardWants,
        keys: NDArray[np.uint8],
        lengths: NDArray[np.uint32],
        depths: NDArray[np.uint32] | None,
        request: Reserve,
    ) -> ShardReservations:
        owned = self.shards.get(ShardId(part.shard))
        if owned is None:
            known_owner, known_epoch = self._known(part.shard)
            return ShardReservations(
                part.shard, is_owner=False, owner_epoch=0, known_owner=known_owner, known_epoch=known_epoch
            )
        if 0 < request.placement_epoch < self._placement - _CHANGES_BEHIND_MAX:
            made = Reservations.none(owned.core.index.find(keys) >= 0, Reason.STALE_MAP)
        else:
            made = await owned.reserve(
                keys,
                lengths,
                depths=depths,
                ttl_s=request.ttl_s if request.ttl_s > 0 else math.inf,
                pool=request.pool,
                hold_s=_seconds(request.hold_s),
                within_s=_seconds(request.deadline_s) - _ANSWER_MARGIN_S,
            )
        self.events.record(EventKind.RESERVED, keys, made.states, made.reasons)
        _tell("reserved", part.shard, made.states, made.reasons)
        return ShardReservations(
            part.shard,
            is_owner=True,
            owner_epoch=owned.epoch,
            states=made.states.tobytes(),
            reasons=made.reasons.tobytes(),
            reservations=made.reservations.tobytes(),
            offsets=made.offsets.tobytes(),
        )

    async def _commit(
        self,
        part: ShardCommit,
        numbers: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        seeds: NDArray[np.uint64],
    ) -> ShardCommitted:
        owned = self.shards.get(ShardId(part.shard))
        if owned is None:
            count = len(numbers)
            declined = np.full(count, PutState.DECLINED, np.uint8).tobytes()
            why = np.full(count, Reason.NO_OWNER, np.uint8).tobytes()
            return ShardCommitted(part.shard, declined, why, *self._known(part.shard))
        keys = owned.keys_of(numbers)
        states, reasons = await owned.commit(numbers, tags, seeds, epoch=OwnerEpoch(part.owner_epoch))
        self.events.record(EventKind.COMMITTED, keys, states, reasons)
        _tell("committed", part.shard, states, reasons)
        return ShardCommitted(part.shard, states.tobytes(), reasons.tobytes())

    def _known(self, shard: str) -> tuple[str, int]:
        """Return who owns a shard, and under which epoch, for who asked the wrong agent."""
        claim = self._claim_of(ShardId(shard))
        return ("", 0) if claim is None else (claim.agent, claim.epoch)


def _tell(what: str, shard: str, states: NDArray[np.uint8], reasons: NDArray[np.uint8]) -> None:
    """Log what became of blocks that a put wants to write."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug("shard %s %s: %s", shard, what, tally_text(states.tobytes(), reasons.tobytes(), PutState))


def _seconds(said: float) -> float:
    """Return a time from the wire; what is no number is no time."""
    return 0.0 if math.isnan(said) else said


def _rows(column: bytes) -> NDArray[np.uint8]:
    return columns.rows16(column, len(column) // columns.KEY_BYTES)


def _lengths_and_depths(part: ShardWants) -> tuple[NDArray[np.uint32], NDArray[np.uint32] | None]:
    count = len(part.keys) // columns.KEY_BYTES
    return columns.u32(part.lengths, count), columns.u32(part.depths, count) if part.depths else None


def _seeds(part: ShardCommit) -> NDArray[np.uint64]:
    return columns.u64(part.seeds, len(part.seeds) // columns.U64.itemsize)


def _has_repeats(numbers: NDArray[np.uint64]) -> bool:
    ordered = np.sort(numbers)
    return bool((ordered[1:] == ordered[:-1]).any())


def _numbers(part: ShardCommit | ShardRelease) -> NDArray[np.uint64]:
    return columns.u64(part.reservations, len(part.reservations) // columns.U64.itemsize)
