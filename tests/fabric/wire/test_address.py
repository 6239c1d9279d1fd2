from __future__ import annotations

import pytest

from ostraca_fabric.errors import UsageError
from ostraca_fabric.wire.address import Address, TcpAddress, TlsAddress, UnixAddress, parse_address

GOOD = [
    ("unix:///run/ostraca/agent.sock", UnixAddress("/run/ostraca/agent.sock")),
    ("tcp://localhost:7400", TcpAddress("localhost", 7400)),
    ("tcp://127.0.0.1:0", TcpAddress("127.0.0.1", 0)),
    ("tcp://[::1]:7400", TcpAddress("::1", 7400)),
    ("tls://agent-1.pod:7400", TlsAddress("agent-1.pod", 7400)),
    ("tls://[::1]:7400", TlsAddress("::1", 7400)),
]
BAD = [
    "",
    "agent.sock",
    "/run/agent.sock",
    "http://localhost:80",
    "unix://relative.sock",
    "unix://",
    "unix:///run/",
    "unix:///a\0b",
    "unix:///" + "x" * 107,
    "tcp://localhost",
    "tcp://:7400",
    "tcp://localhost:",
    "tcp://localhost:65536",
    "tcp://localhost:-1",
    "tcp://localhost:\u0663",
    "tcp://::1:7400",
    "tls://agent-1.pod",
    "tcp://agent..rack:7400",
    "tcp://" + "a" * 64 + ".example:7400",
]


@pytest.mark.parametrize(("text", "address"), GOOD)
def test_an_address_is_read_and_written_back(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


def test_brackets_may_hold_an_address_of_ipv4() -> None:
    assert parse_address("tls://[10.78.1.5]:7400") == TlsAddress("10.78.1.5", 7400)


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_address_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(UsageError, match=r"unix://|tcp://|shorter"):
        parse_address(text)
