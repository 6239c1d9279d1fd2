"""An agent: data path, shard owner, controller and listening addresses.

Several agents may share a process with its transports and drives. The caller that starts an agent stops
it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from ostraca_dpu_agent.adapters.transports.worker_memory import WorkerMemories
from ostraca_dpu_agent.conditions import AgentPhase
from ostraca_dpu_agent.controller.controller import AgentController
from ostraca_dpu_agent.controller.drive_attachments import DriveOpener, path_on_record, preempt_none
from ostraca_dpu_agent.controller.epoch_retirement import EpochRetirement
from ostraca_dpu_agent.controller.recovery import read_superblock
from ostraca_dpu_agent.controller.unavailable import shard_counts
from ostraca_dpu_agent.datapath.data_path import DataPath
from ostraca_dpu_agent.datapath.location.routing import PreviousOwners, RouteTable
from ostraca_dpu_agent.datapath.names import BlockNames
from ostraca_dpu_agent.datapath.requests.context import RequestContext
from ostraca_dpu_agent.datapath.staging.staging import Staging
from ostraca_dpu_agent.experimental.reservation_keeper import ReservationKeeper
from ostraca_dpu_agent.feed.router_feed import RouterFeed
from ostraca_dpu_agent.lifecycle import Lifecycle, tenant_statuses
from ostraca_dpu_agent.paths.flash_work import FlashWorker
from ostraca_dpu_agent.paths.manager import PathManager
from ostraca_dpu_agent.server.dispatcher import RequestDispatcher
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_dpu_agent.shards.reports import shard_status
from ostraca_dpu_agent.shards.service import OwnerService, flash_shares
from ostraca_dpu_agent.shards.volume_copy import VolumeCopies
from ostraca_dpu_agent.volumes import Incarnations, Volumes
from ostraca_fabric.connection import SOCKETS, Network, Server, serve
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.model.fabric_map import AgentRecord, Claim, DriveRecord, FabricMap
from ostraca_fabric.model.ids import ID_BYTES, AgentId, DriveId, ShardId, StartId
from ostraca_fabric.model.overrides import Overrides, Switch
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.ports.owners import AgentNetwork
from ostraca_fabric.ports.transport import Transport
from ostraca_fabric.runtime.process_memory import MemoryProof
from ostraca_fabric.runtime.tasks import Tasks
from ostraca_fabric.runtime.version import VERSION
from ostraca_fabric.telemetry.explain import EventKind
from ostraca_fabric.telemetry.requests import EventRing
from ostraca_fabric.telemetry.status import AgentCounters, AgentStatus, OverridesStatus, Unhit
from ostraca_fabric.wire.handshake import DIRECT, LEAVING, MEMORY, PLACING, REGIONS, Access, AgentHandshake
from ostraca_fabric.wire.messages import AgentMemory, ConnectionLimits

log = logging.getLogger(__name__)


class Agent:
    """An agent of a fabric."""

    def __init__(  # noqa: PLR0913 (the parts of an agent)
        self,
        agent: AgentId,
        settings: AgentSettings,
        *,
        addresses: Sequence[str],
        access: Access,
        fabric_key: bytes,
        membership: Membership,
        owners: AgentNetwork,
        transports: Mapping[str, Transport],
        open_drive: Callable[[DriveRecord], Drive],
        clock: Callable[[], float],
        close_drive: Callable[[DriveId], None] = lambda _: None,
        flash_io: Callable[[], str] = str,
        path_manager: PathManager | None = None,
        network: Network = SOCKETS,
        reached_at: Sequence[str] | None = None,
        life: Lifecycle | None = None,
    ) -> None:
        """Make the parts and map memory; ``start`` makes the agent reachable.

        *open_drive* opens a drive with a path of *path_manager*, or a drive with a path of its own. It raises
        OstracaError. *close_drive* closes a drive and returns at once. *flash_io* names the way of flash I/O.

        *transports* are in order of preference. *clock* is monotonic, in seconds. *network* provides the
        listening sockets. *reached_at* is announced to other agents, by default *addresses*. *life* is
        this agent's lifecycle if it began earlier.
        """
        self.id = agent
        self.start_id = StartId(secrets.token_bytes(ID_BYTES))
        self.crashed = asyncio.Event()
        """Set after the unexpected end of an internal task, a bug; the caller restarts the agent."""

        self._settings = settings
        self._addresses = tuple(addresses)
        self._access = access
        self._network = network
        self._membership = membership
        self._owners = owners
        self._transports = transports
        self._clock = clock
        self._life = Lifecycle(clock) if life is None else life
        self._open_drive = open_drive
        self._flash_io = flash_io
        self._drives: dict[DriveId, GuardedDrive] = {}
        self._events = EventRing(agent, settings.events_max, clock)
        self._owner = OwnerService(clock, self._events, self._claim_of)
        self._staging = Staging(settings.memory)
        self._proof = MemoryProof()
        self._staging.cache.on_evicted = partial(self._events.record, EventKind.CACHE_EVICTED, label="")
        self._routes = RouteTable(membership.map, PreviousOwners(agent, clock, lasts_s=settings.drain_s))
        context = RequestContext(
            agent,
            settings,
            staging=self._staging,
            drives=self._drives,
            owners=owners,
            here=self._owner,
            routes=self._routes.newest,
            clock=clock,
            events=self._events,
            membership=membership,
        )
        self._incarnations = Incarnations(membership, clock, self._apply_flash_shares)
        feed = settings.router_feed
        self._data_path = DataPath(
            agent,
            context,
            membership,
            self._incarnations,
            names=BlockNames(feed.volume, names_max=feed.names_max, first=time.time_ns()),
            unhit_volumes_max=settings.unhit_volumes_max,
        )
        volumes = Volumes(membership, fabric_key, self._incarnations)
        self._router_feed = (
            RouterFeed(feed, context, volumes, lambda: tuple(membership.map.agents), self._data_path.switch)
            if feed.bind
            else None
        )
        self._worker_memories = WorkerMemories()
        self._dispatcher = RequestDispatcher(
            settings.requests,
            data_path=self._data_path,
            owner=self._owner,
            volumes=volumes,
            transports=transports,
            worker_memories=self._worker_memories,
            status=self.status,
            flash=None if path_manager is None else FlashWorker(path_manager, lambda: membership.map),
        )
        record = AgentRecord(agent, self.start_id, tuple(addresses if reached_at is None else reached_at))
        self._record = record
        self._reservation_keeper = None
        if path_manager is not None and path_manager.reservations is not None:
            self._reservation_keeper = ReservationKeeper(
                agent,
                path_manager.reservations,
                path_manager,
                newest_map=lambda: membership.map,
                is_member=lambda: membership.confirm(agent, self.start_id),
            )
        self._controller = AgentController(
            record,
            settings,
            membership=membership,
            owner=self._owner,
            drives=self._drives,
            opener=DriveOpener(
                self._open_guarded,
                close_drive,
                path_on_record if path_manager is None else path_manager.device_of,
                preempt_none if self._reservation_keeper is None else self._reservation_keeper.preempt,
            ),
            clock=clock,
            on_crash=self.crashed.set,
        )
        self._path_manager = path_manager
        self._epoch_retirement = EpochRetirement(
            agent,
            membership=membership,
            owners=owners,
            clock=clock,
            turn_s=settings.placement_turn_s,
            ttl_s=settings.placement_ttl_s,
        )
        self._volume_copies = VolumeCopies(
            membership,
            served=self._owner.shards,
            drives=self._drives,
            turn_s=settings.turn_s,
            read_superblock=read_superblock,
        )
        self._servers: list[Server] = []
        self._loops = Tasks(f"agent {agent}", on_crash=self.crashed.set)

    async def join(self) -> None:
        """Announce this agent. Raises MembershipError.

        Agents that start together all join before any of them starts. Shards are then claimed by the
        agents that placement prefers, not all by the first.
        """
        self._owners.register(self.id, self._dispatcher)
        await self._membership.join(self._record)

    async def start(self) -> None:
        """Serve this agent's shards, then listen. Call ``join`` first.

        Raises MembershipError, and ConnectError when an address can't be bound.
        """
        for transport in self._transports.values():
            transport.register(self._staging.memory.view, chunk_bytes=self._settings.memory.chunk_bytes)
        if self._path_manager is not None:
            await self._path_manager.wait_for_first_attempts(
                self._membership.map, within_s=self._settings.nvme.paths_wait_s
            )
        if self._reservation_keeper is not None:
            await self._reservation_keeper.begin(within_s=self._settings.nvme.paths_wait_s)
            self._loops.spawn(self._reservation_keeper.run())
        await self._controller.turn()
        self._on_map(self._membership.map)
        self._loops.spawn(self._controller.run(self._on_map))
        self._loops.spawn(self._volume_copies.run())
        self._loops.spawn(self._incarnations.run())
        self._loops.spawn(self._epoch_retirement.run())
        self._loops.spawn(self._watch_conditions())
        if self._router_feed is not None:
            self._loops.spawn(self._router_feed.run())
        requests, memory = self._settings.requests, self._staging.memory
        handshake = AgentHandshake(
            agent=self.id,
            start_id=self.start_id,
            access=self._access,
            features=(PLACING, LEAVING, DIRECT, MEMORY, REGIONS),
            limits=ConnectionLimits(requests.frame_bytes_max, requests.blocks_max, requests.inflight_max),
            transports=tuple(self._transports),
            memory=AgentMemory(memory.address, memory.size_bytes, self._proof.address, self._proof.content),
        )
        for address in self._addresses:
            server = await serve(
                address, self._dispatcher, handshake, self._settings.connections, network=self._network
            )
            self._servers.append(server)
        self._life.phase = AgentPhase.SERVING
        log.info("%s listens at %s", self.id, ", ".join(self.addresses))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Listening addresses with real ports; empty before ``start``."""
        return tuple(server.address for server in self._servers)

    def readmit(self, access: Access) -> None:
        """Apply new access rules and end connections that violate them.

        Transfers of an ended connection end as if the worker had died. Call between ``start`` and
        ``drain``.
        """
        for server in self._servers:
            server.readmit(access)

    async def hand_over(self) -> None:
        """Hand every shard over to other agents, and serve until then.

        Workers with a second agent are sent there. Their requests here may end within ``drain_s``, or
        within the time of the handover if longer. Only for an agent that stops while others continue; call
        ``drain`` next.
        """
        self._life.phase = AgentPhase.STOPPING
        until_s = self._clock() + self._settings.drain_s
        for server in self._servers:
            server.announce_leaving()
        await self._controller.hand_over_all()
        for server in self._servers:
            await server.release(within_s=max(0.0, until_s - self._clock()))

    async def drain(self) -> bool:
        """Refuse new requests, then wait for requests and staged puts to end.

        Returns whether every transfer and I/O has ended; if not, this agent's memory must stay mapped.
        """
        self._life.phase = AgentPhase.STOPPING
        for server in self._servers:
            await server.close()
        self._dispatcher.close()
        has_ended = await self._data_path.close(within_s=self._settings.drain_s)
        self._worker_memories.close()
        return has_ended

    async def leave(self) -> bool:
        """Release all claims and leave the fabric.

        Call after all agents that stop together have drained. Returns whether every summary write has
        ended. While the membership store is unreachable, the lease has to expire.
        """
        await self._loops.stop()
        if self._path_manager is not None:
            await self._path_manager.stop()
        has_ended = await self._controller.close()
        self._owners.unregister(self.id)
        try:
            await self._membership.leave(self.id, self.start_id)
        except MembershipError as error:
            log.warning("%s could not deregister, and its lease has to expire: %s", self.id, error)
        for drive in self._drives.values():
            drive.unwatch()
        return has_ended

    def unmap(self) -> None:
        """Unmap this agent's memory.

        Call only if ``drain`` and ``leave`` have reported the end of all work, and after closing the
        transports, which hold references to the memory. Otherwise leave the memory mapped: a transfer may
        still write there.
        """
        self._staging.memory.close()

    def status(self) -> AgentStatus:
        """Return the status of this agent."""
        return self._collect_status(is_whole=True)

    async def _watch_conditions(self) -> None:
        """Observe the conditions every turn, to record when each began.

        Also warn when the agent was suspended for longer than ``grant_s``.
        """
        while True:
            self._collect_status(is_whole=False)
            slept_s = self._clock()
            await asyncio.sleep(self._settings.turn_s)
            suspended_s = self._clock() - slept_s - self._settings.turn_s
            if suspended_s >= self._settings.owner.grant_s:
                log.warning(
                    "%s was suspended for %.0f s: the lease may have expired, and shards may have other "
                    "owners; the agent continues by the membership store",
                    self.id,
                    suspended_s,
                )

    def _collect_status(self, *, is_whole: bool) -> AgentStatus:
        """Collect the whole status, or only the input of the conditions.

        The input lacks healthy drives: a pod has a thousand.
        """
        memory, claim_validity = self._settings.memory, self._controller.claim_validity
        membership = claim_validity.status()
        status = AgentStatus(
            agent=self.id,
            start_id=self.start_id.hex(),
            version=VERSION,
            uptime_s=self._life.uptime_s,
            transports=tuple(self._transports),
            sentence=self._controller.sentence,
            flash_io=self._flash_io(),
            workers=self._dispatcher.workers,
            staging_bytes=memory.staging_bytes,
            staging_used_bytes=self._staging.held_bytes,
            quarantined_bytes=self._staging.quarantined_bytes,
            cache_bytes=memory.cache_bytes,
            cache_used_bytes=self._staging.cache.used_bytes,
            quarantined_cached_blocks=self._staging.quarantined_cached_blocks,
            quarantined_cached_bytes=self._staging.quarantined_cached_bytes,
            counters=self._data_path.context.counters.snapshot() if is_whole else AgentCounters(),
            shards=tuple(
                shard_status(
                    owned,
                    self._volume_copies.of(shard),
                    membership,
                    retires_in_s=self._controller.retires_in_s(shard),
                    now_s=self._clock(),
                    has_pools=is_whole,
                )
                for shard, owned in sorted(self._owner.shards.items())
            ),
            agents=tuple(
                (agent.id, agent.addresses[0])
                for agent in self._membership.map.agents.values()
                if agent.addresses
            ),
            operations=self._data_path.context.counters.operations() if is_whole else (),
            drives=tuple(
                msgspec.structs.replace(drive.status(), hits=self._data_path.context.counters.hits_on[name])
                for name, drive in sorted(self._drives.items())
                if is_whole or drive.why
            ),
            peers=self._owners.peers(),
            membership=membership,
            claims=msgspec.structs.replace(claim_validity.counts),
            paths=()
            if self._path_manager is None
            else self._path_manager.status(
                {} if self._reservation_keeper is None else self._reservation_keeper.states()
            ),
            tenants=tenant_statuses(self._staging) if is_whole else (),
            purged=self._incarnations.purged,
            overrides=_status_of(self._membership.overrides),
            unserved=self._controller.unavailable(),
            owners=shard_counts(self._membership.map) if is_whole else (),
            unhit=self._data_path.unhit() if is_whole else Unhit(),
        )
        return self._life.with_conditions(status)

    def _open_guarded(self, record: DriveRecord) -> GuardedDrive:
        """Open the path to a drive, with a health state of this agent's own.

        Agents of one process share the path.
        """
        return GuardedDrive(self._open_drive(record), self._settings.health, self._clock)

    def _claim_of(self, shard: ShardId) -> Claim | None:
        return self._membership.map.claims.get(shard)

    def _apply_flash_shares(self) -> None:
        self._owner.share_out(flash_shares(self._membership.overrides, self._membership.map))

    def _on_map(self, fabric_map: FabricMap) -> None:
        self._apply_flash_shares()
        self._owner.begin_placement_epoch(
            fabric_map.placement_epoch, has_earlier=bool(fabric_map.earlier_placements)
        )
        if self._path_manager is not None:
            self._path_manager.use_map(fabric_map)
        self._routes.on_map(fabric_map)


def _status_of(overrides: Overrides) -> OverridesStatus:
    switched = sorted((f"{tenant}/{name}", switch) for (tenant, name), switch in overrides.switches.items())
    return OverridesStatus(
        overrides.revision,
        overrides.live.in_force(),
        {volume: switch.value for volume, switch in switched if switch is not Switch.ON},
    )
