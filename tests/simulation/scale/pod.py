"""A pod's controllers: the real controller and owner service of every agent, on drives of a few MiB.

No worker and no data path: what is looked at here is who owns what, how soon, and what that costs the store.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.support.simulated.drives.drive_faults import DriveFaults
from tests.support.simulated.drives.reference_engine import ReferenceEngine
from tests.support.simulated.drives.simulated_drive import SimulatedDrive
from tests.support.simulated.drives.simulated_flash import SimulatedFlash
from tests.support.simulated.hosted import HostedDrive
from tests.support.simulated.simulated_membership import SimulatedMembership, SimulatedStore
from tests.support.simulated.virtual_hosts import HostsLoop, VirtualHost

from ostraca_dpu_agent.controller.controller import AgentController
from ostraca_dpu_agent.controller.drive_attachments import DriveOpener
from ostraca_dpu_agent.datapath.location.routing import PreviousOwners
from ostraca_dpu_agent.settings import AgentSettings, OwnerSettings
from ostraca_dpu_agent.shards.service import OwnerService
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.flash.superblock import Superblock, encode_superblock
from ostraca_fabric.model.extent import FIRST_SEGMENT_OFFSET, MIB, Geometry
from ostraca_fabric.model.fabric_map import (
    AgentRecord,
    DriveRecord,
    EnclosureRecord,
    EnclosureState,
    ShardRecord,
)
from ostraca_fabric.model.ids import AgentId, EnclosureId, FabricId, StartId, drive_id, shard_id
from ostraca_fabric.telemetry.requests import EventRing

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_fabric.model.fabric_map import FabricMap
    from ostraca_fabric.model.ids import DriveId, ShardId

FABRIC = FabricId(bytes(16))
SEGMENTS = 4
SETTINGS = AgentSettings(
    owner=OwnerSettings(blocks_per_shard_max=1024, free_segments=1), events_max=16, drain_s=2.0
)
_LOOK_S = 0.05
_RETRY_S = 1.0


class CountedMembership(SimulatedMembership):
    """A process's way to the store, on which every request is counted as it is made."""

    def __init__(self, pod: Pod) -> None:
        super().__init__(pod.store, pod.dice)
        self._pod = pod

    async def join(self, agent: AgentRecord) -> None:
        self._pod.count("join")
        await super().join(agent)

    async def confirm(self, agent: AgentId, start: StartId) -> bool:
        self._pod.count("confirm")
        return await super().confirm(agent, start)

    async def claim(self, shard: ShardId, *asked: Any, **more: Any) -> Any:
        self._pod.count("claim")
        self._pod.claims_asked[shard] += 1
        return await super().claim(shard, *asked, **more)

    async def grant(self, *asked: Any, **more: Any) -> bool:
        self._pod.count("grant")
        return await super().grant(*asked, **more)

    async def close_grant(self, *asked: Any) -> None:
        self._pod.count("close_grant")
        await super().close_grant(*asked)

    async def release(self, *asked: Any) -> None:
        self._pod.count("release")
        await super().release(*asked)


class ControlledAgent:
    """One start of one agent, without its data path."""

    def __init__(self, name: str, number: int, pod: Pod) -> None:
        self.id = AgentId(name)
        self.start = StartId(number.to_bytes(16, "little"))
        self.host = VirtualHost(name, pod.loop)
        self.membership = CountedMembership(pod)
        self.turns = 0
        self._pod = pod
        self._record = AgentRecord(self.id, self.start, (f"tcp://{name}:7000",))
        self.host.run(self._made)

    def _made(self) -> None:
        clock, pod = self.host.clock, self._pod
        self.drives: dict[DriveId, GuardedDrive] = {}
        self.paths: list[SimulatedDrive] = []
        self._flash_io = ReferenceEngine(pod.settings.flash_io)
        self.owner = OwnerService(clock, EventRing(self.id, pod.settings.events_max, clock))
        self.handed_over = PreviousOwners(self.id, clock, lasts_s=pod.settings.drain_s)
        self.map = self.membership.map
        self.controller = AgentController(
            self._record,
            pod.settings,
            membership=self.membership,
            owner=self.owner,
            drives=self.drives,
            opener=DriveOpener(self._open),
            clock=clock,
        )

    def begin(self) -> None:
        self._running = self.host.spawn(self._run())

    async def end(self) -> None:
        """Hand over and leave, as at SIGTERM."""
        await asyncio.wait([self.host.spawn(self._end())])
        self.host.forget()

    def crash(self) -> None:
        self.host.kill()
        self.membership.close()
        for path in self.paths:
            path.crash()

    async def _run(self) -> None:
        while True:
            try:
                await self.membership.join(self._record)
                break
            except MembershipError:
                await asyncio.sleep(_RETRY_S)
        await self.controller.run(self._on_map)

    async def _end(self) -> None:
        await self.controller.hand_over_all()
        self._running.cancel()
        await asyncio.wait([self._running])
        await self.controller.close()
        await self.membership.leave(self.id, self.start)
        self.membership.close()

    def _on_map(self, fabric_map: FabricMap) -> None:
        self.owner.begin_placement_epoch(
            fabric_map.placement_epoch, has_earlier=bool(fabric_map.earlier_placements)
        )
        self.handed_over.on_map(self.map, fabric_map)
        self.map = fabric_map

    def _open(self, record: DriveRecord) -> GuardedDrive:
        path = SimulatedDrive(record.id, self._pod.flashes[record.id], engine=self._flash_io)
        self.paths.append(path)
        return GuardedDrive(HostedDrive(path), self._pod.settings.health, self.host.clock)


