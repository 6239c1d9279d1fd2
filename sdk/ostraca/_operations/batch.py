"""Jobs and batches: an operation of a caller, and its blocks as requests within the agent's limits.

A batch keeps up to ``windows_inflight`` requests under way. A batch has no thread and never waits. The driver
(``ostraca._operations.driver``) passes on events of the agent, and calls::

    batch.advance()                 start requests as far as there is room
    batch.on(request, event)        from the batch's mailbox; verifies, copies and tags in the driver's thread
    batch.tick()                    the deadline may have passed
    batch.cancel()                  the caller no longer wants the rest
    batch.close()                   always, once, at the end

A batch always ends: by its answers, by its deadline, or by the loss of its session. The outcomes carry the
reasons.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from ostraca._operations.handoff import CompletionQueue
from ostraca._protocol.events import (
    Cancelled,
    Disconnected,
    Finish,
    Reject,
    Reply,
    Send,
    Ticked,
    Verify,
)
from ostraca._protocol.operations import BlockOperation, blocks_per_request
from ostraca._protocol.specs import ChainSpec, OperationSpec
from ostraca.client_metrics import Meter
from ostraca_fabric.errors import ClosedError, ProtocolError, UsageError
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.tables.digests import tag_seeds
from ostraca_fabric.telemetry.requests import tally_text
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.messages import Cancel

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ostraca._connection.session import AgentSession, Mailbox
    from ostraca._failover.connection_manager import ConnectionManager
    from ostraca._memory.arena import Arena
    from ostraca._memory.copy_pool import CopyPool
    from ostraca._memory.device_port import Devices
    from ostraca._memory.views import SlotHolds
    from ostraca._protocol.events import Effect, Event, Verified
    from ostraca.settings import ClientSettings
    from ostraca_fabric.model.chain import Span
    from ostraca_fabric.wire.messages import Message

log = logging.getLogger("ostraca")

_Spec_co = TypeVar("_Spec_co", bound=OperationSpec, covariant=True)
_ChainSpec_co = TypeVar("_ChainSpec_co", bound=ChainSpec, covariant=True)
_Result_co = TypeVar("_Result_co", covariant=True)


@dataclass(slots=True)
class Runtime:
    """Shared state of one client, out of reach of callers' threads.

    Callers hold the runner (``ostraca._operations.runner``). The runtime has no reference to the runner, so
    the runner of a dropped client can be collected. The driver ends the runtime then.
    """

    settings: ClientSettings
    arena: Arena
    copy_pool: CopyPool
    connections: ConnectionManager
    devices: Devices
    """Devices with memory for sources and destinations."""

    completions: CompletionQueue = field(default_factory=CompletionQueue)
    meter: Meter = field(default_factory=Meter)
    is_closed: bool = False
    _pid: int = field(default_factory=os.getpid)

    @property
    def is_ours(self) -> bool:
        """Whether this process created the client."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise ClosedError in a forked child."""
        if not self.is_ours:
            raise ClosedError(
                "the client was created before a fork, and a child process has neither its threads nor its "
                "memory: connect in the child, or start workers with spawn"
            )

    def check_open(self) -> None:
        """Raise ClosedError after close, and in a forked child."""
        self.check_process()
        if self.is_closed:
            raise ClosedError("the client is closed: connect again")

    def check_room(self, blocks: int, slot_bytes: int) -> None:
        """Check that the arena can hold so many blocks at one time. Raises UsageError."""
        fitting = self.arena.slots_of(slot_bytes)
        if not 0 <= blocks <= fitting:
            raise UsageError(
                f"{blocks} blocks at one time, and the arena holds {fitting} of {slot_bytes} bytes: take "
                "fewer, or raise arena_bytes in the settings"
            )

    def close(self) -> None:
        """End all parts after the session. No operation may be under way."""
        self.copy_pool.close()
        self.completions.close()
        self.arena.close(is_used=not self.devices.close())


@dataclass(frozen=True, slots=True)
class BatchContext:
    """A session with the volume open, for one batch, and the mailbox of its requests.

    The session is acquired for the batch, and ``close`` of the batch releases the session. A caller without a
    batch must release the session.
    """

    runtime: Runtime
    holds: SlotHolds
    mailbox: Mailbox
    session: AgentSession
    handle: int
    """The volume's on the session."""

    until_s: float
    """Deadline on the monotonic clock."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Request under way: blocks of the batch from ``first`` on, in ``slots`` if any."""

    operation: BlockOperation
    first: int
    slots: NDArray[np.int64] | None
    sent_s: float


