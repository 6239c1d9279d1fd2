"""Common part of a get and a put."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import IntEnum
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.requests.blocks import RequestBlocks
from ostraca_dpu_agent.datapath.requests.context import Deadline, RequestContext
from ostraca_dpu_agent.datapath.requests.worker import WorkerConnection
from ostraca_dpu_agent.datapath.staging.leases import Purpose, StagingLease
from ostraca_dpu_agent.volumes import ServedVolume
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.extent import rounded_up
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.messages import Get, Put, Settled

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

    def _is_in_regions(self) -> bool:
        """Return whether the blocks lie in regions. Raises UsageError without regions."""
        if self._request.addresses and not self._worker.has_regions:
            raise UsageError("addresses in memory that this agent does not reach: name slots alone")
        return bool(self._request.addresses)

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
