"""Addresses of agents.

The forms are ``unix:///path/to/socket``, ``tcp://host:port`` and ``tls://host:port``.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from ostraca_fabric.errors import UsageError

UNIX_PATH_BYTES_MAX = 107
"""Longest socket path in Linux."""

PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """Socket in the file system of this machine."""

    path: str

    def __str__(self) -> str:
        """Return the address in the form used in settings."""
        return f"unix://{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Port of a host. Port 0 is for listening only, and means any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return the address in the form used in settings."""
        return f"tcp://{_named(self.host)}:{self.port}"


@dataclass(frozen=True, slots=True)
class TlsAddress:
    """Port of a host with TLS. The host's certificate must carry the host as written here."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return the address in the form used in settings."""
        return f"tls://{_named(self.host)}:{self.port}"


Address = UnixAddress | TcpAddress | TlsAddress


def parse_address(text: str) -> Address:
    """Parse an address. Raises UsageError with the accepted forms."""
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "unix":
        return _unix(text, rest)
    if separator and scheme == "tcp":
        return TcpAddress(*_host_and_port(text, rest))
    if separator and scheme == "tls":
        return TlsAddress(*_host_and_port(text, rest))
    raise UsageError(
        f"{text!r} is not an address: write unix:///path/to/socket, tcp://host:port or tls://host:port"
    )


def is_loopback(host: str) -> bool:
    """Return whether a host name is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _named(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _unix(text: str, path: str) -> UnixAddress:
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise UsageError(
            f"{text!r} names no socket: write unix:// and an absolute path, as in unix:///run/agent.sock"
        )
    if len(path.encode()) > UNIX_PATH_BYTES_MAX:
        raise UsageError(
            f"the path in {text!r} is too long: Linux allows {UNIX_PATH_BYTES_MAX} bytes, take a shorter one"
        )
    return UnixAddress(path)


def _host_and_port(text: str, rest: str) -> tuple[str, int]:
    host, separator, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise UsageError(f"{text!r} has a bare IPv6 address: write it in brackets, as in tcp://[::1]:7400")
    # isascii: int() would also take digits of other scripts.
    if not (separator and host and port.isascii() and port.isdigit() and int(port) <= PORT_MAX):
        raise UsageError(
            f"{text!r} names no host and port: write it as tcp://host:port, the port being 0 to {PORT_MAX}"
        )
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise UsageError(f"{text!r} names no host: each part of a name has 1 to 63 characters") from error
    return host, int(port)
