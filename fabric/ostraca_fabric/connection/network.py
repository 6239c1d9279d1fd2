"""What carries connections: the machine's sockets, or something that stands for them.

A ``Network`` makes the transports, and says nothing of what is carried. ``SOCKETS`` is the machine's own;
``ostraca_fabric.testing.simulated_network`` is one that loses hosts and links on purpose. Its transports do
what ``asyncio.Transport`` says. One whose ``get_extra_info("socket")`` is None has no socket that may be
written to beside it; its ``get_extra_info("peer_uid")`` then says which user is at the other end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Protocol

from ostraca_fabric.connection.listening import file_identity, listen, real_address, unlink_own
from ostraca_fabric.errors import UsageError
from ostraca_fabric.tasks import Tasks
from ostraca_fabric.tls import Tls, in_words
from ostraca_fabric.wire.address import Address, TlsAddress, UnixAddress

log = logging.getLogger(__name__)

_HANDSHAKES_MAX = 128
"""TLS handshakes under way at one address; further connections wait in the kernel's backlog."""

_HANDSHAKE_S = 5.0
_SHUTDOWN_S = 2.0
"""How long a connection's end may take until the other end has agreed; then it is cut."""

_ACCEPT_AGAIN_S = 0.1
"""Pause after an accept that failed, as it does where open files have run out."""

Accept = Callable[[], asyncio.BufferedProtocol]
"""Makes the protocol of a connection that somebody makes to us."""


class Listening(Protocol):
    """A place where connections are accepted."""

    @property
    def address(self) -> Address:
        """Where that is, with the real port."""

    def close(self) -> None:
        """Accept no more; connections that were accepted go on."""


class Network(Protocol):
    """Makes connections, of whoever was given it: a process, or a simulated host."""

    async def listen(self, address: Address, accept: Accept) -> Listening:
        """Accept connections at an address, each with a protocol of its own.

        Raises ConnectError when the address can't be had, and UsageError when it can never be.
        """

    async def dial(self, address: Address, protocol: asyncio.BufferedProtocol) -> None:
        """Connect *protocol* to whoever listens there; its ``connection_made`` has been called then.

        Raises OSError when nobody can be reached. Takes as long as the network takes: who dials has a limit.
        """


class _ListeningSocket:
    def __init__(self, asked: Address) -> None:
        self._socket = listen(asked)
        self.address = real_address(asked, self._socket)
        self._file = file_identity(asked)
        self._server: asyncio.Server | None = None

    async def accept(self, accept: Accept) -> None:
        loop = asyncio.get_running_loop()
        is_unix = isinstance(self.address, UnixAddress)
        serve = loop.create_unix_server if is_unix else loop.create_server
        self._server = await serve(accept, sock=self._socket)

    def close(self) -> None:
        assert self._server is not None, "it was made by SocketNetwork.listen"
        self._server.close()
        unlink_own(self.address, self._file)


class _ListeningTls:
    """Accepts by itself: each connection is to have the context of its own time."""

    def __init__(self, asked: TlsAddress, accept: Accept, tls: Tls) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = listen(asked)
        self.address = real_address(asked, self._socket)
        self._accept = accept
        self._tls = tls
        self._is_closed = False
        self._handshakes: set[asyncio.Task[None]] = set()
        self._tasks = Tasks(f"handshakes at {self.address}")
        self._loop.add_reader(self._socket.fileno(), self._take_one)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True  # handshakes under way go on, for as long as they may take
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _take_one(self) -> None:
        try:
            connected, name = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("Could not accept a connection at %s: %s", self.address, error)
            self._loop.remove_reader(self._socket.fileno())
            self._loop.call_later(_ACCEPT_AGAIN_S, self._take_more)
            return
        connected.settimeout(0)
        handshake = self._tasks.spawn(self._shake_hands(connected, str(name[0])))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._shook_hands)
        if len(self._handshakes) >= _HANDSHAKES_MAX:
            self._loop.remove_reader(self._socket.fileno())

    def _shook_hands(self, handshake: asyncio.Task[None]) -> None:
        self._handshakes.discard(handshake)
        self._take_more()

    def _take_more(self) -> None:
        if not self._is_closed and len(self._handshakes) < _HANDSHAKES_MAX:
            self._loop.add_reader(self._socket.fileno(), self._take_one)

    async def _shake_hands(self, connected: socket.socket, host: str) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._accept,
                connected,
                ssl=self._tls.listening,
                ssl_handshake_timeout=_HANDSHAKE_S,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except OSError as error:
            log.info("A TLS handshake of %s at %s failed: %s", host, self.address, in_words(error))


class SocketNetwork:
    """Unix sockets and TCP of this machine, and TLS over TCP for who has certificates."""

    def __init__(self, tls: Tls | None = None) -> None:
        """Without *tls*, addresses of TLS are refused."""
        self._tls = tls

    async def listen(self, address: Address, accept: Accept) -> Listening:
        """Bind a socket; a unix socket that nobody answers at is replaced (``listening.listen``)."""
        if isinstance(address, TlsAddress):
            tls = self._with_tls(address)
            if not tls.has_certificate:
                raise UsageError(f"{address} takes a certificate and its key: give their files")
            return _ListeningTls(address, accept, tls)
        listening = _ListeningSocket(address)
        await listening.accept(accept)
        return listening

    async def dial(self, address: Address, protocol: asyncio.BufferedProtocol) -> None:
        """Connect a socket."""
        loop = asyncio.get_running_loop()
        if isinstance(address, UnixAddress):
            await loop.create_unix_connection(lambda: protocol, address.path)
        elif isinstance(address, TlsAddress):
            await loop.create_connection(
                lambda: protocol,
                address.host,
                address.port,
                ssl=self._with_tls(address).dialling,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        else:
            await loop.create_connection(lambda: protocol, address.host, address.port)

    def _with_tls(self, address: TlsAddress) -> Tls:
        if self._tls is None:
            raise UsageError(f"{address} takes a CA, by which to know the other end: give its file")
        return self._tls


SOCKETS = SocketNetwork()