@dataclass(frozen=True)
class Size:
    """How large a pod is."""

    agents: int = 64
    enclosures: int = 36
    drives: int = 32
    """Of each enclosure, with one shard each."""


class Pod:
    """Every agent, every drive, and the store. Lives on a ``HostsLoop``."""

    def __init__(self, size: Size, seed: int, settings: AgentSettings = SETTINGS) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HostsLoop)
        self.loop = loop
        self.size = size
        self.settings = settings
        self.dice = random.Random(seed)
        self.store = SimulatedStore(FABRIC)
        self.flashes: dict[DriveId, SimulatedFlash] = {}
        self.agents: dict[str, ControlledAgent] = {}
        self.calls: Counter[tuple[int, str]] = Counter()
        """By the second, and by what was asked of the store."""

        self.claims_asked: Counter[ShardId] = Counter()
        self.owners: dict[ShardId, list[AgentId]] = {}
        """Everybody who has owned a shard, in order."""

        self.unowned_s: dict[ShardId, float] = {}
        """The longest that a shard was without an owner."""

        self.handing_over_most = 0
        """The most shards that an agent was handing over at one time, while it stayed."""

        self._unowned_since_s: dict[ShardId, float] = {}
        self._starts = 0
        self._gone: list[VirtualHost] = []
        self.store.watch(self._note_owners)
        self.put([self.made_enclosure(f"e{number:02}") for number in range(size.enclosures)])

    @property
    def map(self) -> FabricMap:
        return self.store.memory.map

    def count(self, what: str) -> None:
        self.calls[int(self.loop.now_s), what] += 1

    def calls_per_s(self, since_s: float, *kinds: str) -> int:
        """Return the most requests that were made in one second since then."""
        seconds: Counter[int] = Counter()
        for (second, kind), calls in self.calls.items():
            if second >= int(since_s) and (not kinds or kind in kinds):
                seconds[second] += calls
        return max(seconds.values(), default=0)

    def made_enclosure(self, name: str) -> EnclosureRecord:
        enclosure = EnclosureId(name)
        shard_bytes = FIRST_SEGMENT_OFFSET + SEGMENTS * MIB
        geometry = Geometry.planned(shard_bytes, segment_bytes=MIB, block_bytes=4096)
        drives, shards = [], []
        for number in range(self.size.drives):
            drive = drive_id(enclosure, f"d{number:02}")
            shard = shard_id(drive, 0)
            flash = self.flashes[drive] = SimulatedFlash(shard_bytes, self.dice)
            superblock = Superblock(FABRIC, bytes(16), enclosure, drive, shard, 0, geometry)
            pages = np.frombuffer(encode_superblock(superblock), np.uint8)
            flash.land(flash.next_number(), 0, pages, lambda: False)
            drives.append(DriveRecord(drive, str(drive)))
            data_bytes = geometry.segments * geometry.data_bytes
            shards.append(ShardRecord(shard, drive, 0, shard_bytes, data_bytes, geometry.data_bytes))
        return EnclosureRecord(enclosure, tuple(drives), tuple(shards))

    def put(self, enclosures: list[EnclosureRecord]) -> None:
        self.store.transact(lambda store: store.memory.put_enclosures(enclosures, force=True))

    def drain_enclosure(self, name: str) -> None:
        """Let it take nothing new, as an operator would before it is taken out."""
        enclosure = self.map.enclosures[EnclosureId(name)]
        shards = tuple(replace(shard, weight=0) for shard in enclosure.shards)
        self.put([replace(enclosure, shards=shards, state=EnclosureState.DRAINING)])

    def lose_enclosure(self, name: str, *, is_lost: bool = True) -> None:
        """Let every I/O of its drives fail, or none any more."""
        for drive in self.map.enclosures[EnclosureId(name)].drives:
            self.flashes[drive.id].faults = DriveFaults(read_errors=is_lost, write_errors=is_lost)

    def start(self, name: str) -> None:
        self._starts += 1
        self.agents[name] = agent = ControlledAgent(name, self._starts, self)
        agent.begin()

    def start_all(self) -> None:
        for number in range(self.size.agents):
            self.start(f"a{number:02}")

    def crash(self, name: str) -> None:
        agent = self.agents.pop(name)
        agent.crash()
        self._gone.append(agent.host)

    async def end_agent(self, name: str) -> None:
        await self.agents.pop(name).end()

    def end(self) -> None:
        for host in [*self._gone, *(agent.host for agent in self.agents.values())]:
            host.forget()

    def owned(self) -> Counter[AgentId]:
        """Count what each agent of the fabric owns."""
        owned = Counter(dict.fromkeys(self.map.agents, 0))
        owned.update(claim.agent for claim in self.map.claims.values())
        return owned

    def unowned(self) -> list[ShardId]:
        return [shard.id for shard in self.map.shards() if shard.id not in self.map.claims]

    def unserved(self) -> list[ShardId]:
        """Return the shards that their owner does not answer for in full."""
        unserved = []
        for shard in self.map.shards():
            claim = self.map.claims.get(shard.id)
            agent = self.agents.get(claim.agent) if claim is not None else None
            owned = agent.owner.shards.get(shard.id) if agent is not None else None
            if owned is None or owned.core.is_recovering:
                unserved.append(shard.id)
        return unserved

    def writers(self) -> Counter[ShardId]:
        """Count the living agents that would hand out space of each shard."""
        return Counter(
            shard
            for agent in self.agents.values()
            for shard, owned in agent.owner.shards.items()
            if owned.may_write_volumes
        )

    async def until(self, holds: Callable[[], bool], *, within_s: float) -> float:
        """Wait until something holds; return for how long. Fails when that takes too long."""
        begun_s = self.loop.now_s
        while not holds():
            waited_s = self.loop.now_s - begun_s
            assert waited_s <= within_s, f"not within {within_s} s: {self.state()}"
            await asyncio.sleep(_LOOK_S)
        return self.loop.now_s - begun_s

    def state(self) -> str:
        return (
            f"{len(self.map.agents)} agents, {len(self.unowned())} shards without an owner, "
            f"{len(self.unserved())} not answered for"
        )

    def forget_owners(self) -> None:
        """Note owners and gaps from now on."""
        now_s = self.loop.now_s
        self.owners = {shard: [claim.agent] for shard, claim in self.map.claims.items()}
        self.unowned_s = {}
        self._unowned_since_s = dict.fromkeys(self._unowned_since_s, now_s)

    def _note_owners(self) -> None:
        now_s = self.loop.now_s
        for agent in self.agents.values():
            if not agent.controller.shards.is_ending.is_set():
                self.handing_over_most = max(
                    self.handing_over_most, len(agent.controller.shards.handing_over)
                )
        claims = self.map.claims
        for shard, claim in claims.items():
            owners = self.owners.setdefault(shard, [])
            since_s = self._unowned_since_s.pop(shard, None)
            if since_s is not None:
                self.unowned_s[shard] = max(self.unowned_s.get(shard, 0.0), now_s - since_s)
                owners.append(claim.agent)
        if len(claims) < len(self.owners) or self._unowned_since_s:
            for shard in self.owners:
                if shard not in claims:
                    self._unowned_since_s.setdefault(shard, now_s)
        for shard in claims.keys() - self.owners.keys():
            self.owners[shard] = [claims[shard].agent]
