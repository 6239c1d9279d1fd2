"""An agent's pages over HTTP: ``/metrics``, ``/healthz``, ``/readyz`` and ``/status``.

They are made on the server's thread. What an agent believes is asked of its own loop, at most once in
``fresh_s``: scrapes, however many, cost the data path one status in that time.

- ``/healthz``: does the agent's loop answer at all? A daemon that does not should be started anew.
- ``/readyz``: can it serve gets? With all conditions, of which only ``ready`` counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ostraca_fabric.adapters.http.app import OK, UNAVAILABLE, Page, text_page
from ostraca_fabric.adapters.http.asked import Asked
from ostraca_fabric.conditions import is_ready
from ostraca_fabric.metrics import agent_samples
from ostraca_fabric.openmetrics import CONTENT_TYPE, render

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Mapping

    from ostraca_fabric.adapters.http.settings import HttpSettings
    from ostraca_fabric.status import AgentStatus


class AgentPages:
    """The pages of one agent. All methods but ``__init__`` belong to the server's loop."""

    def __init__(
        self,
        status: Callable[[], AgentStatus],
        loop: asyncio.AbstractEventLoop,
        settings: HttpSettings,
        clock: Callable[[], float],
    ) -> None:
        """*status* is called on *loop*, the agent's; *clock* is monotonic, in seconds."""
        self._asked = Asked(status, loop, settings, clock, who="the agent")
        self._rendered: tuple[AgentStatus, Page] | None = None

    def routes(self) -> dict[str, Callable[[], Awaitable[Page]]]:
        """Return what makes each page, by its path."""
        return {
            "/metrics": self.metrics,
            "/healthz": self.healthz,
            "/readyz": self.readyz,
            "/status": self.status,
        }

    async def metrics(self) -> Page:
        """Everything that is counted, for Prometheus."""
        status = await self._asked.told()
        if isinstance(status, Page):
            return status
        if self._rendered is None or self._rendered[0] is not status:
            self._rendered = status, Page(render(agent_samples(status)).encode(), CONTENT_TYPE)
        return self._rendered[1]

    async def healthz(self) -> Page:
        """Whether the agent's loop answers."""
        status = await self._asked.told()
        return status if isinstance(status, Page) else text_page("ok")

    async def readyz(self) -> Page:
        """Whether gets can be served, and what else is to be known."""
        status = await self._asked.told()
        if isinstance(status, Page):
            return status
        ready = is_ready(status.conditions)
        body = msgspec.json.encode({"is_ready": ready, "conditions": status.conditions})
        return Page(body, code=OK if ready else UNAVAILABLE)

    async def status(self) -> Page:
        """What the agent believes, in full."""
        status = await self._asked.told()
        return status if isinstance(status, Page) else Page(msgspec.json.encode(status))


def routes_of(agents: Mapping[str, AgentPages]) -> dict[str, Callable[[], Awaitable[Page]]]:
    """Return the pages of a process: of its one agent, or of each of several below ``/agents/<id>``."""
    if len(agents) == 1:
        (pages,) = agents.values()
        return pages.routes()
    return {
        f"/agents/{agent}{path}": make
        for agent, pages in agents.items()
        for path, make in pages.routes().items()
    }
