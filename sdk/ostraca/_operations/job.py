"""Jobs: an operation of a caller, and its blocks as requests within the agent's limits.

A caller's thread creates the job, and the driver (``ostraca._operations.driver``) runs the job. A job has no
thread and never waits. Once begun on a session, the job keeps up to ``windows_inflight`` requests under way.
The driver passes on events of the agent, and calls::

    job.accept()                    always first, once
    job.begin(...)                  a session with the volume open was found
    job.advance()                   start requests as far as there is room
    job.on(request, event)          from the job's mailbox; verifies, copies and tags in the driver's thread
    job.tick()                      the deadline may have passed
    job.cancel()                    the caller no longer wants the rest
    job.close()                     always, once, at the end
    job.result()                    after a close without an error

A begun job always ends: by its answers, by its deadline, or by the loss of its session. The outcomes carry
the reasons.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca._connection.caller_connections import SCRATCH_BYTES
from ostraca._connection.session import AgentSession, Mailbox
from ostraca._failover.connection_manager import ConnectionManager
from ostraca._memory.arena import Arena
from ostraca._memory.copy_pool import CopyPool
from ostraca._memory.device_blocks import Devices
from ostraca._memory.host_blocks import CallerBlocks, HostBlocks, caller_blocks
from ostraca._memory.inline_arena import RequestRows
from ostraca._memory.regions import RegionBlocks, RegionRows, RegionTable
from ostraca._memory.views import SlotHolds
from ostraca._operations.completions import CompletionQueue, Ticket
from ostraca._protocol.operations import (
    BlockOperation,
    Cancelled,
    Disconnected,
    Effect,
    Event,
    Finish,
    ReadExtents,
    Send,
    Ticked,
    Verified,
    Verify,
    blocks_per_request,
)
from ostraca._protocol.specs import ChainSpec, GetSpec, LookupSpec, OperationSpec
from ostraca.client_metrics import DirectCounters
from ostraca.settings import ClientSettings
from ostraca_fabric.errors import ClosedError, ProtocolError, UsageError
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.runtime.threads import run_in_background
from ostraca_fabric.tables.digests import tag_seeds
from ostraca_fabric.telemetry.requests import STATES, HitWatches, Tally, tally_text
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.messages import Cancel, GetExtents

if TYPE_CHECKING:
    from ostraca._connection.caller_connections import CallerConnection
    from ostraca._direct.direct_reader import DirectReader

Deliver = Callable[[Any, BaseException | None], None]
"""Takes the result or the error of a job."""

log = logging.getLogger("ostraca")

_Spec_co = TypeVar("_Spec_co", bound=OperationSpec, covariant=True)
_ChainSpec_co = TypeVar("_ChainSpec_co", bound=ChainSpec, covariant=True)
_Result_co = TypeVar("_Result_co", covariant=True)

_VOLUMES_WATCHED_MAX = 256

_HIT = bytes([BlockState.HIT])
_STORED = bytes([PutState.STAGED, PutState.COMMITTED])


class Meter:
    """Running counts of one client.

    Only the client's driver counts. Any thread may read the counts, without a lock that an exception of a
    signal handler could leave held. An operation that ends meanwhile may be counted in part.
    """

    def __init__(self) -> None:
        self.tallies = {operation: Tally(operation) for operation in STATES}
        self.hit_tokens = 0
        self.saved_s = 0.0
        self._hit_watches = HitWatches(_VOLUMES_WATCHED_MAX)

    def count(self, job: Job[OperationSpec, object], took_s: float) -> None:
        """Count an ended job, which took *took_s*."""
        spec, outcomes, lengths = job.spec, job.outcomes, job.lengths
        if isinstance(spec, LookupSpec) and not spec.is_counted:
            return
        record = spec.volume.record
        tally, (states, reasons) = self.tallies[spec.operation], outcomes.encode()
        if lengths is not None:
            moved = _HIT if isinstance(spec, GetSpec) else _STORED
            hits = len(states) - len(states.translate(None, moved))
            if hits == len(states):
                tally.bytes += int(lengths.sum(dtype=np.int64))
            elif hits:
                tally.bytes += int(lengths @ np.isin(outcomes.states, [*moved]).astype(np.int64))
            if isinstance(spec, GetSpec):
                self.hit_tokens += hits * record.layout.page_tokens
                if spec.recompute_s and spec.blocks:
                    self.saved_s += spec.recompute_s * hits / spec.blocks - took_s
        tally.count(outcomes.states, outcomes.reasons)
        tally.timed(took_s)
        name = f"{record.tenant}/{record.name}"
        if notice := self._hit_watches.count(name, spec.operation, states, reasons):
            log.warning("No hits in %s", notice)


@dataclass(slots=True)
class Runtime:
    """Shared state of one client, out of reach of callers' threads.

    Callers hold the runner (``ostraca._operations.runner``). The runtime has no reference to the runner, so
    the runner of a dropped client can be collected. The driver ends the runtime then.
    """

    settings: ClientSettings
    arena: Arena
    copy_pool: CopyPool
    fetching_pool: CopyPool
    """Pool for blocks that its threads first copy out of an agent's memory."""

    connections: ConnectionManager
    devices: Devices
    """Devices with memory for sources and destinations."""

    direct: DirectReader | None = None
    """Reader of drives of this host; None without any."""

    memory_reads: DirectCounters = field(default_factory=DirectCounters)
    """Blocks copied out of agents' memory, counted by the driver."""

    regions: RegionTable = field(default_factory=RegionTable)
    completions: CompletionQueue = field(default_factory=CompletionQueue)
    meter: Meter = field(default_factory=Meter)
    is_readable: bool = True
    """Whether agents of this host may read this process's memory. Any thread notes failures."""

    is_closed: bool = False
    holds: SlotHolds = field(init=False)
    """Slots held by callers, for code in the driver's thread. Made by the driver."""

    _pid: int = field(default_factory=os.getpid)

    @property
    def direct_counters(self) -> DirectCounters | None:
        """Counts of blocks that the client read itself; None if it may not."""
        if self.direct is not None:
            return self.direct.counters + self.memory_reads
        return self.memory_reads + DirectCounters() if self.settings.direct_memory else None

    @property
    def is_ours(self) -> bool:
        """Whether this process created the client."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise ClosedError in a forked child."""
        if not self.is_ours:
            raise ClosedError(
                "the client was created before a fork, and a child process has neither its threads nor its "
                "memory: start workers with spawn, or connect in the child, without NIXL"
            )

    def check_open(self) -> None:
        """Raise ClosedError after close, and in a forked child."""
        self.check_process()
        if self.is_closed:
            raise ClosedError("the client is closed: connect again")

    def check_room(self, blocks: int, slot_bytes: int) -> None:
        """Check that the arena can hold so many blocks at one time. Raises UsageError."""
        fitting = self.arena.ledger.slots_of(slot_bytes)
        if not 0 <= blocks <= fitting:
            raise UsageError(
                f"{blocks} blocks at one time, and the arena holds {fitting} of {slot_bytes} bytes: take "
                "fewer, or raise arena_bytes in the settings"
            )

    def close(self) -> None:
        """End all parts after the session. No operation may be under way."""
        self.copy_pool.close()
        self.fetching_pool.close()
        self.regions.end()
        has_read = self.direct is None or self.direct.close()
        self.arena.close(is_used=not self.devices.close() or not has_read)


