from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from tests.fabric.connection.bulk import bulk_frame
from tests.fabric.connection.peers import (
    FRAME_BYTES_MAX,
    HANDSHAKE,
    HELLO,
    INFLIGHT_MAX,
    SETTINGS,
    TOKEN,
    Answering,
    Dial,
    open_volume,
    until,
)

from ostraca_fabric.connection import ClientConnection, Server, ServerConnection, connect, serve
from ostraca_fabric.errors import AuthenticationError, ConnectError, UsageError, VersionError
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.wire.frames import encode
from ostraca_fabric.wire.handshake import AGENT, LEAVING, OPERATOR, WORKER, hello_for
from ostraca_fabric.wire.messages import (
    Cancel,
    Damage,
    Failure,
    Hello,
    Leaving,
    Ping,
    Pong,
    Release,
    Resolve,
    Resolved,
    SessionEnded,
    StatusRequest,
    VolumeOpened,
)


@pytest.fixture
async def healthy(server: Server) -> AsyncIterator[ClientConnection]:
    """Open a connection that must not notice attacks on others."""
    connection = await connect(server.address, HELLO)
    yield connection
    assert await connection.ask(Ping(1), 5.0) == Pong(1)
    connection.close()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_a_ping_is_answered_over_either_kind_of_socket(kind: str, tmp_path: Path) -> None:
    asked = f"unix://{tmp_path}/s" if kind == "unix" else "tcp://127.0.0.1:0"
    server = await serve(asked, Answering(), HANDSHAKE, SETTINGS)
    connection = await connect(server.address, HELLO)
    assert connection.welcome.agent == "a1"
    assert await connection.ask(Ping(7), 5.0) == Pong(7)
    connection.close()
    assert await server.close()


async def test_port_zero_is_answered_with_the_real_port() -> None:
    server = await serve("tcp://127.0.0.1:0", Answering(), HANDSHAKE, SETTINGS)
    assert not server.address.endswith(":0")
    assert await server.close()


async def test_messages_over_tcp_are_sent_at_once() -> None:
    server = await serve("tcp://127.0.0.1:0", handler := Answering(), HANDSHAKE, SETTINGS)
    connection = await connect(server.address, HELLO)
    for end in (connection, handler.opened[0]):
        assert end._transport is not None
        assert end._transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    connection.close()
    assert await server.close()


async def test_a_socket_left_by_a_dead_server_is_replaced_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = await serve(f"unix://{path}", Answering(), HANDSHAKE, SETTINGS)
    connection = await connect(server.address, HELLO)
    connection.close()
    assert await server.close()
    assert not path.exists()


async def test_a_socket_where_somebody_answers_is_left_alone(
    server: Server, healthy: ClientConnection
) -> None:
    with pytest.raises(ConnectError, match="another server answers"):
        await serve(server.address, Answering(), HANDSHAKE, SETTINGS)


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(UsageError, match="is no socket"):
        await serve(f"unix://{tmp_path}/s", Answering(), HANDSHAKE, SETTINGS)
    assert (tmp_path / "s").read_text() == "precious"


async def test_a_closing_server_does_not_remove_the_socket_of_its_successor(tmp_path: Path) -> None:
    server = await serve(f"unix://{tmp_path}/s", Answering(), HANDSHAKE, SETTINGS)
    (tmp_path / "s").unlink()
    successor = await serve(f"unix://{tmp_path}/s", Answering(), HANDSHAKE, SETTINGS)
    assert await server.close()
    connection = await connect(successor.address, HELLO)
    connection.close()
    assert await successor.close()


async def test_a_port_in_use_is_a_connect_error_that_names_it() -> None:
    server = await serve("tcp://127.0.0.1:0", Answering(), HANDSHAKE, SETTINGS)
    with pytest.raises(ConnectError, match=server.address):
        await serve(server.address, Answering(), HANDSHAKE, SETTINGS)
    assert await server.close()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"token": "wrong"}, AuthenticationError),
        ({"version_oldest": 9, "version_newest": 9}, VersionError),
        ({"role": "king"}, ConnectError),
        ({"name": "unreachable"}, ConnectError),
        ({"name": "broken"}, ConnectError),
    ],
    ids=str,
)
async def test_who_is_refused_is_told_why(
    server: Server, handler: Answering, change: dict[str, str], error: type[ConnectError]
) -> None:
    with pytest.raises(error) as caught:
        await connect(server.address, msgspec.structs.replace(HELLO, **change))
    assert type(caught.value) is error
    assert handler.opened == []


