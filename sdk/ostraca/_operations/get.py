"""Gets into caller memory or into lent slots.

A get hashes each landed slot, and hands over only blocks that match the writer's tag, seeded with the
expected identity of the block. Verification and copies are a single call into C for all available blocks.
Large waves are shared among several threads (``ostraca._memory.copy_pool``). The flash I/O engine checks
blocks of direct reads that stay where they land.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca._connection.caller_connections import ALONE, CallerConnection
from ostraca._connection.session import AgentSession, Mailbox
from ostraca._memory.copy_pool import CopyPool, verdicts_in
from ostraca._memory.device_blocks import COPY_FAILED, DeviceBlocks
from ostraca._memory.row_writes import RowWrites
from ostraca._memory.staged_reads import StagedReads
from ostraca._memory.views import BlockViews, SlotLoan
from ostraca._operations.job import Runtime, SlotJob
from ostraca._protocol.operations import (
    BlockOperation,
    ExtentsEnded,
    Finish,
    GetOperation,
    Progress,
    Verified,
    Verify,
    window_blocks,
)
from ostraca._protocol.specs import GetSpec
from ostraca.results import GetResult, LateWrite, WithheldRows
from ostraca_fabric.errors import MalformedError, TransportError
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.extent import whole_pages
from ostraca_fabric.model.outcome import BlockState, Reason
from ostraca_fabric.runtime.process_memory import ProcessBlocks
from ostraca_fabric.tables.digests import DAMAGED, GOOD
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import GetExtents

if TYPE_CHECKING:
    from ostraca._direct.device_reads import DeviceMemory

_HIT = int(BlockState.HIT)

_Result_co = TypeVar("_Result_co", covariant=True)


class GetJob(SlotJob[GetSpec, _Result_co]):
    """Base of gets."""

    def __init__(self, runtime: Runtime, spec: GetSpec) -> None:
        super().__init__(runtime, spec)
        self._seeds_of: dict[int, NDArray[np.uint64]] = {}
        """Tag seeds, by request."""

        self._again: list[tuple[NDArray[np.intp], NDArray[np.int64]]] = []
        """Blocks to request again, by position in the job, with their slots."""

        self._copied: list[tuple[NDArray[np.intp], NDArray[np.uint8]]] = []
        """Positions and verdicts of blocks copied out of an agent's memory."""

        self._extents: dict[int, GetExtents] = {}
        """Extents that this worker reads itself, by request."""

    def begin(self, session: AgentSession, handle: int, mailbox: Mailbox) -> None:
        """Begin on a session, whose agent is told what this worker reads itself."""
        super().begin(session, handle, mailbox)
        session.announce_reads(self._runtime.direct)

    def _check(
        self,
        blocks: NDArray[np.int64],
        offsets: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        copy_pool: CopyPool,
        source: ProcessBlocks | None = None,
    ) -> NDArray[np.uint8]:
        """Verify landed blocks, hand over the good blocks; return a ``CheckState`` for each.

        All columns have a row per block; *blocks* are positions in the job. Blocks with a *source* are copied
        from there first.
        """
        raise NotImplementedError

    def _begin(self, request: int, first: int) -> int:
        wanted = window_blocks(
            left=self._blocks - first,
            blocks_max=self._blocks_max,
            arena_slots=self._arena.ledger.slots_of(self._slot_bytes),
            windows_inflight=self._settings.windows_inflight,
            is_first=not first,
        )
        slots = self._take(wanted)
        if slots is None:
            return 0
        return self._get(request, np.arange(first, first + len(slots)), slots)

    @property
    def _has_more(self) -> bool:
        return bool(self._again) or super()._has_more

    def _begin_next(self, request: int) -> bool:
        if not self._again:
            return super()._begin_next(request)
        return self._get(request, *self._again.pop(), is_again=True) > 0

    def _end_rest(self, state: int, reason: Reason) -> None:
        for at, slots in self._again:
            self.outcomes.set(at, state, reason)
            self._arena.give(slots)
        self._again.clear()
        super()._end_rest(state, reason)

    def _get(
        self, request: int, at: NDArray[np.intp], slots: NDArray[np.int64], *, is_again: bool = False
    ) -> int:
        """Request the blocks *at* ascending positions into *slots*; return their number."""
        spans: tuple[Span, ...] = ()

        def build() -> GetOperation:
            nonlocal spans
            spans = self._spans(at)
            return self._operation(request, self._handle, at, spans, slots, is_again=is_again)

        self._submit(request, build, slots)
        # Computed while the agent works, and needed when the first block has landed.
        self._seeds_of[request] = self._seeds(at, spans)
        return len(at)

    def _operation(
        self,
        request: int,
        handle: int,
        at: NDArray[np.intp],
        spans: tuple[Span, ...],
        slots: NDArray[np.int64],
        *,
        is_again: bool = False,
        in_memory: bool = False,
    ) -> GetOperation:
        message = self.spec.message(
            request,
            handle,
            self.until_s - time.monotonic(),
            spans,
            lengths=self.lengths[at],
            slots=slots,
            # Blocks under way are queued before this request, and would be recomputed before its blocks.
            queued=len(at) + sum(each.blocks for each in self._requests.values()),
            is_again=is_again,
            addresses=self._addresses(at),
            in_memory=in_memory,
        )
        return GetOperation(message, until_s=self.until_s, at=at, slots=slots)

    def _addresses(self, at: NDArray[np.intp]) -> bytes:
        """Return where the agent writes the blocks *at* positions, unless that is their slots."""
        return self._region.addresses(at).tobytes() if self._region is not None and self._is_offered else b""

    def _finish(self, operation: BlockOperation, end: Finish) -> None:
        """Note the outcomes of a request. Blocks to request again keep their slots."""
        super()._finish(operation, end)
        if end.again:
            assert operation.slots is not None
            again = codec.positions(end.again, operation.blocks)
            slots = operation.slots[again]
            with self._arena.lock:
                is_taken = self._arena.ledger.take_back(operation.request, slots)
            if is_taken.any():
                self._again.append((operation.at[again[is_taken]], slots[is_taken]))

    def _read(self, operation: BlockOperation, extents: GetExtents) -> None:
        direct, request, mailbox = self._runtime.direct, operation.request, self._mailbox
        if direct is None:
            raise MalformedError("GetExtents to a worker that reads no drives")
        self._extents[request] = extents
        positions = codec.positions(extents.positions, operation.blocks)
        drives = codec.u32(extents.drives, len(positions)).astype(np.intp)
        offsets = codec.u64(extents.offsets, len(positions)).astype(np.int64)
        block_lengths = self.lengths[operation.at[positions]]
        lengths = whole_pages(block_lengths)
        direct.check(drives, offsets, lengths)
        memory, places, stay = self._take_reads(operation, positions, drives, offsets)

        tags = None
        if stay:
            wanted = codec.rows16(extents.tags, len(positions))
            tags = block_lengths, self._seeds_of[request][positions], wanted

        def ended(rows: NDArray[np.intp], state: Progress) -> None:
            mailbox.put((request, ExtentsEnded(positions[rows].tobytes(), state)))

        direct.read(request, drives, offsets, places, lengths, ended, memory=memory, tags=tags)

    def _take_reads(
        self,
        operation: BlockOperation,
        positions: NDArray[np.uint32],
        drives: NDArray[np.intp],  # noqa: ARG002 (slots have their places)
        offsets: NDArray[np.int64],  # noqa: ARG002
    ) -> tuple[NDArray[np.uint8] | DeviceMemory, NDArray[np.int64], bool]:
        """Return the memory for blocks about to be read from drives, their places, and whether blocks stay.

        Other blocks are checked as they are copied to the caller.
        """
        assert operation.slots is not None
        return self._arena.array, operation.slots[positions], True

    def _distrust(self, operation: BlockOperation, damaged: NDArray[np.uint32]) -> None:
        """Suspend drives with damaged blocks: an old copy of a drive would cost each get two reads."""
        extents, direct = self._extents.get(operation.request), self._runtime.direct
        if extents is not None and direct is not None:
            is_damaged = np.isin(codec.positions(extents.positions, operation.blocks), damaged)
            drives = np.frombuffer(extents.drives, codec.U32)[is_damaged]
            for number, count in Counter(drives.tolist()).items():
                direct.suspend(number, count)

    def _verify(self, operation: BlockOperation, wanted: Verify) -> Verified:
        assert operation.slots is not None
        positions = codec.positions(wanted.positions, operation.blocks)
        at, slots = operation.at[positions], operation.slots[positions]
        seeds = self._seeds_of[operation.request][positions]
        tags = codec.rows16(wanted.tags, len(positions))
        reader = self._session.memory if wanted.places else None
        if wanted.places and reader is None:
            raise MalformedError("places in memory to a worker that reads no memory")
        lengths = self.lengths[at]
        source = None if reader is None else reader.blocks(codec.u64(wanted.places, len(at)), lengths)
        copy_pool = self._copy_pool if source is None else self._runtime.fetching_pool
        verdicts = self._check(at, slots, seeds, tags, copy_pool, source)
        if reader is not None and source is not None:
            reader.note(source.errors)
            self._copied.append((at, verdicts))
        elif self._extents and (is_damaged := verdicts == DAMAGED).any():
            self._distrust(operation, positions[is_damaged])
        return Verified(wanted.positions, verdicts.tobytes())

    def count(self) -> None:
        """Count blocks copied out of the agent's memory."""
        counters = self._runtime.memory_reads
        for at, verdicts in self._copied:
            good = at[verdicts == GOOD]
            counters.blocks_read += len(good)
            counters.blocks_failed += len(at) - len(good)
            counters.bytes_read += int(self.lengths[good].sum(dtype=np.int64))


