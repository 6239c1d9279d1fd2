"""HTTP pages of a daemon: ``/metrics``, ``/healthz``, ``/readyz``, ``/status``.

Pages are rendered on the server's thread. The daemon's event loop computes the status at most once per
``fresh_s``. Concurrent requests share the answer, so the number of scrapes does not matter.

- ``/healthz``: whether the daemon's loop answers. Restart a daemon without an answer.
- ``/readyz``: whether the daemon serves, with all conditions; only ``ready`` counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

import msgspec

from ostraca_fabric.telemetry.conditions import Condition, is_ready
from ostraca_fabric.telemetry.http.app import OK, UNAVAILABLE, HttpPage, HttpSettings, text_page
from ostraca_fabric.telemetry.openmetrics import CONTENT_TYPE, Metric, render


class DaemonStatus(Protocol):
    """Status with conditions, of an agent or an enclosure."""

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Conditions of the daemon."""


_Status = TypeVar("_Status", bound=DaemonStatus)


class StatusPages(Generic[_Status]):
    """Pages of one daemon. Only ``__init__`` may run outside the server's loop."""

    def __init__(
        self,
        daemon: str,
        status: Callable[[], _Status],
        metrics: Sequence[Metric[_Status]],
        settings: HttpSettings,
        clock: Callable[[], float],
        *,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Call *status* on *loop*, the event loop of the daemon, named *daemon* in messages.

        *clock* is monotonic, in seconds.
        """
        self._daemon = daemon
        self._status = status
        self._metrics = metrics
        self._settings = settings
        self._clock = clock
        self._loop = loop
        self._answer: asyncio.Future[_Status] | None = None
        self._requested_s = 0.0
        self._rendered: tuple[_Status, HttpPage] | None = None

    def routes(self) -> dict[str, Callable[[], Awaitable[HttpPage]]]:
        """Return the handler of each page, by path."""
        return {
            "/metrics": self._route(self._metrics_page),
            "/healthz": self._route(lambda _: text_page("ok")),
            "/readyz": self._route(_readiness),
            "/status": self._route(lambda status: HttpPage(msgspec.json.encode(status))),
        }

    def _route(self, page_of: Callable[[_Status], HttpPage]) -> Callable[[], Awaitable[HttpPage]]:
        async def page() -> HttpPage:
            """Return the page, or a page about a blocked loop."""
            now_s = self._clock()
            is_old = now_s - self._requested_s >= self._settings.fresh_s
            if self._answer is None or (self._answer.done() and is_old):
                self._requested_s = now_s
                self._answer = asyncio.wrap_future(self._request())
            try:
                async with asyncio.timeout(self._settings.answer_s):
                    status = await asyncio.shield(self._answer)
            except TimeoutError:
                silent_s = self._clock() - self._requested_s
                message = f"{self._daemon} has not answered for {silent_s:.1f} s: its loop is blocked"
                return text_page(message, UNAVAILABLE)
            return page_of(status)

        return page

    def _metrics_page(self, status: _Status) -> HttpPage:
        if self._rendered is None or self._rendered[0] is not status:
            self._rendered = status, HttpPage(render(self._metrics, status).encode(), CONTENT_TYPE)
        return self._rendered[1]

    def _request(self) -> Future[_Status]:
        answer: Future[_Status] = Future()

        def compute() -> None:
            try:
                answer.set_result(self._status())
            except BaseException as error:
                answer.set_exception(error)
                raise

        self._loop.call_soon_threadsafe(compute)
        return answer


def _readiness(status: DaemonStatus) -> HttpPage:
    ready = is_ready(status.conditions)
    body = msgspec.json.encode({"is_ready": ready, "conditions": status.conditions})
    return HttpPage(body, code=OK if ready else UNAVAILABLE)


def process_routes(
    agents: Mapping[str, Mapping[str, Callable[[], Awaitable[HttpPage]]]],
) -> dict[str, Callable[[], Awaitable[HttpPage]]]:
    """Return the pages of a process, from the routes of its agents.

    A single agent has the pages at the root, several agents below ``/agents/<id>``.
    """
    if len(agents) == 1:
        (routes,) = agents.values()
        return dict(routes)
    return {
        f"/agents/{agent}{path}": page for agent, routes in agents.items() for path, page in routes.items()
    }
