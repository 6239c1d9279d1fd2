"""The mover: what gets, puts, look-ups and prefetches share, and their entry points."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ostraca_dpu_agent.mover.counters import Counters
from ostraca_dpu_agent.mover.elsewhere import PrefetchElsewhere
from ostraca_dpu_agent.mover.explain import explain
from ostraca_dpu_agent.mover.get import GetRun
from ostraca_dpu_agent.mover.load import Loader
from ostraca_dpu_agent.mover.locate import Locator
from ostraca_dpu_agent.mover.lookup import LookupRun
from ostraca_dpu_agent.mover.pace import Pace
from ostraca_dpu_agent.mover.prefetch import PrefetchRun
from ostraca_dpu_agent.mover.put import PutRun
from ostraca_dpu_agent.mover.request import Clocked
from ostraca_dpu_agent.mover.shadow import Shadows
from ostraca_fabric.errors import RefusedError
from ostraca_fabric.explain import EventKind
from ostraca_fabric.keys import derive_keys
from ostraca_fabric.outcome import Reason
from ostraca_fabric.policies.guarantees import may_take
from ostraca_fabric.rulings import Rulings, Switch
from ostraca_fabric.tallies import STATES, tally_text
from ostraca_fabric.tasks import Tasks
from ostraca_fabric.threads import show_name
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import Damage, GetDone, LookupDone, PrefetchDone, PutDone
from ostraca_fabric.wire.placing import Places

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from ostraca_dpu_agent.events import EventRing
    from ostraca_dpu_agent.mover.cache import Offer
    from ostraca_dpu_agent.mover.drive_io import WaveIO
    from ostraca_dpu_agent.mover.located import Located
    from ostraca_dpu_agent.mover.request import Blocks, Holder, Worker
    from ostraca_dpu_agent.mover.routes import Routes
    from ostraca_dpu_agent.mover.staging import Lease, Staging
    from ostraca_dpu_agent.settings import AgentSettings
    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.chain import Span
    from ostraca_fabric.ids import AgentId, DriveId, TenantId
    from ostraca_fabric.ports.drive import Drive
    from ostraca_fabric.ports.owners import Owners
    from ostraca_fabric.wire.messages import (
        Explain,
        Explained,
        Get,
        Lookup,
        Prefetch,
        PrefetchFor,
        Put,
    )

_T = TypeVar("_T", bound="LookupDone | GetDone | PutDone | PrefetchDone")

log = logging.getLogger(__name__)

_CHECK_THREADS = 2
_KINDS = {
    "lookup": EventKind.LOOKED_UP,
    "get": EventKind.GOT,
    "put": EventKind.PUT,
    "prefetch": EventKind.PREFETCHED,
    "shadow_lookup": EventKind.SHADOWED,
    "shadow_get": EventKind.SHADOWED,
}

_SWITCHED = {Switch.OFF: Reason.SWITCHED_OFF, Switch.SHADOW: Reason.SHADOWED}


class Mover:
    """Carries blocks for the workers of one agent. Lives on the event loop's thread."""

    def __init__(  # noqa: PLR0913 (what a mover is made of)
        self,
        agent: AgentId,
        settings: AgentSettings,
        *,
        staging: Staging,
        drives: Mapping[DriveId, Drive],
        owners: Owners,
        routes: Callable[[], Routes],
        clock: Callable[[], float],
        events: EventRing,
        rulings: Callable[[], Rulings] = Rulings,
    ) -> None:
        """Work from *routes* and *rulings*, which give the newest; *drives* is kept current by the
        steward.
        """
        self._agent = agent
        self.settings = settings.flow
        self.hold_s = settings.owner.hold_s
        self.staging = staging
        self.tenants = staging.tenants
        self.drives = drives
        self.owners = owners
        self.routes = routes
        self.clock = clock
        self._events = events
        self._rulings = rulings
        self.locator = Locator(agent, owners, drives)
        self.pace = Pace(settings.flow.wave_bytes)
        self._loader = Loader(staging, drives, self.pace, clock)
        self.counters = Counters(
            staging.cache.prefetched, self.pace.estimates, lambda: self.locator.found_earlier
        )
        self.tasks = Tasks("the mover")
        self._shadows = Shadows(self)
        self._requests = 0
        self._checkers = ThreadPoolExecutor(
            _CHECK_THREADS, thread_name_prefix="ostraca-check", initializer=show_name, initargs=("check",)
        )

    async def get(self, worker: Worker, volume: ServedVolume, request: Get) -> GetDone:
        """Bring blocks into the worker's arena."""
        switch = self.switch(volume)
        if switch is Switch.SHADOW:
            self._shadows.get(worker, volume, request)
        if switch is not Switch.ON:
            return self._switched("get", volume, request, switch, GetDone)
        return await self._bounded(
            "get", worker, request, lambda: GetRun(self, worker, volume, request).run()
        )

    async def put(self, worker: Worker, volume: ServedVolume, request: Put) -> PutDone:
        """Take blocks from the worker's arena."""
        if self.switch(volume) is Switch.OFF:
            return self._switched("put", volume, request, Switch.OFF, PutDone)
        return await self._bounded(
            "put", worker, request, lambda: PutRun(self, worker, volume, request).run()
        )

    async def lookup(self, worker: Worker, volume: ServedVolume, request: Lookup) -> LookupDone:
        """Say which blocks could be got."""
        switch = self.switch(volume)
        if switch is Switch.SHADOW:
            self._shadows.lookup(volume, request)
        if switch is not Switch.ON:
            return self._switched("lookup", volume, request, switch, LookupDone)
        stopped = worker.stopped(request.request)
        return await self._bounded("lookup", worker, request, LookupRun(self, volume, request, stopped).run)

    async def prefetch(self, worker: Worker, volume: ServedVolume, request: Prefetch) -> PrefetchDone:
        """Bring blocks into the DRAM cache, or have them brought into that of the agent it names."""
        stopped = worker.stopped(request.request)
        if request.at in ("", self._agent):
            return await self.prefetch_here(volume, request, holder=worker, stopped=stopped)
        if self.switch(volume) is Switch.OFF:
            return self._switched("prefetch", volume, request, Switch.OFF, PrefetchDone)
        elsewhere = PrefetchElsewhere(self, volume, request, stopped)
        return await self._bounded("prefetch", worker, request, elsewhere.run)

    async def prefetch_here(
        self,
        volume: ServedVolume,
        request: Prefetch | PrefetchFor,
        *,
        holder: Holder,
        stopped: asyncio.Future[None],
    ) -> PrefetchDone:
        """Bring blocks into the DRAM cache, with staging that counts for *holder*."""
        if self.switch(volume) is Switch.OFF:
            return self._switched("prefetch", volume, request, Switch.OFF, PrefetchDone)
        run = PrefetchRun(self, volume, request, holder=holder, stopped=stopped)
        return await self._bounded("prefetch", holder, request, run.run)

    def end_session(self, volume: ServedVolume, spans: Sequence[Span]) -> None:
        """Let go of these blocks before others, here and with their owners: a hint, of which nobody hears."""
        if self.switch(volume) is Switch.OFF:
            return
        keys = derive_keys(volume.secret, spans)
        self.staging.cache.demote(keys)
        self.locator.session_ended(self.routes(), volume, spans, keys)

    async def explain(self, volume: ServedVolume, request: Explain) -> Explained:
        """Say what is known of one block."""
        return await explain(self, self._events, volume, request)

    def places(self, volume: ServedVolume, spans: Sequence[Span]) -> Places:
        """Say where the first of these blocks belongs."""
        routes = self.routes()
        return Places(self._agent, routes.map.revision, routes.places(volume.placement_secret, spans))

    async def close(self, *, within_s: float) -> bool:
        """Let what is under way end; say whether all of it has.

        What has not goes on holding its memory, which must stay mapped.
        """
        self._shadows.close()
        ended = await self.tasks.finish(within_s=within_s)
        self._checkers.shutdown(wait=False)
        return ended

    @property
    def requests_max(self) -> int:
        """How many requests may be under way."""
        return self._rulings().live.requests_max or self.settings.requests_max

    @property
    def deadline_max_s(self) -> float:
        """The longest deadline taken at its word."""
        return self._rulings().live.deadline_max_s or self.settings.deadline_max_s

    def switch(self, volume: ServedVolume) -> Switch:
        """Return what is to become of requests for a volume, as far as is known here now."""
        return self._rulings().switch(volume.record.tenant, volume.record.name)

    # For the requests.

    def ended(
        self,
        operation: str,
        keys: NDArray[np.uint8],
        states: NDArray[np.uint8],
        reasons: NDArray[np.uint8],
        good_bytes: int = 0,
    ) -> None:
        """Count and remember what became of blocks, and count the bytes of those moved or stored."""
        self.counters.count(operation, states, reasons, good_bytes)
        self._events.record(_KINDS[operation], keys, states, reasons)

    def clocked(self, deadline_s: float, stopped: asyncio.Future[None]) -> Clocked:
        """Start the clock of a request."""
        allowed_s = min(deadline_s, self.deadline_max_s) - self.settings.answer_margin_s
        return Clocked(self.clock, until_s=self.clock() + allowed_s, stopped=stopped)

    def blocks_per_wave(self, slot_bytes: int) -> int:
        """Say how many slots of this size make a wave."""
        return max(1, self.settings.wave_bytes // slot_bytes)

    def blocks_per_put(self, slot_bytes: int) -> int:
        """Say how many slots of this size make a group of a put: no more than staging ever lends."""
        return max(1, min(self.settings.put_group_bytes, self.staging.put_bytes_max) // slot_bytes)

    async def checked(self, check: Callable[[], NDArray[np.bool_]]) -> NDArray[np.bool_]:
        """Run a check of many bytes off the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._checkers, check)

    async def load(
        self, located: Located, blocks: Blocks, positions: NDArray[np.intp], lease: Lease
    ) -> tuple[NDArray[np.uint8], WaveIO]:
        """Bring located blocks into a lease's slots; returns a Reason per block, NONE where it is there and
        verified, and the reads, for ``release``.

        Damaged ones are reported to their owners.
        """
        reasons, reads = await self._loader.load(located, positions, lease, blocks.seeds)
        if not reads.given_up:
            self.staging.off_drive(lease)
        for row in np.flatnonzero(reasons == Reason.DAMAGED).tolist():
            self._report_damage(located, blocks, int(positions[row]))
        return reasons, reads

    def release(self, lease: Lease, io: WaveIO, *, keep: Offer) -> None:
        """End a wave's lease, as ``Staging.release``; once what drives were given up with has ended."""
        if io.given_up:
            self.staging.leave_to_drive(lease)
            self.tasks.spawn(self._release_late(lease, io))
        else:
            self.staging.release(lease, keep=keep)

    async def _release_late(self, lease: Lease, io: WaveIO) -> None:
        await io.ended()
        self.staging.release(lease)

    def _report_damage(self, located: Located, blocks: Blocks, position: int) -> None:
        self.counters.damaged += 1
        source = located.sources[int(located.source[position])]
        self.owners.tell(
            source.owner,
            Damage(
                shard=source.shard,
                key=blocks.keys[position].tobytes(),
                offset=int(located.offsets[position]),
                length=int(located.lengths[position]),
                generation=int(located.generations[position]),
                tag=located.tags[position].tobytes(),
                seed=int(blocks.seeds[position]),
            ),
        )

    async def _bounded(
        self,
        operation: str,
        holder: Holder,
        request: Get | Put | Lookup | Prefetch | PrefetchFor,
        run: Callable[[], Awaitable[_T]],
    ) -> _T:
        """Serve a request, timed, unless too many are under way, or too many of its tenant."""
        if not self._has_room_for(holder.tenant):
            self._count_declined(operation, sum(map(len, request.spans)))
            message = f"{self._requests} requests are under way on this agent: ask again later"
            raise RefusedError("overloaded", message)
        self._requests += 1
        begun_s = self.clock()
        is_told = log.isEnabledFor(logging.DEBUG)
        if is_told:
            blocks = sum(map(len, request.spans))
            log.debug("%s of %d blocks taken up, %.3f s to go", operation, blocks, request.deadline_s)
        try:
            with self.tenants.asking(holder.tenant):
                answer = await run()
        finally:
            self._requests -= 1
            took_s = self.clock() - begun_s
            self.counters.tallies[operation].timed(took_s)
        if is_told:
            tally = tally_text(answer.states, answer.reasons, STATES[operation])
            log.debug("%s answered after %.3f ms: %s", operation, 1e3 * took_s, tally)
        return answer

    def _switched(
        self,
        operation: str,
        volume: ServedVolume,
        request: Get | Put | Lookup | Prefetch | PrefetchFor,
        switch: Switch,
        answer: Callable[[int, bytes, bytes], _T],
    ) -> _T:
        """Decline a request at once: an operator wants it so."""
        keys = derive_keys(volume.secret, request.spans)
        states = columns.filled(len(keys), STATES[operation]["DECLINED"])
        reasons = columns.filled(len(keys), _SWITCHED[switch])
        self.ended(operation, keys, states, reasons)
        self.counters.tallies[operation].timed(0.0)
        return answer(request.request, states.tobytes(), reasons.tobytes())

    def _has_room_for(self, tenant: TenantId) -> bool:
        most, tenants = self.requests_max, self.tenants
        return self._requests < most and may_take(most, tenants.requests, tenants.members, tenant, 1)

    def _count_declined(self, operation: str, blocks: int) -> None:
        declined = STATES[operation]["DECLINED"]
        self.counters.count(
            operation, np.full(blocks, declined, np.uint8), np.full(blocks, Reason.OVERLOADED, np.uint8)
        )
