"""How to reach etcd, and how long to wait for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ostraca_fabric.errors import UsageError


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """TLS towards etcd; with a certificate and key of our own, mutual TLS."""

    ca: Path
    """The certificates, in PEM, of whom we believe that an etcd is ours."""

    cert: Path | None = None
    """The certificate, in PEM, that we show; None where etcd asks for none."""

    key: Path | None = None
    """Its private key."""

    def __post_init__(self) -> None:
        """Refuse half of a pair."""
        if (self.cert is None) != (self.key is None):
            message = (
                "mutual TLS towards etcd needs both, a certificate and its key: name both files, or neither"
            )
            raise UsageError(message)

    @property
    def files(self) -> tuple[Path, ...]:
        """Those that there are."""
        return tuple(file for file in (self.ca, self.cert, self.key) if file is not None)


@dataclass(frozen=True, slots=True)
class EtcdUser:
    """A user of etcd's own access control. Its role must read and write everything under the prefix."""

    name: str
    read_password: Callable[[], str] = field(repr=False)
    """Asked at each login: when etcd has forgotten us, as it does when the password is changed there. Raises
    FormatError where it can't be read."""


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """How to reach etcd, and how long to wait for it."""

    endpoints: tuple[str, ...]
    """``host:port`` of every member. One that does not answer is left for the next."""

    tls: EtcdTls | None = None
    """None: in the clear, for one's own machine or an isolated network."""

    user: EtcdUser | None = None
    """None: etcd's access control is off, or goes by the certificate's common name."""

    request_timeout_s: float = 1.0
    """How long one member may take to answer before the next is asked. An election takes about as long."""

    operation_timeout_s: float = 5.0
    """How long a call is tried in all, over all members; then it fails with MembershipError. Also how long a
    change is decided anew because somebody else was first, and how long the watch may take to tell of it.
    Nothing that waits for it is on the data path."""

    inflight_max: int = 64
    """How many calls are under way at once. More wait their turn, within ``operation_timeout_s``: with all of
    them at once, each would take longer than ``request_timeout_s``, and be asked again in vain."""

    backoff_min_s: float = 0.02
    """The longest wait before the first repetition; it doubles with each. Waits are random, from half of it
    up."""

    backoff_max_s: float = 1.0
    """Where doubling ends. All agents of a fabric come back at once when etcd does."""

    watch_silence_max_s: float = 5.0
    """A watch that heard nothing for that long, though it asks twice as often for a sign of life, goes to the
    next member. A member that is paused closes no connection."""

    message_bytes_max: int = 64 << 20
    """The longest answer taken: all records of a fabric at once. 10,000 shards take 10 MB."""

    def __post_init__(self) -> None:
        """Refuse what can't work."""
        if not self.endpoints:
            raise UsageError("no endpoint of etcd is named: give host:port of every member")
        for endpoint in self.endpoints:
            host, colon, port = endpoint.rpartition(":")
            if not (host and colon and port.isdigit()) or "/" in endpoint:
                message = f"{endpoint!r} is not an endpoint of etcd: give host:port, without http://"
                raise UsageError(message)
