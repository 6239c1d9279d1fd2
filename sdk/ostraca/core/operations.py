"""Operations: one request each, from its start to its end for the caller.

Whoever runs one calls ``start`` once, then ``on`` with every event, does the effects in order, and stops at
the first ``Finished``, ``Replied`` or ``Rejected``; there is exactly one. ``Ticked`` must come no later than
``until_s``. Slots are no business of an operation: the ledger learns from the agent's final answer, whether
or not the caller still waits for it.

An operation that runs out of time ends LATE for its caller and sends ``Cancel``; blocks of a get that were
verified and handed over before stay HITs. One whose connection is lost ends as MISS (a put: LATE, since it
may yet be committed) with reason DISCONNECTED.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca.core.events import (
    Cancelled,
    Disconnected,
    Finished,
    Rejected,
    Replied,
    Send,
    Ticked,
    Verdict,
    Verified,
    Verify,
)
from ostraca_fabric.errors import (
    ConnectError,
    LayoutMismatchError,
    MalformedError,
    RefusedError,
    UnknownVolumeError,
)
from ostraca_fabric.outcome import BlockState, PutState, Reason
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import (
    Cancel,
    Explained,
    Failed,
    Get,
    GetDone,
    GetProgress,
    Lookup,
    LookupDone,
    Prefetch,
    PrefetchDone,
    Put,
    PutDone,
    StatusDone,
    VolumeOpened,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca.core.events import Effect, Event
    from ostraca_fabric.chain import Span
    from ostraca_fabric.outcome import Ack
    from ostraca_fabric.wire.messages import Message

NOT_STARTED_CODES = frozenset({"unknown_volume", "layout_mismatch", "usage", "overloaded", "malformed"})
"""Codes of ``Failed`` after which no transfer of the request was ever begun.