class Job(Generic[_Spec_co, _Result_co]):
    """Base of all jobs: a spec with checked caller memory, and the outcomes so far."""

    lengths: NDArray[np.uint32] | None = None
    """Bytes of each block, if blocks move."""

    result_type: Callable[[bytes, bytes, str], _Result_co]
    ticket = Ticket(0)
    """Given by the runner."""

    deliver: Deliver | None = None
    """None for the queue of completions; such jobs count against ``submitted_max``. Called once, in the
    driver's thread; must not block.
    """

    memory: CallerBlocks | None = None
    """Blocks in memory of the caller."""

    is_brief = False
    """Whether the caller may do the job."""

    is_for_memory = False
    lacks_connection = False
    """As ``CallerJob`` says."""

    def __init__(self, runtime: Runtime, spec: _Spec_co) -> None:
        self.begun_s = time.monotonic()
        self.until_s = self.begun_s + spec.deadline_s
        """Deadline on the monotonic clock."""

        self.spec = spec
        self._blocks = spec.blocks
        self.outcomes = Outcomes.filled(self._blocks, spec.states.LATE, Reason.DEADLINE)
        self.has_begun = False
        self._runtime = runtime
        self._arena = runtime.arena
        self._copy_pool = runtime.copy_pool
        self._settings = runtime.settings
        self._first = 0
        self._requests: dict[int, BlockOperation] = {}
        self._sent: list[int] = []
        """All requests so far, ended ones included."""

    def run_at(self, connection: CallerConnection) -> bool:  # noqa: ARG002 (for brief operations)
        """Do the job in the caller's thread, in place of all other methods but ``result``.

        Returns False, with nothing done, if the driver must do it. Raises as ``CallerConnection.ask``.
        """
        return False

    def suits(self, session: AgentSession) -> bool:
        """Tell whether the caller can do the job beside this session."""
        return 0 < self._blocks <= blocks_per_request(session.limits, self.spec.volume.hash_bytes)

    def count(self) -> None:
        """Count what only this kind of job counts, at the end. In the driver's thread."""

    def accept(self) -> None:
        """Claim memory of the caller, before anything else. Raises UsageError if it is in use."""

    def begin(self, session: AgentSession, handle: int, mailbox: Mailbox) -> None:
        """Begin on a session, acquired for the job, with the volume open as *handle*.

        ``close`` releases the session. Without ``begin``, the caller releases the session. A job that its
        caller could have done wishes for a connection.
        """
        self._session, self._handle, self._mailbox = session, handle, mailbox
        self._blocks_max = blocks_per_request(session.limits, self.spec.volume.hash_bytes)
        self.has_begun = True
        if self.lacks_connection:
            self._runtime.connections.callers.want_another()

    def result(self) -> _Result_co:
        """Build the caller's result."""
        return self.result_type(*self.outcomes.encode(), self.outcomes.note)

    @property
    def is_over(self) -> bool:
        """Whether every block has its outcome and nothing is under way."""
        return not self._has_more and not self._requests

    @property
    def is_starved(self) -> bool:
        """Whether the job waits for slots or requests of others."""
        return self._has_more and not self._requests

    @property
    def _has_more(self) -> bool:
        """Whether blocks wait for a request."""
        return self._first < self._blocks

    def advance(self) -> None:
        """Start requests as long as there is room."""
        while self._has_more and len(self._requests) < self._settings.windows_inflight:
            ending = self._why_not_begin()
            if ending is not None:
                self._end_rest(*ending)
                return
            if not (self._session.has_room and self._begin_next(self._session.next_request())):
                return

    def on(self, request: int, event: Event) -> None:
        """Process an event of a request.

        Raises RefusedError if the agent can't do the job as requested; close the job then.
        """
        operation = self._requests.get(request)
        if operation is None:
            return
        now_s = time.monotonic()
        try:
            self._do(operation, operation.on(event, now_s))
        except ProtocolError as error:
            self._session.break_off(f"the agent broke the wire's rules: {error}")
            self._do(operation, operation.on(Disconnected(), now_s))

    def tick(self) -> None:
        """End the job if the deadline has passed."""
        if time.monotonic() >= self.until_s:
            if self._requests:
                self._session.report_late(max(each.sent_s for each in self._requests.values()))
            for request in list(self._requests):
                self.on(request, Ticked())
            self._end_rest(self.spec.states.LATE, Reason.DEADLINE)

    def cancel(self) -> None:
        """End the job: blocks not handed over are LATE, with reason CANCELLED."""
        for request in list(self._requests):
            self.on(request, Cancelled())
        self._end_rest(self.spec.states.LATE, Reason.CANCELLED)

    def decline(self, reason: Reason, note: str) -> None:
        """End a job that can't begin; a late job ends as LATE."""
        if time.monotonic() < self.until_s:
            self._end_rest(self.spec.states.DECLINED, reason)
        self._first, self.outcomes.note = self._blocks, note

    def close(self) -> None:
        """Release all resources.

        After an error, such as an interrupt, requests may still be under way.
        """
        for request in list(self._requests):
            self._session.send(Cancel(request))
            self._drop(request)
        self._end_rest(self.spec.states.LATE, Reason.CANCELLED)
        if self.has_begun:
            self._session.release()
            del self._mailbox  # the two know each other, and would keep the caller's memory

    # For the kinds of jobs.

    def _begin_next(self, request: int) -> bool:
        """Start a request for blocks that wait; False without room now."""
        begun = self._begin(request, self._first)
        self._first += begun
        return begun > 0

    def _begin(self, request: int, first: int) -> int:
        """Start a request for blocks from *first* on; return their number.

        Returns 0 without room now.
        """
        raise NotImplementedError

    def _verify(self, operation: BlockOperation, wanted: Verify) -> Verified:
        """Verify landed blocks, and hand over the good blocks."""
        raise NotImplementedError

    def _read(self, operation: BlockOperation, extents: GetExtents) -> None:
        """Begin to read extents of drives into the operation's slots.

        Raises MalformedError for extents that lie on no drive of this worker.
        """
        raise NotImplementedError

    def _rows(self, operation: BlockOperation) -> RequestRows | None:  # noqa: ARG002 (for operations in place)
        """Return the memory for the blocks of an operation, unless that is the arena."""
        return None

    def _why_not_begin(self) -> tuple[int, Reason] | None:
        """Return the outcome of blocks that can't be requested any more, or None."""
        if time.monotonic() >= self.until_s:
            return self.spec.states.LATE, Reason.DEADLINE
        if not self._session.is_alive:
            return self.spec.states.DECLINED, Reason.DISCONNECTED
        return None

    def _end_rest(self, state: int, reason: Reason) -> None:
        """Begin no more requests: blocks without a request get this outcome."""
        self.outcomes.set(slice(self._first, None), state, reason)
        self._first = self._blocks

    def _submit(
        self, request: int, build: Callable[[], BlockOperation], slots: NDArray[np.int64] | None = None
    ) -> int:
        """Build and start a request; return the number of its blocks.

        Unless sent, its slots are given back.
        """
        try:
            operation = build()
            (effect,) = operation.start(time.monotonic())
            if isinstance(effect, Send):
                self._session.submit(request, effect.message, self._mailbox, slots, self._rows(operation))
                self._sent.append(request)
                slots = None
        finally:
            # A copy may still use the slots, unless its end is known.
            if slots is not None and (self.memory is None or self.memory.wait()):
                self._arena.give(slots)
        self._requests[request] = operation
        if log.isEnabledFor(logging.DEBUG):
            label, left_s = self._session.label(request), self.until_s - operation.sent_s
            log.debug(
                "%s sent: %s of %d blocks, %.3f s to go", label, operation.name, operation.blocks, left_s
            )
        if not isinstance(effect, Send):  # late
            self._do(operation, [effect])
        return operation.blocks

    def _do(self, operation: BlockOperation, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message=message):
                    self._session.send(message)
                case ReadExtents(extents=extents):
                    self._read(operation, extents)
                case Verify():
                    self._do(operation, operation.on(self._verify(operation, effect), time.monotonic()))
                case Finish():
                    self._finish(operation, effect)
                    self._drop(operation.request)

    def _take_outcomes(self, effects: Sequence[Effect]) -> bytes:
        """Note the outcomes of all blocks after ``run_at``; return the positions to request again."""
        (end,) = [effect for effect in effects if isinstance(effect, Finish)]
        self.outcomes = end.outcomes
        return end.again

    def _finish(self, operation: BlockOperation, end: Finish) -> None:
        """Note the outcomes of a request, before the release of its slots."""
        found = end.outcomes
        self.outcomes.set(operation.at, found.states, found.reasons)
        self.outcomes.note = self.outcomes.note or found.note
        if log.isEnabledFor(logging.DEBUG):
            label = self._session.label(operation.request)
            took_s = time.monotonic() - operation.sent_s
            tally = tally_text(*found.encode(), self.spec.states)
            log.debug("%s finished after %.3f ms: %s", label, 1e3 * took_s, tally)

    def _drop(self, request: int) -> None:
        """Stop waiting for a request, and release its slots."""
        del self._requests[request]
        self._leave(request)

    def _leave(self, request: int) -> None:
        """End the interest in a request and its slots, at the end of own reads at the earliest."""
        direct = self._runtime.direct
        if direct is None:
            self._session.leave(request)
        else:
            self._session.forget(request)
            direct.when_read(request, partial(self._session.leave, request))


