"""Settings of ``ostraca serve admin``."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from ostraca_cli.commands.serve.daemon_settings import TlsPlace, named_fabric
from ostraca_cli.composition.etcd_options import EtcdPlace
from ostraca_cli.composition.http_pages import http_address
from ostraca_fabric.model.ids import checked_name
from ostraca_fabric.model.limits import check_above_zero, check_one_at_least


@dataclass(frozen=True, slots=True)
class AdminLimits:
    """Limits of the service."""

    connections_max: int = 64
    """Concurrent connections of people, scripts and consoles; each event stream holds one. More get 503,
    except for /healthz and /readyz."""

    body_bytes_max: int = 512 << 10
    """Longest body of a request. A prefetch of 4096 blocks with 32-byte hashes takes 280 KiB, an enclosure
    with every drive named 5 KiB."""

    head_bytes_max: int = 16 << 10
    """Longest head of a request."""

    audit_max: int = 2000
    """Newest entries of the audit log kept in etcd; the service's own log has all. Agents receive each entry,
    so more entries slow every start of an agent a little."""

    operations_max: int = 500
    """Newest finished operations kept."""

    def __post_init__(self) -> None:
        """Raise UsageError for settings that cannot work."""
        check_one_at_least(
            self, "connections_max", "body_bytes_max", "head_bytes_max", "audit_max", "operations_max"
        )


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """Settings of one admin service. Any number of services may serve a fabric."""

    id: str = ""
    """Name of the service in logs; empty: host name."""

    listen: str = "127.0.0.1:7480"
    """``host:port`` of the REST API. Addresses other than loopback require TLS."""

    tokens_file: str = "/etc/ostraca/tokens.toml"
    """The agents' file of tokens; its fabric tokens authenticate this service to agents."""

    people_file: str = "/etc/ostraca/people.toml"
    """Names with bearer tokens, by role. Read again after a change."""

    secrets_check_s: float = 5.0
    """Interval between looks at files of secrets."""

    fabric: str = ""
    """Id of the fabric, in hexadecimal; empty: the id in etcd."""

    follows_reports: bool = False
    """Whether enclosures are registered by their own reports, with the present addresses, as pods need. Blank
    drives are then formatted without a request. A retired enclosure stays out until it is added again."""

    etcd: EtcdPlace = field(default_factory=EtcdPlace)
    tls: TlsPlace = field(default_factory=TlsPlace)
    limits: AdminLimits = field(default_factory=AdminLimits)

    def __post_init__(self) -> None:
        """Raise UsageError for settings that cannot work."""
        check_above_zero(self, "secrets_check_s")
        named_fabric(self.fabric)
        http_address(self.listen)

    def name(self) -> str:
        """Return the service's name; raises UsageError."""
        return checked_name("admin", self.id or socket.gethostname().partition(".")[0].lower())
