"""Puts from caller memory or from leased slots.

A put computes tags from the caller's bytes, *before* the copy, so that a bad copy is detected. For device
memory this takes a device that computes tags (``ostraca._memory.device_blocks``).

An agent may read blocks without the arena: out of this process's memory on this host, or out of an offered
region. It may still read after the end of a put, into its own memory: changed bytes fail their tags there.
"""

from __future__ import annotations

import logging
import time

import numpy as np
from numpy.typing import NDArray

from ostraca._connection.caller_connections import ALONE, SCRATCH_BYTES, CallerConnection
from ostraca._connection.session import AgentSession, Mailbox
from ostraca._memory.copy_pool import compute_tags
from ostraca._memory.host_blocks import HostBlocks
from ostraca._memory.regions import RegionBlocks
from ostraca._memory.views import SlotHolds, SlotLease
from ostraca._operations.job import Runtime, SlotJob
from ostraca._protocol.operations import BlockOperation, Finish
from ostraca._protocol.specs import PutSpec
from ostraca.results import PutResult
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.outcome import Ack, PutState, Reason
from ostraca_fabric.wire.codec import Outcomes

log = logging.getLogger("ostraca")

_TRANSFER_FAILED = bytes([Reason.TRANSFER_FAILED])
_UNREADABLE = "An agent could not read this process's memory: later puts go through the arena"

Filled = tuple[NDArray[np.int64], tuple[Span, ...], bytes]
"""Slots with blocks, the spans of the blocks, and their tags."""


