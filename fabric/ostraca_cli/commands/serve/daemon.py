"""Process of an agent in a fabric kept by etcd: composition root of ``serve agent``."""

from __future__ import annotations

import logging
import os
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ostraca_cli.commands.serve.daemon_settings import DaemonSettings
from ostraca_cli.commands.serve.state_directory import StateDirectory
from ostraca_cli.commands.serve.store import await_namesake, open_membership, retry_while_away
from ostraca_cli.composition.open_drives import OpenDrives
from ostraca_cli.composition.secret_files import read_access, read_fabric_key, read_nvme_secret
from ostraca_cli.composition.transports import create_transports
from ostraca_cli.terminal.logs import log_levels
from ostraca_dpu_agent.adapters.nvme_of.file_paths import FilePaths, TargetPaths
from ostraca_dpu_agent.adapters.nvme_of.kernel import PathSettings
from ostraca_dpu_agent.adapters.nvme_of.nvme_paths import NvmePaths
from ostraca_dpu_agent.adapters.nvme_tcp.association import TcpPathSettings
from ostraca_dpu_agent.adapters.nvme_tcp.tcp_paths import TcpOpener, TcpPaths
from ostraca_dpu_agent.adapters.peers.loopback_owners import LoopbackOwners
from ostraca_dpu_agent.adapters.peers.owners import NetworkOwners
from ostraca_dpu_agent.agent import Agent
from ostraca_dpu_agent.conditions import AgentPhase
from ostraca_dpu_agent.experimental.nvme_reservations import NvmeReservations
from ostraca_dpu_agent.lifecycle import Lifecycle
from ostraca_dpu_agent.paths.manager import PathManager
from ostraca_dpu_agent.server.peer_health_check import PeerHealthCheck
from ostraca_dpu_agent.settings import USERSPACE
from ostraca_fabric.connection import SOCKETS, SocketNetwork
from ostraca_fabric.connection.network import check_free
from ostraca_fabric.drives.device_opener import DeviceOpener
from ostraca_fabric.errors import DriveError, FormatError, MembershipError, OtherFabricError
from ostraca_fabric.membership.etcd.membership import EtcdMembership
from ostraca_fabric.model.fabric_map import AgentRecord, DriveRecord
from ostraca_fabric.model.ids import FabricId
from ostraca_fabric.model.target import NQN_PREFIX
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.ports.transport import Transport
from ostraca_fabric.runtime.tasks import Tasks
from ostraca_fabric.sockets.tls import Tls, TlsFiles
from ostraca_fabric.telemetry.status import AgentStatus
from ostraca_fabric.wire.address import TcpAddress, TlsAddress, UnixAddress, parse_address
from ostraca_fabric.wire.handshake import Access

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class AgentDaemon:
    """Agent process: call ``start``, then ``stop``; single use."""

    def __init__(self, settings: DaemonSettings, state: StateDirectory) -> None:
        """Read the secret and TLS files; everything else waits for ``start``.

        Raises FormatError and UsageError with the problem of a file or an address.
        """
        self.id = settings.agent_id()
        self.reached_at = settings.reached_at()
        self.life = Lifecycle(time.monotonic)
        self._settings = settings
        self._state = state
        self._key = read_fabric_key(Path(settings.fabric_key_file))
        self._network = self._made_network()
        self._access = self._read_access()
        self._membership: EtcdMembership | None = None
        self._owners: NetworkOwners | None = None
        self._transports: dict[str, Transport] = {}
        self._drives = OpenDrives(self._open_drive)

        nvme = settings.nvme
        host = nvme.host_nqn or f"{NQN_PREFIX}host:{self.id}"
        self._tcp_paths = _tcp_paths(settings, host) if nvme.initiator == USERSPACE else None
        self._opener = (
            DeviceOpener(settings.flash_io)
            if self._tcp_paths is None
            else TcpOpener(self._tcp_paths, settings.flash_io)
        )
        self._path_manager = PathManager(
            TargetPaths(files=FilePaths(host), nvme=self._tcp_paths or _nvme_paths(settings, host)),
            self._opener,
            secret_of=lambda name: read_nvme_secret(Path(nvme.secrets_dir), name),
            is_open=lambda namespaces: not namespaces.keys().isdisjoint(self._drives.nguids),
            clock=time.monotonic,
            turn_s=nvme.turn_s,
            hold_s=nvme.hold_s,
            reservations=NvmeReservations() if nvme.reservations else None,
        )
        self.agent: Agent | None = None
        self._set_log_level = log_levels()
        self._tasks = Tasks(f"the daemon of {self.id}")

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """Return the files read by ``readmit``."""
        return (Path(self._settings.tokens_file),)

    def status(self) -> AgentStatus:
        """Return the agent's status; available before ``start`` and after ``stop``."""
        return (
            self.life.initial_status(self.id, self._settings) if self.agent is None else self.agent.status()
        )

    def readmit(self) -> None:
        """Read the tokens again; close connections made with removed tokens.

        Raises FormatError; then everything stays unchanged.
        """
        self._access = self._read_access()
        if self.agent is not None:
            self.agent.readmit(self._access)

    async def start(self) -> None:
        """Join the fabric and serve; waits while etcd is away.

        Raises an OstracaError with advice: etcd has no fabric or another fabric; an address is unavailable;
        an agent of this name runs elsewhere; no transport works. The caller calls ``stop`` next in every
        case.
        """
        settings = self._settings
        check_free(map(parse_address, settings.listen))  # else each failed start takes and drops shards
        wanted = settings.wanted_fabric()
        if wanted is not None:
            self._state.check_fabric(wanted)
        self._report_activity("Looking for the fabric in etcd.")
        try:
            fabric, membership = await self._retry_while_away(
                "join the fabric",
                lambda: open_membership(
                    settings.etcd,
                    wanted or self._state.fabric,
                    self._key,
                    has_joined=self._state.fabric is not None,
                ),
            )
        except OtherFabricError as error:
            if wanted is None:  # only the state directory names the expected fabric
                self._state.check_fabric(FabricId(error.fabric))
            raise
        self._membership = membership
        self._state.check_fabric(fabric)
        self._report_activity("Checking that no other process is this agent.")
        await self._await_namesake(membership)
        self._transports = create_transports(settings.transports)
        self._owners = NetworkOwners(
            self.id,
            here=LoopbackOwners(),
            address_of=membership.addresses.get,
            dice=random.Random(),  # noqa: S311 (waits are no secret)
            connections=settings.connections,
            token=self._token,
            network=self._network,
        )
        self.agent = agent = Agent(
            self.id,
            settings,
            addresses=settings.listen,
            access=self._access,
            fabric_key=self._key,
            membership=membership,
            owners=self._owners,
            transports=self._transports,
            open_drive=self._drives.open,
            close_drive=self._drives.close,
            flash_io=lambda: self._opener.flash_io,
            path_manager=self._path_manager,
            clock=time.monotonic,
            network=self._network,
            reached_at=self.reached_at,
            life=self.life,
        )
        self._state.remember(fabric=fabric, start=agent.start_id)
        await self._retry_while_away("announce this agent", agent.join)
        self._report_activity("Opening drives and claiming shards.")
        await agent.start()
        self._permit_sockets()
        self._report_activity("")
        self._tasks.spawn(self._apply_log_level(membership))
        self._tasks.spawn(PeerHealthCheck(self.id, membership=membership, owners=self._owners).run())

    async def stop(self) -> bool:
        """Hand shards over, end open requests, leave the fabric, close everything.

        Returns whether every transfer and I/O has ended. If not, the process should end without unmapping
        memory, as a plain exit does.
        """
        agent, has_ended = self.agent, True
        self.life.phase = AgentPhase.STOPPING
        self._report_activity("Stopping background tasks.")
        if self._membership is not None:
            self._membership.hurry()
        await self._tasks.stop()
        if agent is not None:
            self._report_activity("Handing shards and workers over to other agents.")
            await agent.hand_over()
            self._report_activity("Waiting for requests to end.")
            drained = await agent.drain()
            self._report_activity("Leaving the fabric.")
            has_ended = await agent.leave() and drained
        self._report_activity("Closing drives and connections.")
        if self._owners is not None:
            await self._owners.close()
        has_ended = await self._drives.are_idle() and has_ended
        if has_ended:
            self._drives.close_all()
            self._opener.close()
        if self._tcp_paths is not None:
            self._tcp_paths.close()
        for transport in self._transports.values():
            await transport.close()
        if agent is not None and has_ended:
            agent.unmap()
        if self._membership is not None:
            await self._membership.close()
        return has_ended

    def _permit_sockets(self) -> None:
        """Set the permissions of unix sockets; raises OSError."""
        permissions = self._settings.socket_permissions()
        for address in map(parse_address, self._settings.listen):
            if permissions is not None and isinstance(address, UnixAddress):
                Path(address.path).chmod(permissions)

    def _report_activity(self, activity: str) -> None:
        self.life.activity = activity
        if self.agent is None:  # the agent samples by itself later: ``since_s`` counts from a sample
            self.status()

    async def _retry_while_away(self, purpose: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Wait for etcd, and report the wait in the status."""
        asked_s = time.monotonic()

        def say(trouble: str) -> None:
            self.life.wait_for_store(trouble, asked_s=asked_s)
            self._report_activity(f"Waiting for etcd, to {purpose}: {trouble}." if trouble else "")

        return await retry_while_away(purpose, attempt, say=say)

    async def _apply_log_level(self, membership: EtcdMembership) -> None:
        """Apply the log level set by operators, until withdrawn."""
        before = ""
        async for overrides in membership.override_changes():
            wanted = overrides.live.log_level
            level = "" if wanted is None else wanted.value
            if level != before:
                self._set_log_level(level or None)
                log.warning("%s: operators set the log level to %s", self.id, level or "its own setting")
                before = level

    def _made_network(self) -> SocketNetwork:
        tls = self._settings.tls
        if not tls.cert:
            return SOCKETS
        reached = [parse_address(each) for each in self.reached_at]
        hosts = [tls.peer_name or each.host for each in reached if isinstance(each, TlsAddress)]
        files = TlsFiles(Path(tls.ca), Path(tls.cert), Path(tls.key))
        return SocketNetwork(Tls(files, hosts, peer_name=tls.peer_name))

    def _read_access(self) -> Access:
        file, tls = Path(self._settings.tokens_file), self._settings.tls
        access = read_access(file, os.getuid())
        if not access.fabric_tokens and any(
            isinstance(parse_address(each), TcpAddress) for each in self.reached_at
        ):
            raise FormatError(
                f"{file} has no fabric token, required among agents over TCP: add `fabric = [...]` with the "
                "same token for all agents, or use tls:// addresses"
            )
        return replace(
            access,
            agent_names=frozenset(tls.agent_names) or None,
            workers_show_certificates=tls.workers_show_certificates,
        )

    def _token(self) -> str:
        return self._access.fabric_tokens[0] if self._access.fabric_tokens else ""

    async def _await_namesake(self, membership: EtcdMembership) -> None:
        """Wait until no other process has this agent's id; raises MembershipError if one keeps the id."""

        async def find() -> AgentRecord | None:
            return membership.map.agents.get(self.id)

        namesake = await await_namesake(find, self._state.start, self._settings.etcd)
        if namesake is not None:
            raise MembershipError(
                f"the fabric already has an agent {self.id}, at {', '.join(namesake.addresses)}: give each "
                "agent its own id, and keep its state directory"
            )

    def _open_drive(self, record: DriveRecord) -> Drive:
        device = self._path_manager.device_of(record)
        if not device:
            raise DriveError(
                f"this host has no path to drive {record.id} ({record.nguid}): check the enclosure and its "
                "paths"
            )
        return self._opener.open(record.id, device, flushes=self._settings.flushes)


def _tcp_paths(settings: DaemonSettings, host: str) -> TcpPaths:
    """Return this host's paths over the user-space initiator."""
    nvme = settings.nvme
    log.warning("Drives over NVMe/TCP are reached by the user-space initiator: slow, for trials")
    path_settings = TcpPathSettings(
        io_queues=nvme.io_queues, keep_alive_s=nvme.keep_alive_s, io_timeout_s=nvme.io_timeout_s
    )
    return TcpPaths(host, _host_id(host), path_settings)


def _nvme_paths(settings: DaemonSettings, host: str) -> NvmePaths:
    """Return this host's paths over the kernel's initiator."""
    nvme, owner = settings.nvme, settings.owner
    path_settings = PathSettings(
        late_write_s=owner.late_write_s,
        pause_max_s=owner.pause_max_s,
        io_queues=nvme.io_queues,
        keep_alive_s=nvme.keep_alive_s,
        reconnect_delay_s=nvme.reconnect_delay_s,
        fast_io_fail_s=nvme.fast_io_fail_s,
    )
    return NvmePaths(host, _host_id(host), path_settings)


def _host_id(host: str) -> str:
    """Return the host id, derived from the host name because enclosures associate the two."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, host))