class GetIntoJob(GetJob[GetResult]):
    """Get into caller memory: with a copy of blocks, or in place for rows of a region."""

    is_for_memory = True

    def __init__(self, runtime: Runtime, spec: GetSpec, into: object) -> None:
        super().__init__(runtime, spec)
        self._use(into, argument="into", is_written=True)
        self._has_lost_copies = False
        self._row_writes = None if self._region is None else RowWrites(self._region)
        self._late_writes: list[LateWrite] = []
        reads_devices = runtime.direct is not None and runtime.direct.reads_devices
        self._staged = (
            StagedReads(self.memory) if reads_devices and isinstance(self.memory, DeviceBlocks) else None
        )

    def result(self) -> GetResult:
        """Build the result."""
        return GetResult(*self.outcomes.encode(), self.outcomes.note, WithheldRows(self._late_writes))

    def suits(self, session: AgentSession) -> bool:
        """Tell whether this worker reads the agent's memory."""
        return super().suits(session) and session.memory is not None and session.memory.is_usable

    def run_at(self, connection: CallerConnection) -> bool:
        """Copy the blocks out of the agent's memory, through scratch memory; False unless all are there."""
        reader = connection.session.memory if connection.reads_memory else None
        if reader is None or not reader.is_usable:
            return False
        at, spans = np.arange(self._blocks), (self.spec.chain.span(),)
        slots = np.zeros(self._blocks, np.int64)
        seeds: list[NDArray[np.uint64]] = []
        operation, effects = connection.ask(
            self.spec.volume,
            partial(self._operation, at=at, spans=spans, slots=slots, in_memory=True),
            self.until_s,
            meanwhile=lambda: seeds.append(self._seeds(at, spans)),
        )
        match effects:
            case []:
                return False
            case [Verify() as wanted]:
                its = codec.positions(wanted.positions, len(at)).astype(np.intp)
                verdicts = self._caller.scatter(
                    connection.scratch,
                    np.cumsum(self.lengths, dtype=np.int64)[its] - self.lengths[its],
                    seeds[0][its],
                    codec.rows16(wanted.tags, len(its)),
                    positions=its,
                    until_s=self.until_s,
                    copy_pool=ALONE,
                    source=reader.blocks(codec.u64(wanted.places, len(its)), self.lengths[its]),
                )
                self._copied.append((its, verdicts))
                effects = operation.on(Verified(wanted.positions, verdicts.tobytes()), time.monotonic())
        return not self._take_outcomes(effects)

    def advance(self) -> None:
        """Start further requests.

        Raises TransportError if blocks already reported as HITs may not have arrived.
        """
        if self._has_lost_copies:
            raise TransportError(COPY_FAILED)
        super().advance()

    def _begin(self, request: int, first: int) -> int:
        self._caller.prepare(self._arena.array)
        return super()._begin(request, first)

    def _get(
        self, request: int, at: NDArray[np.intp], slots: NDArray[np.int64], *, is_again: bool = False
    ) -> int:
        for writes in (self._row_writes, self._staged) if is_again else ():
            if writes is not None:
                writes.forget(at)
        if self._row_writes is not None and self._is_offered:
            self._row_writes.begin(request, at)
        return super()._get(request, at, slots, is_again=is_again)

    def _take_reads(
        self,
        operation: BlockOperation,
        positions: NDArray[np.uint32],
        drives: NDArray[np.intp],
        offsets: NDArray[np.int64],
    ) -> tuple[NDArray[np.uint8] | DeviceMemory, NDArray[np.int64], bool]:
        request, at, direct = operation.request, operation.at[positions], self._runtime.direct
        if self._row_writes is not None:
            if self._row_writes.region.memory.takes_reads:
                return *self._row_writes.begin_reads(request, at), True
            self._row_writes.forget(at)
        if self._staged is not None and direct is not None:
            staged = self._staged.begin(request, at, drives, offsets)
            if staged is not None:
                return *staged, False
            direct.tell_host_reads(self._staged.obstacle)
        memory, places, _ = super()._take_reads(operation, positions, drives, offsets)
        return memory, places, False

    def _release_claimed(self) -> None:
        if self._row_writes is not None:
            self._late_writes = self._row_writes.end(self._when_written)

    def _when_written(self, request: int, act: Callable[[], None]) -> None:
        """Call *act* once neither drives nor the agent write for a request, in this thread or another."""
        if self._is_offered:
            act = partial(self._when_settled, request, act)
        if self._runtime.direct is None:
            act()
        else:
            self._runtime.direct.when_read(request, act)

    def _finish(self, operation: BlockOperation, end: Finish) -> None:
        super()._finish(operation, end)
        writes = self._row_writes
        if writes is not None:
            writes.verify(operation.at[end.outcomes.states == _HIT])
        if writes is not None and self._is_offered and writes.has(operation.at):
            assert operation.slots is not None
            with self._arena.lock:
                is_settled = self._arena.ledger.are_settled(operation.request, operation.slots)
            writes.settle(operation.at[is_settled])

    def _drop(self, request: int) -> None:
        if self._caller.wait():
            if self._staged is not None:
                self._staged.end(request)
            super()._drop(request)
        else:  # never give the slots back: a copy may still read them
            self._has_lost_copies = True
            del self._requests[request]
            self._session.forget(request)

    def _check(
        self,
        blocks: NDArray[np.int64],
        offsets: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        copy_pool: CopyPool,
        source: ProcessBlocks | None = None,
    ) -> NDArray[np.uint8]:
        region, writes, until_s = self._region, self._row_writes, self.until_s
        is_in_row = self._is_in_place or source is not None or (writes is not None and writes.has(blocks))
        if region is not None and is_in_row:
            verdicts = region.verify(blocks, seeds, tags, until_s=until_s, copy_pool=copy_pool, source=source)
            if source is not None:
                region.wipe(blocks[verdicts != GOOD])
            return verdicts
        if self._staged is not None and self._staged.has(blocks):
            return self._staged.scatter(blocks, seeds, tags, until_s=until_s)
        columns = offsets, seeds, tags
        return self._caller.scatter(
            self._arena.array, *columns, positions=blocks, until_s=until_s, copy_pool=copy_pool, source=source
        )


