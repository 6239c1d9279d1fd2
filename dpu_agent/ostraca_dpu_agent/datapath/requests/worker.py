"""The worker of a request, as the data path sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.ids import DriveId, TenantId
from ostraca_fabric.ports.transport import BlockStream, RemoteArena
from ostraca_fabric.tables.digests import TagCheck
from ostraca_fabric.wire.messages import ExtentsRead, GetExtents, GetProgress, Settled

ReadsEnded = Callable[["ExtentsRead | None"], None]
"""Takes the worker's report on direct reads; None without a report. Raises MalformedError."""


class Holder(Protocol):
    """Holder of a request's staging: a worker, or all workers of a tenant at other agents."""

    def __hash__(self) -> int:
        """Distinguish holders."""

    @property
    def tenant(self) -> TenantId:
        """Tenant whose share is used."""


class ReadableMemory(Protocol):
    """Memory of a worker on this host, for puts."""

    def fetch(self, check: TagCheck, addresses: NDArray[np.int64]) -> BlockStream:
        """Start copying the blocks of *check* from *addresses*, and checking each: shape (n,)."""


class WorkerConnection(Holder, Protocol):
    """Origin of a request, and holder of its staging."""

    @property
    def arena(self) -> RemoteArena:
        """The worker's arena. Raises RefusedError without an arena."""

    @property
    def memory(self) -> ReadableMemory | None:
        """The worker's memory, where this agent reads it."""

    @property
    def has_regions(self) -> bool:
        """Whether requests may name addresses in regions of the worker, for the transport of the arena."""

    def stopped(self, request: int) -> asyncio.Future[None]:
        """Return the future that is done when the worker cancels this request."""

    @property
    def direct_drives(self) -> Mapping[DriveId, int]:
        """Numbers of the drives that the worker reads itself; none at its limit of requests."""

    @property
    def reads_memory(self) -> bool:
        """Whether the worker copies blocks out of the agent's memory itself."""

    def expect_reads(self, request: int, *, within_s: float, ended: ReadsEnded) -> None:
        """Call *ended* as soon as the worker's report on ``GetExtents`` ends the reads of a request.

        The end of the time, of the connection or of the caller's wait ends them without a report.
        """

    def end_reads(self, request: int) -> None:
        """End the reads of a request without a report, if any are expected."""

    def send(self, message: GetProgress | GetExtents | Settled) -> None:
        """Send a message; a lost connection loses the message."""

    def send_here(self, message: GetProgress) -> bool:
        """Send a message at once, from any thread; return whether it was sent."""
