from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from tests.fabric.connection.peers import (
    FRAME_BYTES_MAX,
    HELLO,
    INFLIGHT_MAX,
    SETTINGS,
    Answering,
    open_volume,
)

from ostraca_fabric.connection import Server, connect
from ostraca_fabric.connection.client import Aside
from ostraca_fabric.errors import (
    ConnectError,
    FrameTooLongError,
    ProtocolError,
    RefusedError,
    UsageError,
)
from ostraca_fabric.wire.messages import (
    Fetch,
    GetProgress,
    Ping,
    Pong,
    Put,
    Settled,
    VolumeOpened,
)


async def test_answers_find_their_requests_in_any_order(server: Server, handler: Answering) -> None:
    connection = await connect(server.address, HELLO)
    slow = asyncio.ensure_future(connection.ask(open_volume(1, "wait"), 5.0))
    await handler.began.wait()
    assert await connection.ask(open_volume(2, "fine"), 5.0) == VolumeOpened(2, 1, 1)
    handler.release.set()
    assert await slow == VolumeOpened(1, 1, 1)
    connection.close()


async def test_ids_it_gives_differ(server: Server) -> None:
    connection = await connect(server.address, HELLO)
    assert len({connection.next_request_id() for _ in range(100)}) == 100
    connection.close()


async def test_a_time_out_cancels_the_request_and_the_connection_goes_on(server: Server) -> None:
    connection = await connect(server.address, HELLO)
    (at_server,) = server.connections
    with pytest.raises(TimeoutError, match="did not answer"):
        await connection.ask(open_volume(1, "until-cancelled"), 0.01)
    assert await connection.ask(Ping(2), 5.0) == Pong(2)
    assert at_server.inflight == 0, "the Cancel came before the Ping"
    connection.close()


async def test_whoever_waits_when_the_agent_goes_is_told(server: Server, handler: Answering) -> None:
    connection = await connect(server.address, HELLO)
    waiting = asyncio.ensure_future(connection.ask(open_volume(1, "until-cancelled"), 5.0))
    await handler.began.wait()
    assert await server.close()
    with pytest.raises(ConnectError, match="is closed"):
        await waiting
    with pytest.raises(ConnectError, match="is closed"):
        await connection.ask(Ping(2), 5.0)


async def test_the_reason_the_agent_gave_is_in_the_error(server: Server) -> None:
    connection = await connect(server.address, HELLO)
    connection.send(HELLO)
    with pytest.raises(ConnectError, match="Hello is not accepted from a worker"):
        await connection.ask(Ping(1), 5.0)


async def test_no_more_is_asked_than_the_agent_takes(server: Server, handler: Answering) -> None:
    connection = await connect(server.address, HELLO)
    asked = [
        asyncio.ensure_future(connection.ask(open_volume(number, "wait"), 5.0))
        for number in range(INFLIGHT_MAX)
    ]
    await handler.began.wait()
    with pytest.raises(RefusedError, match="in progress") as caught:
        await connection.ask(Ping(99), 5.0)
    assert caught.value.code == "overloaded"
    handler.release.set()
    await asyncio.gather(*asked)
    connection.close()


async def test_an_id_used_twice_is_a_usage_error(server: Server, handler: Answering) -> None:
    connection = await connect(server.address, HELLO)
    first = asyncio.ensure_future(connection.ask(open_volume(1, "wait"), 5.0))
    await handler.began.wait()
    with pytest.raises(UsageError, match="next_request_id"):
        await connection.ask(Ping(1), 5.0)
    handler.release.set()
    assert await first == VolumeOpened(1, 1, 1)
    connection.close()


async def test_a_request_too_long_for_the_agent_is_not_sent(server: Server) -> None:
    connection = await connect(server.address, HELLO)
    with pytest.raises(FrameTooLongError):
        await connection.ask(Put(1, 1, 1.0, 1, (), bytes(FRAME_BYTES_MAX), b"", b"", 1), 5.0)
    assert await connection.ask(Ping(1), 5.0) == Pong(1)
    connection.close()


async def test_what_is_said_beside_answers_comes_in_order(server: Server, handler: Answering) -> None:
    asides: list[Aside] = []
    connection = await connect(server.address, HELLO, on_aside=asides.append)
    said: list[Aside] = [Fetch(1, b"", b""), GetProgress(1, b"", b""), Settled(1)]
    for aside in said:
        handler.opened[0].send(aside)
    assert await connection.ask(Ping(1), 5.0) == Pong(1)
    assert asides == said
    connection.close()


@pytest.mark.parametrize(
    "address", ["unix://{}/none", "tcp://127.0.0.1:1", "tcp://no-such-host.invalid:7400"]
)
async def test_where_nobody_listens_the_error_says_where(tmp_path: Path, address: str) -> None:
    where = address.format(tmp_path)
    with pytest.raises(ConnectError) as caught:
        await connect(where, HELLO)
    assert where in str(caught.value)


@pytest.mark.parametrize(
    ("words", "error"),
    [(b"HTTP/1.1 400 Bad Request", ProtocolError), (b"", ConnectError), (None, ConnectError)],
)
async def test_something_that_is_no_agent_is_found_out(
    tmp_path: Path, words: bytes | None, error: type[Exception]
) -> None:
    """It answers with other words, hangs up, or says nothing."""
    accepted: list[asyncio.StreamWriter] = []

    async def on_connect(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        if words is not None:
            writer.write(words)
            writer.close()

    stranger = await asyncio.start_unix_server(on_connect, tmp_path / "s")
    with pytest.raises(error):
        await connect(f"unix://{tmp_path}/s", HELLO, settings=dataclasses.replace(SETTINGS, handshake_s=0.2))
    for writer in accepted:
        writer.close()
        await writer.wait_closed()
    stranger.close()
    await stranger.wait_closed()
