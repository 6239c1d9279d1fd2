"""Entry points of the data path: switch, limits and measurement of requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from ostraca_dpu_agent.datapath.get import GetRun
from ostraca_dpu_agent.datapath.prefetch import PrefetchRun, prefetch_at_peer
from ostraca_dpu_agent.datapath.put import PutRun
from ostraca_dpu_agent.datapath.queries import explain, look_up
from ostraca_dpu_agent.datapath.request import Deadline, Holder, RequestContext, WorkerConnection
from ostraca_dpu_agent.datapath.shadow import Shadows
from ostraca_dpu_agent.volumes import ServedVolume
from ostraca_fabric.errors import RefusedError
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.ids import AgentId, TenantId
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.model.overrides import Switch
from ostraca_fabric.policies.fair_sharing import may_take
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.tables.digests import derive_keys
from ostraca_fabric.telemetry.explain import BlockPlacements
from ostraca_fabric.telemetry.requests import STATES, HitWatches, tally_text, unhit_sentence
from ostraca_fabric.telemetry.status import Unhit, UnhitVolume
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

_T = TypeVar("_T", bound="LookupDone | GetDone | PutDone | PrefetchDone")

_Watched = TypeVar("_Watched", bound="LookupDone | GetDone | PutDone")

log = logging.getLogger(__name__)

_UNHIT_NAMED = 16
_SWITCHED = {Switch.OFF: Reason.SWITCHED_OFF, Switch.SHADOW: Reason.SHADOWED}


class DataPath:
    """Data path for the workers of an agent. Use on the event loop's thread only."""

    def __init__(
        self, agent: AgentId, context: RequestContext, membership: Membership, *, unhit_volumes_max: int
    ) -> None:
        """Serve for *agent*, with the overrides of *membership*.

        Hits of up to *unhit_volumes_max* volumes are watched.
        """
        self._agent = agent
        self.context = context
        self._membership = membership
        self._hit_watches = HitWatches(unhit_volumes_max)
        self._shadows = Shadows(context)
        self._requests = 0

    async def get(self, worker: WorkerConnection, volume: ServedVolume, request: Get) -> GetDone:
        """Load blocks into the worker's arena."""
        switch = self.switch(volume)
        if switch is Switch.SHADOW:
            self._shadows.get(worker, volume, request)
        if switch is not Switch.ON:
            return self._decline("get", volume, request, switch, GetDone)

        def run(deadline: Deadline) -> Awaitable[GetDone]:
            return GetRun(self.context, worker, volume, request, deadline).run()

        stopped = worker.stopped(request.request)
        return self._watch_hits("get", volume, await self._serve("get", worker, request, stopped, run))

    async def put(self, worker: WorkerConnection, volume: ServedVolume, request: Put) -> PutDone:
        """Store blocks from the worker's arena."""
        if self.switch(volume) is Switch.OFF:
            return self._decline("put", volume, request, Switch.OFF, PutDone)

        def run(deadline: Deadline) -> Awaitable[PutDone]:
            return PutRun(self.context, worker, volume, request, deadline).run()

        stopped = worker.stopped(request.request)
        return self._watch_hits("put", volume, await self._serve("put", worker, request, stopped, run))

    async def lookup(self, worker: WorkerConnection, volume: ServedVolume, request: Lookup) -> LookupDone:
        """Return which blocks are available."""
        switch = self.switch(volume)
        if switch is Switch.SHADOW:
            self._shadows.lookup(volume, request)
        if switch is not Switch.ON:
            return self._decline("lookup", volume, request, switch, LookupDone)
        run = partial(look_up, self.context, volume, request, counted_as="lookup")
        stopped = worker.stopped(request.request)
        return self._watch_hits("lookup", volume, await self._serve("lookup", worker, request, stopped, run))

    async def prefetch(
        self, worker: WorkerConnection, volume: ServedVolume, request: Prefetch
    ) -> PrefetchDone:
        """Load blocks into the DRAM cache of this agent or of a named agent."""
        stopped = worker.stopped(request.request)
        if request.at in ("", self._agent):
            return await self.prefetch_here(volume, request, holder=worker, stopped=stopped)
        if self.switch(volume) is Switch.OFF:
            return self._decline("prefetch", volume, request, Switch.OFF, PrefetchDone)
        run = partial(prefetch_at_peer, self.context, volume, request)
        return await self._serve("prefetch", worker, request, stopped, run)

    async def prefetch_here(
        self,
        volume: ServedVolume,
        request: Prefetch | PrefetchFor,
        *,
        holder: Holder,
        stopped: asyncio.Future[None],
    ) -> PrefetchDone:
        """Load blocks into the DRAM cache, with staging charged to *holder*."""
        if self.switch(volume) is Switch.OFF:
            return self._decline("prefetch", volume, request, Switch.OFF, PrefetchDone)

        def run(deadline: Deadline) -> Awaitable[PrefetchDone]:
            return PrefetchRun(self.context, volume, request, holder=holder, deadline=deadline).run()

        return await self._serve("prefetch", holder, request, stopped, run)

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
            UnhitVolume(str(volume), watch.put_blocks, watch.asked_blocks)
            for volume, watch in self._hit_watches.unhit()
        ]
        return Unhit(len(found), tuple(found[:_UNHIT_NAMED]))

    def _watch_hits(self, operation: str, volume: ServedVolume, answer: _Watched) -> _Watched:
        """Note whether blocks were found.

        A volume whose blocks are never found is logged once.
        """
        name = f"{volume.record.tenant}/{volume.record.name}"
        watch = self._hit_watches.count(name, operation, answer.states, answer.reasons)
        if watch.take_notice():
            sentence = unhit_sentence(name, put_blocks=watch.put_blocks, asked_blocks=watch.asked_blocks)
            log.warning("No hits in %s", sentence)
        return answer

    async def _serve(
        self,
        operation: str,
        holder: Holder,
        request: Get | Put | Lookup | Prefetch | PrefetchFor,
        stopped: asyncio.Future[None],
        run: Callable[[Deadline], Awaitable[_T]],
    ) -> _T:
        """Serve and time a request.

        Refused if too many requests are under way, in total or of the tenant.
        """
        blocks = sum(map(len, request.spans))
        if not self._has_room_for(holder.tenant):
            self.context.counters.decline(operation, blocks, Reason.OVERLOADED)
            raise RefusedError(
                "overloaded", f"{self._requests} requests are in progress on this agent: retry later"
            )
        self._requests += 1
        begun_s = self.context.clock()
        is_debug = log.isEnabledFor(logging.DEBUG)
        if is_debug:
            log.debug("%s of %d blocks begins, %.3f s left", operation, blocks, request.deadline_s)
        self.context.staging.tenants.begin_request(holder.tenant)
        try:
            answer = await run(self.context.start_deadline(request.deadline_s, stopped))
        finally:
            self.context.staging.tenants.end_request(holder.tenant)
            self._requests -= 1
            took_s = self.context.clock() - begun_s
            self.context.counters.tallies[operation].timed(took_s)
        if is_debug:
            tally = tally_text(answer.states, answer.reasons, STATES[operation])
            log.debug("%s answered after %.3f ms: %s", operation, 1e3 * took_s, tally)
        return answer

    def _decline(
        self,
        operation: str,
        volume: ServedVolume,
        request: Get | Put | Lookup | Prefetch | PrefetchFor,
        switch: Switch,
        answer: Callable[[int, bytes, bytes], _T],
    ) -> _T:
        """Decline a request at once, as an operator has ordered."""
        keys = derive_keys(volume.secret, request.spans)
        outcomes = Outcomes.filled(len(keys), STATES[operation]["DECLINED"], _SWITCHED[switch])
        self.context.record(operation, keys, outcomes)
        self.context.counters.tallies[operation].timed(0.0)
        return answer(request.request, *outcomes.encode())

    def _has_room_for(self, tenant: TenantId) -> bool:
        most, tenants = self.context.requests_max, self.context.staging.tenants
        is_alone = len(tenants.members) <= 1 and tenant in tenants.members
        return self._requests < most and (
            is_alone or may_take(most, tenants.requests, tenants.members, tenant, 1)
        )