Not ``frame_too_long``: the *answer* was, and it may have named slots under transfers.
"""

_GOOD, _DAMAGED = int(Verdict.GOOD), int(Verdict.DAMAGED)  # comparing columns with an enum takes 4 us more

_CODES: dict[type[BlockState | PutState], bytes] = {kind: bytes(kind) for kind in (BlockState, PutState)}

CALLER_CODES = frozenset({"unknown_volume", "layout_mismatch", "usage"})
"""Codes of ``Failed`` that are errors to raise: asking again changes nothing."""


def refusal(failed: Failed) -> RefusedError:
    """Return the error that a ``Failed`` stands for."""
    kinds = {"unknown_volume": UnknownVolumeError, "layout_mismatch": LayoutMismatchError}
    return kinds.get(failed.code, RefusedError)(failed.code, failed.message)


class _BlockOperation:
    """What all operations with an outcome per block have in common."""

    _late: int = BlockState.LATE
    _lost: int = BlockState.MISS
    _declined: int = BlockState.DECLINED

    def __init__(self, message: Lookup | Prefetch | Get | Put, *, until_s: float) -> None:
        self.request = message.request
        self.name = type(message).__name__.lower()
        self.blocks = sum(len(span) for span in message.spans)
        self._message = message
        self._until_s = until_s

    def start(self, now_s: float) -> list[Effect]:
        """Return what to do first.

        The remaining time that the agent is told was counted when the message was made.
        """
        if now_s >= self._until_s:
            return [self._ended(self._late, Reason.DEADLINE)]
        return [Send(self._message)]

    def on(self, event: Event, now_s: float) -> list[Effect]:
        """Take an event; return what to do.

        Raises MalformedError when the agent's answer does not fit the request.
        """
        match event:
            case Ticked() if now_s < self._until_s:
                return []
            case Ticked() | Cancelled():
                why = Reason.CANCELLED if isinstance(event, Cancelled) else Reason.DEADLINE
                return [Send(Cancel(self.request)), self._ended(self._late, why)]
            case Disconnected():
                return [self._ended(self._lost, Reason.DISCONNECTED)]
            case Failed(code=code) if code in CALLER_CODES:
                return [Rejected(refusal(event))]
            case Failed(code=code, message=message):
                why = Reason.OVERLOADED if code == "overloaded" else Reason.NONE
                return [self._ended(self._declined, why, f"{code}: {message}")]
            case _:
                return self._on_answer(event, now_s)

    def _on_answer(self, event: Event, now_s: float) -> list[Effect]:
        raise NotImplementedError

    def _ended(self, state: int, reason: Reason, note: str = "") -> Finished:
        return Finished(bytes([state]) * self.blocks, bytes([reason]) * self.blocks, note)

    def _answered(self, states: bytes, reasons: bytes, known: type[BlockState | PutState]) -> Finished:
        columns.u8(states, self.blocks)
        columns.u8(reasons, self.blocks)
        unknown = states.translate(None, _CODES[known])
        if unknown:
            raise MalformedError(f"state {max(unknown)} in an answer: the agent speaks another version")
        return Finished(states, reasons)

    def _unexpected(self, event: Event) -> MalformedError:
        return MalformedError(f"{type(event).__name__} is no answer to a {type(self._message).__name__}")


class LookupOperation(_BlockOperation):
    """Asks which blocks could be got now."""

    def _on_answer(self, event: Event, now_s: float) -> list[Effect]:  # noqa: ARG002 (an answer counts whenever it came)
        if not isinstance(event, LookupDone):
            raise self._unexpected(event)
        return [self._answered(event.states, event.reasons, BlockState)]


class PrefetchOperation(_BlockOperation):
    """Asks the agent to bring blocks into its memory."""

    def _on_answer(self, event: Event, now_s: float) -> list[Effect]:  # noqa: ARG002
        if not isinstance(event, PrefetchDone):
            raise self._unexpected(event)
        return [self._answered(event.states, event.reasons, BlockState)]


class PutOperation(_BlockOperation):
    """Has the agent take blocks from slots."""

    _late = PutState.LATE
    _lost = PutState.LATE
    _declined = PutState.DECLINED

    def _on_answer(self, event: Event, now_s: float) -> list[Effect]:  # noqa: ARG002
        if not isinstance(event, PutDone):
            raise self._unexpected(event)
        return [self._answered(event.states, event.reasons, PutState)]


class GetOperation(_BlockOperation):
    """Has the agent fill slots, and has each block verified as it lands.

    Only a block that ``Verified`` called good is ever a HIT, whatever the agent says: the agent's word alone
    proves nothing.
    """

    def __init__(self, message: Get, *, until_s: float) -> None:
        super().__init__(message, until_s=until_s)
        self._landed = np.zeros(self.blocks, np.bool_)
        self._good = np.zeros(self.blocks, np.bool_)
        self._damaged = np.zeros(self.blocks, np.bool_)
        self._done: GetDone | None = None

    def _on_answer(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case GetProgress():
                return self._on_landed(event.positions, event.tags, now_s)
            case Verified():
                found = columns.positions(event.positions, self.blocks)
                verdicts = columns.u8(event.verdicts, len(found))
                self._good[found[verdicts == _GOOD]] = True
                self._damaged[found[verdicts == _DAMAGED]] = True
                return [] if self._done is None else [self._concluded(self._done)]
            case GetDone():
                # All of it is checked before any of it counts.
                self._answered(event.states, event.reasons, BlockState)
                columns.positions(event.unsettled, self.blocks)
                self._done = event
                return self._on_landed(event.positions, event.tags, now_s) or [self._concluded(event)]
            case _:
                raise self._unexpected(event)

    def _on_landed(self, positions: bytes, tag_column: bytes, now_s: float) -> list[Effect]:
        found = columns.positions(positions, self.blocks)
        tags = columns.rows16(tag_column, len(found))
        is_new = ~self._landed[found]
        self._landed[found] = True
        if now_s >= self._until_s or not is_new.any():
            return []
        return [Verify(found[is_new].tobytes(), tags[is_new].tobytes())]

    def _concluded(self, done: GetDone) -> Finished:
        """Merge what the agent says with what was verified here."""
        states = columns.u8(done.states, self.blocks).copy()
        reasons = columns.u8(done.reasons, self.blocks).copy()
        claimed = (states == BlockState.HIT) & ~self._good
        for blocks, state, reason in (
            (claimed & ~self._landed, BlockState.MISS, Reason.TRANSFER_FAILED),
            (claimed & self._landed, BlockState.LATE, Reason.DEADLINE),
            (self._damaged, BlockState.MISS, Reason.DAMAGED),
            (self._good, BlockState.HIT, Reason.NONE),
        ):
            states[blocks], reasons[blocks] = state, reason
        return Finished(states.tobytes(), reasons.tobytes())

    def _ended(self, state: int, reason: Reason, note: str = "") -> Finished:
        """End without the agent's word, keeping what was verified."""
        states = np.full(self.blocks, state, np.uint8)
        reasons = np.full(self.blocks, reason, np.uint8)
        states[self._damaged], reasons[self._damaged] = BlockState.MISS, Reason.DAMAGED
        states[self._good], reasons[self._good] = BlockState.HIT, Reason.NONE
        return Finished(states.tobytes(), reasons.tobytes(), note)