class SlotJob(Job[_ChainSpec_co, _Result_co]):
    """Base of jobs with blocks in slots; ``lengths`` must be set."""

    lengths: NDArray[np.uint32]

    def __init__(self, runtime: Runtime, spec: _ChainSpec_co) -> None:
        super().__init__(runtime, spec)
        self._slot_bytes = spec.volume.slot_bytes
        self._region: RegionBlocks | None = None
        """Rows that this job has claimed, or will claim."""

        self._has_accepted = False
        self._is_in_place = False
        """Whether this process moves blocks from and to their rows, without the arena."""

        self._is_offered = False
        """Whether the agent does."""

    def accept(self) -> None:
        """Claim rows of a region."""
        if self._region is not None:
            self._region.claim()
        self._has_accepted = True

    def begin(self, session: AgentSession, handle: int, mailbox: Mailbox) -> None:
        """Begin on a session.

        Blocks move in place if this process moves all of their bytes. Its own reads of drives need an arena,
        unless the region takes them: a silent drive may write long after. So may an agent.
        """
        super().begin(session, handle, mailbox)
        region, has_drives = self._region, self._runtime.direct is not None
        takes_all = region is not None and (region.memory.takes_reads or not has_drives)
        self._is_in_place = takes_all and session.takes_rows
        self._is_offered = region is not None and session.offers(region.memory)

    def close(self) -> None:
        """Release all resources, and the claimed rows last."""
        super().close()
        if self._has_accepted:
            self._release_claimed()

    def _release_claimed(self) -> None:
        """Release the claimed rows."""
        if self._region is not None:
            self._region.release()

    def _when_settled(self, request: int, act: Callable[[], None]) -> None:
        """Call *act* once the agent reads and writes nothing for a request: now, or in another thread."""
        later = partial(run_in_background, "rows", act)
        with self._arena.lock:
            is_later = self._arena.ledger.when_settled(request, later)
        if is_later:
            self._runtime.connections.redial.start()
        else:
            act()

    def _use(self, value: object, *, argument: str, is_written: bool) -> None:
        """Check and take the caller's memory for the job's blocks. Raises UsageError."""
        count, block_bytes, devices = (
            self.spec.blocks,
            self.spec.volume.record.block_bytes,
            self._runtime.devices,
        )
        if isinstance(value, RegionRows):
            if value.memory.owner is not self._runtime.regions:
                raise UsageError(
                    f"{argument} names rows of another client's region: register memory with this client"
                )
            self.memory = self._region = value.blocks(
                argument=argument, count=count, block_bytes=block_bytes, is_written=is_written
            )
        else:
            self.memory = caller_blocks(
                value, devices, argument=argument, count=count, block_bytes=block_bytes, is_written=is_written
            )
        self.lengths = self.memory.lengths
        is_small = int(self.lengths.sum(dtype=np.int64)) <= SCRATCH_BYTES
        self.is_brief = is_small and isinstance(self.memory, HostBlocks) and self._region is None  # no claims

    @property
    def _caller(self) -> CallerBlocks:
        assert self.memory is not None, "the job has memory of the caller"
        return self.memory

    def _rows(self, operation: BlockOperation) -> RequestRows | None:
        if self._region is None or not self._is_in_place:
            return None
        return self._region.request_rows(operation.at)

    def _why_not_begin(self) -> tuple[int, Reason] | None:
        with self._arena.lock:
            if not self._arena.ledger.is_open:
                return self.spec.states.DECLINED, Reason.QUARANTINED
        return super()._why_not_begin()

    def _take(self, wanted: int) -> NDArray[np.int64] | None:
        """Take up to *wanted* slots."""
        with self._arena.lock:
            return self._arena.ledger.take_up_to(wanted, self._slot_bytes)

    def _spans(self, at: NDArray[np.intp]) -> tuple[Span, ...]:
        """Return a span for each run of neighbours among the blocks *at* ascending positions."""
        chain, first, last = self.spec.chain, int(at[0]), int(at[-1])
        if last - first < len(at):  # the usual request
            return (chain[first : last + 1].span(),)
        ends = np.flatnonzero(np.diff(at) != 1) + 1
        firsts, lasts = at[[0, *ends]].tolist(), at[[*(ends - 1), -1]].tolist()
        return tuple(chain[first : last + 1].span() for first, last in zip(firsts, lasts, strict=True))

    def _seeds(self, at: NDArray[np.intp], spans: tuple[Span, ...]) -> NDArray[np.uint64]:
        """Return the tag seeds of the blocks *at* ascending positions, in *spans*, from their identities."""
        return tag_seeds(self.spec.volume.identity, spans, self.lengths[at])
