"""ASGI servers by uvicorn: on a thread with an event loop of its own, or on the current loop.

The data path's loop neither accepts these connections nor parses requests; pages fetch data from there across
threads. Connections are limited in number and time. Beyond ``connections_max``, a connection is cut; after
``connection_s``, it is closed, once a pending answer is sent.

``LoopServer`` runs on the current event loop, for a dedicated process. Its application limits connections,
except those of health pages.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.h11_impl import H11Protocol

from ostraca_fabric.connection.network import listen, real_address
from ostraca_fabric.runtime.threads import show_name
from ostraca_fabric.telemetry.http.app import HttpSettings
from ostraca_fabric.wire.address import TcpAddress

_LAST_WORDS_S = 1.0
"""Time for sending a pending answer after the connection's time limit."""


class HttpServer:
    """HTTP server, running from ``start`` to ``stop``."""

    def __init__(self, app: ASGI3Application, address: TcpAddress, settings: HttpSettings) -> None:
        """Store application, address and limits; port 0 means any free port."""
        self._app = app
        self._asked = address
        self._settings = settings
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.url = ""
        """URL with the real port; empty before ``start``."""

    def start(self) -> None:
        """Listen and serve. Raises ConnectError if the address is unavailable."""
        listening = listen(self._asked)
        self.url = str(real_address(self._asked, listening)).replace("tcp://", "http://", 1)
        config = uvicorn.Config(
            self._app,
            http=_limited(self._settings),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # malformed requests of strangers would flood the log
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=self._settings.head_bytes_max,
            timeout_graceful_shutdown=int(_LAST_WORDS_S),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, args=(listening,), name="http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving; blocks until the thread has ended, about two seconds at most."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join()

    def _run(self, listening: socket.socket) -> None:
        show_name("ostraca-http")
        assert self._server is not None
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self._server.serve(sockets=[listening]))


def _limited(settings: HttpSettings) -> type[asyncio.Protocol]:
    class Limited(H11Protocol):
        """Connection with a time limit."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
            super().connection_made(transport)
            self._last: asyncio.TimerHandle | None = None
            if len(self.connections) > settings.connections_max:
                transport.abort()
                return
            self._last = self.loop.call_later(settings.connection_s, self._end)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._last is not None:
                self._last.cancel()
            super().connection_lost(exc)

        def _end(self) -> None:
            """Close at once, or after the pending answer; cut the connection as a last resort."""
            self._last = self.loop.call_later(_LAST_WORDS_S, self.transport.abort)
            self.shutdown()

    return Limited


class LoopServer:
    """Server of one application, from ``run`` until ``stop``."""

    def __init__(
        self,
        app: ASGI3Application,
        *,
        head_bytes_max: int,
        grace_s: int,
        certificate: tuple[Path, Path] | None,
    ) -> None:
        """Serve *app*, over TLS if *certificate* has a certificate and a key.

        On stop, open requests have *grace_s* seconds to finish.
        """
        cert, key = certificate or (None, None)
        self._server = _Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # malformed requests of strangers would flood the log
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=head_bytes_max,
                timeout_graceful_shutdown=grace_s,
                ssl_certfile=cert,
                ssl_keyfile=key,
            )
        )
        self._certificate = certificate
        self._has_ended = asyncio.Event()
        self._grace_s = grace_s

    @property
    def connections(self) -> int:
        """Return the number of open connections; the application limits them."""
        return len(self._server.server_state.connections)

    async def run(self, listening: socket.socket) -> None:
        """Serve until ``stop``."""
        try:
            await self._server.serve(sockets=[listening])
        finally:
            self._has_ended.set()

    def take_certificate(self) -> None:
        """Reload the certificate files for new connections. Raises OSError."""
        if self._certificate is not None and self._server.config.ssl is not None:
            self._server.config.ssl.load_cert_chain(*self._certificate)

    async def stop(self) -> None:
        """Stop serving, after a few seconds for open requests."""
        self._server.should_exit = True
        async with asyncio.timeout(2 * self._grace_s + 1):
            await self._has_ended.wait()


class _Server(uvicorn.Server):
    """Uvicorn server without signal handling of its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield
