"""Health pages of an admin service, ``/healthz`` and ``/readyz``, in front of the API. ASGI.

The pages need no token, and are answered from the first moment on.

- ``/healthz``: the event loop answers. Restart a service without an answer.
- ``/readyz``: etcd answers. The JSON has the form of the agents' page.

Pages are outside the limit of connections: a busy service must not be restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ostraca_admin.api.problems import problem
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.telemetry.conditions import READY, Conditions, Observation, is_ready
from ostraca_fabric.telemetry.http.app import OK, UNAVAILABLE, HttpPage, Pages, text_page

FRESH_S = 1.0
"""Longest age of a check. Requests in this time share one check."""

ANSWER_S = 2.0
"""Time limit for etcd's answer; a kubelet waits a little longer."""

_RETRY_AFTER_S = "2"


class Readiness:
    """Readiness of the service, by checks that concurrent requests share."""

    def __init__(self, clock: Callable[[], float], *, answer_s: float = ANSWER_S) -> None:
        """Begin as not ready. *clock* is monotonic, in seconds."""
        self._clock = clock
        self._answer_s = answer_s
        self._conditions = Conditions()
        self.ask: Callable[[], Awaitable[object]] | None = None
        """Question to etcd; raises MembershipError. None while the service starts."""

        self._page: asyncio.Task[HttpPage] | None = None
        self._begun_s = 0.0
        self.wait = ""
        """Present obstacle of the start."""

    async def page(self) -> HttpPage:
        """Return the page of the newest check."""
        is_old = self._clock() - self._begun_s >= FRESH_S
        if self._page is None or (self._page.done() and is_old):
            self._begun_s = self._clock()
            self._page = asyncio.ensure_future(self._check())
        return await asyncio.shield(self._page)

    async def _check(self) -> HttpPage:
        trouble = await self._trouble()
        sentence = f"Not ready: {trouble}." if trouble else "Ready: etcd answers."
        observed = Observation(READY, is_true=not trouble, sentence=sentence)
        conditions = self._conditions.after(self._clock(), [observed])
        ready = is_ready(conditions)
        body = msgspec.json.encode({"is_ready": ready, "conditions": conditions})
        return HttpPage(body, code=OK if ready else UNAVAILABLE)

    async def _trouble(self) -> str:
        if self.ask is None:
            return f"starting. Waiting for etcd, to find the fabric: {self.wait}" if self.wait else "starting"
        try:
            async with asyncio.timeout(self._answer_s):
                await self.ask()
        except TimeoutError:
            return f"etcd has not answered for {self._answer_s:g} s"
        except MembershipError as error:
            return str(error)
        return ""


class ProbedApp:
    """ASGI application: health pages at once, and the API within a limit of connections."""

    def __init__(self, readiness: Readiness, *, connections: Callable[[], int], connections_max: int) -> None:
        """Serve the pages. *connections* returns the number of open connections."""
        self.app: ASGIApp | None = None
        """The API; None while the service starts."""

        self._probes = {"/healthz": _liveness, "/readyz": readiness.page}
        self._pages = Pages(self._probes)
        self._connections = connections
        self._connections_max = connections_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["path"] in self._probes:
            await self._pages(scope, receive, send)  # type: ignore[arg-type]  # uvicorn's names of ASGI types
        elif self._connections() > self._connections_max:
            detail = (
                f"the service has more than {self._connections_max} connections, its limit: retry later, or "
                "raise limits.connections_max"
            )
            await _unavailable(scope, detail)(scope, receive, send)
        elif self.app is None:
            await _unavailable(scope, "the service waits for etcd and the fabric: see /readyz")(
                scope, receive, send
            )
        else:
            await self.app(scope, receive, send)


def _unavailable(scope: Scope, detail: str) -> ASGIApp:
    headers = {"Retry-After": _RETRY_AFTER_S, "Connection": "close"}  # a body may be left unread
    return problem(Request(scope), 503, detail, headers)


async def _liveness() -> HttpPage:
    return text_page("ok")
