"""Control connection on asyncio: framed messages and bulk bytes.

Runs over unix sockets, TCP, TLS or a given network. ``serve`` is the agent's end, ``connect`` the other end.
Both are ``asyncio.BufferedProtocol`` classes, so bytes land in their final memory without streams in between.
Both run on uvloop and on asyncio's own loop. ``ostraca_fabric.wire`` defines the meaning of the bytes.
"""

from ostraca_fabric.connection.client import ClientConnection, connect
from ostraca_fabric.connection.framed import FramedConnection
from ostraca_fabric.connection.network import SOCKETS, Listening, Network, SocketNetwork
from ostraca_fabric.connection.server import Handler, Server, ServerConnection, serve
from ostraca_fabric.connection.streams import ConnectionSettings

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
