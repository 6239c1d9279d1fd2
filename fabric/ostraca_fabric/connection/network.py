"""Networks that carry connections: the machine's sockets, or a simulation.

A ``Network`` creates transports and knows nothing of their content. ``SOCKETS`` is the machine's own network;
``tests.support.simulated.simulated_network`` loses hosts and links on purpose. Transports follow
``asyncio.Transport``. If ``get_extra_info("socket")`` is None, there is no socket to write to beside the
transport; then ``get_extra_info("peer_uid")`` names the peer's user.

Listening sockets identify the peer of an accepted socket: user id or certificate names.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import stat
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ostraca_fabric.errors import ConnectError, UsageError
from ostraca_fabric.runtime.os_errors import explained
from ostraca_fabric.runtime.tasks import Tasks
from ostraca_fabric.sockets.stream import peer_credentials
from ostraca_fabric.sockets.tls import Tls, in_words
from ostraca_fabric.wire.address import Address, TcpAddress, TlsAddress, UnixAddress
from ostraca_fabric.wire.handshake import PeerCertificate

log = logging.getLogger(__name__)

_HANDSHAKES_MAX = 128
"""TLS handshakes in progress at one address; further connections wait in the kernel's backlog."""

_HANDSHAKE_S = 5.0
_SHUTDOWN_S = 2.0
"""Longest wait for the peer's agreement to a connection's end; then the connection is cut."""

_ACCEPT_AGAIN_S = 0.1
"""Pause after a failed accept, for example without free file descriptors."""

Accept = Callable[[], asyncio.BufferedProtocol]
"""Factory of the protocol of an accepted connection."""


class Listening(Protocol):
    """Place where connections are accepted."""

    @property
    def address(self) -> Address:
        """Address with the real port."""

    def close(self) -> None:
        """Accept no more connections; accepted connections continue."""


class Network(Protocol):
    """Creator of connections for its owner: a process or a simulated host."""

    async def listen(self, address: Address, accept: Accept) -> Listening:
        """Accept connections at an address, each with a protocol of its own.

        Raises ConnectError for an unavailable address, and UsageError for an impossible address.
        """

    async def dial(self, address: Address, protocol: asyncio.BufferedProtocol) -> None:
        """Connect *protocol* to the server at *address*; on return ``connection_made`` was called.

        Raises OSError for an unreachable server. Has no time limit: the caller sets one.
        """


class _ListeningSocket:
    """Listening socket with its own accept: each connection gets the current TLS context, if any."""

    def __init__(self, asked: Address, accept: Accept, tls: Tls | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = listen(asked)
        self.address = real_address(asked, self._socket)
        self._file = file_identity(asked)
        self._accept = accept
        self._tls = tls
        self._is_closed = False
        self._handshakes: set[asyncio.Task[None]] = set()
        self._tasks = Tasks(f"handshakes at {self.address}")
        self._loop.add_reader(self._socket.fileno(), self._take_one)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True  # handshakes in progress continue within their time limit
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        unlink_own(self.address, self._file)

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
        handshake = self._tasks.spawn(self._shake_hands(connected, name))
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

    async def _shake_hands(self, connected: socket.socket, name: object) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._accept,
                connected,
                ssl=None if self._tls is None else self._tls.listening,
                ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_S,
                ssl_shutdown_timeout=None if self._tls is None else _SHUTDOWN_S,
            )
        except OSError as error:
            log.info("A handshake of %s at %s failed: %s", name, self.address, in_words(error))