async def test_the_kernel_vouches_for_the_own_user_but_not_over_tcp(
    server: Server,
) -> None:
    hello = hello_for("worker", "any-tenant", "test")
    connection = await connect(server.address, hello)
    connection.close()
    over_tcp = await serve("tcp://127.0.0.1:0", Answering(), HANDSHAKE, SETTINGS)
    with pytest.raises(AuthenticationError, match="over TCP needs a token"):
        await connect(over_tcp.address, hello)
    assert await over_tcp.close()


async def test_where_no_descriptor_is_left_new_connections_are_closed_at_once_and_others_go_on(
    server: Server,
    healthy: ClientConnection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_more(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as few:
        few.setattr("ostraca_fabric.connection.streams.os.dup", no_more)
        async with asyncio.timeout(5):  # not until the handshake is late
            with pytest.raises(ConnectError):
                await connect(server.address, HELLO)
            reader, writer = await asyncio.open_unix_connection(server.address.removeprefix("unix://"))
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
    assert "Closed a new connection: no usable socket: Too many open files" in caplog.messages
    later = await connect(server.address, HELLO)
    later.close()


async def test_anything_but_hello_first_is_refused(
    server: Server, healthy: ClientConnection, dial: Dial
) -> None:
    peer = await dial(server.address)
    peer.say(Ping(1))
    assert await peer.refused() == "protocol"


async def test_a_second_hello_is_refused(server: Server, healthy: ClientConnection, dial: Dial) -> None:
    peer = await dial.welcomed(server.address)
    peer.say(HELLO)
    assert await peer.refused() == "protocol"


async def test_a_request_before_the_welcome_is_refused(
    server: Server, handler: Answering, dial: Dial
) -> None:
    peer = await dial(server.address)
    peer.say(msgspec.structs.replace(HELLO, name="wait"))
    peer.say(Ping(1))
    assert await peer.refused() == "protocol"
    handler.release.set()


async def test_who_says_nothing_is_refused_in_time(tmp_path: Path, dial: Dial) -> None:
    hasty = dataclasses.replace(SETTINGS, handshake_s=0.02)
    server = await serve(f"unix://{tmp_path}/s", Answering(), HANDSHAKE, hasty)
    peer = await dial(server.address)
    assert await peer.refused() == "protocol"
    await peer.close()
    assert await server.close()


async def test_one_connection_too_many_is_refused_and_there_is_room_again_later(
    server: Server, dial: Dial
) -> None:
    peers = [await dial.welcomed(server.address) for _ in range(SETTINGS.connections_max)]
    with pytest.raises(ConnectError, match="limit"):
        await connect(server.address, HELLO)
    gone = next(iter(server.connections))
    gone.close()
    await gone.wait_closed()
    peers.append(await dial.welcomed(server.address))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (struct.pack("<IB", 4, 0) + b"\xc1\xc1\xc1", "malformed"),
        (struct.pack("<IB", 4, 0) + b"\x92\x63\x01", "malformed"),
        (struct.pack("<IB", 4, 9), "malformed"),
        (struct.pack("<IB", FRAME_BYTES_MAX + 1, 0), "frame_too_long"),
        (bytes(encode(Resolve(1, 1.0, 1.0, ()))), "protocol"),
        (bytes(encode(open_volume(1, "wait"))) * 2, "protocol"),
    ],
    ids=["junk", "unknown type", "unknown kind", "too long", "an agent's request", "a request id used twice"],
)
async def test_who_breaks_the_rules_is_refused_and_nobody_else_notices(
    server: Server,
    handler: Answering,
    healthy: ClientConnection,
    data: bytes,
    code: str,
    caplog: pytest.LogCaptureFixture,
    dial: Dial,
) -> None:
    peer = await dial.welcomed(server.address)
    peer.write(data)
    assert await peer.refused() == code
    handler.release.set()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert code in record.getMessage()


async def test_a_bulk_frame_nobody_asked_for_is_discarded(server: Server, dial: Dial) -> None:
    peer = await dial.welcomed(server.address)
    peer.write(bulk_frame(5, (0, bytes(300_000)), (1, bytes(10))))
    peer.say(Ping(2))
    assert await peer.heard() == Pong(2)


async def test_requests_over_the_limit_are_answered_overloaded_and_the_connection_goes_on(
    server: Server, handler: Answering, dial: Dial
) -> None:
    peer = await dial.welcomed(server.address)
    peer.say(*(open_volume(number, "wait") for number in range(INFLIGHT_MAX + 1)))
    over = await peer.heard()
    assert isinstance(over, Failure)
    assert (over.request, over.code) == (INFLIGHT_MAX, "overloaded")
    handler.release.set()
    assert [await peer.heard() for _ in range(INFLIGHT_MAX)] == [
        VolumeOpened(number, 1, 1) for number in range(INFLIGHT_MAX)
    ]
    peer.say(open_volume(INFLIGHT_MAX, "fine"))
    assert await peer.heard() == VolumeOpened(INFLIGHT_MAX, 1, 1)


