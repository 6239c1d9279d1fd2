"""Requests of an operation: division of its blocks, and each request from start to end.

The runner of an operation calls ``start`` once, then ``on`` with every event, and executes the effects in
order. ``Finish`` is the end, unless an error was raised. ``Ticked`` must come no later than ``until_s``.
Operations only remember their slots: the ledger processes the agent's final answer, even if the caller no
longer waits.

An operation without time left ends LATE for its caller and sends ``Cancel``; verified blocks of a get stay
HITs. After the loss of the connection, an operation ends as MISS with reason DISCONNECTED. A put ends as LATE
then, because the agent may still commit the blocks.

A batch may be larger than a request: the agent limits blocks and frame length per connection, and the arena's
slots are limited. A window is the part of a batch named in one request. Windows cover the batch in order,
without gaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import (
    LayoutMismatchError,
    MalformedError,
    RefusedError,
    UnknownVolumeError,
)
from ostraca_fabric.model.chain import Chain
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.tables.digests import DAMAGED, GOOD
from ostraca_fabric.telemetry.requests import STATES
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.messages import (
    SPANS_MAX,
    Cancel,
    ConnectionLimits,
    Explained,
    ExtentsRead,
    Failure,
    Get,
    GetDone,
    GetExtents,
    GetProgress,
    Lookup,
    LookupDone,
    Message,
    Prefetch,
    PrefetchDone,
    Put,
    PutDone,
    StatusDone,
    VolumeOpened,
)


class Progress(IntEnum):
    """Progress of a block of a get, apart from the agent's answer."""

    AWAITED = 0
    LANDED = 1
    """Delivered by the agent, and not verified."""

    READING = 2
    """Read from a drive by this worker, and not verified."""

    COPYING = 3
    """To be copied out of the agent's memory by this worker, and not verified."""

    FAILED = 4
    """Not read or copied by this worker, or damaged: to be requested again."""

    LOST = 5
    """The drive is silent: the read may still use the slot."""

    DAMAGED = 6
    """Delivered by the agent, and does not match its tag."""

    VERIFIED = 7


@dataclass(frozen=True, slots=True)
class Verified:
    """Completion of a ``Verify``.

    ``positions`` is a u32 column, ``verdicts`` has a ``CheckState`` of one byte for each position.
    """

    positions: bytes
    verdicts: bytes


@dataclass(frozen=True, slots=True)
class ExtentsEnded:
    """End of some reads of ``ReadExtents``.

    ``positions`` is a u32 column. ``state``: VERIFIED, READING for blocks that are read and not verified,
    FAILED or LOST.
    """

    positions: bytes
    state: Progress


@dataclass(frozen=True, slots=True)
class Ticked:
    """Passage of time, without any other event."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """Loss of the connection: no more messages about this request will come."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Cancellation by the caller."""


Answer = (
    VolumeOpened
    | LookupDone
    | GetProgress
    | GetExtents
    | GetDone
    | PutDone
    | PrefetchDone
    | StatusDone
    | Explained
    | Failure
)
Event = Answer | Verified | ExtentsEnded | Ticked | Disconnected | Cancelled


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message to the agent."""

    message: Message


@dataclass(frozen=True, slots=True)
class Verify:
    """Verify these slots, hand over the good blocks, and return ``Verified``.

    ``positions`` is a u32 column, ``tags`` has 16 bytes for each position. Blocks with ``places``, a u64
    column, are copied from there in the agent's memory first.
    """

    positions: bytes
    tags: bytes
    places: bytes = b""


@dataclass(frozen=True, slots=True)
class ReadExtents:
    """Read these extents into their slots; ``ExtentsEnded`` follows for every position.

    Columns as in ``GetExtents``, with known positions.
    """

    extents: GetExtents


@dataclass(frozen=True, slots=True)
class Finish:
    """End the operation for its caller, with a state and a reason per block.

    Blocks ``again``, a u32 column of positions, are to be requested again: the agent can deliver them.
    """

    outcomes: Outcomes
    again: bytes = b""


Effect = Send | Verify | ReadExtents | Finish


NOT_STARTED_CODES = frozenset({"unknown_volume", "layout_mismatch", "usage", "overloaded", "malformed"})
"""Codes of ``Failure`` for requests whose transfers never began.

