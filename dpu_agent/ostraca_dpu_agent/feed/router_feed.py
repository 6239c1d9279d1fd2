"""Loop of the feed: collect names, look blocks up, announce pages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from ostraca_dpu_agent.datapath.requests.context import RequestContext
from ostraca_dpu_agent.feed.messages import FeedMessages
from ostraca_dpu_agent.feed.pages import FedPages, Part
from ostraca_dpu_agent.settings import RouterFeedSettings
from ostraca_dpu_agent.volumes import ServedVolume, Volumes
from ostraca_fabric.errors import ConnectError, RefusedError
from ostraca_fabric.model.ids import AgentId, TenantId
from ostraca_fabric.model.outcome import BlockState, Reason
from ostraca_fabric.model.overrides import Switch
from ostraca_fabric.model.volume import Layout
from ostraca_fabric.policies.rounds import Rounds
from ostraca_fabric.sockets.zmtp_publisher import ZmtpPublisher
from ostraca_fabric.tables.digests import derive_keys
from ostraca_fabric.wire.codec import Outcomes, filled
from ostraca_fabric.wire.messages import NamesAnswer, NamesQuery

log = logging.getLogger(__name__)

_PAGES = 512
"""Pages looked up at once, about."""

_TURN_S = 0.5
"""Longest interval between looks for new names."""

_HEARTBEAT_S = 1.0
"""Longest silence: a router notices a lost message at the next."""

_ANSWER_S = 1.0
_BIND_RETRY_S = 10.0
_PARTS_MAX = 1024
"""Blocks of a page, at most: each is remembered and looked up. Any worker may create the volume."""

_NANOSECONDS = 10**9


class RouterFeed:
    """Feed of one volume. Call ``run``."""

    def __init__(
        self,
        settings: RouterFeedSettings,
        context: RequestContext,
        volumes: Volumes,
        agents: Callable[[], Sequence[AgentId]],
        switch: Callable[[ServedVolume], Switch],
    ) -> None:
        """Feed from all *agents* that exist now. *switch* returns the present switch of a volume."""
        self._settings = settings
        self._context = context
        self._volumes = volumes
        self._agents = agents
        self._switch = switch
        self._messages = FeedMessages(
            key_prefix=settings.key_prefix, tenant=settings.router_tenant, first=time.time_ns()
        )
        self._numbers: dict[AgentId, int] = {}
        self._volume: ServedVolume | None = None
        self._pages: FedPages | None = None
        self._names_due_s = self._sent_s = 0.0
        self._has_new_subscribers = False
        self._publisher = ZmtpPublisher(settings.bind, on_subscriber=self._note_subscriber)

    @property
    def address(self) -> str:
        """Address of the feed; empty while not listening."""
        return self._publisher.address

    async def run(self) -> None:
        """Feed until cancelled; if the address can't be bound, try again."""
        while True:
            try:
                async with self._publisher:
                    log.info("Pages of %s are announced at %s", self._settings.volume, self.address)
                    while True:
                        pause_s = await self._turn()
                        await asyncio.sleep(min(pause_s, _TURN_S))
            except ConnectError as error:
                log.warning("No pages are announced: %s", error)
                await asyncio.sleep(_BIND_RETRY_S)

    async def _turn(self) -> float:
        """Do the next lookups, and announce the results; return the time until the next turn."""
        settings, now_s = self._settings, self._context.clock()
        if self._volume is None:
            tenant, _, name = settings.volume.partition("/")
            try:
                volume = await self._volumes.find(TenantId(tenant), name)
                parts = _parts(volume.record.layout)
            except RefusedError as error:
                log.debug("The router gets no news of %s: %s", settings.volume, error)
                self._send()
                return _TURN_S
            self._volume = volume
            self._pages = FedPages(
                Rounds(round_s=settings.round_s, rate_per_s=settings.pages_per_s),
                parts=parts,
                pages_max=settings.pages_max,
                repeat_s=settings.repeat_s,
            )
        assert self._pages is not None
        if now_s >= self._names_due_s:
            self._names_due_s = now_s + _TURN_S
            await asyncio.gather(*(self._learn(self._pages, agent) for agent in self._agents()))
        if self._has_new_subscribers:  # once a turn: a visit of all pages takes long
            self._has_new_subscribers = False
            self._pages.repeat_all()
        due, pause_s = self._pages.take_due(_PAGES)
        if due:
            self._volume = self._volumes.newest(self._volume)
            if self._switch(self._volume) is Switch.ON:
                await self._look_up(self._pages, self._volume, due)
            else:  # all gets are declined
                self._pages.record({page: {} for page in due}, now_s)
        self._send()
        return pause_s

    async def _learn(self, pages: FedPages, agent: AgentId) -> None:
        """Take new names from an agent."""
        query = NamesQuery(0, _ANSWER_S, self._settings.volume, self._numbers.get(agent, 0))
        try:
            answer = await self._context.owners.ask(agent, query)
        except (TimeoutError, ConnectError) as error:
            log.debug("No names from %s: %s", agent, error)
            return
        if isinstance(answer, NamesAnswer):
            self._numbers[agent] = answer.next
            pages.learn(answer.spans)

    async def _look_up(self, pages: FedPages, volume: ServedVolume, due: Sequence[bytes]) -> None:
        """Ask the shard owners for all blocks of pages, uncounted.

        A page counts only if each of its blocks is found, or certainly missing.
        """
        named = pages.spans(due)
        spans = [span for span, _ in named]
        keys = derive_keys(volume.secret, spans)
        found = await self._context.locator.locate(
            self._context.routes(),
            volume,
            spans,
            keys,
            wanted=np.ones(len(keys), np.bool_),
            within_s=_ANSWER_S,
            pin_s=0.0,
            is_brief=True,
            is_counted=False,
        )
        outcomes = Outcomes(filled(len(keys), BlockState.MISS), found.reasons.copy())
        outcomes.states[found.is_found], outcomes.reasons[found.is_found] = BlockState.HIT, Reason.NONE
        self._context.counters.count("recheck", outcomes)
        is_certain = found.is_found | (found.reasons == Reason.NOT_FOUND)
        states: dict[bytes, dict[Part, bool]] = {}
        uncertain: set[bytes] = set()
        at = 0
        for span, names in named:
            for page in names:
                states.setdefault(page, {})[span.rank, span.group] = bool(found.is_found[at])
                if not is_certain[at]:
                    uncertain.add(page)
                at += 1
        pages.record(
            {page: parts for page, parts in states.items() if page not in uncertain}, self._context.clock()
        )

    def _send(self) -> None:
        events = self._pages.take_events() if self._pages else []
        now_s = self._context.clock()
        if events or now_s - self._sent_s >= _HEARTBEAT_S:
            self._sent_s = now_s
            for frames in self._messages.batches(events, at_ms=time.time_ns() * 1000 // _NANOSECONDS):
                self._publisher.send(frames)

    def _note_subscriber(self) -> None:
        self._has_new_subscribers = True


def _parts(layout: Layout) -> list[Part]:
    """Return rank and group of each block of a page. Raises RefusedError for too many."""
    ranks, groups = layout.ranks, max(1, len(layout.groups))
    if ranks * groups > _PARTS_MAX:
        raise RefusedError("limit", f"a page has {ranks * groups} blocks, and a fed one {_PARTS_MAX} at most")
    return [(rank, group) for rank in range(ranks) for group in range(groups)]