async def test_a_cancelled_request_still_gets_its_final_message(
    server: Server, handler: Answering, dial: Dial
) -> None:
    peer = await dial.welcomed(server.address)
    peer.say(open_volume(1, "until-cancelled"))
    await handler.began.wait()
    peer.say(Cancel(99), Cancel(1))
    assert await peer.heard() == VolumeOpened(1, 1, 1)


async def test_the_end_of_a_connection_cancels_its_requests_and_is_told_once(
    server: Server, handler: Answering, dial: Dial
) -> None:
    peer = await dial.welcomed(server.address)
    peer.say(open_volume(1, "until-cancelled"))
    await handler.began.wait()
    (connection,) = server.connections
    assert connection.inflight == 1
    await peer.close()
    await connection.wait_closed()
    assert await server.close()
    assert connection.inflight == 0
    assert handler.closed == [connection]


async def test_a_connection_that_ends_while_it_opens_is_closed_once_it_was_opened(
    server: Server, handler: Answering, dial: Dial
) -> None:
    peer = await dial(server.address)
    peer.say(msgspec.structs.replace(HELLO, name="wait"))
    peer.say(Ping(1))
    assert await peer.refused() == "protocol"
    assert handler.closed == []
    handler.release.set()
    await peer.close()
    assert await server.close()
    assert handler.opened == handler.closed != []


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("unknown", "unknown_volume"),
        ("usage", "usage"),
        ("short-column", "malformed"),
        ("long", "frame_too_long"),
        ("bug", "internal"),
    ],
)
async def test_what_a_handler_raises_is_answered_with_its_code(
    server: Server, name: str, code: str, caplog: pytest.LogCaptureFixture, dial: Dial
) -> None:
    peer = await dial.welcomed(server.address)
    peer.say(open_volume(1, name))
    failed = await peer.heard()
    assert isinstance(failed, Failure)
    assert (failed.request, failed.code) == (1, code)
    assert [record.exc_info is not None for record in caplog.records] == [True] * (code == "internal")
    peer.say(open_volume(1, "fine"))
    assert await peer.heard() == VolumeOpened(1, 1, 1)


async def test_an_agents_connection_serves_owners_requests_and_notices(
    server: Server, handler: Answering
) -> None:
    connection = await connect(server.address, hello_for(AGENT, "", "a2", TOKEN))
    notices: list[Release | Damage | SessionEnded] = [
        Release(()),
        Damage("bug", bytes(16), 0, 1, 1, bytes(16), seed=0),
        SessionEnded(()),
    ]
    for notice in notices:
        connection.tell(notice)
    assert await connection.ask(Resolve(5, 1.0, 1.0, ()), 5.0) == Resolved(5, ())
    assert handler.notices == notices
    connection.close()


async def test_an_operator_may_ask_for_the_status(server: Server) -> None:
    connection = await connect(server.address, hello_for(OPERATOR, "", "me"))
    assert await connection.ask(Ping(1), 5.0) == Pong(1)
    with pytest.raises(ConnectError, match="LookupDone is not accepted"):
        await connection.ask(StatusRequest(5), 5.0)


async def test_who_does_not_read_its_answers_is_cut_off(
    server: Server,
    handler: Answering,
    healthy: ClientConnection,
    caplog: pytest.LogCaptureFixture,
    dial: Dial,
) -> None:
    peer = await dial.welcomed(server.address)
    stuck = handler.opened[-1]
    for number in range(200):
        peer.say(open_volume(number, "large"))
        if not stuck.is_open:
            break
        await asyncio.sleep(0)
    await asyncio.wait_for(stuck.wait_closed(), 10)
    assert any("reads no messages" in record.getMessage() for record in caplog.records)


async def test_a_server_that_closes_waits_for_requests_under_way(
    server: Server, handler: Answering, dial: Dial
) -> None:
    peer = await dial.welcomed(server.address)
    peer.say(open_volume(1, "wait"))
    await handler.began.wait()
    closing = asyncio.ensure_future(server.close())
    assert await peer.rest() == b""
    assert not closing.done()
    handler.release.set()
    assert await closing


