"""Target of an enclosure: an NVMe-oF subsystem and its controllers, the paths to it. Pure.

Each enclosure has one subsystem: a host keeps a few queues to each controller, for any number of drives. An
enclosure on files uses the same terms: its subsystem is a directory, with exports and permitted hosts in
``exports.json``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath

from ostraca_fabric.errors import UsageError, shown

SERVICE_DEFAULT = 4420
"""Port assigned by IANA to NVMe over Fabrics."""

PORT_MAX = 65535
CONTROLLERS_MAX = 8
NQN_BYTES_MAX = 223
"""NVMe base specification, "NVMe Qualified Names"."""

NQN_PREFIX = "nqn.2025-01.io.ostraca:"
"""Prefix of generated names."""

_NQN = re.compile(r"nqn\.[0-9]{4}-[0-9]{2}\.[a-z0-9.-]+:[A-Za-z0-9._:+-]+\Z")
_NGUID = re.compile(r"[0-9a-f]{32}\Z")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?\Z|[0-9a-fA-F:]+(?:%[A-Za-z0-9._-]+)?\Z")


class TargetTransport(Enum):
    """Transport of a controller."""

    RDMA = "rdma"
    TCP = "tcp"
    FILES = "files"


@dataclass(frozen=True, slots=True)
class Controller:
    """Path to an enclosure."""

    transport: TargetTransport
    address: str
    """Host name or address; for an enclosure on files, the directory."""

    service: int = 0
    """Port; 0 for an enclosure on files."""

    def __str__(self) -> str:
        """Return the form used in configuration, as parsed by ``parse_controller``."""
        if self.transport is TargetTransport.FILES:
            return f"files://{self.address}"
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.transport.value}://{host}:{self.service}"


@dataclass(frozen=True, slots=True)
class Target:
    """Subsystem of an enclosure. Raises UsageError for invalid values."""

    nqn: str
    controllers: tuple[Controller, ...]
    """In order of preference."""

    secret: str = ""
    """Name of the DH-HMAC-CHAP secret for hosts: a file in each agent's directory of secrets. Empty: no
    secret."""

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        check_nqn(self.nqn)
        if not 1 <= len(self.controllers) <= CONTROLLERS_MAX:
            raise UsageError(
                f"an enclosure has 1 to {CONTROLLERS_MAX} controllers, not {len(self.controllers)}"
            )
        if len(set(self.controllers)) != len(self.controllers):
            raise UsageError("a controller is named twice: name each path once")
        if len({each.transport is TargetTransport.FILES for each in self.controllers}) > 1:
            raise UsageError("an enclosure is reached through files or over NVMe-oF, not both")

    @property
    def is_files(self) -> bool:
        """Whether the target is a directory instead of NVMe-oF."""
        return self.controllers[0].transport is TargetTransport.FILES


def parse_controller(text: str) -> Controller:
    """Parse a controller: ``rdma://host:4420``, ``tcp://host:4420``, ``files:///dir``.

    The port is optional. Raises UsageError with the valid forms.
    """
    scheme, separator, rest = text.partition("://")
    try:
        transport = TargetTransport(scheme if separator else "")
    except ValueError:
        raise UsageError(
            f"{shown(text)} is no controller: write rdma://host:port, tcp://host:port or files:///directory"
        ) from None
    if transport is TargetTransport.FILES:
        path = PurePosixPath(rest)
        if not path.is_absolute() or ".." in path.parts or "\0" in rest or not path.name:
            raise UsageError(f"{shown(text)} names no directory: write files:// and an absolute path")
        return Controller(transport, str(path))
    host, port = _host_and_port(text, rest)
    return Controller(transport, host, port)


def check_nqn(nqn: str) -> str:
    """Return *nqn* if valid as a qualified name. Raises UsageError."""
    if not _NQN.match(nqn) or len(nqn.encode()) > NQN_BYTES_MAX:
        raise UsageError(
            f"{shown(nqn)} is no NVMe qualified name: write nqn.<year>-<month>.<domain, reversed>:<name>, as "
            f"in {NQN_PREFIX}shelf-1"
        )
    return nqn


def check_nguid(nguid: str) -> str:
    """Return *nguid* if valid: 32 hexadecimal digits, not all zero.

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
