"""Entry points of the data path: switch, erasures, limits and measurement of requests."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.get import GetRun
from ostraca_dpu_agent.datapath.names import BlockNames, full_name
from ostraca_dpu_agent.datapath.prefetch import PrefetchRun, prefetch_at_peer
from ostraca_dpu_agent.datapath.put import PutRun
from ostraca_dpu_agent.datapath.queries import explain, get_in_memory, look_up
from ostraca_dpu_agent.datapath.requests.context import Deadline, RequestContext
from ostraca_dpu_agent.datapath.requests.worker import Holder, WorkerConnection
from ostraca_dpu_agent.datapath.shadow import Shadows
from ostraca_dpu_agent.volumes import Incarnations, ServedVolume
from ostraca_fabric.errors import RefusedError
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.ids import AgentId, TenantId
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.model.overrides import Switch
from ostraca_fabric.policies.rate_limit import RateLimit
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.tables.digests import derive_keys
from ostraca_fabric.telemetry.explain import BlockPlacements
from ostraca_fabric.telemetry.requests import OTHER_STATES, STATES, HitWatches, tally_text
from ostraca_fabric.telemetry.status import Unhit, UnhitVolume
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.messages import (
    Explain,
    Explained,
    Get,
    GetDone,
    Lookup,
    LookupDone,
    Prefetch,
    PrefetchDone,
    PrefetchFor,
    Put,
    PutDone,
)

BlockRequest = Get | Put | Lookup | Prefetch | PrefetchFor

_T = TypeVar("_T", bound="LookupDone | GetDone | PutDone | PrefetchDone")

log = logging.getLogger(__name__)

_UNHIT_NAMED = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Operation:
    """Kind of block requests: its name, its answer, and its part in a tenant's rate limit."""

    name: str
    done: type[LookupDone | GetDone | PutDone | PrefetchDone]
    rate_left_min: float = 0.0
    """Declined if no more than this share of the tenant's rate limit is left."""
    used: tuple[IntEnum, ...] = ()
    """States of blocks with possibly transferred bytes."""


_RECHECK = _Operation("recheck", LookupDone)
_PREFETCH = _Operation("prefetch", PrefetchDone, 0.25, (BlockState.HIT, BlockState.LATE))

_OPERATIONS = {
    Get: _Operation("get", GetDone, 0.0, (BlockState.HIT, BlockState.LATE)),
    Put: _Operation("put", PutDone, 0.5, (PutState.STAGED, PutState.COMMITTED, PutState.LATE)),
    Lookup: _Operation("lookup", LookupDone),
    Prefetch: _PREFETCH,
    PrefetchFor: _PREFETCH,
}


