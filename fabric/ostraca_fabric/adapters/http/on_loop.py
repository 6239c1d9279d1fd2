"""Runs an ASGI application by uvicorn on the running event loop, for a process that does nothing else."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

    from uvicorn._types import ASGI3Application


class LoopServer:
    """Serves an application from ``run`` until ``stop``."""

    def __init__(
        self,
        app: ASGI3Application,
        *,
        connections_max: int,
        head_bytes_max: int,
        grace_s: int,
        certificate: tuple[Path, Path] | None,
    ) -> None:
        """Serve *app*, over TLS with a *certificate* and its key; *grace_s* is how long what is under way has
        when it stops.
        """
        cert, key = certificate or (None, None)
        self._server = _Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # what strangers get wrong is not worth a line each
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=head_bytes_max,
                limit_concurrency=connections_max,
                timeout_graceful_shutdown=grace_s,
                ssl_certfile=cert,
                ssl_keyfile=key,
            )
        )
        self._certificate = certificate
        self._has_ended = asyncio.Event()
        self._grace_s = grace_s

    async def run(self, listening: socket.socket) -> None:
        """Serve until ``stop``."""
        try:
            await self._server.serve(sockets=[listening])
        finally:
            self._has_ended.set()

    def take_certificate(self) -> None:
        """Show new connections what the files of the certificate hold now. Raises OSError."""
        if self._certificate is not None and self._server.config.ssl is not None:
            self._server.config.ssl.load_cert_chain(*self._certificate)

    async def stop(self) -> None:
        """Answer what is under way, for a few seconds, and serve no more."""
        self._server.should_exit = True
        async with asyncio.timeout(2 * self._grace_s + 1):
            await self._has_ended.wait()


class _Server(uvicorn.Server):
    """A server that leaves signals to whoever started it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
