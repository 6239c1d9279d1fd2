"""The control connection on asyncio: framed messages and bulk bytes over unix sockets, TCP, or a network that
is given.

``serve`` is an agent's end, ``connect`` the other. Both are ``asyncio.BufferedProtocol`` classes, so bytes
land where they belong without streams in between, and both run on uvloop as on asyncio's own loop. What the
bytes mean is decided in ``ostraca_fabric.wire``, purely.
"""

from ostraca_fabric.connection.client import ClientConnection, connect
from ostraca_fabric.connection.framed import FramedConnection
from ostraca_fabric.connection.network import SOCKETS, Listening, Network, SocketNetwork
from ostraca_fabric.connection.server import Handler, Server, ServerConnection, serve
from ostraca_fabric.connection.settings import ConnectionSettings

__all__ = [
    "SOCKETS",
    "ClientConnection",
    "ConnectionSettings",
    "FramedConnection",
    "Handler",
    "Listening",
    "Network",
    "Server",
    "ServerConnection",
    "SocketNetwork",
    "connect",
    "serve",
]