class Batch(Generic[_Spec_co]):
    """Base of all batches.

    Read ``outcomes`` when the batch is over.
    """

    def __init__(self, context: BatchContext, spec: _Spec_co) -> None:
        self.outcomes = Outcomes.filled(spec.blocks, spec.states.LATE, Reason.DEADLINE)
        self._context = context
        self._spec = spec
        self._session = context.session
        self._arena = context.runtime.arena
        self._copy_pool = context.runtime.copy_pool
        self._settings = context.runtime.settings
        self._blocks = spec.blocks
        self._blocks_max = blocks_per_request(context.session.limits, spec.volume.hash_bytes)
        self._until_s = context.until_s
        self._first = 0
        self._requests: dict[int, BatchRequest] = {}
        self._is_closed = False

    @property
    def is_over(self) -> bool:
        """Whether every block has its outcome and nothing is under way."""
        return self._first >= self._blocks and not self._requests

    @property
    def is_starved(self) -> bool:
        """Whether the batch waits for slots or requests of others."""
        return self._first < self._blocks and not self._requests

    def advance(self) -> None:
        """Start requests as long as there is room."""
        while self._first < self._blocks and len(self._requests) < self._settings.windows_inflight:
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
                    if not begun and request not in self._requests:
                        self._session.unreserve(request)
            if not begun:
                return
            self._first += begun

    def on(self, request: int, event: Event) -> None:
        """Process an event of a request.

        Raises RefusedError if the agent can't do the batch as requested; close the batch then.
        """
        under_way = self._requests.get(request)
        if under_way is None:
            return
        now_s = time.monotonic()
        try:
            effects = under_way.operation.on(event, now_s)
        except ProtocolError as error:
            self._session.break_off(f"the agent broke the wire's rules: {error}")
            effects = under_way.operation.on(Disconnected(), now_s)
        self._do(request, effects)

    def tick(self) -> None:
        """End all requests under way if the deadline has passed."""
        if time.monotonic() >= self._until_s:
            if self._requests:
                self._session.report_late(max(each.sent_s for each in self._requests.values()))
            for request in list(self._requests):
                self.on(request, Ticked())

    def cancel(self) -> None:
        """End the batch: blocks not handed over are LATE, with reason CANCELLED."""
        for request in list(self._requests):
            self.on(request, Cancelled())
        self._end_rest(self._spec.states.LATE, Reason.CANCELLED)

    def close(self) -> None:
        """Release all resources.

        After an error, such as an interrupt, requests may still be under way.
        """
        for request in list(self._requests):
            self._session.cancel(request)
            self._drop(request)
        if not self._is_closed:
            self._is_closed = True
            self._session.release()

    # For the kinds of batches.

    def _begin(self, request: int, first: int) -> int:
        """Start a request for blocks from *first* on; return their number.

        Returns 0 without room now.
        """
        raise NotImplementedError

    def _verify(self, request: BatchRequest, wanted: Verify) -> Verified:
        """Verify landed blocks, and hand over the good blocks."""
        raise NotImplementedError

    def _why_not_begin(self) -> tuple[int, Reason] | None:
        """Return the outcome of blocks that can't be requested any more, or None."""
        if time.monotonic() >= self._until_s:
            return self._spec.states.LATE, Reason.DEADLINE
        if not self._session.is_alive:
            return self._spec.states.DECLINED, Reason.DISCONNECTED
        return None

    def _end_rest(self, state: int, reason: Reason) -> None:
        """Begin no more requests: blocks without a request get this outcome."""
        self.outcomes.set(slice(self._first, None), state, reason)
        self._first = self._blocks

    def _submit(self, operation: BlockOperation, first: int, slots: NDArray[np.int64] | None = None) -> None:
        now_s = time.monotonic()
        self._requests[operation.request] = BatchRequest(operation, first, slots, now_s)
        if log.isEnabledFor(logging.DEBUG):
            label, left_s = self._session.label(operation.request), self._until_s - now_s
            log.debug(
                "%s sent: %s of %d blocks, %.3f s to go", label, operation.name, operation.blocks, left_s
            )
        effects = operation.start(now_s)
        if not any(isinstance(effect, Send) for effect in effects):
            self._session.unreserve(operation.request)
            if slots is not None:
                self._arena.give(slots)
        self._do(operation.request, effects)

    def _do(self, request: int, effects: Sequence[Effect]) -> None:
        under_way = self._requests[request]
        for effect in effects:
            match effect:
                case Send(message=Cancel()):
                    self._session.cancel(request)
                case Send(message=message):
                    self._send(under_way, message)
                case Verify():
                    verified = self._verify(under_way, effect)
                    self._do(request, under_way.operation.on(verified, time.monotonic()))
                case Finish(outcomes=outcomes):
                    self._finish(under_way, outcomes)
                    self._drop(request)
                case Reject(error=error):
                    raise error
                case Reply():
                    raise AssertionError("only questions are replied to")

    def _send(self, under_way: BatchRequest, message: Message) -> None:
        """Send a request.

        If encoding fails, the request is not under way, and its slots are given back.
        """
        request = under_way.operation.request
        try:
            self._session.submit(request, message, self._context.mailbox, under_way.slots)
        except BaseException:
            del self._requests[request]  # ``advance`` unreserves the request
            if under_way.slots is not None:
                self._arena.give(under_way.slots)
            raise

    def _finish(self, under_way: BatchRequest, found: Outcomes) -> None:
        first = under_way.first
        self.outcomes.set(slice(first, first + len(found)), found.states, found.reasons)
        self.outcomes.note = self.outcomes.note or found.note
        if log.isEnabledFor(logging.DEBUG):
            label = self._session.label(under_way.operation.request)
            took_s = time.monotonic() - under_way.sent_s
            tally = tally_text(*found.encode(), self._spec.states)
            log.debug("%s finished after %.3f ms: %s", label, 1e3 * took_s, tally)

    def _drop(self, request: int) -> None:
        """Stop waiting for a request, and release its slots."""
        del self._requests[request]
        self._session.leave(request)


