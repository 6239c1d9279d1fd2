"""Everything an operator may set of ``ostraca serve admin``."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from ostraca.cli.etcd_place import EtcdPlace
from ostraca.cli.http import http_address
from ostraca.cli.serve.daemon_settings import TlsPlace, named_fabric
from ostraca_fabric.errors import UsageError
from ostraca_fabric.ids import checked_name
from ostraca_fabric.limits import check_above_zero


@dataclass(frozen=True, slots=True)
class AdminLimits:
    """What the service may cost."""

    connections_max: int = 64
    """Connections at once. People, scripts and consoles; each event stream holds one."""

    body_bytes_max: int = 512 << 10
    """Longest body of a request. A prefetch of 4096 blocks with hashes of 32 bytes takes 280 KiB, an
    enclosure with every drive named 5."""

    head_bytes_max: int = 16 << 10
    """Longest head of a request."""

    audit_max: int = 2000
    """Entries of the audit log that are kept in etcd, the newest; all of them are in this service's log as
    well. Agents are told of each, so that more of them make each start of an agent a little longer."""

    operations_max: int = 500
    """Operations that are kept after their end, the newest."""

    def __post_init__(self) -> None:
        """Refuse what can't work."""
        if min(self.connections_max, self.body_bytes_max, self.head_bytes_max) < 1:
            message = "connections_max, body_bytes_max and head_bytes_max are 1 or more"
            raise UsageError(message)
        if min(self.audit_max, self.operations_max) < 1:
            message = "audit_max and operations_max are 1 or more"
            raise UsageError(message)


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """Settings of one admin service. Any number of them may serve a fabric."""

    id: str = ""
    """What it is called in logs; empty: as the machine is."""

    listen: str = "127.0.0.1:7480"
    """``host:port`` of the REST API. Anywhere but on loopback it takes TLS."""

    tokens_file: str = "/etc/ostraca/tokens.toml"
    """The agents' file of tokens; its fabric tokens are what this service shows to agents."""

    people_file: str = "/etc/ostraca/people.toml"
    """Who may ask for what here: names with their bearer tokens, by role. Read again when it changes."""

    secrets_look_s: float = 5.0
    """How often files of secrets are looked at."""

    fabric: str = ""
    """The fabric's id, in hexadecimal; empty: the one that etcd has at the prefix."""

    etcd: EtcdPlace = field(default_factory=EtcdPlace)
    tls: TlsPlace = field(default_factory=TlsPlace)
    limits: AdminLimits = field(default_factory=AdminLimits)

    def __post_init__(self) -> None:
        """Refuse what can't work."""
        check_above_zero(self, "secrets_look_s")
        named_fabric(self.fabric)
        http_address(self.listen)

    def name(self) -> str:
        """Return what it is called. Raises UsageError."""
        return checked_name("admin", self.id or socket.gethostname().partition(".")[0].lower())
