"""What TCP is asked for."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from collections.abc import Iterator

import pytest

from ostraca_fabric.connection import ConnectionSettings
from ostraca_fabric.connection.streams import tuned


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_host_that_is_gone_is_noticed_also_while_something_is_on_its_way(
    family: socket.AddressFamily,
) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        tuned(sock, ConnectionSettings(keepalive_s=7))
        asked = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        assert [sock.getsockopt(socket.IPPROTO_TCP, each) for each in asked] == [7, 7, 3, 21_000]


@contextlib.contextmanager
def _towards_one_who_takes_nothing(settings: ConnectionSettings) -> Iterator[socket.socket]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sock,
        server.accept()[0],
    ):
        tuned(sock, settings)
        sock.setblocking(False)
        yield sock


def test_a_process_that_takes_nothing_is_given_up_once_there_is_no_more_room_on_the_way_to_it() -> None:
    settings = ConnectionSettings(keepalive_s=1)
    with (
        _towards_one_who_takes_nothing(settings) as full,
        _towards_one_who_takes_nothing(settings) as patient,
    ):
        patient.send(b"fits")
        with contextlib.suppress(BlockingIOError):
            while True:
                full.send(bytes(1 << 16))
        ended = select.poll()
        ended.register(full, select.POLLERR)
        assert ended.poll(15_000)
        assert full.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ETIMEDOUT
        assert patient.send(b"fits too") == len(b"fits too")
