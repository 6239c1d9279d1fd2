"""Answers GET and HEAD of a few pages, as ASGI. It reads no request's body, and remembers nothing of any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, Scope

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"

OK = 200
NOT_FOUND = 404
NOT_ALLOWED = 405
UNAVAILABLE = 503

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Page:
    """What is answered."""

    body: bytes
    content_type: str = JSON
    code: int = OK


def text_page(text: str, code: int = OK) -> Page:
    """Return a page for people."""
    return Page(f"{text}\n".encode(), TEXT, code)


class Pages:
    """An ASGI application of a few fixed paths."""

    def __init__(self, pages: Mapping[str, Callable[[], Awaitable[Page]]]) -> None:
        """Answer at each path by calling what makes its page, on the server's thread."""
        self._pages = pages

    async def __call__(self, scope: Scope, _: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Answer one request."""
        assert scope["type"] == "http", scope["type"]
        page = await self._page(scope["method"], scope["path"])
        headers = [
            (b"content-type", page.content_type.encode()),
            (b"content-length", str(len(page.body)).encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        ]
        if page.code == NOT_ALLOWED:  # what has a body is not read to its end
            headers += [(b"allow", b"GET, HEAD"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": page.code, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else page.body
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _page(self, method: str, path: str) -> Page:
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
    """Return a path that somebody asked for as it can stand in an answer."""
    return ascii(path[:_SHOWN_CHARACTERS])
