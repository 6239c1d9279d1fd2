"""Blocks of a request, as columns, and the common part of a get and a put."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.requests.context import Deadline, RequestContext
from ostraca_dpu_agent.datapath.requests.worker import WorkerConnection
from ostraca_dpu_agent.datapath.staging.cache import CacheOffer
from ostraca_dpu_agent.datapath.staging.leases import Purpose, StagingLease
from ostraca_dpu_agent.volumes import ServedVolume
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.extent import rounded_up
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.tables.digests import derive_keys, tag_seeds
from ostraca_fabric.tables.slots import Wave
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.messages import Get, Put, Settled


class RequestBlocks:
    """Blocks of a request, as columns."""

    def __init__(
        self, volume: ServedVolume, spans: Sequence[Span], lengths: NDArray[np.uint32], equal_bytes: int = 0
    ) -> None:
        """Derive the keys; *lengths* has one value per block."""
        self.spans = spans
        self.lengths = lengths
        self.equal_bytes = equal_bytes
        """Length of every block, 0 if lengths differ or are unknown: the usual request needs no sums."""

        self.keys = derive_keys(volume.secret, spans)
        """Shape (n, 16)."""
        self.tenant = volume.record.tenant
        self._identity = volume.identity

    @classmethod
    def of(cls, volume: ServedVolume, spans: Sequence[Span], lengths: bytes) -> RequestBlocks:
        """Parse a request's columns. Raises MalformedError for a mismatch."""
        column = codec.u32(lengths, sum(map(len, spans)))
        first = lengths[: codec.U32.itemsize]
        equal_bytes = int(column[0]) if len(column) and lengths == first * len(column) else 0
        return cls(volume, spans, column, equal_bytes)

    def total_bytes(self, positions: NDArray[np.intp]) -> int:
        """Return the bytes of blocks."""
        return len(positions) * self.equal_bytes or int(self.lengths[positions].sum())

    @property
    def longest_bytes(self) -> int:
        """Largest length; 1 without blocks."""
        return self.equal_bytes or int(self.lengths.max(initial=1))

    @property
    def shortest_bytes(self) -> int:
        """Smallest length; 1 without blocks."""
        return self.equal_bytes or int(self.lengths.min(initial=self.longest_bytes))

    @cached_property
    def seeds(self) -> NDArray[np.uint64]:
        """Tag seeds of the blocks, made on first use: cached blocks need none here."""
        return tag_seeds(self._identity, self.spans, self.lengths)

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.keys)

    def cache_offer(
        self,
        positions: NDArray[np.intp],
        tags: NDArray[np.uint8],
        is_kept: NDArray[np.bool_],
        *,
        uses: int = 1,
    ) -> CacheOffer:
        """Offer the blocks of a wave to the DRAM cache, for ``Staging.release``.

        *positions* are the wave's blocks in the request, and *tags* (n, 16) those of the wave. *is_kept* has
        a value per block of the wave and is read only at the release.
        """
        return CacheOffer(self.keys[positions], tags, self.lengths[positions], is_kept, uses, self.tenant)


_TransferRequest = TypeVar("_TransferRequest", bound="Get | Put")


class TransferRun(Generic[_TransferRequest]):
    """Common part of a get and a put: blocks, their places at the worker, transfers and outcomes."""

    def __init__(
        self,
        context: RequestContext,
        worker: WorkerConnection,
        volume: ServedVolume,
        request: _TransferRequest,
        deadline: Deadline,
        *,
        late: IntEnum,
    ) -> None:
        """Parse the request; begin with *late* as the state of every block.

        Raises MalformedError for mismatched columns, and UsageError for impossible sizes.
        """
        self._context = context
        self._worker = worker
        self._volume = volume
        self._request: _TransferRequest = request
        self._deadline = deadline
        self._blocks = RequestBlocks.of(volume, request.spans, request.lengths)
        count, longest_bytes = len(self._blocks), self._blocks.longest_bytes
        if count:
            volume.check_sizes(self._blocks.shortest_bytes, longest_bytes, request.slot_bytes)
        self._slots = codec.u64(request.addresses or request.slots, count).astype(np.int64)
        """Offsets in the worker's arena, or addresses in its memory."""

        self._slot_bytes = rounded_up(longest_bytes)
        self._outcomes = Outcomes.filled(count, late, Reason.DEADLINE)
        self._leases: set[StagingLease] = set()
        """Leases to quarantine if the request ends before their transfers."""

    def _check_regions(self) -> None:
        """Raise UsageError for blocks in regions, without regions."""
        if self._request.addresses and not self._worker.has_regions:
            raise UsageError("addresses in memory that this agent does not reach: name slots alone")

    def _wave(self, positions: NDArray[np.intp], lease: StagingLease) -> Wave:
        """Return the two ends of a transfer, for blocks in a lease."""
        return Wave(
            staging=lease.offsets,
            arena=self._slots[positions],
            lengths=self._blocks.lengths[positions],
            staging_slot_bytes=lease.slot_bytes,
            arena_slot_bytes=self._request.slot_bytes,
            in_regions=bool(self._request.addresses),
        )

    async def _lease(
        self,
        purpose: Purpose,
        drive: DriveId | None,
        count: int,
        slot_bytes: int,
        within_s: float | None = None,
    ) -> StagingLease | Reason:
        return await self._context.lease(
            purpose,
            drive,
            count,
            slot_bytes,
            holder=self._worker,
            deadline=self._deadline,
            within_s=within_s,
        )

    async def _end(
        self, work: asyncio.Future[None], answered: asyncio.Future[None], stop: Callable[[], NDArray[np.intp]]
    ) -> NDArray[np.intp]:
        """Wait until *answered*, then *stop*, and return the blocks of unsettled transfers.

        Their memory is quarantined. Then, and after any exception, ``Settled`` follows the end of *work*.
        """
        must_settle = True
        try:
            await self._deadline.wait(answered)
            for lease in self._leases:
                self._context.staging.quarantine(lease)
            unsettled = stop()
            must_settle = len(unsettled) > 0
        finally:
            if must_settle:
                work.add_done_callback(lambda _: self._worker.send(Settled(self._request.request)))
        return unsettled
