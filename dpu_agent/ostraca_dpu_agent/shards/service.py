"""Service of the shard owner: requests of data paths to this agent's shards, and the answers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, assert_never

import msgspec
import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.shards.core import Allocations, has_in_each
from ostraca_dpu_agent.shards.reports import owner_view
from ostraca_dpu_agent.shards.shard import OwnedShard
from ostraca_fabric.errors import MalformedError
from ostraca_fabric.model.chain import DEPTH_UNKNOWN
from ostraca_fabric.model.fabric_map import Claim, FabricMap
from ostraca_fabric.model.ids import OwnerEpoch, PlacementEpoch, ShardId
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.model.overrides import Overrides
from ostraca_fabric.ports.owners import GivenSpace, ShardAnswer, WantedSpace
from ostraca_fabric.runtime.tasks import completed, gathered
from ostraca_fabric.telemetry.explain import EventKind
from ostraca_fabric.telemetry.requests import EventRing, current_label, labelled, tally_text
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import (
    Commit,
    Committed,
    Damage,
    Inspect,
    Inspected,
    OwnerAnswer,
    OwnerNotice,
    OwnerRequest,
    Release,
    Reserve,
    Reserved,
    Resolve,
    Resolved,
    RingProgressAnswer,
    RingProgressQuery,
    SessionEnded,
    ShardCommit,
    ShardCommitted,
    ShardExtents,
    ShardReservations,
    ShardRingProgress,
    ShardWants,
)

log = logging.getLogger(__name__)

_ANSWER_MARGIN_S = 0.002
"""The owner answers this long before the deadline: without an answer by then a data path gives up."""


_BUSY = int(Reason.BUSY)  # numpy takes three times as long with an enum's member

_POOLS = 1 << 64

_CHANGES_BEHIND_MAX = 1
"""Placement changes unknown to a put's agent, at most: a change reaches the agents in turn, and declines no
put. Writes of an agent further behind are wasted: such a placement is soon not asked any more, and the agent
never looks for existing blocks in newer placements."""


@dataclass(frozen=True, slots=True)
class _FormerShard:
    """Shard that was handed over."""

    owned: OwnedShard
    epoch: OwnerEpoch
    """Epoch of its claim: a shard in recovery has none of its own yet."""

    until_s: float = math.inf
    """End of the answers to lookups."""


class _Reservation(NamedTuple):
    """Reservation of space in a shard, perhaps under way."""

    owned: OwnedShard
    making: asyncio.Future[Allocations]


class OwnerService:
    """Service of the shards that this agent owns."""

    def __init__(
        self,
        clock: Callable[[], float],
        events: EventRing,
        claim_of: Callable[[ShardId], Claim | None] = lambda _: None,
    ) -> None:
        """Begin without shards; *clock* is the agent's own, in seconds.

        *claim_of* returns the claim of a shard as known to this agent: the answer to a caller that asks the
        wrong agent.
        """
        self._clock = clock
        self._claim_of = claim_of
        self.events = events
        self.shards: dict[ShardId, OwnedShard] = {}
        self._placement, self._has_earlier = PlacementEpoch(0), False
        self._former: dict[ShardId, _FormerShard] = {}
        self._shares: Mapping[int, float] = {}

    def serve(self, owned: OwnedShard) -> None:
        """Serve a shard, before its recovery."""
        self.shards[owned.record.id] = owned
        owned.share_out(self._shares)

    def share_out(self, shares: Mapping[int, float]) -> None:
        """Set each pool's share of every shard, owned now or later."""
        if shares != self._shares:
            self._shares = dict(shares)
            for owned in self.shards.values():
                owned.share_out(self._shares)

    def begin_placement_epoch(self, epoch: PlacementEpoch, *, has_earlier: bool) -> None:
        """Note the current placement epoch, and whether earlier ones are still asked.

        A new epoch forgets all reads so far: many blocks belong elsewhere now, and are not reinserted unless
        they are read here again.
        """
        if self._placement != epoch:
            for owned in self.shards.values():
                owned.core.index.forget_all_reads()
        self._placement, self._has_earlier = epoch, has_earlier
        for owned in self.shards.values():
            owned.core.begin_placement_epoch(epoch, has_earlier=has_earlier)

    def disown(self, shard: ShardId) -> None:
        """Stop serving a shard."""
        self.shards.pop(shard, None)

    def hand_over(self, shard: ShardId, epoch: OwnerEpoch) -> None:
        """Own a shard, claimed under *epoch*, no more, but still answer lookups.

        The lookups go on until ``end_lookups``, and a while longer: the next owner has to recover first.
        """
        self._former[shard] = _FormerShard(self.shards.pop(shard), epoch)

    @property
    def handed_over(self) -> frozenset[ShardId]:
        """Shards handed over that have no known successor yet."""
        return frozenset(shard for shard, former in self._former.items() if former.until_s == math.inf)

    def end_lookups(self, shard: ShardId, *, until_s: float) -> None:
        """Answer lookups for a shard handed over until *until_s*, as another agent owns it."""
        self._former[shard] = replace(self._former[shard], until_s=until_s)

    def forget_former(self, shard: ShardId) -> None:
        """Forget a shard handed over before: it is served again, and the old index is outdated."""
        self._former.pop(shard, None)

    def prune(self) -> None:
        """Release shards handed over whose lookups have ended: each keeps its index in memory."""
        now_s = self._clock()
        self._former = {shard: former for shard, former in self._former.items() if now_s < former.until_s}

    def clear(self) -> None:
        """Stop serving all shards."""
        self.shards.clear()
        self._former.clear()

    def answer(self, request: OwnerRequest) -> OwnerAnswer | Awaitable[OwnerAnswer]:
        """Answer a data path: a lookup at once, and a change of a shard when it is done.

        Raises MalformedError if columns do not fit each other; then nothing was done.
        """
        match request:
            case Resolve():
                return self._resolved(request)
            case Reserve():
                return self._reserved(request)
            case Commit():
                return self._committed(request)
            case Inspect():
                if len(request.key) != codec.KEY_BYTES:
                    raise MalformedError(f"a key has {codec.KEY_BYTES} bytes, not {len(request.key)}")
                view = owner_view(self.shards.get(ShardId(request.shard)), request.key, self.events)
                return Inspected(request.request, msgspec.msgpack.encode(view))
            case RingProgressQuery():
                return self._turned_over(request)
            case _:
                assert_never(request)

    def _resolved(self, request: Resolve) -> Resolved:
        wanted = [(part, _rows(part.keys)) for part in request.shards]
        with labelled(request.label):
            answers = [
                (part, self.resolve(ShardId(part.shard), PlacementEpoch(part.placement_epoch), keys, request))
                for part, keys in wanted
            ]
        return Resolved(request.request, tuple(_encoded(part.shard, answer) for part, answer in answers))

    def _turned_over(self, request: RingProgressQuery) -> RingProgressAnswer:
        # Shards recovered since the last request begin to count.
        self.begin_placement_epoch(self._placement, has_earlier=self._has_earlier)
        passed = (
            ShardRingProgress(shard, owned.core.progress.turned_over())
            for shard, owned in self.shards.items()
            if not owned.core.is_recovering
        )
        return RingProgressAnswer(request.request, tuple(passed))

    def _reserved(self, request: Reserve) -> Reserved | Awaitable[Reserved]:
        if not 0 <= request.pool < _POOLS:
            raise MalformedError(f"pool {request.pool} is not a number of 64 bits")
        wanted = [_wanted(part) for part in request.shards]
        with labelled(request.label):
            given = self.reserve(wanted, request)
        return _reserved(request, given) if isinstance(given, list) else _reserved_later(request, given)

    def reserve(
        self, wanted: Sequence[WantedSpace], terms: Reserve
    ) -> list[GivenSpace] | Awaitable[list[GivenSpace]]:
        """Reserve space in shards, as ``ports.owners.LocalShards``."""
        until_s = self._clock() + _seconds(terms.deadline_s)
        begun = [self._reserve(each, terms) for each in wanted]
        if all(each is None or each.making.done() for each in begun):
            return self._given(wanted, terms, begun, until_s)
        return self._given_later(wanted, terms, begun, until_s, current_label())

    async def _given_later(
        self,
        wanted: Sequence[WantedSpace],
        terms: Reserve,
        begun: Sequence[_Reservation | None],
        until_s: float,
        label: str,
    ) -> list[GivenSpace]:
        for each in begun:
            if each is not None:
                await each.making
        with labelled(label):
            return self._given(wanted, terms, begun, until_s)

    def _given(
        self,
        wanted: Sequence[WantedSpace],
        terms: Reserve,
        begun: Sequence[_Reservation | None],
        until_s: float,
    ) -> list[GivenSpace]:
        """Answer after the end of all reservations; None stands for a shard of another owner."""
        return [
            self._give(each, terms, reservation, until_s)
            for each, reservation in zip(wanted, begun, strict=True)
        ]

    async def _committed(self, request: Commit) -> Committed:
        written = [
            (part, _u64(part.reservations), _rows(part.tags), _u64(part.seeds)) for part in request.shards
        ]
        for _, numbers, tags, seeds in written:
            if not len(set(numbers.tolist())) == len(numbers) == len(tags) == len(seeds):
                raise MalformedError("a commit must name each reservation once, with one tag and one seed")
        with labelled(request.label):
            answers = await gathered([self._commit(*each) for each in written])
        return Committed(request.request, tuple(answers))

    def notice(self, notice: OwnerNotice) -> None:
        """Handle a message that needs no answer."""
        match notice:
            case Release():
                for part in notice.shards:
                    owned, ended = self.shards.get(ShardId(part.shard)), _u64(part.reservations)
                    if owned is not None and owned.core.release(
                        self._clock(), part.pins, ended, may_land=part.may_land
                    ):
                        owned.wake()
            case SessionEnded():
                for named in notice.shards:
                    owned = self.shards.get(ShardId(named.shard))
                    if owned is not None:
                        owned.core.catalog.end_session(_rows(named.keys))
            case Damage():
                owned = self.shards.get(ShardId(notice.shard))
                if owned is not None:
                    owned.check_damage(notice)
            case _:
                assert_never(notice)

    def resolve(
        self, shard: ShardId, placement_epoch: PlacementEpoch, keys: NDArray[np.uint8], terms: Resolve
    ) -> ShardAnswer:
        """Look up blocks of a shard, as ``ports.owners.LocalShards``."""
        owned = self.shards.get(shard) or self._former_shard(shard)
        if owned is None:
            known_owner, known_epoch = self._known(shard)
            return ShardAnswer(is_owner=False, known_owner=known_owner, known_epoch=known_epoch)
        core, pin_s = owned.core, _seconds(terms.pin_s)
        is_counted = self._is_counted(terms, placement_epoch)
        extents, pin = None, 0
        if terms.is_brief and pin_s <= 0:
            found = core.has(keys, is_counted=is_counted)
        else:
            extents = core.resolve(
                self._clock(), keys, pin_s=pin_s, promises=terms.promises, is_counted=is_counted
            )
            found, pin = extents.found, extents.pin
        if log.isEnabledFor(logging.DEBUG):
            log.debug("shard %s: %d of %d blocks found", shard, np.count_nonzero(found), len(keys))
        return ShardAnswer(
            is_owner=True,
            owner_epoch=core.epoch,
            is_found=found,
            extents=None if terms.is_brief else extents,
            pin=pin,
            is_recovering=core.is_recovering,
        )

    def is_whole(self, shard: ShardId) -> bool:
        """Return whether this agent owns a shard and knows all of its blocks."""
        owned = self.shards.get(shard)
        return owned is not None and not owned.core.is_recovering

    def has(
        self,
        runs: Sequence[tuple[ShardId | None, int]],
        placement_epoch: PlacementEpoch,
        keys: NDArray[np.uint8],
        terms: Resolve,
    ) -> NDArray[np.bool_]:
        """Return which blocks exist, as ``ports.owners.LocalShards``."""
        cores = [(None if shard is None else self.shards[shard].core, count) for shard, count in runs]
        found = has_in_each(cores, keys, is_counted=self._is_counted(terms, placement_epoch))
        if log.isEnabledFor(logging.DEBUG):
            shards = {shard for shard, _ in runs if shard is not None}
            log.debug("%d shards: %d of %d blocks found", len(shards), np.count_nonzero(found), len(keys))
        return found

    def _is_counted(self, terms: Resolve, placement_epoch: PlacementEpoch) -> bool:
        """Return whether a look-up counts as a read: a look-up under an obsolete placement does not."""
        return terms.is_counted and not 0 < placement_epoch < self._placement

    def _former_shard(self, shard: ShardId) -> OwnedShard | None:
        """Return a shard handed over, unless two owners are known to have followed.

        The second may be this agent, with the shard in recovery: blocks put in between are unknown here until
        then.
        """
        former = self._former.get(shard)
        if former is None:
            return None
        if self._clock() >= former.until_s:
            del self._former[shard]
            return None
        claim = self._claim_of(shard)
        return former.owned if claim is None or claim.epoch <= former.epoch + 1 else None

    def _reserve(self, wanted: WantedSpace, terms: Reserve) -> _Reservation | None:
        owned = self.shards.get(wanted.shard)
        if owned is None:
            return None
        if 0 < terms.placement_epoch < self._placement - _CHANGES_BEHIND_MAX:
            return _Reservation(owned, completed(owned.decline(wanted.keys, Reason.STALE_MAP)))
        making = owned.reserve(
            wanted.keys,
            wanted.lengths,
            depths=wanted.depths,
            ttl_s=terms.ttl_s if terms.ttl_s > 0 else math.inf,
            pool=terms.pool,
            hold_s=_seconds(terms.hold_s),
            within_s=_seconds(terms.deadline_s) - _ANSWER_MARGIN_S,
            is_again=terms.is_again,
        )
        return _Reservation(owned, making)

    def _give(
        self, wanted: WantedSpace, terms: Reserve, reservation: _Reservation | None, until_s: float
    ) -> GivenSpace:
        if reservation is None:
            known_owner, known_epoch = self._known(wanted.shard)
            return GivenSpace(is_owner=False, known_owner=known_owner, known_epoch=known_epoch)
        owned, space = reservation.owned, reservation.making.result()
        if terms.waits:
            space = owned.with_busy(space, within_s=until_s - self._clock())
        is_final = space.reasons != _BUSY  # busy blocks are retried many times a second
        self.events.record(
            EventKind.RESERVED, wanted.keys[is_final], space.states[is_final], space.reasons[is_final]
        )
        _log_outcomes("reserved", wanted.shard, space.states, space.reasons)
        return GivenSpace(
            is_owner=True,
            owner_epoch=owned.core.epoch,
            states=space.states,
            reasons=space.reasons,
            reservations=space.reservations,
            offsets=space.offsets,
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
            declined = codec.Outcomes.filled(len(numbers), PutState.DECLINED, Reason.NO_OWNER)
            return ShardCommitted(part.shard, *declined.encode(), *self._known(part.shard))
        keys = owned.keys_of(numbers)
        states, reasons = await owned.commit(numbers, tags, seeds, epoch=OwnerEpoch(part.owner_epoch))
        self.events.record(EventKind.COMMITTED, keys, states, reasons)
        _log_outcomes("committed", part.shard, states, reasons)
        return ShardCommitted(part.shard, states.tobytes(), reasons.tobytes())

    def _known(self, shard: str) -> tuple[str, int]:
        """Return (owner, epoch) of a shard, for a caller that asked the wrong agent."""
        claim = self._claim_of(ShardId(shard))
        return ("", 0) if claim is None else (claim.agent, claim.epoch)


def _log_outcomes(step: str, shard: str, states: NDArray[np.uint8], reasons: NDArray[np.uint8]) -> None:
    """Log the outcomes of a put's blocks."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug("shard %s %s: %s", shard, step, tally_text(states.tobytes(), reasons.tobytes(), PutState))


def _encoded(shard: str, answer: ShardAnswer) -> ShardExtents:
    extents = answer.extents
    return ShardExtents(
        shard,
        is_owner=answer.is_owner,
        owner_epoch=answer.owner_epoch,
        found=b"" if answer.is_found is None else answer.is_found.tobytes(),
        offsets=b"" if extents is None else extents.offsets.tobytes(),
        lengths=b"" if extents is None else extents.lengths.tobytes(),
        generations=b"" if extents is None else extents.generations.tobytes(),
        tags=b"" if extents is None else extents.tags.tobytes(),
        pin=answer.pin,
        is_recovering=answer.is_recovering,
        known_owner=answer.known_owner,
        known_epoch=answer.known_epoch,
    )


def _seconds(from_wire: float) -> float:
    """Return a time from the wire; NaN counts as 0."""
    return 0.0 if math.isnan(from_wire) else from_wire


def _rows(column: bytes) -> NDArray[np.uint8]:
    """Return a writable copy: C finds its address in a fraction of the time."""
    return codec.rows16(column, len(column) // codec.KEY_BYTES).copy()


def _wanted(part: ShardWants) -> WantedSpace:
    keys = _rows(part.keys)
    count = len(keys)
    depths = codec.u32(part.depths, count) if part.depths else np.full(count, DEPTH_UNKNOWN, np.uint32)
    return WantedSpace(ShardId(part.shard), keys, codec.u32(part.lengths, count), depths)


def _reserved(request: Reserve, given: Sequence[GivenSpace]) -> Reserved:
    parts = zip(request.shards, given, strict=True)
    return Reserved(
        request.request,
        tuple(
            ShardReservations(
                part.shard,
                is_owner=space.is_owner,
                owner_epoch=space.owner_epoch,
                states=space.states.tobytes(),
                reasons=space.reasons.tobytes(),
                reservations=space.reservations.tobytes(),
                offsets=space.offsets.tobytes(),
                known_owner=space.known_owner,
                known_epoch=space.known_epoch,
            )
            for part, space in parts
        ),
    )


async def _reserved_later(request: Reserve, giving: Awaitable[Sequence[GivenSpace]]) -> Reserved:
    return _reserved(request, await giving)


def _u64(column: bytes) -> NDArray[np.uint64]:
    return codec.u64(column, len(column) // codec.U64.itemsize)


def flash_shares(overrides: Overrides, fabric_map: FabricMap) -> dict[int, float]:
    """Return each pool's share of flash: its tenant's quota of usable flash.

    Every shard has the same share, since placement fills shards alike.
    """
    usable_bytes = sum(shard.weight for shard in fabric_map.shards())
    quotas: Counter[int] = Counter()
    for tenant in overrides.tenants.values():
        if tenant.flash_bytes:
            quotas[tenant.pool] += tenant.flash_bytes
    return {pool: quota / usable_bytes for pool, quota in quotas.items()} if usable_bytes else {}
