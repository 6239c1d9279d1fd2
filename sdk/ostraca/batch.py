"""Batches: many blocks in one operation, as requests that the agent accepts.

A batch keeps up to ``windows_inflight`` requests under way. It owns no thread and never waits: a *shell* (see
``ostraca.shells``) gives it what comes from the agent, and lets it go on::

    batch.advance()                 start what there is room for
    batch.on(request, event)        from the batch's mailbox; verifies, copies and tags in the shell's thread
    batch.tick()                    the deadline may have passed
    batch.cancel()                  nobody wants the rest
    batch.close()                   always, once, at the end

A batch always ends: by its answers, by its deadline, or by the loss of its session, whose reasons its
outcomes then carry.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca.core.events import Cancelled, Disconnected, Finished, Rejected, Replied, Send, Ticked, Verify
from ostraca_fabric.errors import ProtocolError
from ostraca_fabric.outcome import BlockState, Reason
from ostraca_fabric.tallies import STATES, tally_text
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import Cancel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ostraca.arena import Arena
    from ostraca.core.events import Effect, Event, Verified
    from ostraca.core.operations import GetOperation, LookupOperation, PrefetchOperation, PutOperation
    from ostraca.crew import Crew
    from ostraca.session import Mailbox, Session
    from ostraca.settings import ClientSettings
    from ostraca_fabric.volume import VolumeIdentity, VolumeRecord

    BlockOperation = LookupOperation | PrefetchOperation | GetOperation | PutOperation

log = logging.getLogger("ostraca")


@dataclass(frozen=True, slots=True)
class Target:
    """A volume as one session knows it, and where one batch hears of its requests.

    The session is taken up for that batch, whose ``close`` puts it down. Who begins none does that.
    """

    mail: Mailbox
    session: Session
    arena: Arena
    crew: Crew
    settings: ClientSettings
    identity: VolumeIdentity
    record: VolumeRecord
    handle: int


@dataclass(frozen=True, slots=True)
class Under:
    """A request under way: blocks ``first`` on of the batch, in ``slots`` when it has any."""

    operation: BlockOperation
    first: int
    slots: NDArray[np.int64] | None
    begun_s: float


class Batch:
    """What all batches have in common. Read ``states``, ``reasons`` and ``note`` when it is over."""

    _late: int = BlockState.LATE
    _declined: int = BlockState.DECLINED

    def __init__(self, target: Target, blocks: int, *, until_s: float) -> None:
        self.note = ""
        self._target = target
        self._session = target.session
        self._blocks = blocks
        self._until_s = until_s
        self._states = columns.filled(blocks, self._late)
        self._reasons = columns.filled(blocks, Reason.DEADLINE)
        self._first = 0
        self._under: dict[int, Under] = {}
        self._is_closed = False

    @property
    def states(self) -> bytes:
        """One state per block."""
        return self._states.tobytes()

    @property
    def reasons(self) -> bytes:
        """One reason per block."""
        return self._reasons.tobytes()

    @property
    def is_over(self) -> bool:
        """Whether every block has its outcome and nothing is under way."""
        return self._first >= self._blocks and not self._under

    @property
    def is_starved(self) -> bool:
        """Whether it can only go on when slots or requests of others have ended."""
        return self._first < self._blocks and not self._under

    def advance(self) -> None:
        """Start requests as long as there is room for them."""
        while self._first < self._blocks and len(self._under) < self._target.settings.windows_inflight:
            ending = self._why_not_begin()
            if ending is not None:
                self._end_rest(*ending)
                return
            request = self._session.reserve()
            begun = 0
            if request is not None:
                try:
                    begun = self._begin(request, self._first)
                finally:
                    if not begun and request not in self._under:
                        self._session.unreserve(request)
            if not begun:
                return
            self._first += begun

    def on(self, request: int, event: Event) -> None:
        """Take what happened to a request.

        Raises RefusedError when the agent says that the batch can't be done as asked; close it then.
        """
        under = self._under.get(request)
        if under is None:
            return
        now_s = time.monotonic()
        try:
            effects = under.operation.on(event, now_s)
        except ProtocolError as error:
            self._session.break_off(f"the agent broke the wire's rules: {error}")
            effects = under.operation.on(Disconnected(), now_s)
        self._do(request, effects)

    def tick(self) -> None:
        """End what is under way if the deadline has passed."""
        if time.monotonic() >= self._until_s:
            if self._under:
                self._session.missed(max(under.begun_s for under in self._under.values()))
            for request in list(self._under):
                self.on(request, Ticked())

    def cancel(self) -> None:
        """End the batch: what has not been handed over by now is LATE, because of CANCELLED."""
        for request in list(self._under):
            self.on(request, Cancelled())
        self._end_rest(self._late, Reason.CANCELLED)

    def close(self) -> None:
        """Let go of everything. When something raised, an interrupt say, requests may be under way."""
        for request in list(self._under):
            self._session.cancel(request)
            self._drop(request)
        if not self._is_closed:
            self._is_closed = True
            self._session.put_down()

    # What the kinds of batches do.

    def _begin(self, request: int, first: int) -> int:
        """Start a request for blocks from *first* on; return how many, 0 when there is no room now."""
        raise NotImplementedError

    def _verify(self, under: Under, wanted: Verify) -> Verified:
        """Check and hand over what landed."""
        raise NotImplementedError

    def _why_not_begin(self) -> tuple[int, Reason] | None:
        """Tell what becomes of blocks that can't be asked for any more."""
        if time.monotonic() >= self._until_s:
            return self._late, Reason.DEADLINE
        if not self._session.is_alive:
            return self._declined, Reason.DISCONNECTED
        return None

    def _end_rest(self, state: int, reason: Reason) -> None:
        """Begin no more requests: blocks that are in none have this outcome."""
        self._states[self._first :], self._reasons[self._first :] = state, reason
        self._first = self._blocks

    def _submit(self, operation: BlockOperation, first: int, slots: NDArray[np.int64] | None = None) -> None:
        now_s = time.monotonic()
        self._under[operation.request] = Under(operation, first, slots, now_s)
        if log.isEnabledFor(logging.DEBUG):
            label, left_s = self._session.label(operation.request), self._until_s - now_s
            log.debug(
                "%s sent: %s of %d blocks, %.3f s to go", label, operation.name, operation.blocks, left_s
            )
        effects = operation.start(now_s)
        if not any(isinstance(effect, Send) for effect in effects):
            self._session.unreserve(operation.request)
            if slots is not None:
                self._target.arena.give(slots)
        self._do(operation.request, effects)

    def _do(self, request: int, effects: Sequence[Effect]) -> None:
        under = self._under[request]
        for effect in effects:
            match effect:
                case Send(message=Cancel()):
                    self._session.cancel(request)
                case Send(message=message):
                    self._session.submit(request, message, self._target.mail, under.slots)
                case Verify():
                    self._do(request, under.operation.on(self._verify(under, effect), time.monotonic()))
                case Finished():
                    self._finish(under, effect)
                    self._drop(request)
                case Rejected(error=error):
                    raise error
                case Replied():
                    raise AssertionError("only questions are replied to")

    def _finish(self, under: Under, end: Finished) -> None:
        blocks = slice(under.first, under.first + under.operation.blocks)
        self._states[blocks] = np.frombuffer(end.states, np.uint8)
        self._reasons[blocks] = np.frombuffer(end.reasons, np.uint8)
        self.note = self.note or end.note
        if log.isEnabledFor(logging.DEBUG):
            label, took_s = self._session.label(under.operation.request), time.monotonic() - under.begun_s
            tally = tally_text(end.states, end.reasons, STATES[under.operation.name])
            log.debug("%s finished after %.3f ms: %s", label, 1e3 * took_s, tally)

    def _drop(self, request: int) -> None:
        """Stop waiting for a request and let go of its slots."""
        del self._under[request]
        self._session.leave(request)
