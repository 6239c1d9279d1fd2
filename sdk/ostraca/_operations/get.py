"""Gets: jobs and batches.

A get hashes each landed slot, and hands over only blocks that match the writer's tag, seeded with the
expected identity of the block. Verification and copies are a single call into C for all available blocks.
Large waves are shared among several threads (``ostraca._memory.copy_pool``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca._memory.copy_pool import no_verdicts, verdicts_of, verified_slices
from ostraca._memory.device_blocks import COPY_FAILED
from ostraca._memory.host_blocks import caller_blocks
from ostraca._memory.views import BlockViews, SlotLoan
from ostraca._operations.batch import OperationJob, SlotBatch
from ostraca._protocol.events import Verified
from ostraca._protocol.operations import GetOperation, window_blocks
from ostraca._protocol.specs import GetSpec, OperationSpec
from ostraca.results import GetResult
from ostraca_fabric.errors import TransportError
from ostraca_fabric.wire import codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ostraca._memory.host_blocks import CallerBlocks
    from ostraca._memory.views import SlotHold
    from ostraca._operations.batch import Batch, BatchContext, BatchRequest, Runtime
    from ostraca._protocol.events import Verify
    from ostraca_fabric.wire.codec import Outcomes


def get_job(runtime: Runtime, spec: GetSpec, into: object) -> OperationJob[GetResult]:
    """Build a get of blocks into caller memory."""
    begun_s = time.monotonic()
    blocks = caller_blocks(
        into,
        runtime.devices,
        argument="into",
        count=spec.blocks,
        block_bytes=spec.volume.record.block_bytes,
        is_written=True,
    )
    return OperationJob(
        spec,
        begun_s,
        lambda context: GetIntoBatch(context, spec, blocks),
        lambda outcomes, _: GetResult(*outcomes.encode(), outcomes.note),
        lengths=blocks.lengths,
    )


def get_views_job(runtime: Runtime, spec: GetSpec, lengths: int | Sequence[int]) -> OperationJob[BlockViews]:
    """Build a get of blocks into slots lent to the caller."""
    begun_s = time.monotonic()
    runtime.check_room(spec.blocks, spec.volume.slot_bytes)
    sizes = spec.volume.lengths(lengths, spec.blocks)

    def result(outcomes: Outcomes, batch: Batch[OperationSpec] | None) -> BlockViews:
        found = GetResult(*outcomes.encode(), outcomes.note)
        if not isinstance(batch, GetViewsBatch):
            return BlockViews(found, SlotLoan.nothing(spec.blocks))
        loan = SlotLoan(batch.memory, batch.offsets, sizes, batch.good, batch.hold(), is_written=False)
        return BlockViews(found, loan)

    return OperationJob(
        spec,
        begun_s,
        lambda context: GetViewsBatch(context, spec, sizes),
        result,
        lengths=sizes,
    )


@dataclass(frozen=True, slots=True)
class _LandedBlocks:
    """Blocks landed in slots and not yet verified: columns with a row per block."""

    blocks: NDArray[np.int64]
    """Positions in the batch."""

    offsets: NDArray[np.int64]
    seeds: NDArray[np.uint64]
    tags: NDArray[np.uint8]


class GetBatch(SlotBatch[GetSpec]):
    """Base of gets. ``_check`` verifies landed blocks, and hands over the good blocks."""

    def __init__(self, context: BatchContext, spec: GetSpec, lengths: NDArray[np.uint32]) -> None:
        super().__init__(context, spec, lengths)
        self._seeds_by_first: dict[int, NDArray[np.uint64]] = {}

    def _check(self, landed: _LandedBlocks) -> NDArray[np.uint8]:
        """Verify blocks, hand over the good blocks; return a ``BlockVerdict`` for each."""
        raise NotImplementedError

    def _begin(self, request: int, first: int) -> int:
        arena = self._arena
        wanted = window_blocks(
            left=self._blocks - first,
            blocks_max=self._blocks_max,
            arena_slots=arena.slots_of(self._slot_bytes),
            windows_inflight=self._settings.windows_inflight,
        )
        slots = arena.take_up_to(wanted, self._slot_bytes)
        if slots is None:
            return 0
        count = len(slots)
        try:
            message = self._spec.message(
                request,
                self._context.handle,
                self._until_s - time.monotonic(),
                self._spans(first, count),
                lengths=self._lengths[first : first + count],
                slots=slots,
                # Blocks under way are queued before this request, and would be recomputed before its blocks.
                queued=count + sum(each.operation.blocks for each in self._requests.values()),
            )
        except BaseException:
            arena.give(slots)
            raise
        self._submit(GetOperation(message, until_s=self._until_s), first, slots)
        # Computed while the agent works, and needed when the first block has landed.
        self._seeds_by_first[first] = self._seeds(first, count)
        return count

    def _verify(self, request: BatchRequest, wanted: Verify) -> Verified:
        assert request.slots is not None
        positions = codec.positions(wanted.positions, request.operation.blocks)
        verdicts = self._check(
            _LandedBlocks(
                blocks=request.first + positions.astype(np.int64),
                offsets=request.slots[positions],
                seeds=self._seeds_by_first[request.first][positions],
                tags=codec.rows16(wanted.tags, len(positions)),
            )
        )
        return Verified(wanted.positions, verdicts.tobytes())


class GetIntoBatch(GetBatch):
    """Get with a copy of blocks to caller memory."""

    def __init__(self, context: BatchContext, spec: GetSpec, into: CallerBlocks) -> None:
        super().__init__(context, spec, into.lengths)
        self._into = into
        self._has_lost_copies = False

    def advance(self) -> None:
        """Start further requests.

        Raises TransportError if blocks already reported as HITs may not have arrived.
        """
        if self._has_lost_copies:
            raise TransportError(COPY_FAILED)
        super().advance()

    def _begin(self, request: int, first: int) -> int:
        self._into.prepare(self._arena.array)
        return super()._begin(request, first)

    def _drop(self, request: int) -> None:
        if self._into.wait():
            super()._drop(request)
        else:  # never give the slots back: a copy may still read them
            self._has_lost_copies = True
            del self._requests[request]
            self._session.forget(request)

    def _check(self, landed: _LandedBlocks) -> NDArray[np.uint8]:
        return self._into.scatter(
            self._arena.array,
            landed.offsets,
            landed.seeds,
            landed.tags,
            positions=landed.blocks,
            until_s=self._until_s,
            copy_pool=self._copy_pool,
        )


class GetViewsBatch(GetBatch):
    """Get that leaves blocks in their slots.

    The ``good`` blocks lie at ``offsets`` of ``memory``. After the last access to these slots, release the
    ``hold``.
    """

    def __init__(self, context: BatchContext, spec: GetSpec, lengths: NDArray[np.uint32]) -> None:
        super().__init__(context, spec, lengths)
        self.memory = context.runtime.arena.array
        self.good = np.zeros(spec.blocks, np.bool_)
        self.offsets = np.zeros(spec.blocks, np.int64)
        self._held_requests: list[int] = []

    def hold(self) -> SlotHold:
        """Return the hold of all slots, for the caller of the operation."""
        return self._context.holds.new(self._release)

    def close(self) -> None:
        """Release all resources; if the batch is not over, the views too."""
        is_over = self.is_over
        super().close()
        if not is_over:
            self._release()

    def _release(self) -> None:
        """Give the slots back. No access to the slots may follow."""
        for request in self._held_requests:
            self._session.leave(request)
        self._held_requests.clear()

    def _check(self, landed: _LandedBlocks) -> NDArray[np.uint8]:
        verdicts = no_verdicts(len(landed.blocks))
        for some, good in verified_slices(
            self.memory,
            landed.offsets,
            self._lengths[landed.blocks],
            landed.seeds,
            landed.tags,
            until_s=self._until_s,
            copy_pool=self._copy_pool,
        ):
            handed_over = landed.blocks[some][good]
            self.offsets[handed_over] = landed.offsets[some][good]
            self.good[handed_over] = True
            verdicts[some] = verdicts_of(good)
        return verdicts

    def _drop(self, request: int) -> None:
        del self._requests[request]
        self._session.forget(request)
        self._held_requests.append(request)
