"""Runs an ASGI application by uvicorn, on a thread with an event loop of its own.

The data path's loop neither accepts these connections nor parses what they say; whatever a page needs of it
is asked across. Connections are limited in number and in time: one above ``connections_max`` is cut, and each
is closed after ``connection_s``, at the latest when it has been told what it was asking.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ostraca_fabric.connection.listening import listen, real_address
from ostraca_fabric.threads import show_name

if TYPE_CHECKING:
    import socket

    from uvicorn._types import ASGI3Application

    from ostraca_fabric.adapters.http.settings import HttpSettings
    from ostraca_fabric.wire.address import TcpAddress

_LAST_WORDS_S = 1.0
"""How long an answer under way may take to leave when its connection's time is over."""


class HttpServer:
    """Serves pages from ``start`` to ``stop``."""

    def __init__(self, app: ASGI3Application, address: TcpAddress, settings: HttpSettings) -> None:
        """Take what to serve, and where; port 0 takes any that is free."""
        self._app = app
        self._asked = address
        self._settings = settings
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """Where it is found, with the real port; empty before ``start``."""
        return self._url

    def start(self) -> None:
        """Listen and serve. Raises ConnectError when the address can't be had."""
        listening = listen(self._asked)
        self._url = str(real_address(self._asked, listening)).replace("tcp://", "http://", 1)
        config = uvicorn.Config(
            self._app,
            http=_limited(self._settings),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # what strangers get wrong is not worth a line each
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=self._settings.head_bytes_max,
            timeout_graceful_shutdown=int(_LAST_WORDS_S),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, args=(listening,), name="http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Serve no more; blocks until the thread has ended, a second or two at most."""
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
        """A connection that ends."""

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
            """Close at once, or after the answer under way; and cut it where that does not help."""
            self._last = self.loop.call_later(_LAST_WORDS_S, self.transport.abort)
            self.shutdown()

    return Limited