class SocketNetwork:
    """Unix sockets and TCP of this machine, and TLS over TCP with certificates."""

    def __init__(self, tls: Tls | None = None) -> None:
        """Configure the network; without *tls*, TLS addresses are refused."""
        self._tls = tls

    async def listen(self, address: Address, accept: Accept) -> Listening:
        """Bind a socket; a dead unix socket is replaced (``listening.listen``)."""
        if isinstance(address, TlsAddress):
            tls = self._with_tls(address)
            if not tls.has_certificate:
                raise UsageError(f"{address} needs a certificate and a key: give both files")
            return _ListeningSocket(address, accept, tls)
        return _ListeningSocket(address, accept, None)

    async def dial(self, address: Address, protocol: asyncio.BufferedProtocol) -> None:
        """Connect a socket."""
        loop = asyncio.get_running_loop()
        if isinstance(address, UnixAddress):
            await loop.create_unix_connection(lambda: protocol, address.path)
        elif isinstance(address, TlsAddress):
            tls = self._with_tls(address)
            await loop.create_connection(
                lambda: protocol,
                address.host,
                address.port,
                ssl=tls.dialling,
                server_hostname=tls.peer_name or address.host,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        else:
            await loop.create_connection(lambda: protocol, address.host, address.port)

    def _with_tls(self, address: TlsAddress) -> Tls:
        if self._tls is None:
            raise UsageError(f"{address} needs a CA to verify the other end: give the CA's file")
        return self._tls


SOCKETS = SocketNetwork()


_BACKLOG = 128
_PROBE_S = 1.0
_ANY = "::"
_SocketName = str | tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
"""Name of a socket: a path, or the tuple of its address family."""


def listen(address: Address) -> socket.socket:
    """Return a socket that listens at *address*.

    A unix socket that does not answer is left over from a dead process, and is replaced. Two processes that
    start at the same instant can both find a dead socket: a process that must be alone takes a lock of its
    own first. Raises ConnectError if another server answers, or if the address is unavailable.
    """
    try:
        if isinstance(address, UnixAddress):
            _remove_dead(address)
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            name: _SocketName = address.path
        else:
            listening, name = _tcp_socket(address)
        try:
            listening.bind(name)
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise ConnectError(f"can't listen at {address}: {explained(error)}") from error
    listening.settimeout(0)
    return listening


def check_free(addresses: Iterable[Address]) -> None:
    """Listen at all addresses for a moment, as an early check. Raises as ``listen``."""
    with ExitStack() as held:
        for address in addresses:
            held.enter_context(listen(address))
            held.callback(unlink_own, address, file_identity(address))


def real_address(asked: Address, listening: socket.socket) -> Address:
    """Return the requested address, with the assigned port in place of port 0."""
    return asked if isinstance(asked, UnixAddress) else replace(asked, port=listening.getsockname()[1])


def file_identity(address: Address) -> tuple[int, int] | None:
    """Return device and inode of a unix socket's file, or None for other addresses.

    Distinguishes the file from a later file of the same name.
    """
    if not isinstance(address, UnixAddress):
        return None
    found = Path(address.path).stat()
    return found.st_dev, found.st_ino


def unlink_own(address: Address, identity: tuple[int, int] | None) -> None:
    """Remove the file of a unix socket, unless another process has replaced the file."""
    with suppress(FileNotFoundError):
        if isinstance(address, UnixAddress) and file_identity(address) == identity:
            Path(address.path).unlink()


def peer_uid(transport: asyncio.BaseTransport) -> int | None:
    """Return the peer's user id from the kernel, or None if unknown."""
    connected = transport.get_extra_info("socket")
    if connected is None:
        simulated: int | None = transport.get_extra_info("peer_uid")
        return simulated
    if connected.family != socket.AF_UNIX:
        return None
    return peer_credentials(connected)[1]


def peer_process(transport: asyncio.BaseTransport) -> int:
    """Return the peer's process id from the kernel, or 0 if unknown."""
    connected = transport.get_extra_info("socket")
    if connected is None or connected.family != socket.AF_UNIX:
        return 0
    return peer_credentials(connected)[0]


def secured(transport: asyncio.BaseTransport) -> PeerCertificate | None:
    """Return the peer's certificate names from TLS; None without TLS."""
    shown: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    if shown is None:
        return None
    certificate = shown.getpeercert()
    if not certificate:
        return PeerCertificate(None)
    names = {str(entry[1]) for entry in certificate.get("subjectAltName", ())}
    subject = certificate.get("subject", ())
    names.update(str(part[1]) for named in subject for part in named if part[0] == "commonName")
    return PeerCertificate(frozenset(names))


def _tcp_socket(address: TcpAddress | TlsAddress) -> tuple[socket.socket, _SocketName]:
    """Return an unbound socket and its name; ``::`` admits IPv4, too, and works without IPv6."""
    host = "0.0.0.0" if address.host == _ANY and not socket.has_dualstack_ipv6() else address.host  # noqa: S104 (as asked for)
    family, kind, protocol, _, name = socket.getaddrinfo(
        host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if host == _ANY:
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return listening, name


def _remove_dead(address: UnixAddress) -> None:
    try:
        mode = Path(address.path).stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{address.path} exists and is no socket: choose another path, or remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            Path(address.path).unlink()
            return
        except TimeoutError:
            pass  # a full backlog: a server is there
    raise ConnectError(f"another server answers at {address}: stop it, or choose another address")
