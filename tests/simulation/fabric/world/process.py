"""An agent's process: the real ``Agent`` on simulated ports, as its daemon would compose it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tests.simulation.fabric.history.story import Story
from tests.simulation.fabric.world import blocks
from tests.simulation.fabric.world.links import CONNECTIONS
from tests.simulation.fabric.world.worker import MIB, token_of
from tests.support.simulated.drives.reference_engine import ReferenceEngine
from tests.support.simulated.drives.simulated_drive import SimulatedDrive
from tests.support.simulated.drives.simulated_flash import SimulatedFlash
from tests.support.simulated.hosted import HostedDrive, HostedNetwork
from tests.support.simulated.simulated_membership import SimulatedMembership, SimulatedStore, StoreFaults
from tests.support.simulated.simulated_network import SimulatedNetwork
from tests.support.simulated.simulated_transport import SimulatedPlane, SimulatedTransport
from tests.support.simulated.virtual_hosts import HostsLoop, VirtualHost, outside
from tests.support.simulated.wrong_way import Harm, WrongWayTransport

from ostraca_dpu_agent.adapters.peers.loopback_owners import LoopbackOwners
from ostraca_dpu_agent.adapters.peers.owners import NetworkOwners
from ostraca_dpu_agent.adapters.transports.inline_transport import InlineTransport
from ostraca_dpu_agent.agent import Agent
from ostraca_dpu_agent.settings import AgentSettings, MemorySettings, OwnerSettings
from ostraca_fabric.drives.drive_health import DriveCondition
from ostraca_fabric.drives.io_engine import FlashIoSettings
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.model.ids import AgentId, DriveId
from ostraca_fabric.policies.endurance import EnduranceSettings
from ostraca_fabric.ports.transport import INLINE
from ostraca_fabric.wire.handshake import Access

if TYPE_CHECKING:
    from ostraca_dpu_agent.shards.shard import OwnedShard
    from ostraca_fabric.model.extent import Pieces
    from ostraca_fabric.model.fabric_map import DriveRecord
    from ostraca_fabric.model.ids import ShardId, TenantId
    from ostraca_fabric.ports.drive import Drive
    from ostraca_fabric.ports.transport import Transport

_RETRY_S = 1.0
FABRIC_TOKEN = "fabric"
LIES = (Harm.TRUNCATED, Harm.CORRUPTED, Harm.MIXED_UP, Harm.ELSEWHERE, Harm.LOST, Harm.DUPLICATED)

CACHE_BYTES, SMALL_CACHE_BYTES = 2 * MIB, MIB // 2

SETTINGS = AgentSettings(
    memory=MemorySettings(
        staging_bytes=4 * MIB,
        reserve_bytes=2 * MIB,
        cache_bytes=CACHE_BYTES,
        chunk_bytes=2 * MIB,
        worker_share=0.5,
        drive_share=0.5,
    ),
    owner=OwnerSettings(
        hold_s=6.0,
        pin_max_s=3.0,
        blocks_per_shard_max=1024,
        endurance=EnduranceSettings(ghost_bytes=4096),
    ),
    connections=CONNECTIONS,
    flash_io=FlashIoSettings(drive_bytes_max=256 << 10),  # so few that I/Os wait for each other
    events_max=256,
    reopen_backoff_s=2.0,
    placement_turn_s=5.0,
    drain_s=2.0,
)
REQUESTS_MAX = SETTINGS.flow.requests_max


@dataclass
class Outside:
    """What all processes of a fabric share."""

    loop: HostsLoop
    dice: random.Random
    story: Story
    store: SimulatedStore
    network: SimulatedNetwork
    plane: SimulatedPlane
    flashes: dict[DriveId, SimulatedFlash]
    reach: StoreFaults = field(default_factory=StoreFaults)
    lies: float = 0.0
    """The share of transfers that are not what they are said to be."""

    settings: AgentSettings = SETTINGS
    tenants: tuple[TenantId, ...] = ()
    """Those whose workers agents let in."""


class AgentProcess:
    """One start of one agent. ``begin`` it; end it with ``crash``, or in order."""

    def __init__(self, name: str, outside: Outside, *, rate: float) -> None:
        self.name = name
        self.id = AgentId(name)
        self.host = VirtualHost(name, outside.loop, rate=rate, began_s=outside.dice.uniform(0, 1e6))
        self.membership = SimulatedMembership(outside.store, outside.dice, outside.reach)
        self.transport = SimulatedTransport(outside.plane)
        self.drives: list[HostedDrive] = []
        self.on_write: Callable[[DriveId, Pieces], None] = lambda _, __: None
        self.has_started = False
        self.is_ending = False
        """Whether it ends in order."""

        self._outside = outside
        self._flash_io = ReferenceEngine(outside.settings.flash_io)
        transport: Transport = self.transport
        if outside.lies:
            transport = WrongWayTransport(
                transport, LIES, seed=outside.dice.randrange(1 << 30), share=outside.lies
            )
        network = HostedNetwork(outside.network.host(name), self.host)
        self._others = NetworkOwners(
            self.id,
            here=LoopbackOwners(),
            address_of=self._address_of,
            dice=random.Random(outside.dice.randrange(1 << 30)),
            connections=CONNECTIONS,
            token=lambda: FABRIC_TOKEN,
            network=network,
        )
        self.agent = self.host.run(
            lambda: Agent(
                self.id,
                outside.settings,
                addresses=(address_of(name),),
                access=Access(
                    own_uid=1000,
                    tenant_tokens={tenant: (token_of(tenant),) for tenant in outside.tenants},
                    fabric_tokens=(FABRIC_TOKEN,),
                ),
                fabric_key=blocks.FABRIC_KEY,
                membership=self.membership,
                owners=self._others,
                transports={transport.name: transport, INLINE: InlineTransport()},
                open_drive=self._open_drive,
                clock=self.host.clock,
                network=network,
            )
        )

    @property
    def is_alive(self) -> bool:
        return not self.host.is_dead

    @property
    def shards(self) -> dict[ShardId, OwnedShard]:
        """The shards that it answers for."""
        return self.agent._owner.shards

    def has(self, keys: NDArray[np.uint8], *, in_staging: bool, in_cache: bool) -> NDArray[np.bool_]:
        """Say which blocks it lists, in shards that it answers for or did, or, if so asked, has in DRAM."""
        owner = self.agent._owner
        answers_for = [*owner.shards.values(), *(former.owned for former in owner._former.values())]
        known = np.zeros(len(keys), np.bool_)
        for owned in answers_for:
            known |= owned.core.index.find(keys) >= 0
        if in_staging:
            known |= self.agent._data_path.context.staged.contains(keys)
        return known | self.agent._staging.cache.contains(keys) if in_cache else known

    @property
    def linked_to(self) -> list[tuple[AgentId, bytes]]:
        """The starts of other agents that it keeps a connection to, as far as it knows."""
        open_ones = ((agent, link._open_connection()) for agent, link in self._others._links.items())
        return [(agent, each.welcome.start_id) for agent, each in open_ones if each is not None]

    def has_given_up(self, drives: Iterable[DriveId]) -> bool:
        """Say whether it leaves one of these drives alone for as long as it lives."""
        known = self.agent._drives
        return any(
            drive in known and known[drive].health.condition is DriveCondition.FAILED for drive in drives
        )

    def begin(self) -> None:
        self.host.spawn(self._start())

    async def _start(self) -> None:
        while True:
            try:
                await self.agent.join()
                break
            except MembershipError as error:
                self._outside.story.tell(self.name, f"can't join: {error}")
                await asyncio.sleep(_RETRY_S)
        while True:
            try:
                await self.agent.start()
                break
            except MembershipError as error:
                self._outside.story.tell(self.name, f"can't start: {error}")
                await asyncio.sleep(_RETRY_S)
        self.has_started = True

    def begin_end(self, ended: Callable[[bool, int], None]) -> None:
        """Have it end in order, as its daemon has it on SIGTERM.

        Say whether it takes all I/O to have ended, and how many transfers were under way then.
        """
        self.is_ending = True
        self.host.spawn(self._end(ended))

    async def _end(self, ended: Callable[[bool, int], None]) -> None:
        await self.agent.hand_over()
        has_drained = await self.agent.drain()
        has_ended, under_way = await self.agent.leave() and has_drained, len(self.transport.under_way)
        await self._others.close()
        if has_ended:
            await self.transport.close()
            self.agent.unmap()
        outside(ended, has_ended, under_way)

    def crash(self) -> None:
        """End the process at once, and leave its work under way to the world."""
        self.host.kill()
        self.membership.close()
        self.transport.crash()
        for drive in self.drives:
            drive.path.crash()

    def forget(self) -> None:
        """Let its memory go, when the history is over."""
        self.host.forget()

    def _address_of(self, agent: AgentId) -> tuple[str, ...]:
        record = self.membership.map.agents.get(agent)
        return record.addresses if record is not None else ()

    def _open_drive(self, record: DriveRecord) -> Drive:
        flash = self._outside.flashes[record.id]
        drive = HostedDrive(SimulatedDrive(record.id, flash, engine=self._flash_io))
        drive.on_write = lambda pieces: self.on_write(record.id, pieces)
        self.drives.append(drive)
        return drive


def address_of(name: str) -> str:
    return f"tcp://{name}:7000"


@dataclass(frozen=True)
class Lateness:
    """What owners count on: as in ``OwnerSettings``, in seconds."""

    hold_s: float = 6.0
    pause_max_s: float = 60.0
    late_write_s: float = 120.0
    adopt_every_s: float = 10.0


def settings_with(lateness: Lateness, *, cache_bytes: int, requests_max: int) -> AgentSettings:
    memory = replace(SETTINGS.memory, cache_bytes=cache_bytes)
    owner = replace(
        SETTINGS.owner,
        hold_s=lateness.hold_s,
        pause_max_s=lateness.pause_max_s,
        late_write_s=lateness.late_write_s,
        adopt_every_s=lateness.adopt_every_s,
    )
    flow = replace(SETTINGS.flow, requests_max=requests_max)
    return replace(SETTINGS, memory=memory, flow=flow, owner=owner)
