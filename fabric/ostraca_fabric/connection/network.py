"""What carries connections: the machine's sockets, or something that stands for them.

A ``Network`` makes the transports, and says nothing of what is carried. ``SOCKETS`` is the machine's own;
``ostraca_fabric.testing.simulated_network`` is one that loses hosts and links on purpose. Its transports do
what ``asyncio.Transport`` says. One whose ``get_extra_info("socket")`` is None has no socket that may be
written to beside it; its ``get_extra_info("peer_uid")`` then says which user is at the other end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from ostraca_fabric.connection.listening import file_identity, listen, real_address, unlink_own
from ostraca_fabric.wire.address import Address, UnixAddress

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


class SocketNetwork:
    """Unix sockets and TCP of this machine."""

    async def listen(self, address: Address, accept: Accept) -> Listening:
        """Bind a socket; a unix socket that nobody answers at is replaced (``listening.listen``)."""
        listening = _ListeningSocket(address)
        await listening.accept(accept)
        return listening

    async def dial(self, address: Address, protocol: asyncio.BufferedProtocol) -> None:
        """Connect a socket."""
        loop = asyncio.get_running_loop()
        if isinstance(address, UnixAddress):
            await loop.create_unix_connection(lambda: protocol, address.path)
        else:
            await loop.create_connection(lambda: protocol, address.host, address.port)


SOCKETS = SocketNetwork()
