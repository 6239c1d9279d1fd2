"""What a worker asks of TCP on its way to an agent."""

from __future__ import annotations

import socket
import time

from ostraca._connection.dial import _connect_socket
from ostraca_fabric.wire.address import parse_address


def test_an_agents_host_that_went_dark_is_noticed_within_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = parse_address(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        with _connect_socket(address, time.monotonic() + 10.0) as sock:
            asked = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
            assert [sock.getsockopt(socket.IPPROTO_TCP, each) for each in asked] == [3, 1, 6_000]
