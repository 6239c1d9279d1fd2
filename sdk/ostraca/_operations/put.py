"""Puts: jobs and batches.

A put computes tags from the caller's bytes, *before* the copy, so that a bad copy is detected. For device
memory this is impossible (``ostraca._memory.device_blocks``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ostraca._memory.copy_pool import compute_tags
from ostraca._memory.host_blocks import caller_blocks
from ostraca._operations.batch import OperationJob, SlotBatch
from ostraca._protocol.operations import BlockOperation
from ostraca._protocol.specs import PutSpec
from ostraca.results import PutResult
from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ostraca._memory.host_blocks import CallerBlocks
    from ostraca._memory.views import SlotLease
    from ostraca._operations.batch import BatchContext, Runtime


def put_job(runtime: Runtime, spec: PutSpec, source: object) -> OperationJob[PutResult]:
    """Build a put of blocks from caller memory."""
    begun_s = time.monotonic()
    blocks = caller_blocks(
        source,
        runtime.devices,
        argument="source",
        count=spec.blocks,
        block_bytes=spec.volume.record.block_bytes,
        is_written=False,
    )
    return OperationJob(
        spec,
        begun_s,
        lambda context: PutFromBatch(context, spec, blocks),
        lambda outcomes, _: PutResult(*outcomes.encode(), outcomes.note),
        lengths=blocks.lengths,
    )


def put_slots_job(runtime: Runtime, spec: PutSpec, lease: SlotLease) -> OperationJob[PutResult]:
    """Build a put of blocks from leased slots.

    The lease is over, whatever the outcome of the job.
    """
    begun_s = time.monotonic()
    if len(lease) != spec.blocks:
        raise UsageError(
            f"the lease has {len(lease)} slots and the chain {spec.blocks} blocks: lease as many"
        )
    runtime.check_open()
    hold, offsets, sizes = lease.end_for_put()

    def begin(context: BatchContext) -> PutSlotsBatch:
        batch = PutSlotsBatch(context, spec, offsets, sizes)
        context.holds.pass_on(hold)
        return batch

    return OperationJob(
        spec,
        begun_s,
        begin,
        lambda outcomes, _: PutResult(*outcomes.encode(), outcomes.note),
        release=hold.release,
        lengths=sizes,
    )


class PutBatch(SlotBatch[PutSpec]):
    """Base of puts, in windows of about ``put_window_bytes``.

    The agent fetches one window while the next is gathered.
    """

    def _fill(self, first: int, wanted: int) -> tuple[NDArray[np.int64], bytes] | None:
        """Return slots filled with up to *wanted* blocks from *first* on, and tags.

        Returns None if no slot is free.
        """
        raise NotImplementedError

    def _begin(self, request: int, first: int) -> int:
        window_blocks = max(1, self._settings.put_window_bytes // self._slot_bytes)
        filled = self._fill(first, min(self._blocks - first, window_blocks, self._blocks_max))
        if filled is None:
            return 0
        slots, tags = filled
        count = len(slots)
        try:
            message = self._spec.message(
                request,
                self._context.handle,
                self._until_s - time.monotonic(),
                self._spans(first, count),
                lengths=self._lengths[first : first + count],
                slots=slots,
                tags=tags,
            )
        except BaseException:
            self._arena.give(slots)
            raise
        self._submit(BlockOperation(message, until_s=self._until_s), first, slots)
        return count


class PutFromBatch(PutBatch):
    """Put from caller memory."""

    def __init__(self, context: BatchContext, spec: PutSpec, source: CallerBlocks) -> None:
        super().__init__(context, spec, source.lengths)
        self._source = source

    def _fill(self, first: int, wanted: int) -> tuple[NDArray[np.int64], bytes] | None:
        arena = self._arena
        slots = arena.take_up_to(wanted, self._slot_bytes)
        if slots is None:
            return None
        try:
            seeds = self._seeds(first, len(slots))
            tags = self._source.gather(arena.array, slots, seeds, first=first, copy_pool=self._copy_pool)
        except BaseException:
            if self._source.wait():  # otherwise a copy may still write to the slots
                arena.give(slots)
            raise
        return slots, tags.tobytes()


class PutSlotsBatch(PutBatch):
    """Put of blocks already in slots.

    The batch owns the slots, and gives unsent slots back.
    """

    def __init__(
        self,
        context: BatchContext,
        spec: PutSpec,
        slots: NDArray[np.int64],
        lengths: NDArray[np.uint32],
    ) -> None:
        super().__init__(context, spec, lengths)
        self._slots = slots
        self._sent = 0

    def close(self) -> None:
        """Release all resources, with the slots never sent."""
        super().close()
        self._arena.give(self._slots[self._sent :])

    def _fill(self, first: int, wanted: int) -> tuple[NDArray[np.int64], bytes]:
        slots = self._slots[first : first + wanted]
        lengths = self._lengths[first : first + len(slots)]
        seeds = self._seeds(first, len(slots))
        tags = compute_tags(self._arena.array, slots, lengths, seeds, copy_pool=self._copy_pool)
        self._sent = first + len(slots)
        return slots, tags.tobytes()
