"""Connection settings of etcd, and timeouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ostraca_fabric.errors import UsageError
from ostraca_fabric.sockets.tls import TlsFiles

_PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class EtcdUser:
    """User of etcd's access control.

    The user's role needs reading and writing of all keys under the prefix.
    """

    name: str
    read_password: Callable[[], str] = field(repr=False)
    """Function for the password, called at each login, also after a password change in etcd. Raises
    FormatError for an unreadable password."""


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """Connection settings of etcd, and timeouts."""

    endpoints: tuple[str, ...]
    """``host:port`` of every member. The client leaves a silent member for the next."""

    tls: TlsFiles | None = None
    """None: no encryption, for a local machine or an isolated network."""

    user: EtcdUser | None = None
    """None: etcd's access control is off, or uses the certificate's common name."""

    request_timeout_s: float = 1.0
    """Time for a member's answer before the next member is asked. An election takes about as long."""

    operation_timeout_s: float = 5.0
    """Time for a call over all members; then the call fails with MembershipError. Also the time for a change
    against competing writers, and for the watch to report a change. No wait for etcd is on the data path."""

    inflight_max: int = 64
    """Maximum number of concurrent calls. Further calls wait within ``operation_timeout_s``. Without the
    limit, each call would exceed ``request_timeout_s`` and be repeated in vain."""

    backoff_min_s: float = 0.02
    """Longest wait before the first repetition, doubled with each. Waits are random, from half of the bound
    up."""

    backoff_max_s: float = 1.0
    """Upper bound of doubling. All agents of a fabric return at once when etcd does."""

    watch_silence_max_s: float = 5.0
    """Silence after which a watch moves to the next member, despite requests for a sign of life after half
    the time. A paused member closes no connection."""

    message_bytes_max: int = 64 << 20
    """Longest accepted answer: all records of a fabric at once. 10,000 shards take 10 MB."""

    def __post_init__(self) -> None:
        """Refuse unusable settings."""
        if not self.endpoints:
            raise UsageError("no endpoint of etcd is named: give host:port of every member")
        for endpoint in self.endpoints:
            _check_endpoint(endpoint)


def _check_endpoint(endpoint: str) -> None:
    """Refuse an endpoint that gRPC would misread as a name or another port. Raises UsageError."""
    host, colon, port = endpoint.rpartition(":")
    advice = ""
    if "," in endpoint or endpoint.split() != [endpoint]:
        advice = "give each member by itself, as host:port"
    elif not (host and colon and port.isdecimal()) or "/" in endpoint:
        advice = "give host:port, without http://"
    elif ":" in host and not (host.startswith("[") and host.endswith("]")):
        advice = "put an IPv6 address in brackets, as [::1]:2379"
    elif not 0 < int(port) <= _PORT_MAX:
        advice = f"ports are 1 to {_PORT_MAX}"
    if advice:
        raise UsageError(f"{endpoint!r} is not an endpoint of etcd: {advice}")
