"""The server of pages: what it answers, and what strangers can't make it do."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import pytest

from ostraca_fabric.errors import ConnectError, UsageError
from ostraca_fabric.telemetry.http.app import HttpPage, HttpSettings, Pages, text_page
from ostraca_fabric.telemetry.http.server import HttpServer
from ostraca_fabric.wire.address import TcpAddress

SETTINGS = HttpSettings(connections_max=4, head_bytes_max=4096)
LOOPBACK = TcpAddress("127.0.0.1", 0)


async def page() -> HttpPage:
    return text_page("hello")


@pytest.fixture
def server() -> Iterator[HttpServer]:
    started = HttpServer(Pages({"/page": page}), LOOPBACK, SETTINGS)
    started.start()
    yield started
    started.stop()


def connected(server: HttpServer) -> socket.socket:
    found = urlsplit(server.url)
    assert found.hostname is not None
    assert found.port is not None
    return socket.create_connection((found.hostname, found.port), timeout=10)


def answer(server: HttpServer, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)) as connection:
        return asked(connection, method, path, body)


def asked(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
) -> tuple[int, bytes]:
    connection.request(method, path, body)
    response = connection.getresponse()
    return response.status, response.read()


def ends(connection: socket.socket) -> bool:
    """Wait for the other end to close."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_pages_are_answered_by_get_and_head_and_nothing_else_is(server: HttpServer) -> None:
    assert answer(server, "GET", "/page") == (200, b"hello\n")
    assert answer(server, "GET", "/page?x=1") == (200, b"hello\n")
    assert answer(server, "HEAD", "/page") == (200, b"")
    assert answer(server, "GET", "/") == (200, b"pages:\n  /page\n")
    assert answer(server, "GET", "/none") == (404, b"there is no '/none'; there are:\n  /page\n")
    assert answer(server, "POST", "/page", b"x" * 100) == (405, b"only GET and HEAD are answered\n")


def test_a_head_that_is_too_long_is_refused(server: HttpServer) -> None:
    with connected(server) as connection:
        connection.sendall(b"GET /page HTTP/1.1\r\nHost: x\r\nLong: " + b"x" * 8192)
        assert connection.recv(64).startswith(b"HTTP/1.1 400 ")


def test_a_connection_that_says_nothing_or_little_is_closed_in_time() -> None:
    started = HttpServer(Pages({"/page": page}), LOOPBACK, HttpSettings(connection_s=0.1))
    started.start()
    with connected(started) as silent, connected(started) as slow, connected(started) as posting:
        slow.sendall(b"GET /page HT")
        posting.sendall(b"GET /page HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
        assert ends(silent)
        assert ends(slow)
        assert ends(posting)
    started.stop()


def test_connections_beyond_the_limit_are_cut_and_the_others_are_served(server: HttpServer) -> None:
    netloc = urlsplit(server.url).netloc
    with ExitStack() as stack:
        served = [
            stack.enter_context(closing(http.client.HTTPConnection(netloc, timeout=10)))
            for _ in range(SETTINGS.connections_max)
        ]
        for connection in served:  # each is known to have been let in
            assert asked(connection, "GET", "/page")[0] == 200
        assert ends(stack.enter_context(connected(server)))
        assert asked(served[0], "GET", "/page")[0] == 200


def test_an_address_in_use_is_said_at_once(server: HttpServer) -> None:
    found = urlsplit(server.url)
    assert found.port is not None
    with pytest.raises(ConnectError, match="can't listen at"):
        HttpServer(Pages({}), TcpAddress("127.0.0.1", found.port), SETTINGS).start()


def test_a_stopped_server_is_gone_even_when_somebody_is_connected() -> None:
    started = HttpServer(Pages({"/page": page}), LOOPBACK, SETTINGS)
    started.stop()  # before it was started: nothing to do
    started.start()
    with connected(started) as connection:
        started.stop()
        assert ends(connection)
    with pytest.raises(ConnectionRefusedError):
        connected(started)


def test_limits_that_let_nothing_through_are_refused() -> None:
    with pytest.raises(UsageError):
        HttpSettings(connections_max=0)
