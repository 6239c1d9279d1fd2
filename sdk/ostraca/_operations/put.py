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

from ostraca._connection.caller_connections import ALONE, CallerConnection
from ostraca._connection.session import AgentSession, Mailbox
from ostraca._memory.copy_pool import compute_tags
from ostraca._memory.host_blocks import HostBlocks
from ostraca._memory.views import SlotLease
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


class PutJob(SlotJob[PutSpec, PutResult]):
    """Base of puts, in windows of about ``put_window_bytes``.

    The agent fetches one window while the next is gathered.
    """

    result_type = PutResult
    _is_unreadable = False
    """Whether this put was the first to learn that an agent can't read this process's memory."""

    def begin(self, session: AgentSession, handle: int, mailbox: Mailbox) -> None:
        """Begin on a session, whose agent may read the blocks out of this process's memory."""
        super().begin(session, handle, mailbox)
        self._is_read = session.reads_worker and self._runtime.is_readable
        self._is_offered = self._is_offered and not session.reads_worker
        is_unmoved = self._is_read or self._is_offered or self._is_in_place
        memory = self.memory if is_unmoved else None
        self._unmoved = memory if isinstance(memory, HostBlocks) and memory.is_contiguous else None

    def _tags(
        self, at: NDArray[np.intp], slots: NDArray[np.int64], seeds: NDArray[np.uint64]
    ) -> NDArray[np.uint8]:
        """Fill the slots with the blocks *at* these positions, unless they are there; return their tags."""
        raise NotImplementedError

    def _operation(
        self,
        request: int,
        handle: int,
        at: NDArray[np.intp],
        spans: tuple[Span, ...],
        slots: NDArray[np.int64],
        tags: NDArray[np.uint8],
        addresses: NDArray[np.uint64] | None,
    ) -> BlockOperation:
        message = self.spec.message(
            request,
            handle,
            self.until_s - time.monotonic(),
            spans,
            lengths=self.lengths[at],
            slots=slots,
            tags=tags.tobytes(),
            addresses=b"" if addresses is None else addresses.tobytes(),
        )
        return BlockOperation(message, until_s=self.until_s, at=at, slots=slots)

    def _addresses(self, at: NDArray[np.intp], slots: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return where the agent reads the blocks *at* these positions."""
        in_arena = slots.astype(np.uint64) + np.uint64(self._arena.array.ctypes.data)
        return in_arena if self._unmoved is None else self._unmoved.addresses(at)

    def _finish(self, operation: BlockOperation, end: Finish) -> None:
        super()._finish(operation, end)
        if self._is_read:
            self._note_reads(end.outcomes)

    def _note_reads(self, outcomes: Outcomes) -> None:
        """Have no agent read this process's memory after a failure."""
        if self._runtime.is_readable and _TRANSFER_FAILED in outcomes.reasons.tobytes():
            self._runtime.is_readable, self._is_unreadable = False, True

    def count(self) -> None:
        """Report memory that can't be read: a caller's thread takes no lock of a log."""
        if self._is_unreadable:
            log.warning("An agent could not read this process's memory: later puts go through the arena")

    def _begin(self, request: int, first: int) -> int:
        if first and self._session.takes_rows:
            self._session.resume_reading()  # the agent fetches the earlier window meanwhile
        window_blocks = max(1, self._settings.put_window_bytes // self._slot_bytes)
        slots = self._take(min(self._blocks - first, window_blocks, self._blocks_max))
        if slots is None:
            return 0

        def build() -> BlockOperation:
            at = np.arange(first, first + len(slots))
            spans = self._spans(at)
            tags = self._tags(at, slots, self._seeds(at, spans))
            addresses = self._addresses(at, slots) if self._is_read or self._is_offered else None
            return self._operation(request, self._handle, at, spans, slots, tags, addresses)

        return self._submit(request, build, slots)


class PutFromJob(PutJob):
    """Put from caller memory."""

    def __init__(self, runtime: Runtime, spec: PutSpec, source: object) -> None:
        super().__init__(runtime, spec)
        self._use(source, argument="source", is_written=False)
        self._is_sent = False
        """Whether the caller has sent the put."""

        is_plain = isinstance(self.memory, HostBlocks) and self.memory.is_contiguous
        self.is_brief = self.is_brief and is_plain and spec.ack is Ack.STAGED

    def suits(self, session: AgentSession) -> bool:
        """Tell whether the agent reads this process's memory."""
        return super().suits(session) and session.reads_worker and self._runtime.is_readable

    def run_at(self, connection: CallerConnection) -> bool:
        """Have the agent copy the blocks out of this process's memory."""
        source, at, spans = self.memory, np.arange(self._blocks), (self.spec.chain.span(),)
        if not connection.reads_worker:
            return False
        assert isinstance(source, HostBlocks), "brief puts are out of host memory"
        tags = source.tags(at, self._seeds(at, spans), copy_pool=ALONE)

        def start(request: int, handle: int) -> BlockOperation:
            self._is_sent = True
            slots = np.zeros(len(at), np.int64)
            return self._operation(request, handle, at, spans, slots, tags, source.addresses(at))

        _, effects = connection.ask(self.spec.volume, start, self.until_s)
        self._is_sent = bool(effects)
        if effects:
            self._take_outcomes(effects)
            self._note_reads(self.outcomes)
        return bool(effects)

    def _end_rest(self, state: int, reason: Reason) -> None:
        """Begin no more requests. Blocks sent by the caller, without an answer, may be stored yet."""
        super()._end_rest(PutState.LATE if self._is_sent else state, reason)

    def _release_claimed(self) -> None:
        """Release the rows. The region stays as long as an agent may read there."""
        if self._region is not None and self._is_offered:
            for request in self._sent:
                self._region.memory.hold()
                self._when_settled(request, self._region.memory.let_go)
        super()._release_claimed()

    def _tags(
        self, at: NDArray[np.intp], slots: NDArray[np.int64], seeds: NDArray[np.uint64]
    ) -> NDArray[np.uint8]:
        if self._unmoved is not None:
            return self._unmoved.tags(at, seeds, copy_pool=self._copy_pool)
        memory, pool = self._arena.array, self._copy_pool
        return self._caller.gather(memory, slots, seeds, first=int(at[0]), copy_pool=pool)


class PutSlotsJob(PutJob):
    """Put of blocks already in slots that this client leased. The lease is over, whatever the outcome.

    An accepted job owns the slots, and gives unsent slots back.
    """

    def __init__(self, runtime: Runtime, spec: PutSpec, lease: SlotLease) -> None:
        super().__init__(runtime, spec)
        if not isinstance(lease, SlotLease):
            raise UsageError(
                f"a {type(lease).__name__} was passed as lease: pass the slots that volume.slots() returned"
            )
        if len(lease) != spec.blocks:
            raise UsageError(
                f"the lease has {len(lease)} slots and the chain {spec.blocks} blocks: lease as many"
            )
        runtime.check_open()
        self._hold, self._slots, self.lengths = lease.end_for_put(runtime.arena, self._slot_bytes)
        self._taken = 0

    def accept(self) -> None:
        """Become the owner of the slots. Raises UsageError if another thread has put or released them."""
        self._runtime.holds.pass_on(self._hold)
        super().accept()

    def _release_claimed(self) -> None:
        self._arena.give(self._slots[self._taken :])

    def _take(self, wanted: int) -> NDArray[np.int64]:
        slots = self._slots[self._taken : self._taken + wanted]
        self._taken += len(slots)
        return slots

    def _tags(
        self, at: NDArray[np.intp], slots: NDArray[np.int64], seeds: NDArray[np.uint64]
    ) -> NDArray[np.uint8]:
        return compute_tags(self._arena.array, slots, self.lengths[at], seeds, copy_pool=self._copy_pool)
