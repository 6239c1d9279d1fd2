"""Settings of ``ostraca serve agent``: an agent and its process."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass, field

from ostraca_cli.composition.etcd_options import EtcdPlace
from ostraca_cli.composition.http_pages import http_address
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.ids import ID_BYTES, AgentId, FabricId, checked_name
from ostraca_fabric.wire.address import Address, TcpAddress, TlsAddress, UnixAddress, parse_address

_DRAINS = 5
"""Multiple of ``drain_s``: handover, takeover by others, end of open requests, writing, closing."""

_STORE_WAITS = 2
"""Multiple of ``operation_timeout_s``: a wait for an absent etcd, and the end of earlier operations."""

_SOCKET_MODE = re.compile("0?[0-7]{3}")


@dataclass(frozen=True, slots=True)
class TlsPlace:
    """Certificate of this process for ``tls://`` addresses. All files are PEM."""

    cert: str = ""
    """Certificate, followed by intermediate certificates; empty: no TLS. Must carry the host of the address
    used by others."""

    key: str = ""
    """Private key, not encrypted."""

    ca: str = ""
    """CA certificates of all agents, this one included."""

    agent_names: tuple[str, ...] = ()
    """An agent's certificate must carry one of these names; empty: any certificate of the CA suffices. List
    names if the CA signs for others than agents."""

    peer_name: str = ""
    """Name that the certificates of all agents carry, checked in place of the host of an address; empty: the
    host. For pods, whose addresses change. The CA must sign this name for agents only."""

    workers_show_certificates: bool = False
    """Whether workers must present a certificate of the CA beside their token."""

    def __post_init__(self) -> None:
        """Raise UsageError unless certificate, key and CA are given together."""
        given = [bool(self.cert), bool(self.key), bool(self.ca)]
        if any(given) and not all(given):
            raise UsageError("tls.cert, tls.key and tls.ca go together: give all three, or none")


@dataclass(frozen=True, slots=True)
class DaemonSettings(AgentSettings):
    """Settings of one agent and its process."""

    id: str = ""
    """Name of the agent in the fabric, constant for the lifetime of its state directory; empty: host name."""

    listen: tuple[str, ...] = ("unix:///run/ostraca/agent.sock",)
    """Addresses to listen on: ``unix://`` for local workers; ``tls://host:port``, or ``tcp://host:port`` on a
    private network, for other agents and remote workers. At least one ``tls://`` or ``tcp://`` address is
    required."""

    socket_mode: str = ""
    """Permissions of unix sockets, in octal; empty: those of the umask. 0666 admits workers of other users,
    as of other containers. Every connection proves its tenant, so permissions only limit connecting."""

    advertise: tuple[str, ...] = ()
    """Addresses announced to others; empty: those of ``listen`` except unix sockets. Required if the agent
    listens at 0.0.0.0 or [::], or others use another name."""

    state_dir: str = "/var/lib/ostraca/agent"
    """Directory of this agent alone, for its process lock and the id of its fabric."""

    fabric: str = ""
    """Id of the fabric, in hexadecimal; empty: the id in the state directory, else the id in etcd."""

    fabric_key_file: str = "/etc/ostraca/fabric.key"
    """Key of the fabric, the same file for all agents."""

    tokens_file: str = "/etc/ostraca/tokens.toml"
    """File of tokens and users, by tenant. Fabric tokens in the file also authenticate this agent to others
    over TCP."""

    transports: tuple[str, ...] = ("nixl", "inline")
    """Transports of blocks, preferred first. Transports missing on this machine are skipped, unless no other
    is listed."""

    http_listen: str = ""
    """``host:port`` of /metrics, /healthz, /readyz and /status; empty: none. The pages have no
    authentication."""

    flushes: bool = False
    """Whether drives that are files are flushed around each summary, so that committed blocks survive a power
    cut. Block devices report their own need."""

    etcd: EtcdPlace = field(default_factory=EtcdPlace)
    tls: TlsPlace = field(default_factory=TlsPlace)

    def __post_init__(self) -> None:
        """Raise UsageError for settings that cannot work."""
        AgentSettings.__post_init__(self)  # not super(): slots=True makes a new class
        if self.owner.grant_s > self.etcd.lease_ttl_s:
            raise UsageError(
                f"owner.grant_s is {self.owner.grant_s}, above etcd.lease_ttl_s {self.etcd.lease_ttl_s}: "
                "lower owner.grant_s, since other agents own the shards after the lease"
            )
        if self.flow.write_behind_s > self.owner.hold_s / 2:
            raise UsageError(
                f"flow.write_behind_s is {self.flow.write_behind_s}: keep it at half of owner.hold_s "
                f"({self.owner.hold_s}) or less, or staged blocks lose their space"
            )
        if self.fabric:
            self.wanted_fabric()
        if self.http_listen:
            http_address(self.http_listen)
        self.socket_permissions()

    @property
    def stop_limit_s(self) -> float:
        """Longest time of a graceful shutdown while all dependencies work."""
        drains_s = _DRAINS * self.drain_s + self.connections.drain_s
        return drains_s + _STORE_WAITS * self.etcd.operation_timeout_s

    def agent_id(self) -> AgentId:
        """Return the agent's name; raises UsageError."""
        return AgentId(checked_name("agent", self.id or socket.gethostname().partition(".")[0].lower()))

    def socket_permissions(self) -> int | None:
        """Return the permissions of unix sockets, None for the umask's; raises UsageError."""
        if not self.socket_mode:
            return None
        if not _SOCKET_MODE.fullmatch(self.socket_mode):
            raise UsageError(f"socket_mode is {self.socket_mode!r}: give permissions in octal, as in 0666")
        return int(self.socket_mode, 8)

    def wanted_fabric(self) -> FabricId | None:
        """Return the required fabric; raises UsageError."""
        return named_fabric(self.fabric)

    def reached_at(self) -> tuple[str, ...]:
        """Return the addresses for other agents; raises UsageError without any."""
        listened = [parse_address(each) for each in self.listen]
        reachable = [parse_address(each) for each in self.advertise] or [
            each for each in listened if not isinstance(each, UnixAddress)
        ]
        if not any(isinstance(each, TcpAddress | TlsAddress) for each in listened) or not reachable:
            raise UsageError(
                "other agents cannot reach this agent: listen at tls://host:port, or at tcp://host:port on a "
                "private network"
            )
        for each in reachable:
            _check_reachable(each)
        if not self.tls.cert and any(isinstance(each, TlsAddress) for each in (*listened, *reachable)):
            raise UsageError("a tls:// address needs a certificate: give tls.cert, tls.key and tls.ca")
        return tuple(map(str, reachable))


def named_fabric(text: str) -> FabricId | None:
    """Return the fabric id in *text*, None if empty; raises UsageError."""
    try:
        named = FabricId(bytes.fromhex(text))
    except ValueError:
        named = FabricId(b"?")
    if len(named) not in (0, ID_BYTES):
        raise UsageError(f"fabric is {text!r}: give {2 * ID_BYTES} hex digits, or omit the setting")
    return named or None


def _check_reachable(address: Address) -> None:
    if isinstance(address, UnixAddress):
        raise UsageError(f"other agents cannot reach {address}: advertise tls://host:port or tcp://host:port")
    if address.port == 0 or _is_any(address.host):
        raise UsageError(
            f"other agents cannot reach {address}: advertise a reachable address, as in "
            f"tcp://{socket.gethostname()}:7400"
        )


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
