"""A whole fabric: hosts with an agent and a worker each, enclosures, and the store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.fabric.history.story import Story
from tests.simulation.fabric.oracle.calm import Calm
from tests.simulation.fabric.oracle.heard import Heard
from tests.simulation.fabric.oracle.limits import check_limits
from tests.simulation.fabric.oracle.margins import Margins
from tests.simulation.fabric.oracle.operations import get, look_up, put
from tests.simulation.fabric.oracle.oracle import Oracle
from tests.simulation.fabric.oracle.own_reads import check_bad_read
from tests.simulation.fabric.oracle.said import Said
from tests.simulation.fabric.world.agent_memory import AgentMemories, MemoryReads
from tests.simulation.fabric.world.blocks import VOLUMES, Blocks, Volume
from tests.simulation.fabric.world.direct import DirectReads, HostPaths
from tests.simulation.fabric.world.drives import FABRIC, Drives
from tests.simulation.fabric.world.placed import Placed
from tests.simulation.fabric.world.process import (
    CACHE_BYTES,
    REQUESTS_MAX,
    SMALL_CACHE_BYTES,
    AgentProcess,
    Lateness,
    Outside,
    address_of,
    settings_with,
)
from tests.simulation.fabric.world.worker import Ended, Worker
from tests.simulation.fabric.world.worker_memory import OfferedMemories
from tests.simulation.shard.model import ViolationError
from tests.support.agent.shard_invariants import check_core
from tests.support.invariants import check_ledger
from tests.support.simulated.drives.drive_faults import DriveFaults
from tests.support.simulated.hosted import HostedNetwork
from tests.support.simulated.simulated_membership import SimulatedStore, StoreFaults
from tests.support.simulated.simulated_network import SimulatedNetwork
from tests.support.simulated.simulated_transport import SimulatedPlane, TransferFaults
from tests.support.simulated.virtual_hosts import HostsLoop, VirtualHost

from ostraca_dpu_agent.shards.shard import OwnedShard
from ostraca_fabric.model.outcome import Ack, BlockState, PutState
from ostraca_fabric.model.overrides import LiveSettings, Overrides
from ostraca_fabric.telemetry.requests import tally_text
from ostraca_fabric.wire.messages import WIRE_VERSION

if TYPE_CHECKING:
    from ostraca_fabric.model.fabric_map import FabricMap
    from ostraca_fabric.model.ids import EnclosureId, ShardId, TenantId

_CHECKS = 12
STRIKES = (
    "agent_dies",
    "agent_ends",
    "worker_dies",
    "worker_is_reset",
    "agent_stops",
    "agent_stops_before_it_acts",
    "agent_stops_before_it_writes",
    "machine_stops",
    "store_is_cut_off",
    "store_goes_down",
    "hosts_are_parted",
    "link_is_slow",
)


@dataclass(frozen=True)
class Setup:
    """What a history is played on."""

    hosts: int = 2
    enclosures: int = 1
    drives: int = 2
    """Of each enclosure, with one shard each."""

    segments: int = 4
    numbers: int = 64
    """Of blocks, in all volumes together."""

    volumes: tuple[Volume, ...] = VOLUMES[:1]
    """Beside each agent there is a worker of each of their tenants."""

    chained: float = 0.0
    """The share of each volume's blocks that are in chains."""

    blocks: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Of an operation."""

    drive_faults: DriveFaults = field(default_factory=lambda: DriveFaults(late=0.5, late_s=4.0))
    lateness: Lateness = field(default_factory=Lateness)
    transfer_faults: TransferFaults = field(default_factory=TransferFaults)
    reach: StoreFaults = field(default_factory=StoreFaults)
    lies: float = 0.0
    inline: float = 0.0
    """The share of workers whose blocks cross in frames of their connections."""

    regions: float = 0.0
    """The share of their operations whose blocks lie in rows of the worker's own memory."""

    pushed: float = 0.0
    """The same of the other workers, to whose rows agents write."""

    wires: tuple[int, ...] = (WIRE_VERSION,)
    """The newest version of the wire that workers speak: agents speak one that is older, or the same."""

    told: float = 1.0
    """The share of workers that an agent tells when it is about to end."""

    silence: float = 0.0
    """Of processes that die: their connections are not ended, and seem to live for a while."""

    requests_max: int = REQUESTS_MAX
    """Under way at an agent."""

    has_cache: bool = True
    has_small_cache: bool = False
    """Whether a cache is so small that its blocks soon give way."""

    drift: float = 0.0
    """How much faster or slower a process's clock may be."""

    strikes: tuple[str, ...] = STRIKES
    """What may go wrong: methods of ``History``."""

    direct: DirectReads | None = None
    """How workers read drives themselves, where they may. Then there is one tenant."""

    memory: MemoryReads | None = None
    """How workers copy blocks out of the memory of the agent beside them, where they may."""

    expects_all: bool = True
    """No write is later than ``late_write_s``: so no block is lost that no fault of a drive excuses."""

    @property
    def cache_bytes(self) -> int:
        """Of an agent's DRAM."""
        return (SMALL_CACHE_BYTES if self.has_small_cache else CACHE_BYTES) * self.has_cache


