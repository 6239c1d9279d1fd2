"""One agent as a process of its own, in a fabric that etcd keeps: the composition root of ``ostraca serve
agent``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ostraca.cli.idle_drives import are_idle
from ostraca.cli.logs import log_levels
from ostraca.cli.serve.secret_files import read_access, read_fabric_key, read_nvme_secret
from ostraca.cli.serve.store import opened, patiently
from ostraca.cli.transports import made_transports
from ostraca_dpu_agent.agent import Agent
from ostraca_dpu_agent.conditions import Phase
from ostraca_dpu_agent.greeting import Greeting
from ostraca_dpu_agent.life import Life
from ostraca_dpu_agent.paths.keeper import PathKeeper
from ostraca_fabric.adapters.file_drive import DriveSettings, FileDrive
from ostraca_fabric.adapters.file_paths import FilePaths
from ostraca_fabric.adapters.loopback_owners import LoopbackOwners
from ostraca_fabric.adapters.network_owners import NetworkOwners
from ostraca_fabric.adapters.nvme_paths import NvmePaths
from ostraca_fabric.adapters.nvme_reservations import NvmeReservations
from ostraca_fabric.adapters.nvme_timeouts import PathSettings
from ostraca_fabric.adapters.target_paths import TargetPaths
from ostraca_fabric.connection import SOCKETS, SocketNetwork
from ostraca_fabric.connection.listening import check_free
from ostraca_fabric.errors import DriveError, FormatError, MembershipError, OtherFabricError
from ostraca_fabric.ids import FabricId
from ostraca_fabric.target import NQN_PREFIX
from ostraca_fabric.tasks import Tasks
from ostraca_fabric.tls import Tls, TlsFiles
from ostraca_fabric.wire.address import TcpAddress, TlsAddress, parse_address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ostraca.cli.serve.daemon_settings import DaemonSettings
    from ostraca.cli.serve.state_directory import StateDirectory
    from ostraca_fabric.adapters.etcd.membership import EtcdMembership
    from ostraca_fabric.fabric_map import DriveRecord
    from ostraca_fabric.ids import AgentId, DriveId
    from ostraca_fabric.ports.drive import Drive
    from ostraca_fabric.ports.transport import Transport
    from ostraca_fabric.status import AgentStatus
    from ostraca_fabric.wire.handshake import Access

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_LOOK_AGAIN_S = 0.25
_LEASES_WAITED = 2
_DRAINS = 5
"""``drain_s``: shards are handed over, taken by others, what is under way ends, is written, and is closed."""

_STORE_WAITS = 2
"""``operation_timeout_s``: one that is away is waited for once, and what was begun before that ends."""


class AgentDaemon:
    """One agent. ``start`` it, then ``stop`` it; it is used once."""

    def __init__(self, settings: DaemonSettings, state: StateDirectory) -> None:
        """Read the files of secrets and of TLS; nothing else happens before ``start``.

        Raises FormatError and UsageError that say what is wrong with a file or an address.
        """
        self.id = settings.agent_id()
        self.reached_at = settings.reached_at()
        self.life = Life(time.monotonic)
        self._settings = settings
        self._state = state
        self._key = read_fabric_key(Path(settings.fabric_key_file))
        self._network = self._made_network()
        self._access = self._read_access()
        self._membership: EtcdMembership | None = None
        self._owners: NetworkOwners | None = None
        self._transports: dict[str, Transport] = {}
        self._drives: dict[DriveId, Drive] = {}
        self._nguids: dict[DriveId, str] = {}
        """Of the drives that are open."""

        nvme = settings.nvme
        self._keeper = PathKeeper(
            _paths(settings, nvme.host_nqn or f"{NQN_PREFIX}host:{self.id}"),
            secret_of=lambda name: read_nvme_secret(Path(nvme.secrets_dir), name),
            is_open=lambda namespaces: not namespaces.keys().isdisjoint(self._nguids.values()),
            clock=time.monotonic,
            turn_s=nvme.turn_s,
            hold_s=nvme.hold_s,
            reservations=NvmeReservations() if nvme.reservations else None,
        )
        self.agent: Agent | None = None
        self._log_at = log_levels()
        self._tasks = Tasks(f"the daemon of {self.id}")

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """The files that ``readmit`` reads."""
        return (Path(self._settings.tokens_file),)

    @property
    def stops_within_s(self) -> float:
        """How long ``stop`` may take, while all that it waits for does as it should."""
        settings = self._settings
        drains_s = _DRAINS * settings.drain_s + settings.connections.drain_s
        return drains_s + _STORE_WAITS * settings.etcd.operation_timeout_s

    def status(self) -> AgentStatus:
        """Return what the agent believes, from before it is made until after its end."""
        return self.life.unmade(self.id, self._settings) if self.agent is None else self.agent.status()

    def readmit(self) -> None:
        """Read the tokens again, and refuse connections that were made with those that are gone.

        Raises FormatError, and then all stays as it was.
        """
        self._access = self._read_access()
        if self.agent is not None:
            self.agent.readmit(self._access)

    async def start(self) -> None:
        """Join the fabric and serve; wait for etcd as long as it is away.

        Raises an OstracaError that says what to do: etcd has another fabric, or none; an address can't be
        had; an agent of this name runs elsewhere; no transport works. ``stop`` comes next then, too.
        """
        settings = self._settings
        check_free(map(parse_address, settings.listen))  # else each try would take shards, and drop them
        wanted = settings.wanted_fabric()
        if wanted is not None:
            self._state.check_fabric(wanted)
        self._say("I look for the fabric in etcd.")
        try:
            fabric, membership = await self._patiently(
                "join the fabric",
                lambda: opened(
                    settings.etcd,
                    wanted or self._state.fabric,
                    self._key,
                    has_joined=self._state.fabric is not None,
                ),
            )
        except OtherFabricError as error:
            if wanted is None:  # then nothing but the directory says which fabric it is to be
                self._state.check_fabric(FabricId(error.fabric))
            raise
        self._membership = membership
        self._state.check_fabric(fabric)
        self._say("I make sure that no other process is this agent.")
        await self._await_namesake(membership)
        self._transports = made_transports(settings.transports)
        self._owners = NetworkOwners(
            self.id,
            here=LoopbackOwners(),
            address_of=lambda agent: _address_of(membership, agent),
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
            open_drive=self._open_drive,
            close_drive=self._close_drive,
            keeper=self._keeper,
            clock=time.monotonic,
            network=self._network,
            reached_at=self.reached_at,
            life=self.life,
        )
        self._state.remember(fabric=fabric, start=agent.start_id)
        await self._patiently("announce this agent", agent.join)
        self._say("I look for drives, and for shards that are mine to serve.")
        await agent.start()
        self._say("")
        self._tasks.spawn(self._log_as_ruled(membership))
        self._tasks.spawn(Greeting(self.id, membership=membership, owners=self._owners).run())

    async def stop(self) -> bool:
        """Leave the shards to other agents, end what is under way, leave the fabric, close everything.

        Returns whether every transfer and I/O has ended. If not, the process should end without unmapping
        memory, as it does when it simply exits.
        """
        agent, has_ended = self.agent, True
        self.life.phase = Phase.STOPPING
        self._say("I end what was begun.")
        if self._membership is not None:
            self._membership.hurry()
        await self._tasks.stop()
        if agent is not None:
            self._say("I leave shards and workers to other agents.")
            await agent.hand_over()
            self._say("I end what is under way.")
            drained = await agent.drain()
            self._say("I leave the fabric.")
            has_ended = await agent.leave() and drained
        self._say("I close what is open.")
        if self._owners is not None:
            await self._owners.close()
        has_ended = await are_idle(self._drives.values()) and has_ended
        if has_ended:  # closing a drive waits for its I/O, and what has not ended by now may never
            for drive in self._drives.values():
                drive.close()
        for transport in self._transports.values():
            await transport.close()
        if agent is not None and has_ended:
            agent.unmap()
        if self._membership is not None:
            await self._membership.close()
        return has_ended

    def _say(self, doing: str) -> None:
        self.life.doing = doing
        if self.agent is None:  # which looks by itself, once it is there: ``since_s`` counts from a look
            self.status()

    async def _patiently(self, what: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Wait for etcd, and say so in the status."""
        asked_s = time.monotonic()

        def say(trouble: str) -> None:
            self.life.wait_for_store(trouble, asked_s=asked_s)
            self._say(f"I wait for etcd, to {what}: {trouble}." if trouble else "")

        return await patiently(what, attempt, say=say)

    async def _log_as_ruled(self, membership: EtcdMembership) -> None:
        """Log from the level on that operators want, as long as they do."""
        before = ""
        async for rulings in membership.ruling_changes():
            wanted = rulings.live.log_level
            level = "" if wanted is None else wanted.value
            if level != before:
                self._log_at(level or None)
                log.warning("%s logs from %s on, as operators want it", self.id, level or "its own level")
                before = level

    def _made_network(self) -> SocketNetwork:
        tls = self._settings.tls
        if not tls.cert:
            return SOCKETS
        reached = [parse_address(each) for each in self.reached_at]
        hosts = [each.host for each in reached if isinstance(each, TlsAddress)]
        return SocketNetwork(Tls(TlsFiles(Path(tls.ca), Path(tls.cert), Path(tls.key)), hosts))

    def _read_access(self) -> Access:
        file, tls = Path(self._settings.tokens_file), self._settings.tls
        access = read_access(file, os.getuid())
        if not access.fabric_tokens and any(
            isinstance(parse_address(each), TcpAddress) for each in self.reached_at
        ):
            raise FormatError(
                f"{file} has no fabric token, by which agents know each other over TCP: write fabric = "
                '["..."] into it, the same for all of them, or use tls:// addresses'
            )
        return replace(
            access,
            agent_names=frozenset(tls.agent_names) or None,
            workers_show_certificates=tls.workers_show_certificates,
        )

    def _token(self) -> str:
        return self._access.fabric_tokens[0] if self._access.fabric_tokens else ""

    async def _await_namesake(self, membership: EtcdMembership) -> None:
        """Wait until no other process is this agent. Raises MembershipError when one goes on to be.

        The one that had this state directory before is gone, whatever its lease says.
        """
        until_s = time.monotonic() + _LEASES_WAITED * self._settings.etcd.lease_ttl_s
        while (there := membership.map.agents.get(self.id)) is not None and there.start != self._state.start:
            if time.monotonic() >= until_s:
                raise MembershipError(
                    f"an agent {self.id} is in the fabric already, at {', '.join(there.addresses)}: give "
                    "each agent an id of its own, and keep its state directory with it"
                )
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _open_drive(self, record: DriveRecord) -> Drive:
        if record.id not in self._drives:
            settings = DriveSettings(has_volatile_cache=True if self._settings.flushes else None)
            device = self._keeper.device_of(record)
            if not device:
                raise DriveError(f"this host has no path to drive {record.id}, which is {record.nguid}")
            self._drives[record.id] = FileDrive.open(record.id, device, settings)
            self._nguids[record.id] = record.nguid
        return self._drives[record.id]

    def _close_drive(self, drive: DriveId) -> None:
        """Let a drive go. What it still has to do may never end, so nobody waits for that."""
        self._nguids.pop(drive, None)
        if (opened := self._drives.pop(drive, None)) is not None:
            threading.Thread(target=opened.close, name=f"closes-{drive}", daemon=True).start()


def _paths(settings: DaemonSettings, host: str) -> TargetPaths:
    """Return this host's paths. Its host id follows from its name: enclosures hold the two together."""
    nvme, owner = settings.nvme, settings.owner
    asked = PathSettings(
        late_write_s=owner.late_write_s,
        pause_max_s=owner.pause_max_s,
        io_queues=nvme.io_queues,
        keep_alive_s=nvme.keep_alive_s,
        reconnect_delay_s=nvme.reconnect_delay_s,
        fast_io_fail_s=nvme.fast_io_fail_s,
    )
    host_id = str(uuid.uuid5(uuid.NAMESPACE_URL, host))
    return TargetPaths(files=FilePaths(host), nvme=NvmePaths(host, host_id, asked))


def _address_of(membership: EtcdMembership, agent: AgentId) -> tuple[str, ...]:
    record = membership.map.agents.get(agent)
    return record.addresses if record is not None else ()