class PutJob(SlotJob[PutSpec, PutResult]):
    """Base of puts, in windows of about ``put_window_bytes``.

    The agent fetches one window while the next is gathered.
    """

    def begin(self, session: AgentSession, handle: int, mailbox: Mailbox, holds: SlotHolds) -> None:
        """Begin on a session, whose agent may read the blocks out of this process's memory."""
        super().begin(session, handle, mailbox, holds)
        self._is_read = session.reads_worker and self._runtime.is_readable
        self._is_offered = self._is_offered and not session.reads_worker

    def result(self) -> PutResult:
        """Build the result."""
        return PutResult(*self.outcomes.encode(), self.outcomes.note)

    def _fill(self, first: int, wanted: int) -> Filled | None:
        """Return slots filled with up to *wanted* blocks from *first* on, their spans, and tags.

        Returns None if no slot is free.
        """
        raise NotImplementedError

    def _addresses(self, at: NDArray[np.intp], slots: NDArray[np.int64]) -> NDArray[np.uint64]:  # noqa: ARG002 (for blocks outside of the arena)
        """Return where the agent reads the blocks *at* these positions."""
        return slots.astype(np.uint64) + np.uint64(self._arena.array.ctypes.data)

    def _finish(self, operation: BlockOperation, end: Finish) -> None:
        super()._finish(operation, end)
        if self._is_read and self._note_reads(end.outcomes):
            log.warning(_UNREADABLE)

    def _note_reads(self, outcomes: Outcomes) -> bool:
        """Have no agent read this process's memory after a failure; return whether this is news."""
        is_news = self._runtime.is_readable and _TRANSFER_FAILED in outcomes.reasons.tobytes()
        if is_news:
            self._runtime.is_readable = False
        return is_news

    def _begin(self, request: int, first: int) -> int:
        if first and self._session.takes_rows:
            self._session.resume_reading()  # the agent fetches the earlier window meanwhile
        window_blocks = max(1, self._settings.put_window_bytes // self._slot_bytes)
        filled = self._fill(first, min(self._blocks - first, window_blocks, self._blocks_max))
        if filled is None:
            return 0
        slots, spans, tags = filled
        at = np.arange(first, first + len(slots))

        def build() -> BlockOperation:
            message = self.spec.message(
                request,
                self._handle,
                self.until_s - time.monotonic(),
                spans,
                lengths=self.lengths[at],
                slots=slots,
                tags=tags,
                addresses=self._addresses(at, slots).tobytes() if self._is_read or self._is_offered else b"",
            )
            return BlockOperation(message, until_s=self.until_s, at=at, slots=slots)

        return self._submit_from(slots, build)


class PutFromJob(PutJob):
    """Put from caller memory."""

    def __init__(self, runtime: Runtime, spec: PutSpec, source: object) -> None:
        super().__init__(runtime, spec)
        self._source = self._caller_memory(source, argument="source", is_written=False)
        self._reads: list[int] = []
        """Requests whose agent reads out of rows."""

        self.lengths = self._source.lengths
        self._is_sent = self._is_unreadable = False
        """Whether the caller has sent the put, and was the first to learn that its memory can't be read."""

        is_small = 0 < int(self.lengths.sum(dtype=np.int64)) <= SCRATCH_BYTES
        is_plain = isinstance(self._source, HostBlocks) and self._source.is_contiguous
        has_no_rows = self._region is None  # which the driver claims
        self.is_brief = is_small and is_plain and has_no_rows and spec.ack is Ack.STAGED

    def suits(self, session: AgentSession) -> bool:
        """Tell whether the agent reads this process's memory."""
        return session.reads_worker and self._runtime.is_readable

    def run_at(self, connection: CallerConnection) -> bool:
        """Have the agent copy the blocks out of this process's memory."""
        source, at, spans = self._source, np.arange(self._blocks), (self.spec.chain.span(),)
        if not connection.reads_worker or not connection.fits(self._blocks, self.spec.volume):
            return False
        assert isinstance(source, HostBlocks), "brief puts are out of host memory"
        tags = source.tags(at, self._seeds(at, spans), copy_pool=ALONE).tobytes()

        def start(request: int, handle: int, left_s: float) -> BlockOperation:
            message = self.spec.message(
                request,
                handle,
                left_s,
                spans,
                lengths=self.lengths,
                slots=np.zeros(len(at), np.int64),
                tags=tags,
                addresses=source.addresses(at).tobytes(),
            )
            self._is_sent = True
            return BlockOperation(message, until_s=self.until_s)

        _, effects = connection.ask(self.spec.volume, start, self.until_s)
        self._is_sent = bool(effects)
        if effects:
            self._take_outcomes(effects)
            self._is_unreadable = self._note_reads(self.outcomes)
        return bool(effects)

    def count(self) -> None:
        """Report memory that can't be read: a caller's thread takes no lock of a log."""
        if self._is_unreadable:
            log.warning(_UNREADABLE)

    def forget_memory(self) -> None:
        """Forget the source."""
        del self._source

    def _end_rest(self, state: int, reason: Reason) -> None:
        """Begin no more requests. Blocks sent by the caller, without an answer, may be stored yet."""
        super()._end_rest(PutState.LATE if self._is_sent else state, reason)

    def begin(self, session: AgentSession, handle: int, mailbox: Mailbox, holds: SlotHolds) -> None:
        """Begin on a session."""
        super().begin(session, handle, mailbox, holds)
        self._unmoved: HostBlocks | None = None
        if isinstance(self._source, HostBlocks) and (self._is_read or self._is_offered or self._is_in_place):
            self._unmoved = self._source if self._source.is_contiguous else None

    def _begin(self, request: int, first: int) -> int:
        if self._region is not None and self._is_offered:
            self._reads.append(request)
        return super()._begin(request, first)

    def _release_rows(self, region: RegionBlocks) -> None:
        """Release the rows. The region stays as long as an agent may read there."""
        for request in self._reads:
            region.memory.hold()
            self._when_settled(request, region.memory.let_go)
        super()._release_rows(region)

    def _addresses(self, at: NDArray[np.intp], slots: NDArray[np.int64]) -> NDArray[np.uint64]:
        return super()._addresses(at, slots) if self._unmoved is None else self._unmoved.addresses(at)

    def _fill(self, first: int, wanted: int) -> Filled | None:
        arena = self._arena
        slots = self._take(wanted)
        if slots is None:
            return None
        try:
            at = np.arange(first, first + len(slots))
            spans = self._spans(at)
            seeds = self._seeds(at, spans)
            if self._unmoved is not None:
                tags = self._unmoved.tags(at, seeds, copy_pool=self._copy_pool)
            else:
                tags = self._source.gather(arena.array, slots, seeds, first=first, copy_pool=self._copy_pool)
        except BaseException:
            if self._source.wait():  # otherwise a copy may still write to the slots
                arena.give(slots)
            raise
        return slots, spans, tags.tobytes()


class PutSlotsJob(PutJob):
    """Put of blocks already in leased slots. The lease is over, whatever the outcome of the job.

    A begun job owns the slots, and gives unsent slots back.
    """

    def __init__(self, runtime: Runtime, spec: PutSpec, lease: SlotLease) -> None:
        super().__init__(runtime, spec)
        if len(lease) != spec.blocks:
            raise UsageError(
                f"the lease has {len(lease)} slots and the chain {spec.blocks} blocks: lease as many"
            )
        runtime.check_open()
        self._hold, self._slots, self.lengths = lease.end_for_put()
        self._sent = 0

    def begin(self, session: AgentSession, handle: int, mailbox: Mailbox, holds: SlotHolds) -> None:
        """Begin on a session, as the owner of the slots."""
        super().begin(session, handle, mailbox, holds)
        holds.pass_on(self._hold)

    def close(self) -> None:
        """Release all resources, with the slots never sent."""
        super().close()
        if self.has_begun:
            self._arena.give(self._slots[self._sent :])
        else:
            self._hold.release()

    def _fill(self, first: int, wanted: int) -> Filled:
        slots = self._slots[first : first + wanted]
        lengths = self.lengths[first : first + len(slots)]
        at = np.arange(first, first + len(slots))
        spans = self._spans(at)
        seeds = self._seeds(at, spans)
        tags = compute_tags(self._arena.array, slots, lengths, seeds, copy_pool=self._copy_pool)
        self._sent = first + len(slots)
        return slots, spans, tags.tobytes()
