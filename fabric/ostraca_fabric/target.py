"""How an enclosure's drives are reached: an NVMe-oF subsystem, and controllers that are paths to it. Pure.

One subsystem per enclosure: a host keeps a few queues to each controller, however many drives are behind.
An enclosure on files has the same words: its subsystem is a directory, whose ``exports.json`` says what it
exports and to whom.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath

from ostraca_fabric.errors import UsageError, shown

SERVICE_DEFAULT = 4420
"""The port that IANA gave to NVMe over Fabrics."""

PORT_MAX = 65535
CONTROLLERS_MAX = 8
NQN_BYTES_MAX = 223
"""NVMe base specification, "NVMe Qualified Names"."""

NQN_PREFIX = "nqn.2025-01.io.ostraca:"
"""What names begin with that nobody chose."""

_NQN = re.compile(r"nqn\.[0-9]{4}-[0-9]{2}\.[a-z0-9.-]+:[A-Za-z0-9._:+-]+\Z")
_NGUID = re.compile(r"[0-9a-f]{32}\Z")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?\Z|[0-9a-fA-F:]+(?:%[A-Za-z0-9._-]+)?\Z")


class Transport(Enum):
    """What a controller is reached by."""

    RDMA = "rdma"
    TCP = "tcp"
    FILES = "files"


@dataclass(frozen=True, slots=True)
class Controller:
    """One path to an enclosure."""

    transport: Transport
    address: str
    """A host's name or address; of an enclosure on files, its directory."""

    service: int = 0
    """The port; 0 of an enclosure on files."""

    def __str__(self) -> str:
        """Return it as people write it."""
        if self.transport is Transport.FILES:
            return f"files://{self.address}"
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.transport.value}://{host}:{self.service}"


@dataclass(frozen=True, slots=True)
class Target:
    """An enclosure's subsystem. Raises UsageError when it can't be one."""

    nqn: str
    controllers: tuple[Controller, ...]
    """Those to prefer first."""

    secret: str = ""
    """The name of the DH-HMAC-CHAP secret that hosts show it: a file in each agent's directory of secrets.
    Empty: it asks for none."""

    def __post_init__(self) -> None:
        """Refuse what names nothing."""
        check_nqn(self.nqn)
        if not 1 <= len(self.controllers) <= CONTROLLERS_MAX:
            raise UsageError(
                f"an enclosure has 1 to {CONTROLLERS_MAX} controllers, not {len(self.controllers)}"
            )
        if len(set(self.controllers)) != len(self.controllers):
            message = "a controller is named twice: name each path once"
            raise UsageError(message)
        if len({each.transport is Transport.FILES for each in self.controllers}) > 1:
            message = "an enclosure is reached through files or over NVMe-oF, not both"
            raise UsageError(message)

    @property
    def is_files(self) -> bool:
        """Whether it is a directory, and not NVMe-oF."""
        return self.controllers[0].transport is Transport.FILES


def parse_controller(text: str) -> Controller:
    """Read a controller as people write it: ``rdma://host:4420``, ``tcp://host:4420``, ``files:///dir``.

    The port may be left out. Raises UsageError that says how one is written.
    """
    scheme, separator, rest = text.partition("://")
    try:
        transport = Transport(scheme if separator else "")
    except ValueError:
        raise UsageError(
            f"{shown(text)} is no controller: write rdma://host:port, tcp://host:port or files:///directory"
        ) from None
    if transport is Transport.FILES:
        path = PurePosixPath(rest)
        if not path.is_absolute() or ".." in path.parts or "\0" in rest or not path.name:
            raise UsageError(f"{shown(text)} names no directory: write files:// and an absolute path")
        return Controller(transport, str(path))
    host, port = _host_and_port(text, rest)
    return Controller(transport, host, port)


def check_nqn(nqn: str) -> str:
    """Return *nqn* when it is a qualified name. Raises UsageError."""
    if not _NQN.match(nqn) or len(nqn.encode()) > NQN_BYTES_MAX:
        raise UsageError(
            f"{shown(nqn)} is no NVMe qualified name: write nqn.<year>-<month>.<domain, reversed>:<name>, as "
            f"in {NQN_PREFIX}shelf-1"
        )
    return nqn


def check_nguid(nguid: str) -> str:
    """Return *nguid* when it identifies a namespace: 32 hexadecimal digits, not all zero.

    Raises UsageError.
    """
    if not _NGUID.match(nguid) or not int(nguid, 16):
        raise UsageError(f"{shown(nguid)} is no NGUID: write its 32 hexadecimal digits, in lower case")
    return nguid


def _host_and_port(text: str, rest: str) -> tuple[str, int]:
    if rest.startswith("["):
        host, _, port = rest[1:].partition("]")
        is_good = not port or port.startswith(":")
        port = port.removeprefix(":")
    else:
        host, _, port = rest.partition(":")
        is_good = ":" not in port
    service = int(port) if port.isascii() and port.isdigit() else (SERVICE_DEFAULT if not port else 0)
    if not is_good or not _HOST.match(host) or not 0 < service <= PORT_MAX:
        raise UsageError(
            f"{shown(text)} names no host and port: write it as tcp://host:{SERVICE_DEFAULT}, an IPv6 "
            "address in brackets"
        )
    return host, service