class SlotBatch(Batch[_ChainSpec_co]):
    """Base of batches with blocks in slots."""

    def __init__(self, context: BatchContext, spec: _ChainSpec_co, lengths: NDArray[np.uint32]) -> None:
        super().__init__(context, spec)
        self._lengths = lengths
        self._slot_bytes = spec.volume.slot_bytes

    def _why_not_begin(self) -> tuple[int, Reason] | None:
        with self._arena.changed:
            if not self._arena.ledger.is_open:
                return self._spec.states.DECLINED, Reason.QUARANTINED
        return super()._why_not_begin()

    def _spans(self, first: int, blocks: int) -> tuple[Span, ...]:
        return (self._spec.chain[first : first + blocks].span(),)

    def _seeds(self, first: int, blocks: int) -> NDArray[np.uint64]:
        """Return the tag seeds of a window, from the identities of its blocks."""
        lengths = self._lengths[first : first + blocks]
        return tag_seeds(self._spec.volume.identity, self._spans(first, blocks), lengths)


def _release_nothing() -> None:
    """Do nothing: most skipped jobs hold no resources."""


@dataclass(frozen=True, slots=True)
class OperationJob(Generic[_Result_co]):
    """Operation of one caller: a spec with checked caller memory, its start on a session, and its result."""

    spec: OperationSpec
    begun_s: float
    """On the monotonic clock."""

    begin: Callable[[BatchContext], Batch[OperationSpec]]
    result: Callable[[Outcomes, Batch[OperationSpec] | None], _Result_co]
    """Build the caller's result; the batch is None if the job was never begun."""

    release: Callable[[], None] = _release_nothing
    """Called in place of ``begin``."""

    lengths: NDArray[np.uint32] | None = None
    """Bytes of each block, if blocks move."""

    @property
    def until_s(self) -> float:
        """Deadline on the monotonic clock."""
        return self.begun_s + self.spec.deadline_s

    def late(self, reason: Reason = Reason.DEADLINE, note: str = "") -> Outcomes:
        """Build the outcomes of a job that ends without an answer."""
        return Outcomes.filled(self.spec.blocks, self.spec.states.LATE, reason, note)

    def declined(self, reason: Reason, note: str) -> Outcomes:
        """Build the outcomes of a job that can't begin."""
        return Outcomes.filled(self.spec.blocks, self.spec.states.DECLINED, reason, note)

    def immediate_outcomes(self) -> Outcomes | None:
        """Return the outcomes of a job without need of an agent: empty, or late."""
        return self.late() if not self.spec.blocks or time.monotonic() >= self.until_s else None

    def unreachable(self, note: str) -> Outcomes:
        """Return the outcomes of a job without any agent found by now."""
        is_late = time.monotonic() >= self.until_s
        return self.late(note=note) if is_late else self.declined(Reason.DISCONNECTED, note)
