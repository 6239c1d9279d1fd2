"""What other agents ask of this one: its shards, as their owner, and its DRAM cache, for their workers. What
operators ask of it for a tenant is as if another agent did.

What is asked for the workers of other agents has the limits of this agent's own requests, and all of one
tenant together holds no more staging than one worker may.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ostraca_dpu_agent.mover.request import check_spans
from ostraca_fabric.errors import RefusedError, UnknownVolumeError, UsageError
from ostraca_fabric.ids import TenantId
from ostraca_fabric.labels import labelled
from ostraca_fabric.wire.messages import Placed, PrefetchFor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator

    from ostraca_dpu_agent.gate import Gate
    from ostraca_dpu_agent.mover.mover import Mover
    from ostraca_dpu_agent.owner.service import OwnerService
    from ostraca_dpu_agent.settings import RequestSettings
    from ostraca_dpu_agent.volumes import ServedVolume, Volumes
    from ostraca_fabric.wire.messages import AgentRequest, AnswerToAgent, OwnerNotice, Place, PrefetchDone


@dataclass(frozen=True, slots=True)
class Guests:
    """The workers of other agents, of one tenant: who holds the staging that is used for them."""

    tenant: TenantId


class Neighbours:
    """Answers agents."""

    def __init__(
        self, settings: RequestSettings, *, owner: OwnerService, mover: Mover, volumes: Volumes, gate: Gate
    ) -> None:
        """Serve shards through *owner*, prefetches through *mover* as far as *gate* lets them."""
        self._settings = settings
        self._owner = owner
        self._mover = mover
        self._volumes = volumes
        self._gate = gate
        self._stops: set[asyncio.Future[None]] = set()
        self._is_closed = False

    def answer(self, request: AgentRequest) -> AnswerToAgent | Awaitable[AnswerToAgent]:
        """Answer a request. Raises as ``OwnerService.answer`` and ``prefetch``."""
        if isinstance(request, PrefetchFor):
            return self._prefetch_until_closed(request)
        return self._owner.answer(request)

    def notice(self, notice: OwnerNotice) -> None:
        """Take what needs no answer."""
        self._owner.notice(notice)

    async def prefetch(self, request: PrefetchFor, stopped: asyncio.Future[None]) -> PrefetchDone:
        """Bring blocks into the DRAM cache, until *stopped* is done.

        Raises UnknownVolumeError, UsageError for what no worker could ask either, and RefusedError.
        """
        tenant = TenantId(request.tenant)
        with labelled(request.label):
            volume = await self._known(tenant, request)
            check_spans(volume, request.spans, blocks_max=self._settings.blocks_max)
            bring = partial(self._mover.prefetch_here, holder=Guests(tenant), stopped=stopped)
            return await self._gate.passed(volume, request, bring)

    async def place(self, request: Place) -> Placed:
        """Say where a block belongs. No owner is asked, so that nobody learns whether it is there.

        Raises UnknownVolumeError, UsageError and RefusedError.
        """
        volume = await self._volumes.named(TenantId(request.tenant), request.volume)
        check_spans(volume, request.spans, blocks_max=self._settings.blocks_max)
        blocks = sum(map(len, request.spans))
        if blocks != 1:
            raise UsageError(f"{blocks} blocks to place: name one")
        return Placed(request.request, msgspec.msgpack.encode(self._mover.places(volume, request.spans)))

    def close(self) -> None:
        """Take no more prefetches, and end those under way that no connection ends."""
        self._is_closed = True
        for stop in self._stops:
            stop.set_result(None)
        self._stops.clear()

    async def _prefetch_until_closed(self, request: PrefetchFor) -> PrefetchDone:
        if self._is_closed:
            raise RefusedError("overloaded", "this agent is being stopped")
        with self._stop() as stop:
            return await self.prefetch(request, stop)

    @contextmanager
    def _stop(self) -> Iterator[asyncio.Future[None]]:
        stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stops.add(stop)
        try:
            yield stop
        finally:
            self._stops.discard(stop)

    async def _known(self, tenant: TenantId, request: PrefetchFor) -> ServedVolume:
        volume = await self._volumes.named(tenant, request.volume)
        if volume.record.incarnation != request.incarnation:
            raise UnknownVolumeError(
                "unknown_volume",
                f"volume {request.volume!r} is known here as incarnation {volume.record.incarnation}, not "
                f"{request.incarnation}",
            )
        return volume