async def test_nobody_writes_the_log_but_the_agent(
    server: Server, dial: Dial, caplog: pytest.LogCaptureFixture
) -> None:
    forged = "x\nWARNING: all is well" + "y" * 5000
    peer = await dial(server.address)
    peer.say(msgspec.structs.replace(HELLO, role=forged, name=forged))
    assert await peer.refused() == "protocol"
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 1000


async def test_who_would_not_be_let_in_any_more_is_put_out_and_others_stay(
    server: Server, healthy: ClientConnection
) -> None:
    handshake, other = server.handshake, "another token"
    access = dataclasses.replace(handshake.access, tenant_tokens={TenantId("red"): (TOKEN, other)})
    server.readmit(access)
    second = await connect(server.address, hello_for(WORKER, "red", "test", other))
    server.readmit(handshake.access)
    await asyncio.wait_for(second.wait_closed(), 5)
    with pytest.raises(ConnectError, match="credentials revoked"):
        await second.ask(Ping(1), 5.0)
    with pytest.raises(AuthenticationError):
        await connect(server.address, hello_for(WORKER, "red", "test", other))


async def test_who_is_being_let_in_while_the_rules_change_is_put_out_too() -> None:
    class Announcing(Answering):
        async def on_open(self, connection: ServerConnection, hello: Hello, peer_uid: int | None) -> None:
            self.began.set()
            await super().on_open(connection, hello, peer_uid)

    handler = Announcing()
    server = await serve("tcp://127.0.0.1:0", handler, HANDSHAKE, SETTINGS)
    waiting = hello_for(WORKER, "red", "wait", TOKEN)
    opening = asyncio.create_task(connect(server.address, waiting))
    await asyncio.wait_for(handler.began.wait(), 10)
    server.readmit(dataclasses.replace(HANDSHAKE.access, tenant_tokens={}))
    handler.release.set()  # too late
    with pytest.raises(AuthenticationError, match="credentials revoked"):
        await asyncio.wait_for(opening, 5)
    assert await server.close()


async def test_the_process_of_a_worker_that_has_hung_up_meanwhile_is_known(tmp_path: Path) -> None:
    seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    class Naming(Answering):
        async def on_open(self, connection: ServerConnection, hello: Hello, peer_uid: int | None) -> None:
            self.began.set()
            await self.release.wait()
            seen.set_result(connection.peer_process)

    handler = Naming()
    server = await serve(f"unix://{tmp_path}/s", handler, HANDSHAKE, SETTINGS)
    opening = asyncio.create_task(connect(server.address, hello_for(WORKER, "red", "test", TOKEN)))
    await asyncio.wait_for(handler.began.wait(), 10)
    opening.cancel()
    await asyncio.wait([opening])
    await until(lambda: not server.connections)
    handler.release.set()
    assert await asyncio.wait_for(seen, 10) == os.getpid()
    assert await server.close()


class TestLeaving:
    """A server whose agent ends in order."""

    @pytest.fixture
    async def leaving(self, tmp_path: Path) -> AsyncIterator[Server]:
        handshake = dataclasses.replace(HANDSHAKE, features=(LEAVING,))
        server = await serve(f"unix://{tmp_path}/s", Answering(), handshake, SETTINGS)
        yield server
        assert await server.close()

    async def test_workers_that_know_another_agent_are_told_and_waited_for(self, leaving: Server) -> None:
        told: list[object] = []
        knows = msgspec.structs.replace(HELLO, features=(LEAVING,))
        before = await connect(leaving.address, knows, on_aside=told.append)
        leaving.announce_leaving()
        later = await connect(leaving.address, knows, on_aside=told.append)
        for connection in (before, later):
            assert await connection.ask(open_volume(1, "served"), 5.0) == VolumeOpened(1, 1, 1)
        assert told == [Leaving(), Leaving()]
        released = asyncio.ensure_future(leaving.release(within_s=60.0))
        before.close()
        await before.wait_closed()
        assert await later.ask(Ping(2), 5.0) == Pong(2)
        assert not released.done()
        later.close()
        await released

    async def test_others_are_neither_told_nor_waited_for(self, leaving: Server) -> None:
        told: list[object] = []
        connection = await connect(leaving.address, HELLO, on_aside=told.append)
        leaving.announce_leaving()
        await leaving.release(within_s=60.0)
        assert await connection.ask(Ping(1), 5.0) == Pong(1)
        assert told == []
        connection.close()

    async def test_who_does_not_go_is_waited_for_no_longer_than_said(self, leaving: Server) -> None:
        connection = await connect(leaving.address, msgspec.structs.replace(HELLO, features=(LEAVING,)))
        leaving.announce_leaving()
        await leaving.release(within_s=0.01)
        connection.close()
