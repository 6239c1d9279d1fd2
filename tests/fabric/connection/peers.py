"""A handler that does what the name of a volume says, and a peer that says whatever bytes it likes."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable

from tests.fabric.wire.samples import LAYOUT

from ostraca_fabric.connection import ConnectionSettings, ServerConnection
from ostraca_fabric.errors import MalformedError, TransportError, UnknownVolumeError, UsageError
from ostraca_fabric.model.ids import AgentId, StartId, TenantId
from ostraca_fabric.wire.address import UnixAddress, parse_address
from ostraca_fabric.wire.codec import MessageDecoder
from ostraca_fabric.wire.frames import HEADER_BYTES, LENGTH_BYTES, encode
from ostraca_fabric.wire.handshake import WORKER, Access, AgentHandshake, hello_for
from ostraca_fabric.wire.messages import (
    Answer,
    AnyMessage,
    ConnectionLimits,
    Hello,
    LookupDone,
    Message,
    Notice,
    OpenVolume,
    Refused,
    Request,
    Resolve,
    Resolved,
    VolumeOpened,
)

FRAME_BYTES_MAX = 100_000
INFLIGHT_MAX = 3
TOKEN = "open sesame"
SETTINGS = ConnectionSettings(
    connections_max=4, unread_bytes_max=1 << 20, send_buffer_bytes=1 << 16, drain_s=5.0
)
HANDSHAKE = AgentHandshake(
    AgentId("a1"),
    StartId(bytes(16)),
    Access(os.getuid(), tenant_tokens={TenantId("red"): (TOKEN,)}, fabric_tokens=(TOKEN,)),
    ConnectionLimits(frame_bytes_max=FRAME_BYTES_MAX, blocks_max=512, inflight_max=INFLIGHT_MAX),
    transports=("inline",),
)
HELLO = hello_for(WORKER, "red", "test", TOKEN)
ANY: MessageDecoder[AnyMessage] = MessageDecoder(AnyMessage, sender="anyone")

_RAISED = {
    "unknown": UnknownVolumeError("unknown_volume", "no such volume"),
    "usage": UsageError("pass something else"),
    "short-column": MalformedError("a column is short"),
    "bug": ZeroDivisionError(),
}


class Answering:
    """Serves; the name of an ``OpenVolume``'s volume says how."""

    def __init__(self) -> None:
        self.opened: list[ServerConnection] = []
        self.closed: list[ServerConnection] = []
        self.notices: list[Notice] = []
        self.began = asyncio.Event()
        self.release = asyncio.Event()

    async def on_open(self, connection: ServerConnection, hello: Hello, peer_uid: int | None) -> None:
        if hello.name == "wait":
            await self.release.wait()
        if hello.name == "unreachable":
            raise TransportError("the arena can't be reached")
        if hello.name == "broken":
            raise ZeroDivisionError
        self.opened.append(connection)

    async def handle(self, connection: ServerConnection, request: Request) -> Answer:
        if isinstance(request, Resolve):
            return Resolved(request.request, ())
        if not isinstance(request, OpenVolume):
            return LookupDone(request.request, b"", b"")
        if request.name in _RAISED:
            raise _RAISED[request.name]
        match request.name:
            case "long":
                return LookupDone(request.request, bytes(FRAME_BYTES_MAX), b"")
            case "large":
                return LookupDone(request.request, bytes(FRAME_BYTES_MAX // 2), b"")
            case "wait":
                self.began.set()
                await self.release.wait()
            case "until-cancelled":
                self.began.set()
                await connection.cancelled(request.request)
        return VolumeOpened(request.request, 1, 1)

    def on_notice(self, connection: ServerConnection, notice: Notice) -> None:
        self.notices.append(notice)
        if getattr(notice, "shard", "") == "bug":
            raise ZeroDivisionError

    def on_close(self, connection: ServerConnection) -> None:
        self.closed.append(connection)


def open_volume(request: int, name: str) -> OpenVolume:
    return OpenVolume(request, name, LAYOUT, 1 << 16, create=False)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something is so that no message tells of; the test's time-out is the limit."""
    while not condition():  # noqa: ASYNC110 (there is no event to wait for)
        await asyncio.sleep(0)


class RawPeer:
    """Speaks bytes to a server. Make it with ``Dial``, which closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def say(self, *messages: Message) -> None:
        self.write(b"".join(encode(message) for message in messages))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def end(self) -> None:
        """Say that nothing more comes."""
        self._writer.write_eof()

    async def read(self, count: int) -> bytes:
        return await asyncio.wait_for(self._reader.readexactly(count), 10)

    async def heard(self) -> AnyMessage:
        """Return the next message."""
        length, kind = struct.unpack("<IB", await self.read(HEADER_BYTES))
        assert kind == 0
        return ANY.decode(await self.read(length - (HEADER_BYTES - LENGTH_BYTES)))

    async def refused(self) -> str:
        """Return the code of the Refused that is next, and the last."""
        refused = await self.heard()
        assert isinstance(refused, Refused), refused
        assert await self.rest() == b""
        return refused.code

    async def rest(self) -> bytes:
        """Return what comes until the other end closes."""
        try:
            return await asyncio.wait_for(self._reader.read(), 10)
        except ConnectionResetError:
            return b""

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except (BrokenPipeError, ConnectionResetError):
            return


class Dial:
    """Makes raw peers and closes them all in the end."""

    def __init__(self) -> None:
        self._peers: list[RawPeer] = []

    async def __call__(self, address: str) -> RawPeer:
        """Connect and say nothing."""
        where = parse_address(address)
        if isinstance(where, UnixAddress):
            peer = RawPeer(*await asyncio.open_unix_connection(where.path))
        else:
            peer = RawPeer(*await asyncio.open_connection(where.host, where.port))
        self._peers.append(peer)
        return peer

    async def welcomed(self, address: str) -> RawPeer:
        """Connect and shake hands."""
        peer = await self(address)
        peer.say(HELLO)
        await peer.heard()
        return peer

    async def close(self) -> None:
        for peer in self._peers:
            await peer.close()