class GetViewsJob(GetJob[BlockViews]):
    """Get that leaves blocks in their slots, lent to the caller."""

    def __init__(self, runtime: Runtime, spec: GetSpec, lengths: int | Sequence[int]) -> None:
        super().__init__(runtime, spec)
        runtime.check_room(spec.blocks, spec.volume.slot_bytes)
        self.lengths = spec.volume.lengths(lengths, spec.blocks)
        self._offsets = np.zeros(spec.blocks, np.int64)

    def result(self) -> BlockViews:
        """Build the views; their release gives the slots back."""
        found = GetResult(*self.outcomes.encode(), self.outcomes.note)
        hold = self._runtime.holds.new(self._release)
        memory, is_lent = self._arena.array, self.outcomes.states == BlockState.HIT
        return BlockViews(
            found, SlotLoan(memory, self._offsets, self.lengths, is_lent, hold, is_written=False)
        )

    def close(self) -> None:
        """Release all resources; if the job is not over, the views too."""
        is_over = self.is_over
        super().close()
        if not is_over:
            self._release()

    def _release(self) -> None:
        """Give the slots back. No access to the slots may follow."""
        for request in self._sent:
            self._leave(request)

    def _check(
        self,
        blocks: NDArray[np.int64],
        offsets: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        copy_pool: CopyPool,
        source: ProcessBlocks | None = None,
    ) -> NDArray[np.uint8]:
        columns = offsets, self.lengths[blocks], seeds, tags
        return verdicts_in(
            self._arena.array, *columns, until_s=self.until_s, copy_pool=copy_pool, source=source
        )

    def _finish(self, operation: BlockOperation, end: Finish) -> None:
        super()._finish(operation, end)
        assert operation.slots is not None
        self._offsets[operation.at] = operation.slots

    def _drop(self, request: int) -> None:
        del self._requests[request]
        self._session.forget(request)