``frame_too_long`` is excluded: the *answer* was too long, and may have named slots under transfers.
"""

NOT_HERE_CODES = frozenset({"not_in_memory", "no_arena"})
"""Codes of ``Failure`` for gets of blocks in the agent's memory: other gets may succeed. Agents of an earlier
release answer ``no_arena``.
"""

# Comparing columns with an enum takes 4 us more.
_AWAITED, _LANDED, _COPYING = int(Progress.AWAITED), int(Progress.LANDED), int(Progress.COPYING)
_VERIFIED = int(Progress.VERIFIED)

_CODES: dict[type[BlockState | PutState], bytes] = {kind: bytes(kind) for kind in (BlockState, PutState)}

_ANSWERS: dict[type[object], type[LookupDone | PrefetchDone | GetDone | PutDone]] = {
    Lookup: LookupDone,
    Prefetch: PrefetchDone,
    Get: GetDone,
    Put: PutDone,
}

CALLER_CODES = frozenset({"unknown_volume", "layout_mismatch", "usage"})
"""Codes of ``Failure`` to raise as errors: a retry changes nothing."""


def refusal(failed: Failure) -> RefusedError:
    """Return the error for a ``Failure``."""
    kinds = {"unknown_volume": UnknownVolumeError, "layout_mismatch": LayoutMismatchError}
    return kinds.get(failed.code, RefusedError)(failed.code, failed.message)


class BlockOperation:
    """Lookup, prefetch or put: a request with an outcome per block."""

    def __init__(
        self,
        message: Lookup | Prefetch | Get | Put,
        *,
        until_s: float,
        at: NDArray[np.intp] | None = None,
        slots: NDArray[np.int64] | None = None,
    ) -> None:
        """Begin with the request's *message*, for the blocks *at* these positions of a job.

        The first blocks by default. *slots*: a slot for each block, if any.
        """
        self.request = message.request
        self.blocks = sum(len(span) for span in message.spans)
        self.at = np.arange(self.blocks) if at is None else at
        self.slots = slots
        self.sent_s = -math.inf
        self.name = type(message).__name__.lower()
        self._message = message
        self._states = STATES[self.name]
        self._until_s = until_s

    def start(self, now_s: float) -> list[Effect]:
        """Return the first effects.

        The remaining time in the message was computed when the message was made.
        """
        self.sent_s = now_s
        if now_s >= self._until_s:
            return [self._end(self._states.LATE, Reason.DEADLINE)]
        return [Send(self._message)]

    def on(self, event: Event, now_s: float) -> list[Effect]:
        """Process an event; return the effects.

        Raises MalformedError if the agent's answer does not fit the request, and RefusedError if the request
        is impossible.
        """
        match event:
            case Ticked() if now_s < self._until_s:
                return []
            case Ticked() | Cancelled():
                reason = Reason.CANCELLED if isinstance(event, Cancelled) else Reason.DEADLINE
                return [Send(Cancel(self.request)), self._end(self._states.LATE, reason)]
            case Disconnected():
                lost = BlockState.MISS if self._states is BlockState else PutState.LATE
                return [self._end(lost, Reason.DISCONNECTED)]
            case Failure(code=code) if code in CALLER_CODES:
                raise refusal(event)
            case Failure(code=code, message=message):
                reason = Reason.OVERLOADED if code == "overloaded" else Reason.NONE
                return [self._end(self._states.DECLINED, reason, f"{code}: {message}")]
            case _:
                return self._on_answer(event, now_s)

    def _on_answer(self, event: Event, now_s: float) -> list[Effect]:  # noqa: ARG002 (a late answer counts too)
        if not isinstance(event, _ANSWERS[type(self._message)]):
            raise self._mismatch(event)
        return [Finish(self._outcomes(event))]

    def _end(self, state: int, reason: Reason, note: str = "") -> Finish:
        return Finish(Outcomes.filled(self.blocks, state, reason, note))

    def _outcomes(self, answer: LookupDone | PrefetchDone | GetDone | PutDone) -> Outcomes:
        outcomes = Outcomes.read(answer.states, answer.reasons, self.blocks)
        unknown = answer.states.translate(None, _CODES[self._states])
        if unknown:
            raise MalformedError(f"state {max(unknown)} in an answer: the agent speaks another version")
        return outcomes

    def _mismatch(self, event: Event) -> MalformedError:
        return MalformedError(f"{type(event).__name__} is no answer to a {type(self._message).__name__}")


class GetOperation(BlockOperation):
    """Load of blocks into slots, with verification of each landed block.

    Only a verified block becomes a HIT: the agent's answer alone proves nothing.
    """

    def __init__(
        self,
        message: Get,
        *,
        until_s: float,
        at: NDArray[np.intp] | None = None,
        slots: NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__(message, until_s=until_s, at=at, slots=slots)
        self._is_again = message.is_again
        self._progress = np.zeros(self.blocks, np.uint8)  # Progress.AWAITED
        self._answer: Outcomes | None = None
        self._own: NDArray[np.uint32] | None = None
        """Positions of the blocks that this worker reads from drives itself."""

        self._is_reading = False
        """Whether some of these reads have not ended: the agent is told of the end of all, for its pins."""

    def _on_answer(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case GetProgress():
                return self._on_landed(event, now_s)
            case Verified():
                self._on_verified(event)
                return self._report_reads() + self._conclude()
            case GetExtents():
                return self._on_extents(event, now_s)
            case ExtentsEnded():
                return self._on_read(event)
            case GetDone():
                # Check the whole message before any part counts.
                answer = self._outcomes(event)
                codec.positions(event.unsettled, self.blocks)
                self._answer = answer
                return self._on_landed(event, now_s) or self._conclude()
            case _:
                raise self._mismatch(event)

    def _on_landed(self, news: GetProgress | GetDone, now_s: float) -> list[Effect]:
        """Verify blocks that are new and not read here."""
        found = codec.positions(news.positions, self.blocks)
        tags = codec.rows16(news.tags, len(found))
        is_copied = len(news.places) > 0
        places = codec.u64(news.places, len(found) if is_copied else 0)
        if is_copied and self._is_again:
            raise MalformedError("places in memory for blocks that the agent must deliver")
        is_new = self._progress[found] == _AWAITED
        verify = Verify(news.positions, news.tags, news.places)
        if np.count_nonzero(is_new) < len(found):
            found = found[is_new]
            copied = places[is_new].tobytes() if is_copied else b""
            verify = Verify(found.tobytes(), tags[is_new].tobytes(), copied)
        self._progress[found] = _COPYING if is_copied else _LANDED
        return [verify] if len(found) and now_s < self._until_s else []

    def _on_extents(self, extents: GetExtents, now_s: float) -> list[Effect]:
        if self._is_again or self._own is not None:
            raise MalformedError("a second GetExtents for blocks")
        positions = codec.positions(extents.positions, self.blocks)
        count = len(positions)
        codec.u32(extents.drives, count)
        codec.u64(extents.offsets, count)
        tags = codec.rows16(extents.tags, count)
        if not count or not codec.are_distinct(positions) or self._progress[positions].any():
            raise MalformedError("GetExtents without blocks, or with blocks that were named before")
        self._own, self._own_tags = np.sort(positions), np.zeros((self.blocks, codec.TAG_BYTES), np.uint8)
        self._own_tags[positions] = tags
        self._progress[positions] = Progress.READING
        self._is_reading = True
        return [] if now_s >= self._until_s else [ReadExtents(extents)]

    def _on_read(self, ended: ExtentsEnded) -> list[Effect]:
        positions = codec.positions(ended.positions, self.blocks)
        if ended.state is Progress.READING:
            return [Verify(ended.positions, self._own_tags[positions].tobytes())]
        self._progress[positions] = ended.state
        return self._report_reads() + self._conclude()

    def _on_verified(self, verified: Verified) -> None:
        """Take verdicts. Blocks read or copied here and not good have failed."""
        found = codec.positions(verified.positions, self.blocks)
        verdicts = codec.u8(verified.verdicts, len(found))
        is_good = verdicts == GOOD
        if verified.verdicts.count(GOOD) < len(found):
            is_landed = self._progress[found] == _LANDED
            self._progress[found[~is_good & ~is_landed]] = Progress.FAILED
            self._progress[found[is_landed & (verdicts == DAMAGED)]] = Progress.DAMAGED
        self._progress[found[is_good]] = _VERIFIED

    def _report_reads(self) -> list[Effect]:
        """Report the end of all own reads to the agent, once."""
        if self._own is None or not self._is_reading:
            return []
        own = self._progress[self._own]
        self._is_reading = bool((own == Progress.READING).any())
        good, failed = (self._own[own == each].tobytes() for each in (Progress.VERIFIED, Progress.FAILED))
        return [] if self._is_reading else [Send(ExtentsRead(self.request, good, failed))]

    def _conclude(self) -> list[Effect]:
        """End with the agent's answer and the results of the verification, once both are there."""
        if self._answer is None or self._is_reading:
            return []
        progress = self._progress
        if np.count_nonzero(progress == _VERIFIED) == self.blocks:  # the usual end
            return [Finish(Outcomes.filled(self.blocks, BlockState.HIT))]
        outcomes = self._answer.copy()
        is_claimed = outcomes.states == BlockState.HIT
        outcomes.set(is_claimed & (progress == _AWAITED), BlockState.MISS, Reason.TRANSFER_FAILED)
        outcomes.set(is_claimed & (progress == _LANDED), BlockState.LATE, Reason.DEADLINE)
        outcomes.set(progress == Progress.LOST, BlockState.MISS, Reason.DRIVE_SUSPECT)
        failed = (progress == _COPYING) | (progress == Progress.FAILED)
        outcomes.set(failed, BlockState.LATE, Reason.DEADLINE)
        return [self._with_verdicts(outcomes, again=np.flatnonzero(failed).astype(codec.U32).tobytes())]

    def _end(self, state: int, reason: Reason, note: str = "") -> Finish:
        """End without the agent's answer, keeping the verified blocks."""
        return self._with_verdicts(Outcomes.filled(self.blocks, state, reason, note))

    def _with_verdicts(self, outcomes: Outcomes, again: bytes = b"") -> Finish:
        outcomes.set(self._progress == Progress.DAMAGED, BlockState.MISS, Reason.DAMAGED)
        outcomes.set(self._progress == _VERIFIED, BlockState.HIT)
        return Finish(outcomes, again)


