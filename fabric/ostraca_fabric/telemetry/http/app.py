"""ASGI application for GET and HEAD of a few fixed pages, and limits of the server.

No request body is read, and no state is kept between requests. This module can be imported without uvicorn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, Scope

from ostraca_fabric.model.limits import check_above_zero

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"

OK = 200
NOT_FOUND = 404
NOT_ALLOWED = 405
UNAVAILABLE = 503

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class HttpPage:
    """Response of a page."""

    body: bytes
    content_type: str = JSON
    code: int = OK


def text_page(text: str, code: int = OK) -> HttpPage:
    """Return a plain-text page for people."""
    return HttpPage(f"{text}\n".encode(), TEXT, code)


class Pages:
    """ASGI application with a fixed set of paths."""

    def __init__(self, pages: Mapping[str, Callable[[], Awaitable[HttpPage]]]) -> None:
        """Map each path to a function for its page, called on the server's thread."""
        self._pages = pages

    async def __call__(self, scope: Scope, _: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Answer a request."""
        assert scope["type"] == "http", scope["type"]
        page = await self._page(scope["method"], scope["path"])
        headers = [
            (b"content-type", page.content_type.encode()),
            (b"content-length", str(len(page.body)).encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        ]
        if page.code == NOT_ALLOWED:  # a body may be left unread
            headers += [(b"allow", b"GET, HEAD"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": page.code, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else page.body
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _page(self, method: str, path: str) -> HttpPage:
        if method not in ("GET", "HEAD"):
            return text_page("only GET and HEAD are answered", NOT_ALLOWED)
        make = self._pages.get(path)
        if make is not None:
            return await make()
        there = "".join(f"\n  {known}" for known in self._pages)
        if path == "/":
            return text_page(f"pages:{there}")
        return text_page(f"there is no {_shown(path)}; there are:{there}", NOT_FOUND)


def _shown(path: str) -> str:
    """Return a requested path in a form safe to print."""
    return ascii(path[:_SHOWN_CHARACTERS])


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Limits of the pages over HTTP."""

    connections_max: int = 16
    """Concurrent connections; more are cut. Enough for two scrapers and a few people."""

    head_bytes_max: int = 16 << 10
    """Longest head of a request. No request needs a body; bodies are read up to 64 KiB."""

    connection_s: float = 10.0
    """Lifetime of a connection, so that silent clients free their slot. Raise the limit for slow scrapers."""

    fresh_s: float = 1.0
    """Longest age of an answer. Requests in this time share one answer and one query of the data path."""

    answer_s: float = 2.0
    """Time limit for the daemon's own status before the daemon is reported unhealthy. A loop blocked for as
    long serves no gets."""

    def __post_init__(self) -> None:
        """Refuse what can't work."""
        check_above_zero(self, "connections_max", "head_bytes_max", "connection_s", "answer_s")
