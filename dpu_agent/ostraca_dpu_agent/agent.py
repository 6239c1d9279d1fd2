"""One agent: mover, owner and steward put together, and the addresses it listens at.

Several agents may share a process, and then its transports and drives. Whoever starts an agent stops it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ostraca_dpu_agent.conditions import Phase
from ostraca_dpu_agent.events import EventRing
from ostraca_dpu_agent.gate import Gate
from ostraca_dpu_agent.incarnations import Incarnations
from ostraca_dpu_agent.life import Life
from ostraca_dpu_agent.mover.handed_over import HandedOver
from ostraca_dpu_agent.mover.mover import Mover
from ostraca_dpu_agent.mover.routes import Routes
from ostraca_dpu_agent.mover.staging import Staging
from ostraca_dpu_agent.neighbours import Neighbours
from ostraca_dpu_agent.owner.service import OwnerService
from ostraca_dpu_agent.paths.flash_work import FlashWorker
from ostraca_dpu_agent.paths.reserving import Reserving
from ostraca_dpu_agent.quotas import Quotas, flash_shares
from ostraca_dpu_agent.session import Sessions
from ostraca_dpu_agent.shard_status import shard_status
from ostraca_dpu_agent.steward.attaching import Opening, bar_nobody, path_of
from ostraca_dpu_agent.steward.retiring import Retiring
from ostraca_dpu_agent.steward.steward import Steward
from ostraca_dpu_agent.steward.volume_copies import VolumeCopies
from ostraca_dpu_agent.tenant_status import tenant_statuses
from ostraca_dpu_agent.unserved import owners_of
from ostraca_dpu_agent.volumes import Volumes
from ostraca_fabric.adapters.guarded_drive import GuardedDrive
from ostraca_fabric.connection import SOCKETS, serve
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.explain import EventKind
from ostraca_fabric.fabric_map import AgentRecord
from ostraca_fabric.ids import ID_BYTES, StartId
from ostraca_fabric.rulings import Switch
from ostraca_fabric.status import AgentCounters, AgentStatus, RulingsStatus
from ostraca_fabric.tasks import Tasks
from ostraca_fabric.version import VERSION
from ostraca_fabric.wire.handshake import LEAVING, AgentHandshake
from ostraca_fabric.wire.messages import ConnectionLimits
from ostraca_fabric.wire.placing import PLACING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ostraca_dpu_agent.paths.keeper import PathKeeper
    from ostraca_dpu_agent.settings import AgentSettings
    from ostraca_fabric.connection import Network, Server
    from ostraca_fabric.fabric_map import Claim, DriveRecord, FabricMap
    from ostraca_fabric.ids import AgentId, DriveId, EnclosureId, ShardId
    from ostraca_fabric.ports.drive import Drive
    from ostraca_fabric.ports.membership import Membership
    from ostraca_fabric.ports.owners import Reach
    from ostraca_fabric.ports.transport import Transport
    from ostraca_fabric.rulings import Rulings
    from ostraca_fabric.wire.handshake import Access

log = logging.getLogger(__name__)


class Agent:
    """One agent of a fabric."""

    def __init__(  # noqa: PLR0913 (what an agent is made of)
        self,
        agent: AgentId,
        settings: AgentSettings,
        *,
        addresses: Sequence[str],
        access: Access,
        fabric_key: bytes,
        membership: Membership,
        owners: Reach,
        transports: Mapping[str, Transport],
        open_drive: Callable[[DriveRecord], Drive],
        clock: Callable[[], float],
        close_drive: Callable[[DriveId], None] = lambda _: None,
        keeper: PathKeeper | None = None,
        network: Network = SOCKETS,
        reached_at: Sequence[str] | None = None,
        life: Life | None = None,
    ) -> None:
        """Make the parts; memory is mapped here, nothing is reachable before ``start``.

        *open_drive* opens a drive that *keeper* has a path to, or one with a path of its own, and raises
        OstracaError; *close_drive* lets one go, and returns at once.

        *transports* in order of preference; *clock* is monotonic, in seconds; *network* is where it listens,
        and *reached_at* what others are told of that: *addresses*, unless there is more to say; *life* is
        this agent's so far, where it began before.
        """
        self.id = agent
        self.start_id = StartId(secrets.token_bytes(ID_BYTES))
        self.crashed = asyncio.Event()
        """Set when something in it has ended that must not, which is a bug: it is to be started anew."""

        self._settings = settings
        self._addresses = tuple(addresses)
        self._access = access
        self._network = network
        self._membership = membership
        self._owners = owners
        self._transports = transports
        self._clock = clock
        self._life = Life(clock) if life is None else life
        self._open_drive = open_drive
        self._drives: dict[DriveId, GuardedDrive] = {}
        self._events = EventRing(agent, settings.events_max, clock)
        self._owner = OwnerService(clock, self._events, self._claim_of)
        self._staging = Staging(settings.memory)
        self._staging.cache.on_evicted = partial(self._events.record, EventKind.CACHE_EVICTED, label="")
        self._routes = Routes(membership.map)
        self._handed_over = HandedOver(agent, clock, lasts_s=settings.drain_s)
        self._mover = Mover(
            agent,
            settings,
            staging=self._staging,
            drives=self._drives,
            owners=owners,
            routes=self._newest_routes,
            clock=clock,
            events=self._events,
            rulings=lambda: membership.rulings,
        )
        self._incarnations = Incarnations(membership, clock, self._share_out)
        volumes = Volumes(membership, fabric_key, self._incarnations)
        quotas = Quotas(agent, lambda: membership.rulings, clock)
        gate = Gate(lambda: membership.rulings, self._incarnations, quotas, self._mover.counters)
        self._neighbours = Neighbours(
            settings.requests, owner=self._owner, mover=self._mover, volumes=volumes, gate=gate
        )
        self._sessions = Sessions(
            settings.requests,
            mover=self._mover,
            neighbours=self._neighbours,
            volumes=volumes,
            gate=gate,
            transports=transports,
            status=self.status,
            flash=None if keeper is None else FlashWorker(keeper, lambda: membership.map),
        )
        record = AgentRecord(agent, self.start_id, tuple(addresses if reached_at is None else reached_at))
        self._record = record
        self._reserving = None
        if keeper is not None and keeper.reservations is not None:
            self._reserving = Reserving(
                agent,
                keeper.reservations,
                keeper,
                newest_map=lambda: membership.map,
                stands=lambda: membership.confirm(agent, self.start_id),
            )
        self._steward = Steward(
            record,
            settings,
            membership=membership,
            owner=self._owner,
            drives=self._drives,
            opening=Opening(
                self._open_guarded,
                close_drive,
                path_of if keeper is None else keeper.device_of,
                bar_nobody if self._reserving is None else self._reserving.bar,
            ),
            clock=clock,
            on_crash=self.crashed.set,
        )
        self._keeper = keeper
        self._retiring = Retiring(
            agent,
            membership=membership,
            owners=owners,
            clock=clock,
            turn_s=settings.placement_turn_s,
            ttl_s=settings.placement_ttl_s,
        )
        self._volume_copies = VolumeCopies(
            membership, owner=self._owner, drives=self._drives, turn_s=settings.turn_s
        )
        self._servers: list[Server] = []
        self._loops = Tasks(f"agent {agent}", on_crash=self.crashed.set)

    async def join(self) -> None:
        """Announce this agent. Raises MembershipError.

        Agents that start together join before any of them starts: shards are then claimed by whom placement
        prefers, and not all by the first.
        """
        self._owners.register(self.id, self._neighbours)
        await self._membership.join(self._record)

    async def start(self) -> None:
        """Serve the shards that fall to this agent, then listen. Call it after ``join``.

        Raises MembershipError, and ConnectError when an address can't be had.
        """
        for transport in self._transports.values():
            transport.register(self._staging.memory.view, chunk_bytes=self._settings.memory.chunk_bytes)
        if self._keeper is not None:
            await self._keeper.found(self._membership.map, within_s=self._settings.nvme.found_within_s)
        if self._reserving is not None:
            await self._reserving.begin(within_s=self._settings.nvme.found_within_s)
            self._loops.spawn(self._reserving.run())
        await self._steward.turn()
        self._on_map(self._membership.map)
        self._loops.spawn(self._steward.run(self._on_map))
        self._loops.spawn(self._volume_copies.run())
        self._loops.spawn(self._incarnations.run())
        self._loops.spawn(self._retiring.run())
        self._loops.spawn(self._look())
        requests = self._settings.requests
        handshake = AgentHandshake(
            agent=self.id,
            start_id=self.start_id,
            access=self._access,
            features=(PLACING, LEAVING),
            limits=ConnectionLimits(requests.frame_bytes_max, requests.blocks_max, requests.inflight_max),
            transports=tuple(self._transports),
        )
        for address in self._addresses:
            server = await serve(
                address, self._sessions, handshake, self._settings.connections, network=self._network
            )
            self._servers.append(server)
        self._life.phase = Phase.SERVING
        log.info("%s listens at %s", self.id, ", ".join(self.addresses))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens, with real ports; empty before ``start``."""
        return tuple(server.address for server in self._servers)

    def readmit(self, access: Access) -> None:
        """Let in by other rules from now on, and refuse connections that they would not let in.

        What crosses for them ends as when a worker is gone. Call it between ``start`` and ``drain``.
        """
        for server in self._servers:
            server.readmit(access)

    async def hand_over(self) -> None:
        """Leave every shard to the other agents of the fabric, and go on serving what can be got until they
        have them. Workers that know another agent are sent there, and what they have begun here ends here, in
        ``drain_s`` or for as long as the shards take. For an agent that ends while others go on; ``drain``
        comes next.
        """
        self._life.phase = Phase.STOPPING
        until_s = self._clock() + self._settings.drain_s
        for server in self._servers:
            server.announce_leaving()
        await self._steward.hand_over_all()
        for server in self._servers:
            await server.release(within_s=max(0.0, until_s - self._clock()))

    async def drain(self) -> bool:
        """Take no more requests, and let those under way and puts acknowledged as staged end.

        Returns whether every transfer and I/O has ended; if not, this agent's memory must stay mapped.
        """
        self._life.phase = Phase.STOPPING
        for server in self._servers:
            await server.close()
        self._neighbours.close()
        return await self._mover.close(within_s=self._settings.drain_s)

    async def leave(self) -> bool:
        """Give the claims back and leave the fabric, once all agents that stop together have drained.

        Returns whether every summary write has ended. While the store is away, the lease has to run out.
        """
        await self._loops.stop()
        if self._keeper is not None:
            await self._keeper.stop()
        has_ended = await self._steward.close()
        self._owners.unregister(self.id)
        try:
            await self._membership.leave(self.id, self.start_id)
        except MembershipError as error:
            log.warning("%s can't leave the fabric now, it is gone when its lease ends: %s", self.id, error)
        for drive in self._drives.values():
            drive.unwatch()
        return has_ended

    def unmap(self) -> None:
        """Let this agent's memory go.

        Only when ``drain`` and ``leave`` have said that everything has ended, and after its transports are
        closed, which know the memory. Otherwise leave it mapped: something may still land there.
        """
        self._staging.memory.close()

    def status(self) -> AgentStatus:
        """Return what this agent believes."""
        return self._seen(is_whole=True)

    async def _look(self) -> None:
        """See every turn how conditions are, so that it is known since when they are so; and whether this
        agent stood still for longer than its claims stand unasked.
        """
        while True:
            self._seen(is_whole=False)
            slept_s = self._clock()
            await asyncio.sleep(self._settings.turn_s)
            stood_s = self._clock() - slept_s - self._settings.turn_s
            if stood_s >= self._settings.owner.grant_s:
                log.warning(
                    "%s was stopped, or could do nothing, for %.0f s: its lease may have ended meanwhile, "
                    "and its shards have other owners; it goes on as the membership store says",
                    self.id,
                    stood_s,
                )

    def _seen(self, *, is_whole: bool) -> AgentStatus:
        """Look at everything, or only at what conditions are judged by, which is a third less work."""
        memory, standing = self._settings.memory, self._steward.standing
        membership = standing.status()
        status = AgentStatus(
            agent=self.id,
            start_id=self.start_id.hex(),
            version=VERSION,
            uptime_s=self._life.uptime_s,
            transports=tuple(self._transports),
            sentence=self._steward.sentence,
            workers=self._sessions.workers,
            staging_bytes=memory.staging_bytes,
            staging_used_bytes=self._staging.held_bytes,
            quarantined_bytes=self._staging.quarantined_bytes,
            cache_bytes=memory.cache_bytes,
            cache_used_bytes=self._staging.cache.used_bytes,
            quarantined_cached_blocks=self._staging.quarantined_cached_blocks,
            quarantined_cached_bytes=self._staging.quarantined_cached_bytes,
            counters=self._mover.counters.snapshot() if is_whole else AgentCounters(),
            shards=tuple(
                shard_status(
                    owned,
                    self._volume_copies.of(shard),
                    membership,
                    retires_in_s=self._steward.retires_in_s(shard),
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
            operations=self._mover.counters.operations() if is_whole else (),
            drives=tuple(
                msgspec.structs.replace(drive.status(), hits=self._mover.counters.hits_on[name])
                for name, drive in sorted(self._drives.items())
            ),
            peers=self._owners.peers(),
            membership=membership,
            claims=msgspec.structs.replace(standing.counts),
            paths=() if self._keeper is None else self._keeper.status(self._reserved()),
            tenants=tenant_statuses(self._staging) if is_whole else (),
            purged=self._incarnations.purged,
            rulings=_status_of(self._membership.rulings),
            unserved=self._steward.unserved(),
            owners=owners_of(self._membership.map) if is_whole else (),
        )
        return self._life.judged(status)

    def _reserved(self) -> Mapping[EnclosureId, str]:
        return {} if self._reserving is None else self._reserving.states()

    def _open_guarded(self, record: DriveRecord) -> GuardedDrive:
        """Open the path to a drive. Agents of one process share it; what each believes of it is its own."""
        return GuardedDrive(self._open_drive(record), self._settings.health, self._clock)

    def _claim_of(self, shard: ShardId) -> Claim | None:
        return self._membership.map.claims.get(shard)

    def _share_out(self) -> None:
        self._owner.share_out(flash_shares(self._membership.rulings, self._membership.map))

    def _on_map(self, fabric_map: FabricMap) -> None:
        self._share_out()
        self._owner.placed(fabric_map.placement_epoch, has_earlier=bool(fabric_map.earlier_placements))
        if self._keeper is not None:
            self._keeper.see(fabric_map)
        before = self._routes
        if fabric_map.revision != before.map.revision:
            self._handed_over.on_map(before.map, fabric_map)
            self._routes = Routes(fabric_map, before, self._handed_over.owners)

    def _newest_routes(self) -> Routes:
        before = self._routes
        if before.handed_over and before.handed_over != self._handed_over.owners:
            self._routes = Routes(before.map, before, self._handed_over.owners)
        return self._routes


def _status_of(rulings: Rulings) -> RulingsStatus:
    switched = sorted((f"{tenant}/{name}", switch) for (tenant, name), switch in rulings.switches.items())
    return RulingsStatus(
        rulings.revision,
        rulings.live.in_force(),
        {volume: switch.value for volume, switch in switched if switch is not Switch.ON},
    )