@dataclass
class WorkerProcess:
    """One worker, and the process that it is."""

    host: VirtualHost
    worker: Worker


class World:
    """Everything but what is to happen. Lives on a ``HostsLoop``."""

    def __init__(self, setup: Setup, dice: random.Random, story: Story) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HostsLoop)
        self.setup = setup
        self.dice = dice
        self.story = story
        self.loop = loop
        self.blocks = Blocks(setup.numbers, setup.volumes, setup.chained)
        self.oracle = Oracle(self.blocks, is_lied_to=setup.lies > 0)
        self.drives = Drives(dice, setup.drive_faults, segments=setup.segments)
        self.host_paths = None
        if setup.direct is not None:
            self.host_paths = HostPaths(self.drives, dice, setup.direct, story.happened)
        self.placed = Placed(self.blocks)
        self.calm = Calm(self)
        self.disowned_shards = 0
        self.margins = Margins(self)
        self.said = Said(self.oracle)
        self.heard = Heard(self)
        self.outside = Outside(
            loop=loop,
            dice=dice,
            story=story,
            store=SimulatedStore(FABRIC),
            network=SimulatedNetwork(dice.randrange(1 << 30), give_up_s=10.0),
            plane=SimulatedPlane(dice, setup.transfer_faults),
            flashes=self.drives.flashes,
            reach=setup.reach,
            lies=setup.lies,
            settings=settings_with(
                setup.lateness, cache_bytes=setup.cache_bytes, requests_max=setup.requests_max
            ),
            tenants=tuple(self.blocks.tenants),
        )
        self.agents: dict[str, AgentProcess] = {}
        self.workers: dict[str, WorkerProcess] = {}
        self.memories = self.worker_memories = None
        if setup.memory is not None:
            self.memories = AgentMemories(
                self.agents, dice, setup.memory, story.happened, is_lied_to=setup.lies > 0
            )
            self.worker_memories = OfferedMemories(self.memories)
        self._gone: list[VirtualHost] = []
        self._failed: BaseException | None = None
        self._rulings = 0
        self._checks = 0
        self._moving: set[asyncio.Task[None]] = set()
        self.drained: set[EnclosureId] = set()
        """Enclosures that ever took nothing new: what is there may be passed over."""

        self.has_forgotten_placements = False
        """Whether an earlier placement epoch was forced out, or lost with the store."""

        self.has_forgotten_owners = False
        """Whether the store knows of owners before now only what flash says."""

        self.forgotten_epochs: dict[ShardId, int] = {}
        """Epoch of each shard's last owner when the store was emptied."""

        enclosures = [self.drives.made_enclosure(setup.drives) for _ in range(setup.enclosures)]
        self.outside.store.transact(lambda store: store.memory.put_enclosures(enclosures))
        if setup.direct is not None:
            self.let_read_directly(is_on=True)
        for number in range(setup.hosts):
            self.start_agent(f"h{number}")
        for number in range(setup.hosts * len(self.blocks.tenants)):
            self.start_worker(f"w{number}")

    # ------------------------------------------------------------------------------------------ the parts

    @property
    def map(self) -> FabricMap:
        """What the store says."""
        return self.outside.store.memory.map

    def let_read_directly(self, *, is_on: bool) -> None:
        """Let workers read drives themselves, or not, as an operator would, where the store is up."""
        tenants, store = self.blocks.tenants, self.outside.store
        assert len(tenants) == 1, "drives know no tenants"
        if store.is_up:
            self._rulings += 1
            live = LiveSettings(direct_reads_tenant=tenants[0] if is_on else "")
            ruled = Overrides(live=live, revision=self._rulings)
            store.transact(lambda store: setattr(store.memory, "overrides", ruled))

    def start_agent(self, name: str) -> None:
        """Start an agent, or its successor on the same host."""
        before = self.agents.get(name)
        if before is not None:
            before.transport.over()
            self._gone.append(before.host)
            self.outside.network.restart(name)
        drift = self.setup.drift
        process = AgentProcess(name, self.outside, rate=1 + self.dice.uniform(-drift, drift))
        process.on_write = lambda drive, pieces: self.judge(self.margins.writes, drive, pieces)
        self.agents[name] = process
        self.story.tell(name, f"starts as {process.agent.start_id.hex()[:8]}")
        process.begin()

    def crash_agent(self, name: str) -> None:
        """Kill an agent's process."""
        self.story.tell(name, "CRASHES")
        self.agents[name].crash()
        self.outside.network.crash(name, silently=self.dice.random() < self.setup.silence)

    def end_agent(self, name: str, then: Callable[[], None]) -> None:
        """Have an agent's process end in order."""
        process = self.agents[name]

        def ended(has_ended: bool, under_way: int) -> None:
            self.story.tell(name, "has ended" if has_ended else "has ended, with I/O under way")
            self.story.happened["agents ended"] += has_ended
            if has_ended and under_way:
                self.fail(ViolationError(f"{name} has ended, and {under_way} of its transfers have not"))
            process.crash()
            self.outside.network.crash(name)
            then()

        process.begin_end(ended)

    def start_worker(self, name: str) -> None:
        """Start a worker beside the agent of the same number.

        Once each agent has a worker, further workers belong to the next tenant.
        """
        number = int(name[1:])
        tenant = self.blocks.tenants[number // self.setup.hosts]
        host = VirtualHost(name, self.loop)
        others = sorted(self.agents, key=lambda agent: (int(agent[1:]) - number) % len(self.agents))
        network = HostedNetwork(self.outside.network.host(name), host)
        self.outside.network.restart(name)
        self.outside.network.put_beside(name, others[0])
        worker = host.run(
            lambda: Worker(
                name,
                [address_of(each) for each in others],
                tenant=tenant,
                its=self.blocks,
                network=network,
                plane=self.outside.plane,
                dice=self.dice,
                is_inline=self.dice.random() < self.setup.inline,
                wire_newest=self.dice.choice(self.setup.wires),
                is_told=self.dice.random() < self.setup.told,
                host_paths=self.host_paths,
                memories=self.memories,
                worker_memories=self.worker_memories,
                is_lied_to=self.setup.lies > 0,
                regions=self.setup.regions,
                pushed=self.setup.pushed,
            )
        )
        worker.on_bad_read = lambda *read: self.judge(check_bad_read, self, *read)
        self.workers[name] = WorkerProcess(host, worker)

    def crash_worker(self, name: str) -> None:
        """Kill a worker's process."""
        self.story.tell(name, "CRASHES")
        process = self.workers[name]
        process.host.kill()
        process.worker.arena.close()
        self._gone.append(process.host)
        self.outside.network.crash(name, silently=self.dice.random() < self.setup.silence)

    # ------------------------------------------------------------------------------------------ traffic

    def workers_of(self, tenant: TenantId) -> list[str]:
        """Return the names of a tenant's workers."""
        return sorted(name for name, process in self.workers.items() if process.worker.tenant == tenant)

    def begin_put(self, name: str, numbers: list[int], deadline_s: float, ack: Ack) -> None:
        self._begin(name, put(self, name, numbers, deadline_s, ack))

    def begin_get(
        self,
        name: str,
        numbers: list[int],
        deadline_s: float,
        then: Callable[[list[int], Ended], None] = lambda _, __: None,
    ) -> None:
        self._begin(name, get(self, name, numbers, deadline_s, then))

    def begin_lookup(self, name: str, numbers: list[int], deadline_s: float, pin_s: float = 0.0) -> None:
        self._begin(name, look_up(self, name, numbers, deadline_s, pin_s))

    @property
    def partings(self) -> int:
        """How many processes are gone, and how often a living one let go of a shard, with what it listed."""
        return len(self._gone) + self.disowned_shards

    def told(self, name: str, what: str, numbers: list[int], end: Ended) -> None:
        """Put into the story how an operation ended."""
        if end.states[:1] == [-1]:
            said = "no agent, or no slot"
        else:
            state = PutState if what == "put" else BlockState
            said = tally_text(bytes(end.states), bytes(end.reasons), state)
            for each in end.states:
                self.story.happened[f"{what} {state(each).name}"] += 1
                if end.is_in_place:
                    self.story.happened[f"{what} in place {state(each).name}"] += 1
            self.story.happened["rows withheld"] += end.withheld
        self.story.tell(name, f"{what} {numbers} by {end.agent or 'nobody'}: {said}")

    def _begin(self, name: str, moving: Coroutine[None, None, None]) -> None:
        task = self.workers[name].host.spawn(moving)
        self._moving.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._moving.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.fail(task.exception())

    async def settle(self) -> None:
        """Wait for everything that living workers have begun; those that died never end."""
        dead = {id(task) for host in self._gone for task in host._tasks}
        while moving := {task for task in self._moving if id(task) not in dead}:
            await asyncio.wait(moving)
            self.check()
        self._moving.clear()

    # ------------------------------------------------------------------------------------------ what is so

    def is_last_owner(self, owned: OwnedShard) -> bool:
        """Say whether nobody has claimed a shard since its owner did, however sure that one is of it."""
        shard, given = owned.record.id, self.outside.store.memory._grants.get(owned.record.id)
        return given is not None and (given.epoch or self.forgotten_epochs.get(shard)) == owned.epoch

    def judge(self, hear: Callable[..., object], *said: object, **named: object) -> None:
        """Have something judged in the middle of what an agent does, which does not hear of it."""
        try:
            hear(*said, **named)
        except ViolationError as violation:
            self.fail(violation)

    def fail(self, error: BaseException | None) -> None:
        """Keep the first thing that went wrong."""
        self._failed = self._failed or error

    def check(self) -> None:
        """Look at what costs little; now and then at everything. Nobody is asked, and nothing moves."""
        self._checks += 1
        if self._failed is not None:
            raise self._failed
        for process in self.workers.values():
            if process.worker.violations:
                raise ViolationError(process.worker.violations[0])
        if self.setup.expects_all:
            self.oracle.excused["late volume records"] += self.drives.check_writes()
        self.margins.check()
        for agent in self.agents.values():
            if agent.is_alive:
                check_limits(agent, self.outside.settings)
        if not self._checks % _CHECKS:
            self.check_closely()

    def check_closely(self) -> None:
        """Look at everything at once."""
        for process in self.workers.values():
            check_ledger(process.worker.ledger)
            region = process.worker.region
            if region is not None:
                region.check()
                if region.withheld and not process.worker.ledger.quarantined_bytes:
                    raise ViolationError(f"rows of {process.worker.name} are withheld, and nothing can land")
        for agent in self.agents.values():
            if agent.is_alive:
                for owned in agent.shards.values():
                    check_core(owned.core)
                    is_last = self.is_last_owner(owned) and not self.has_forgotten_owners
                    self.said.check(owned.core, is_last=is_last)

    def end(self) -> None:
        """Tear everything down."""
        hosts = [*self._gone, *(each.host for each in self.agents.values())]
        for host in [*hosts, *(each.host for each in self.workers.values())]:
            host.forget()
