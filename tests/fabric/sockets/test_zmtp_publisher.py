"""Publisher for ZeroMQ subscribers, with a subscriber that knows only the protocol."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import uvloop

from ostraca_fabric.errors import ConnectError
from ostraca_fabric.sockets import zmtp_publisher
from ostraca_fabric.sockets.zmtp_publisher import ZmtpPublisher, frame

GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
SUBSCRIBE = frame(b"\x05READY\x0bSocket-Type\0\0\0\x03SUB", 4) + frame(b"\x01", 0)


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    flags, size = await reader.readexactly(2)
    if flags & 2:
        size = int.from_bytes(bytes([size]) + await reader.readexactly(7), "big")
    return flags & ~2, await reader.readexactly(size)


def place_of(publisher: ZmtpPublisher) -> tuple[str, int]:
    host, port = publisher.address.removeprefix("tcp://").split(":")
    return host, int(port)


async def subscriber(publisher: ZmtpPublisher) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*place_of(publisher))
    writer.write(GREETING)
    greeting = await reader.readexactly(64)
    assert (greeting[0], greeting[9], greeting[10], greeting[12:16]) == (0xFF, 0x7F, 3, b"NULL")
    assert await read_frame(reader) == (4, b"\x05READY\x0bSocket-Type\0\0\0\x03PUB")
    writer.write(SUBSCRIBE)
    return reader, writer


async def test_subscribers_get_all_messages_from_then_on() -> None:
    began: list[int] = []
    async with ZmtpPublisher("tcp://127.0.0.1:0", on_subscriber=lambda: began.append(1)) as publisher:
        publisher.send((b"", b"before"))
        readers = [await subscriber(publisher) for _ in range(2)]
        publisher.send((b"", b"number", b"x" * 300))
        for reader, writer in readers:
            assert [await read_frame(reader) for _ in range(3)] == [(1, b""), (1, b"number"), (0, b"x" * 300)]
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        assert began == [1, 1]
    assert not publisher.subscribers


def test_agents_on_uvloop_publish_too() -> None:
    uvloop.run(test_subscribers_get_all_messages_from_then_on())


async def test_connections_beyond_the_limit_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmtp_publisher, "_CONNECTIONS_MAX", 1)
    async with ZmtpPublisher("tcp://127.0.0.1:0", on_subscriber=lambda: None) as publisher:
        reader, writer = await subscriber(publisher)
        beyond = await asyncio.open_connection(*place_of(publisher))
        assert await ended(beyond[0]) == b""
        publisher.send((b"still here",))
        assert await read_frame(reader) == (0, b"still here")
        writer.close()
        beyond[1].close()


async def test_a_connection_without_a_greeting_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmtp_publisher, "_GREETING_S", 0.01)
    async with ZmtpPublisher("tcp://127.0.0.1:0", on_subscriber=lambda: None) as publisher:
        reader, writer = await asyncio.open_connection(*place_of(publisher))
        assert await ended(reader) == zmtp_publisher._GREETING
        assert not publisher.connections
        writer.close()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return all bytes until the end of a connection, which a reset may be."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while more := await reader.read(100):
            received += more
    return received


async def test_a_subscriber_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmtp_publisher, "_UNREAD_BYTES_MAX", 1 << 20)
    async with ZmtpPublisher("tcp://127.0.0.1:0", on_subscriber=lambda: None) as publisher:
        _, writer = await subscriber(publisher)
        for _ in range(200):
            publisher.send((bytes(1 << 18),))
            await asyncio.sleep(0)
        assert not publisher.subscribers
        writer.close()


async def test_the_end_disconnects_also_before_the_greeting() -> None:
    began: list[int] = []
    async with ZmtpPublisher("tcp://127.0.0.1:0", on_subscriber=lambda: began.append(1)) as publisher:
        host, port = publisher.address.removeprefix("tcp://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await reader.readexactly(64)
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()
    assert not began


async def test_an_address_in_use_is_named() -> None:
    async with ZmtpPublisher("tcp://127.0.0.1:0", on_subscriber=lambda: None) as first:
        with pytest.raises(ConnectError, match=first.address):
            await ZmtpPublisher(first.address, on_subscriber=lambda: None).__aenter__()
