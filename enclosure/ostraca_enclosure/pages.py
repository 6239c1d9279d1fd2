"""An enclosure's pages over HTTP: ``/metrics``, ``/healthz``, ``/readyz`` and ``/status``.

- ``/healthz``: does the daemon's loop answer at all? One that does not should be started anew.
- ``/readyz``: is any drive exported? With all conditions, of which only ``ready`` counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from ostraca_fabric.adapters.http.app import OK, UNAVAILABLE, Page, text_page
from ostraca_fabric.adapters.http.asked import Asked
from ostraca_fabric.conditions import is_ready
from ostraca_fabric.enclosure_metrics import enclosure_samples
from ostraca_fabric.openmetrics import CONTENT_TYPE, render
from ostraca_fabric.status import EnclosureStatus


class EnclosurePages:
    """The pages of one enclosure."""

    def __init__(self, asked: Asked[EnclosureStatus]) -> None:
        """Say what *asked* is told."""
        self._asked = asked

    def routes(self) -> dict[str, Callable[[], Awaitable[Page]]]:
        """Return what makes each page, by its path."""
        return {
            "/metrics": self.metrics,
            "/healthz": self.healthz,
            "/readyz": self.readyz,
            "/status": self.status,
        }

    async def metrics(self) -> Page:
        """Return what there is to count, for Prometheus."""
        status = await self._asked.told()
        if isinstance(status, Page):
            return status
        return Page(render(enclosure_samples(status)).encode(), CONTENT_TYPE)

    async def healthz(self) -> Page:
        """Say whether the daemon's loop answers."""
        status = await self._asked.told()
        return status if isinstance(status, Page) else text_page("ok")

    async def readyz(self) -> Page:
        """Say whether hosts find a drive here, and what else is to be known."""
        status = await self._asked.told()
        if isinstance(status, Page):
            return status
        ready = is_ready(status.conditions)
        body = msgspec.json.encode({"is_ready": ready, "conditions": status.conditions})
        return Page(body, code=OK if ready else UNAVAILABLE)

    async def status(self) -> Page:
        """Say what the daemon believes, in full."""
        status = await self._asked.told()
        return status if isinstance(status, Page) else Page(msgspec.json.encode(status))
