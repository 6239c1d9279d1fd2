"""Batches: many blocks in one call, as requests that the agent accepts, in the caller's own thread.

A batch keeps up to ``windows_inflight`` requests under way and takes what happens to them from one mailbox.
Verifying, copying and tagging happen here, in the thread that called, while the agent works on what comes
next.

A batch always ends: by its answers, by its deadline, or by the loss of its session, whose reasons its
outcomes then carry.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from ostraca.core.events import Disconnected, Finished, Rejected, Replied, Send, Ticked, Verify
from ostraca_fabric.errors import ProtocolError
from ostraca_fabric.outcome import BlockState, Reason
from ostraca_fabric.wire.messages import Cancel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ostraca.arena import Arena
    from ostraca.core.events import Effect, Event, Verified
    from ostraca.core.operations import GetOperation, LookupOperation, PrefetchOperation, PutOperation
    from ostraca.session import Mailbox, Session
    from ostraca.settings import ClientSettings
    from ostraca_fabric.volume import VolumeIdentity, VolumeRecord

    BlockOperation = LookupOperation | PrefetchOperation | GetOperation | PutOperation

_ROOM_RECHECK_S = 0.05
"""Longest sleep while waiting for other callers' slots: a session that is lost meanwhile is then noticed."""


@dataclass(frozen=True, slots=True)
class Target:
    """A volume as one session knows it."""

    session: Session
    arena: Arena
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


class Batch:
    """What all batches have in common. Call ``run`` once, then read ``states``, ``reasons`` and ``note``."""

    _late: int = BlockState.LATE
    _declined: int = BlockState.DECLINED

    def __init__(self, target: Target, blocks: int, *, until_s: float) -> None:
        self.note = ""
        self._target = target
        self._session = target.session
        self._blocks = blocks
        self._until_s = until_s
        self._states = np.full(blocks, self._late, np.uint8)
        self._reasons = np.full(blocks, Reason.DEADLINE, np.uint8)
        self._mail: Mailbox = SimpleQueue()
        self._under: dict[int, Under] = {}

    @property
    def states(self) -> bytes:
        """One state per block."""
        return self._states.tobytes()

    @property
    def reasons(self) -> bytes:
        """One reason per block."""
        return self._reasons.tobytes()

    def run(self) -> None:
        """Do it all. Raises RefusedError when the agent says that it can't be done as asked."""
        first = 0
        try:
            while first < self._blocks or self._under:
                first = self._begin_more(first)
                if self._under:
                    self._take_one()
        finally:
            # Something raised, maybe an interrupt: nobody waits any more, and the slots must not stay with
            # us.
            for request in list(self._under):
                self._session.cancel(request)
                self._drop(request)

    def _begin(self, request: int, first: int) -> int:
        """Start a request for blocks from *first* on; return how many, 0 when there is no room now."""
        raise NotImplementedError

    def _verify(self, under: Under, wanted: Verify) -> Verified:
        """Check and hand over what landed."""
        raise NotImplementedError

    def _begin_more(self, first: int) -> int:
        """Start requests as long as there is room; return the first block that is in none."""
        while first < self._blocks and len(self._under) < self._target.settings.windows_inflight:
            ending = self._why_not_begin()
            if ending is not None:
                self._states[first:], self._reasons[first:] = ending
                return self._blocks
            request = self._session.reserve()
            begun = 0 if request is None else self._begin(request, first)
            if request is not None and not begun:
                self._session.unreserve(request)
            if not begun:
                if self._under:
                    break
                self._wait_for_room()
            first += begun
        return first

    def _why_not_begin(self) -> tuple[int, Reason] | None:
        """Tell what becomes of blocks that can't be asked for any more."""
        if time.monotonic() >= self._until_s:
            return self._late, Reason.DEADLINE
        if not self._session.is_alive:
            return self._declined, Reason.DISCONNECTED
        return None

    def _wait_for_room(self) -> None:
        """Wait until slots or requests of others may have ended, at most until the deadline."""
        changed = self._target.arena.changed
        with changed:
            changed.wait(min(_ROOM_RECHECK_S, max(0.0, self._until_s - time.monotonic())))

    def _submit(self, operation: BlockOperation, first: int, slots: NDArray[np.int64] | None = None) -> None:
        self._under[operation.request] = Under(operation, first, slots)
        effects = operation.start(time.monotonic())
        if not any(isinstance(effect, Send) for effect in effects):
            self._session.unreserve(operation.request)
            if slots is not None:
                self._target.arena.give(slots)
        self._do(operation.request, effects)

    def _take_one(self) -> None:
        """Take one event, or find that time has run out."""
        step_s = self._session.progress_s
        left_s = max(0.0, self._until_s - time.monotonic())
        try:
            request, event = self._mail.get(timeout=left_s if step_s is None else min(step_s, left_s))
        except Empty:
            if step_s is not None:
                self._session.progress()
        else:
            self._on(request, event)
        if time.monotonic() >= self._until_s:
            for late in list(self._under):
                self._on(late, Ticked())

    def _on(self, request: int, event: Event) -> None:
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

    def _do(self, request: int, effects: Sequence[Effect]) -> None:
        under = self._under[request]
        for effect in effects:
            match effect:
                case Send(message=Cancel()):
                    self._session.cancel(request)
                case Send(message=message):
                    self._session.submit(request, message, self._mail, under.slots)
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

    def _drop(self, request: int) -> None:
        """Stop waiting for a request and let go of its slots."""
        del self._under[request]
        self._session.leave(request)
