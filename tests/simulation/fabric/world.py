"""A whole fabric: hosts with an agent and a worker each, enclosures, and the store."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tests.simulation.fabric.oracle import Oracle
from tests.simulation.fabric.process import AgentProcess, Outside, address_of, settings_with
from tests.simulation.fabric.story import Story
from tests.simulation.fabric.volume_records import are_volume_records, check_volume_records
from tests.simulation.fabric.worker import Ended, Worker
from tests.simulation.model import ViolationError

from ostraca_dpu_agent.events import EventRing
from ostraca_fabric.explain import EventKind
from ostraca_fabric.fabric_map import DriveRecord, EnclosureRecord, ShardRecord
from ostraca_fabric.flash.geometry import FIRST_SEGMENT_OFFSET, MIB, Geometry
from ostraca_fabric.flash.superblock import Superblock, encode_superblock
from ostraca_fabric.ids import EnclosureId, FabricId, drive_id, shard_id
from ostraca_fabric.outcome import Ack, BlockState, PutState
from ostraca_fabric.tallies import STATES, tally_text
from ostraca_fabric.testing.drive_faults import Befell, DriveFaults
from ostraca_fabric.testing.hosted import HostedNetwork
from ostraca_fabric.testing.simulated_flash import SimulatedFlash
from ostraca_fabric.testing.simulated_membership import SimulatedStore, StoreFaults
from ostraca_fabric.testing.simulated_network import SimulatedNetwork
from ostraca_fabric.testing.simulated_transport import SimulatedPlane, TransferFaults
from ostraca_fabric.testing.virtual_hosts import HostsLoop, VirtualHost

if TYPE_CHECKING:
    from ostraca_fabric.ids import DriveId, ShardId

FABRIC = FabricId(bytes(16))
REST_WITHIN_S = 900.0
_GET_BLOCKS = 16
_CHECKS = 12
_GET_TRIES = 12
_AGAIN_S = 4.0
"""What was held off is tried again within half a minute."""


@dataclass(frozen=True)
class Setup:
    """What a history is played on."""

    hosts: int = 2
    enclosures: int = 1
    drives: int = 2
    """Of each enclosure, with one shard each."""

    segments: int = 4
    numbers: int = 64
    blocks: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Of an operation."""

    drive_faults: DriveFaults = field(default_factory=lambda: DriveFaults(late=0.5, late_s=4.0))
    transfer_faults: TransferFaults = field(default_factory=TransferFaults)
    reach: StoreFaults = field(default_factory=StoreFaults)
    lies: float = 0.0
    has_cache: bool = True
    drift: float = 0.0
    """How much faster or slower a process's clock may be."""

    strikes: tuple[str, ...] = (
        "agent_dies",
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
    """What may go wrong: methods of ``History``."""

    expects_all: bool = True
    """No write is later than ``late_write_s``, and nothing is damaged: no block is lost."""


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
        self.oracle = Oracle(setup.numbers, is_lied_to=setup.lies > 0)
        self.outside = Outside(
            loop=loop,
            dice=dice,
            story=story,
            store=SimulatedStore(FABRIC),
            network=SimulatedNetwork(dice.randrange(1 << 30), give_up_s=10.0),
            plane=SimulatedPlane(dice, setup.transfer_faults),
            flashes={},
            reach=setup.reach,
            lies=setup.lies,
            settings=settings_with(cache=setup.has_cache),
        )
        self.agents: dict[str, AgentProcess] = {}
        self.workers: dict[str, WorkerProcess] = {}
        self._gone: list[VirtualHost] = []
        self._failed: BaseException | None = None
        self._checks = 0
        self._mishaps_seen: Counter[DriveId] = Counter()
        self._moving: set[asyncio.Task[None]] = set()
        enclosures = [self.made_enclosure(f"e{number}") for number in range(setup.enclosures)]
        self.outside.store.transact(lambda store: store.memory.put_enclosures(enclosures))
        for number in range(setup.hosts):
            self.start_agent(f"h{number}")
        for number in range(setup.hosts):
            self.start_worker(f"w{number}")

    # ------------------------------------------------------------------------------------------ the parts

    def made_enclosure(self, name: str) -> EnclosureRecord:
        """Format an enclosure's drives."""
        setup, enclosure = self.setup, EnclosureId(name)
        shard_bytes = FIRST_SEGMENT_OFFSET + setup.segments * MIB
        geometry = Geometry.planned(shard_bytes, segment_bytes=MIB, block_bytes=4096)
        drives, shards = [], []
        for number in range(setup.drives):
            drive = drive_id(enclosure, f"d{number}")
            flash = SimulatedFlash(shard_bytes, self.dice)
            shard = shard_id(drive, 0)
            superblock = Superblock(FABRIC, bytes(16), enclosure, drive, shard, 0, geometry)
            pages = np.frombuffer(encode_superblock(superblock), np.uint8)
            flash.land(flash.next_number(), 0, pages, lambda: False)
            flash.faults = setup.drive_faults
            self.outside.flashes[drive] = flash
            drives.append(DriveRecord(drive, str(drive)))
            data_bytes = geometry.segments * geometry.data_bytes
            shards.append(ShardRecord(shard, drive, 0, shard_bytes, data_bytes, geometry.data_bytes))
        return EnclosureRecord(enclosure, tuple(drives), tuple(shards))

    def start_agent(self, name: str) -> None:
        """Start an agent, or its successor on the same host."""
        before = self.agents.get(name)
        if before is not None:
            before.transport.over()
            self._gone.append(before.host)
            self.outside.network.restart(name)
        drift = self.setup.drift
        process = AgentProcess(name, self.outside, rate=1 + self.dice.uniform(-drift, drift))
        self.agents[name] = process
        self.story.tell(name, f"starts as {process.agent.start_id.hex()[:8]}")
        process.begin()

    def crash_agent(self, name: str) -> None:
        """Kill an agent's process."""
        self.story.tell(name, "CRASHES")
        self.agents[name].crash()
        self.outside.network.crash(name)

    def start_worker(self, name: str) -> None:
        """Start a worker, beside the agent of the same number."""
        number = int(name[1:])
        host = VirtualHost(name, self.loop)
        others = sorted(self.agents, key=lambda agent: (int(agent[1:]) - number) % len(self.agents))
        network = HostedNetwork(self.outside.network.host(name), host)
        self.outside.network.restart(name)
        worker = host.run(
            lambda: Worker(
                name,
                [address_of(each) for each in others],
                network=network,
                plane=self.outside.plane,
                dice=self.dice,
            )
        )
        self.workers[name] = WorkerProcess(host, worker)

    def crash_worker(self, name: str) -> None:
        """Kill a worker's process."""
        self.story.tell(name, "CRASHES")
        process = self.workers[name]
        process.host.kill()
        process.worker.arena.close()
        self._gone.append(process.host)
        self.outside.network.crash(name)

    # ------------------------------------------------------------------------------------------ traffic

    def begin_put(self, name: str, numbers: list[int], deadline_s: float, ack: Ack) -> None:
        versions = [self.oracle.new_version(number) for number in numbers]

        async def put() -> None:
            worker = self.workers[name].worker
            until_s = self.loop.time() + deadline_s
            end = await worker.put(versions, deadline_s, ack)
            self._told(name, "put", numbers, end)
            self.oracle.ended("put", self.loop.time() - until_s)
            self.oracle.put(versions, end)

        self._begin(name, put())

    def begin_get(self, name: str, numbers: list[int], deadline_s: float) -> None:
        self._begin(name, self._get(name, numbers, deadline_s, self._told_get))

    def begin_lookup(self, name: str, numbers: list[int], deadline_s: float) -> None:
        async def lookup() -> None:
            until_s = self.loop.time() + deadline_s
            end = await self.workers[name].worker.lookup(numbers, deadline_s)
            self._told(name, "lookup", numbers, end)
            self.oracle.ended("lookup", self.loop.time() - until_s)

        self._begin(name, lookup())

    async def _get(
        self, name: str, numbers: list[int], deadline_s: float, then: Callable[[list[int], Ended], None]
    ) -> None:
        until_s = self.loop.time() + deadline_s
        end = await self.workers[name].worker.get(numbers, deadline_s)
        self._told(name, "get", numbers, end)
        self.oracle.ended("get", self.loop.time() - until_s)
        self.oracle.got(numbers, end)
        then(numbers, end)

    def _told_get(self, numbers: list[int], end: Ended) -> None:
        pass

    def _told(self, name: str, what: str, numbers: list[int], end: Ended) -> None:
        if end.states[:1] == [-1]:
            said = "no agent, or no slot"
        else:
            said = tally_text(bytes(end.states), bytes(end.reasons), STATES[what])
            state = PutState if what == "put" else BlockState
            for each in end.states:
                self.story.happened[f"{what} {state(each).name}"] += 1
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

    def observe(self, agent: str, kind: EventKind, keys: NDArray[np.uint8], states: object) -> None:
        """Hear of what an agent did to blocks."""
        process = self.agents.get(agent)
        if process is None or not process.is_alive:
            return
        if kind in (EventKind.EVICTED, EventKind.DROPPED):
            numbers = self.oracle.numbers_of(keys)
            self.story.tell(agent, f"{kind.name} {numbers}")
            self.oracle.gone(kind, numbers)
        elif kind is EventKind.COMMITTED and isinstance(states, np.ndarray):
            done = np.ascontiguousarray(keys[states == PutState.COMMITTED])
            for owned in process.shards.values() if len(done) else ():
                found = owned.core.index.find(done) >= 0
                numbers = self.oracle.numbers_of(done[found])
                if numbers:
                    self.story.tell(agent, f"COMMITTED {numbers} in {owned.record.id}, epoch {owned.epoch}")
                    self.oracle.committed(owned.record.id, owned.epoch, numbers)

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
            self._check_writes()
        if not self._checks % _CHECKS:
            self.check_closely()

    def check_closely(self) -> None:
        """Look at everything at once."""
        for process in self.workers.values():
            process.worker.ledger.check()
        for agent in self.agents.values():
            if agent.is_alive:
                for owned in agent.shards.values():
                    owned.core.check()

    def _check_writes(self) -> None:
        for drive, flash in self.outside.flashes.items():
            mishaps = itertools.islice(flash.mishaps, self._mishaps_seen[drive], None)
            for mishap in mishaps:
                self._mishaps_seen[drive] += 1
                if mishap.kind is Befell.LATE and are_volume_records(mishap):
                    self.oracle.excused["late volume records"] += 1
                elif mishap.kind is Befell.LATE:
                    raise ViolationError(
                        f"a write to {drive} landed at {mishap.begin} over what was submitted after it"
                    )

    def restlessness(self) -> str:
        """Say why the fabric is not at rest; nothing when it is."""
        truth = self.outside.store.memory.map
        for name, process in self.agents.items():
            if not (process.is_alive and process.has_started) or process.host.is_paused:
                return f"{name} is not up"
            if process.agent._routes.map.claims != truth.claims:
                return f"{name} does not know all claims"
        for shard in truth.shards():
            owners = [name for name, process in self.agents.items() if shard.id in process.shards]
            claim = truth.claims.get(shard.id)
            if claim is None or owners != [claim.agent]:
                return f"{shard.id} is claimed by {claim and claim.agent}, and answered for by {owners}"
            if self._owned(owners[0], shard.id):
                return self._owned(owners[0], shard.id)
        return ""

    def _owned(self, name: str, shard: ShardId) -> str:
        owned = self.agents[name].shards[shard]
        return f"{name} is reading what {shard} holds" if owned.core.is_recovering else ""

    async def rest(self) -> None:
        """Wait until the fabric is at rest; it must get there by itself."""
        until_s = self.loop.now_s + REST_WITHIN_S
        while why := self.restlessness():
            if self.loop.now_s > until_s:
                raise ViolationError(f"the fabric comes to no rest: {why}")
            self.check()
            await asyncio.sleep(0.5)
        await asyncio.sleep(1.0)
        self.check_closely()
        for process in self.agents.values():
            compared = check_volume_records(process, self.outside.flashes)
            self.story.happened["volume records compared"] += compared
        self.story.tell("-", "the fabric is at rest")

    async def everything_is_found(self) -> None:
        """Get every block that must be there, when the fabric is at rest."""
        for begin in range(0, len(self.oracle.listed), _GET_BLOCKS):
            left = self.oracle.listed[begin : begin + _GET_BLOCKS]
            for attempt in range(_GET_TRIES):
                missing = await self._missing(left)
                left = [number for number, _, _ in missing]
                if not left:
                    break
                if attempt == _GET_TRIES - 1:
                    for each in missing:
                        self.oracle.must_be_found(*each)
                await asyncio.sleep(_AGAIN_S)

    async def _missing(self, numbers: list[int]) -> list[tuple[int, int, int]]:
        """Get blocks by any worker; return those that were no HITs, with state and reason."""
        ends: list[Ended] = []
        name = self.dice.choice(sorted(self.workers))
        self._begin(name, self._get(name, numbers, 5.0, lambda _, end: ends.append(end)))
        await self.settle()
        self.check()
        (end,) = ends
        outcomes = zip(numbers, end.states, end.reasons, strict=True)
        return [each for each in outcomes if each[1] != BlockState.HIT]

    def end(self) -> None:
        """Tear everything down."""
        hosts = [*self._gone, *(each.host for each in self.agents.values())]
        for host in [*hosts, *(each.host for each in self.workers.values())]:
            host.forget()


class Watched:
    """Has a world hear of every event of every agent, as long as it is entered."""

    def __init__(self, heard: Callable[[str, EventKind, NDArray[np.uint8], object], None]) -> None:
        self._heard = heard
        self._record = EventRing.record

    def __enter__(self) -> None:
        record, heard = self._record, self._heard

        def recording(
            ring: EventRing, kind: EventKind, keys: NDArray[np.uint8], *rest: object, **named: object
        ) -> None:
            record(ring, kind, keys, *rest, **named)  # type: ignore[arg-type]  # handed on
            heard(ring.agent, kind, keys, rest[0] if rest else None)

        EventRing.record = recording  # type: ignore[method-assign,assignment]  # until it is left

    def __exit__(self, *_: object) -> None:
        EventRing.record = self._record  # type: ignore[method-assign]
