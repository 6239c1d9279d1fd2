"""What TCP is asked for."""

from __future__ import annotations

import socket

import pytest

from ostraca_fabric.connection import ConnectionSettings
from ostraca_fabric.connection.lines import tuned


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_host_that_is_gone_is_noticed_also_while_something_is_on_its_way(
    family: socket.AddressFamily,
) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        tuned(sock, ConnectionSettings(keepalive_s=7))
        asked = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        assert [sock.getsockopt(socket.IPPROTO_TCP, each) for each in asked] == [7, 7, 3, 21_000]