class Question:
    """Asks something about no block in particular: ends as Replied, or as Rejected with what to raise."""

    def __init__(self, message: Message, *, request: int, until_s: float) -> None:
        self.request = request
        self._message = message
        self._until_s = until_s

    def start(self, now_s: float) -> list[Effect]:
        """Return what to do first."""
        return self.on(Ticked(), now_s) if now_s >= self._until_s else [Send(self._message)]

    def on(self, event: Event, now_s: float) -> list[Effect]:
        """Take an event; return what to do. Raises MalformedError when the agent's answer does not fit."""
        what = type(self._message).__name__
        match event:
            case VolumeOpened() | StatusDone() | Explained():
                return [Replied(event)]
            case Failed():
                return [Rejected(refusal(event))]
            case Disconnected():
                return [Rejected(ConnectError(f"the agent went away before it answered {what}; try again"))]
            case Ticked():
                if now_s < self._until_s:
                    return []
                return [
                    Send(Cancel(self.request)),
                    Rejected(ConnectError(f"the agent did not answer {what} in time; is it stopped?")),
                ]
            case _:
                raise MalformedError(f"{type(event).__name__} is no answer to a {what}")


Operation = LookupOperation | PrefetchOperation | GetOperation | PutOperation | Question


def get_message(  # one keyword per field of the wire's message, with columns made here
    *,
    request: int,
    handle: int,
    deadline_s: float,
    spans: tuple[Span, ...],
    lengths: NDArray[np.uint32],
    slots: NDArray[np.int64],
    slot_bytes: int,
    recompute_s: float,
) -> Get:
    """Say which blocks to bring into which slots."""
    return Get(
        request,
        handle,
        deadline_s,
        spans,
        lengths.astype(columns.U32).tobytes(),
        slots.astype(columns.U64).tobytes(),
        slot_bytes,
        recompute_s,
    )


def put_message(  # noqa: PLR0913 (as the message)
    *,
    request: int,
    handle: int,
    deadline_s: float,
    ack: Ack,
    spans: tuple[Span, ...],
    lengths: NDArray[np.uint32],
    tags: bytes,
    slots: NDArray[np.int64],
    slot_bytes: int,
    ttl_s: float,
) -> Put:
    """Say which blocks to take from which slots."""
    return Put(
        request,
        handle,
        deadline_s,
        int(ack),
        spans,
        lengths.astype(columns.U32).tobytes(),
        tags,
        slots.astype(columns.U64).tobytes(),
        slot_bytes,
        ttl_s,
    )