class DataPath:
    """Data path for the workers of an agent. Use on the event loop's thread only."""

    def __init__(
        self,
        agent: AgentId,
        context: RequestContext,
        membership: Membership,
        incarnations: Incarnations,
        *,
        names: BlockNames,
        unhit_volumes_max: int,
    ) -> None:
        """Serve for *agent*, with the overrides of *membership* and the erasures of *incarnations*.

        Blocks put and got go to *names*. Hits of up to *unhit_volumes_max* volumes are watched.
        """
        self.names = names
        self._agent = agent
        self.context = context
        self._membership = membership
        self._incarnations = incarnations
        self._hit_watches = HitWatches(unhit_volumes_max)
        self._shadows = Shadows(context)
        self._rates: defaultdict[TenantId, RateLimit] = defaultdict(lambda: RateLimit(context.clock()))

    async def get(self, worker: WorkerConnection, volume: ServedVolume, request: Get) -> GetDone:
        """Load blocks into the worker's arena. Raises as ``_serve``."""
        if request.in_memory and self.switch(volume) is not Switch.ON:
            raise RefusedError("not_in_memory", "blocks of this volume are not served now: use an arena")
        self.names.record(volume, request.spans)
        return await self._serve(
            worker,
            volume,
            request,
            worker.stopped(request.request),
            partial(get_in_memory, self.context, worker, volume, request)
            if request.in_memory
            else lambda deadline: GetRun(self.context, worker, volume, request, deadline).run(),
            shadow=lambda: self._shadows.get(worker, volume, request),
        )

    async def put(self, worker: WorkerConnection, volume: ServedVolume, request: Put) -> PutDone:
        """Store a worker's blocks."""
        self.names.record(volume, request.spans)
        return await self._serve(
            worker,
            volume,
            request,
            worker.stopped(request.request),
            lambda deadline: PutRun(self.context, worker, volume, request, deadline).run(),
        )

    async def lookup(self, worker: WorkerConnection, volume: ServedVolume, request: Lookup) -> LookupDone:
        """Return which blocks are available."""
        return await self._serve(
            worker,
            volume,
            request,
            worker.stopped(request.request),
            partial(look_up, self.context, volume, request, counted_as=_operation(request).name),
            shadow=lambda: self._shadows.lookup(volume, request) if request.is_counted else None,
        )

    async def prefetch(
        self, worker: WorkerConnection, volume: ServedVolume, request: Prefetch
    ) -> PrefetchDone:
        """Load blocks into the DRAM cache of this agent or of a named agent."""
        stopped = worker.stopped(request.request)
        if self._is_served_here(request):
            return await self.prefetch_here(volume, request, holder=worker, stopped=stopped)
        run = partial(prefetch_at_peer, self.context, volume, request)
        return await self._serve(worker, volume, request, stopped, run)

    async def prefetch_here(
        self,
        volume: ServedVolume,
        request: Prefetch | PrefetchFor,
        *,
        holder: Holder,
        stopped: asyncio.Future[None],
    ) -> PrefetchDone:
        """Load blocks into the DRAM cache, with staging charged to *holder*."""
        return await self._serve(
            holder,
            volume,
            request,
            stopped,
            lambda deadline: PrefetchRun(
                self.context, volume, request, holder=holder, deadline=deadline
            ).run(),
        )

    def end_session(self, volume: ServedVolume, spans: Sequence[Span]) -> None:
        """Mark blocks for earlier eviction, here and at their owners.

        This is a hint without an answer.
        """
        if self.switch(volume) is Switch.OFF:
            return
        keys = derive_keys(volume.secret, spans)
        self.context.staging.cache.demote(keys)
        self.context.locator.session_ended(self.context.routes(), volume, spans, keys)

    async def explain(self, volume: ServedVolume, request: Explain) -> Explained:
        """Return the known state of a block."""
        return await explain(self.context, volume, request, self.switch(volume))

    def places(self, volume: ServedVolume, spans: Sequence[Span]) -> BlockPlacements:
        """Return the placement of the first block."""
        routes = self.context.routes()
        return BlockPlacements(
            self._agent, routes.map.revision, routes.places(volume.placement_secret, spans)
        )

    async def close(self, *, within_s: float) -> bool:
        """Wait for the end of all work; return whether all has ended.

        Unfinished work keeps its memory, which must stay mapped.
        """
        self._shadows.close()
        return await self.context.close(within_s=within_s)

    def switch(self, volume: ServedVolume) -> Switch:
        """Return the volume's switch, as known here."""
        return self._membership.overrides.switches.get((volume.record.tenant, volume.record.name), Switch.ON)

    def unhit(self) -> Unhit:
        """Return the volumes whose blocks were never found."""
        found = [
            UnhitVolume(volume, watch.put_blocks, watch.asked_blocks)
            for volume, watch in self._hit_watches.unhit()
        ]
        return Unhit(len(found), tuple(found[:_UNHIT_NAMED]))

    async def _serve(
        self,
        holder: Holder,
        volume: ServedVolume,
        request: BlockRequest,
        stopped: asyncio.Future[None],
        run: Callable[[Deadline], Awaitable[_T]],
        *,
        shadow: Callable[[], None] | None = None,
    ) -> _T:
        """Serve a request, or decline all of its blocks. In shadow mode, *shadow* replaces *run* if given.

        Raises as *run* does, MalformedError, and RefusedError if too many requests are under way.
        """
        operation, switch, record = _operation(request), self.switch(volume), volume.record
        if switch is Switch.OFF:
            return self._decline(operation, volume, request, Reason.SWITCHED_OFF, is_recorded=True)  # type: ignore[no-any-return]  # as ``_OPERATIONS`` says
        if not self._incarnations.is_served(record):
            return self._decline(operation, volume, request, Reason.STALE_VOLUME)  # type: ignore[no-any-return]  # as above
        charged_bytes = self._charge(operation, volume, request)
        if charged_bytes is None:
            return self._decline(operation, volume, request, Reason.QUOTA)  # type: ignore[no-any-return]  # as above
        answer: _T | None = None
        self._incarnations.begin_use(record)
        try:
            if switch is Switch.SHADOW and shadow is not None:
                shadow()
                answer = self._decline(operation, volume, request, Reason.SHADOWED, is_recorded=True)
            else:
                answer = await self._execute(operation, holder, request, stopped, run)
                if operation not in (_PREFETCH, _RECHECK):
                    self._watch_hits(operation.name, volume, answer)
            return answer
        finally:
            self._incarnations.end_use(record)
            if charged_bytes:
                self._settle(operation, volume, request, charged_bytes, answer)

    async def _execute(
        self,
        operation: _Operation,
        holder: Holder,
        request: BlockRequest,
        stopped: asyncio.Future[None],
        run: Callable[[Deadline], Awaitable[_T]],
    ) -> _T:
        """Run and time a request.

        Refused if too many requests are under way, in total or of the tenant.
        """
        name, blocks = operation.name, sum(map(len, request.spans))
        tenants = self.context.staging.tenants
        if not self.context.has_room_for(holder.tenant):
            self.context.counters.decline(name, blocks, Reason.OVERLOADED)
            raise RefusedError(
                "overloaded",
                f"{tenants.requests.total()} requests are in progress on this agent: retry later",
            )
        begun_s, is_debug = self.context.clock(), log.isEnabledFor(logging.DEBUG)
        if is_debug:
            log.debug("%s of %d blocks begins, %.3f s left", name, blocks, request.deadline_s)
        tenants.add(tenants.requests, holder.tenant)
        try:
            answer = await run(self.context.start_deadline(request.deadline_s, stopped))
        finally:
            tenants.remove(tenants.requests, holder.tenant)
            took_s = self.context.clock() - begun_s
            self.context.counters.tallies[name].timed(took_s)
        if is_debug:
            tally = tally_text(answer.states, answer.reasons, (STATES | OTHER_STATES)[name])
            log.debug("%s answered after %.3f ms: %s", name, 1e3 * took_s, tally)
        return answer

    def _watch_hits(self, operation: str, volume: ServedVolume, answer: _T) -> None:
        """Note whether blocks were found.

        A volume whose blocks are never found is logged once.
        """
        name = full_name(volume.record)
        if notice := self._hit_watches.count(name, operation, answer.states, answer.reasons):
            log.warning("No hits in %s", notice)

    def _decline(
        self,
        operation: _Operation,
        volume: ServedVolume,
        request: BlockRequest,
        reason: Reason,
        *,
        is_recorded: bool = False,
    ) -> Any:  # noqa: ANN401 (the answer to it)
        """Decline a request at once. *is_recorded*: record each block, as for an order of an operator."""
        if is_recorded and operation is not _RECHECK:
            keys = derive_keys(volume.secret, request.spans)
            outcomes = Outcomes.filled(len(keys), STATES[operation.name]["DECLINED"], reason)
            self.context.record(operation.name, keys, outcomes)
            self.context.counters.tallies[operation.name].timed(0.0)
        else:
            outcomes = self.context.counters.decline(operation.name, sum(map(len, request.spans)), reason)
        return operation.done(request.request, *outcomes.encode())

    def _is_served_here(self, request: BlockRequest) -> bool:
        return not isinstance(request, Prefetch) or request.at in ("", self._agent)

    def _charge(self, operation: _Operation, volume: ServedVolume, request: BlockRequest) -> int | None:
        """Charge a request's possible bytes to its tenant's rate limit.

        Returns the bytes for ``_settle``, or None to decline. Raises MalformedError.
        """
        tenant = volume.record.tenant
        bytes_per_s = self._membership.overrides.tenant(tenant).agent_bytes_per_s
        if not bytes_per_s:
            self._rates.pop(tenant, None)
            return 0
        if not operation.used or not self._is_served_here(request):
            return 0  # the request moves no bytes, or the other agent counts the request
        rate = self._rates[tenant]
        if rate.fullness(self.context.clock(), bytes_per_s) <= operation.rate_left_min:
            return None
        request_bytes = int(_lengths(volume, request).sum())
        rate.take(request_bytes)
        return request_bytes

    def _settle(
        self,
        operation: _Operation,
        volume: ServedVolume,
        request: BlockRequest,
        charged_bytes: int,
        answer: _T | None,
    ) -> None:
        """Refund unused bytes; all of them if the request failed."""
        rate = self._rates.get(volume.record.tenant)
        if rate is not None:
            states = np.frombuffer(b"" if answer is None else answer.states, np.uint8)
            used = _lengths(volume, request)[: len(states)][np.isin(states, operation.used)]
            rate.take(int(used.sum()) - charged_bytes)


def _operation(request: BlockRequest) -> _Operation:
    is_recheck = isinstance(request, Lookup) and not request.is_counted
    return _RECHECK if is_recheck else _OPERATIONS[type(request)]


def _lengths(volume: ServedVolume, request: BlockRequest) -> NDArray[np.uint32]:
    """Return the bytes of each block, as far as known.

    For a prefetch, the largest possible length.
    """
    count = sum(map(len, request.spans))
    if isinstance(request, Get | Put):
        return codec.u32(request.lengths, count)
    return np.full(count, volume.record.block_bytes, np.uint32)
