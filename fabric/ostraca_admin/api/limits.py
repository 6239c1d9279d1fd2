"""Length limit of request bodies; a longer body is not read to the end. ASGI."""

from __future__ import annotations

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostraca_admin.api.problems import problem


class BodyLimit:
    """Middleware to answer 413 to a body of more than *body_bytes_max*."""

    def __init__(self, app: ASGIApp, *, body_bytes_max: int) -> None:
        """Wrap *app*."""
        self._app = app
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, with its whole body at hand."""
        body, has_more = b"", scope["type"] == "http"
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body, has_more = body + message.get("body", b""), message.get("more_body", False)
            if len(body) > self._body_bytes_max:
                detail = f"the request body exceeds the limit of {self._body_bytes_max} bytes"
                refusal = problem(Request(scope), 413, detail, {"Connection": "close"})
                return await refusal(scope, receive, send)
        whole = [{"type": "http.request", "body": body}] if scope["type"] == "http" else []

        async def received() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, received, send)
        return None