_MESSAGE_BYTES = 1024
"""Bytes of a request besides blocks, with room to spare: ids, field names, the first stripe unit of each
span.
"""

_COLUMN_BYTES = 4 + 8 + 16 + 5
"""Bytes per block: length, slot, tag, and the count of a stripe unit with a single block."""


def blocks_per_request(limits: ConnectionLimits, hash_bytes: int) -> int:
    """Return the number of blocks that always fit one request; at least 1.

    In the worst case, each block has a stripe unit of its own.
    """
    per_block = 2 * hash_bytes + _COLUMN_BYTES
    return max(1, min(limits.blocks_max, (limits.frame_bytes_max - _MESSAGE_BYTES) // per_block))


def windows(chains: Sequence[Chain], blocks_max: int) -> Iterator[tuple[Chain, ...]]:
    """Cut chains, laid end to end, into windows, in order.

    A window has at most *blocks_max* blocks and SPANS_MAX chains.
    """
    part: list[Chain] = []
    room = blocks_max
    for chain in chains:
        begin = 0
        while begin < len(chain):
            part.append(chain[begin : begin + room])
            begin, room = begin + len(part[-1]), room - len(part[-1])
            if not room or len(part) == SPANS_MAX:
                yield tuple(part)
                part, room = [], blocks_max
    if part:
        yield tuple(part)


_FIRST_SHARE = 32
"""Part of a window that the first request of many names: the prefix comes early."""


def window_blocks(
    *, left: int, blocks_max: int, arena_slots: int, windows_inflight: int, is_first: bool = False
) -> int:
    """Choose the number of blocks in the next request of a get.

    If the arena can hold all remaining blocks, the request names all: the agent makes its own waves.
    Otherwise the request names a share of the arena, so that one window is verified and copied while others
    are under way.
    """
    if left <= arena_slots:
        return min(left, blocks_max)
    share = arena_slots // windows_inflight
    return min(blocks_max, max(1, share // _FIRST_SHARE if is_first else share))
