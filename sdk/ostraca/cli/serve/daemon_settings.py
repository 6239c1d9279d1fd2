"""Everything an operator may set of ``ostraca serve agent``: an agent's settings, and its process's."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ostraca.cli.etcd_place import EtcdPlace
from ostraca.cli.http import http_address
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.ids import ID_BYTES, AgentId, FabricId, checked_name
from ostraca_fabric.wire.address import TcpAddress, TlsAddress, UnixAddress, parse_address

if TYPE_CHECKING:
    from ostraca_fabric.wire.address import Address


@dataclass(frozen=True, slots=True)
class TlsPlace:
    """The agent's certificate, for addresses that begin with ``tls://``. All files are PEM."""

    cert: str = ""
    """The certificate, and behind it those between it and the CA; empty: no TLS. It must carry the host that
    others reach this agent at."""

    key: str = ""
    """Its private key, not encrypted."""

    ca: str = ""
    """Certificates that sign those of all agents, this one's too."""

    agent_names: tuple[str, ...] = ()
    """Names of which an agent's certificate carries one; empty: whoever shows a certificate of the CA may be
    an agent. List them where the CA signs for others than agents."""

    workers_show_certificates: bool = False
    """Whether workers, too, show a certificate of the CA, beside their token."""

    def __post_init__(self) -> None:
        """Refuse less than all."""
        given = [bool(self.cert), bool(self.key), bool(self.ca)]
        if any(given) and not all(given):
            message = "tls.cert, tls.key and tls.ca go together: give all three, or none"
            raise UsageError(message)


@dataclass(frozen=True, slots=True)
class DaemonSettings(AgentSettings):
    """Settings of one agent, and of the process it is alone in."""

    id: str = ""
    """What the agent is called in the fabric, by no other name for as long as its state directory lasts;
    empty: as the machine is."""

    listen: tuple[str, ...] = ("unix:///run/ostraca/agent.sock",)
    """Where it listens: ``unix://`` for workers of this machine, ``tls://host:port`` or, on a network that
    nobody else is on, ``tcp://host:port`` for other agents and for workers elsewhere. It needs one of these
    two, or others can't reach it."""

    advertise: tuple[str, ...] = ()
    """What others are told to reach it at; empty: the addresses of ``listen`` that are not unix sockets. Set
    it where it listens at 0.0.0.0, or others reach it by another name."""

    state_dir: str = "/var/lib/ostraca/agent"
    """A directory of its own, by which a process knows that the one before is gone, and which fabric it has
    joined."""

    fabric: str = ""
    """The fabric's id, in hexadecimal; empty: the one that its state directory remembers, else the one that
    etcd has at the prefix."""

    fabric_key_file: str = "/etc/ostraca/fabric.key"
    """The fabric's key, the same file for all of its agents."""

    tokens_file: str = "/etc/ostraca/tokens.toml"
    """Who may speak for whom. Its fabric tokens are also what this agent shows to others over TCP."""

    transports: tuple[str, ...] = ("nixl", "inline")
    """What blocks cross by, in order of preference. One that this machine lacks is left out, unless it is the
    only one."""

    http_listen: str = ""
    """``host:port`` of /metrics, /healthz, /readyz and /status; empty for none. Whoever reaches it may read
    them."""

    flushes: bool = False
    """Whether drives that are files are flushed around each summary, so that a committed block outlives a
    power cut. Block devices say themselves whether they need it."""

    etcd: EtcdPlace = field(default_factory=EtcdPlace)
    tls: TlsPlace = field(default_factory=TlsPlace)

    def __post_init__(self) -> None:
        """Refuse what can't work."""
        AgentSettings.__post_init__(self)  # not super(): a slotted dataclass is another class than its body
        if self.owner.grant_s > self.etcd.lease_ttl_s:
            message = (
                f"owner.grant_s is {self.owner.grant_s} and etcd.lease_ttl_s {self.etcd.lease_ttl_s}: make "
                "the first no more than the second, for then other agents own the shards"
            )
            raise UsageError(message)
        if self.fabric:
            self.wanted_fabric()
        if self.http_listen:
            http_address(self.http_listen)

    def agent_id(self) -> AgentId:
        """Return what the agent is called. Raises UsageError."""
        return AgentId(checked_name("agent", self.id or socket.gethostname().partition(".")[0].lower()))

    def wanted_fabric(self) -> FabricId | None:
        """Return the fabric that was named. Raises UsageError."""
        return named_fabric(self.fabric)

    def reached_at(self) -> tuple[str, ...]:
        """Return where others reach the agent. Raises UsageError when they can't."""
        listened = [parse_address(each) for each in self.listen]
        told = [parse_address(each) for each in self.advertise] or [
            each for each in listened if not isinstance(each, UnixAddress)
        ]
        if not any(isinstance(each, TcpAddress | TlsAddress) for each in listened) or not told:
            message = (
                "other agents can't reach this one: let it listen at tls://host:port, or at tcp://host:port "
                "on a network that nobody else is on"
            )
            raise UsageError(message)
        for each in told:
            _check_reachable(each)
        if not self.tls.cert and any(isinstance(each, TlsAddress) for each in (*listened, *told)):
            message = "an address is tls://, which takes a certificate: give tls.cert, tls.key and tls.ca"
            raise UsageError(message)
        return tuple(map(str, told))


def named_fabric(text: str) -> FabricId | None:
    """Return the fabric that *text* names, None for an empty one. Raises UsageError."""
    try:
        named = FabricId(bytes.fromhex(text))
    except ValueError:
        named = FabricId(b"?")
    if len(named) not in (0, ID_BYTES):
        raise UsageError(f"fabric is {text!r}: write its {2 * ID_BYTES} hex digits, or leave it out")
    return named or None


def _check_reachable(address: Address) -> None:
    if isinstance(address, UnixAddress):
        raise UsageError(f"other agents can't reach {address}: advertise tls://host:port or tcp://host:port")
    if address.port == 0 or _is_any(address.host):
        raise UsageError(
            f"other agents can't reach {address}: say with advertise where they can, as in "
            f"tcp://{socket.gethostname()}:7400"
        )


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
