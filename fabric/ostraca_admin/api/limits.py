"""Length limit of request bodies; a longer body is not read to the end. ASGI."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

from ostraca_admin.api.problems import MEDIA_TYPE

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class _TooLongError(Exception):
    """The body exceeds the limit."""


class BodyLimit:
    """Middleware to answer 413 to a body of more than *body_bytes_max*."""

    def __init__(self, app: ASGIApp, *, body_bytes_max: int) -> None:
        """Wrap *app*."""
        self._app = app
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received, has_answered = 0, False

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._body_bytes_max:
                raise _TooLongError
            return message

        async def sent(message: Message) -> None:
            nonlocal has_answered
            if received <= self._body_bytes_max or has_answered:
                has_answered = True
                await send(message)

        with suppress(_TooLongError):
            await self._app(scope, counted, sent)
        if received > self._body_bytes_max and not has_answered:  # in place of the app's answer
            await self._refuse(scope, send)

    async def _refuse(self, scope: Scope, send: Send) -> None:
        detail = f"the request body exceeds the limit of {self._body_bytes_max} bytes"
        body = json.dumps(
            {
                "type": "about:blank",
                "title": "Content Too Large",
                "status": 413,
                "detail": detail,
                "instance": scope["path"],
            }
        ).encode()
        headers = [
            (b"content-type", MEDIA_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})
