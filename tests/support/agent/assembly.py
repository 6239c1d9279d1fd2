"""One agent with its drive in memory and workers in this process, whose I/O and transfers can be held up."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tests.support.agent.owned_shard import keys_of, rows16, seeds_of, tag_of
from tests.support.agent.shard_invariants import check_core
from tests.support.invariants import check_cache, check_slots
from tests.support.simulated.drives.memory_drive import MemoryDrive

from ostraca_dpu_agent.adapters.peers.loopback_owners import LoopbackOwners
from ostraca_dpu_agent.adapters.transports.inline_transport import InlineTransport
from ostraca_dpu_agent.adapters.transports.submitted_stream import SubmittedStreams
from ostraca_dpu_agent.agent import Agent
from ostraca_dpu_agent.datapath.data_path import DataPath
from ostraca_dpu_agent.datapath.requests.context import RequestContext
from ostraca_dpu_agent.datapath.requests.worker import ReadableMemory, ReadsEnded
from ostraca_dpu_agent.settings import (
    MIB,
    AgentSettings,
    FlowSettings,
    MemorySettings,
    OwnerSettings,
    ScrubSettings,
)
from ostraca_dpu_agent.shards.core import Allocations
from ostraca_dpu_agent.shards.service import OwnerService
from ostraca_dpu_agent.shards.shard import OwnedShard
from ostraca_dpu_agent.volumes import ServedVolume, Volumes
from ostraca_fabric.drives.drive_health import HealthSettings
from ostraca_fabric.errors import DriveError
from ostraca_fabric.flash.superblock import Superblock, encode_superblock
from ostraca_fabric.membership.memory_membership import MemoryMembership
from ostraca_fabric.model.chain import Chain, Span
from ostraca_fabric.model.extent import Geometry, Pieces
from ostraca_fabric.model.fabric_map import DriveRecord, EnclosureRecord, ShardRecord
from ostraca_fabric.model.ids import (
    AgentId,
    DriveId,
    EnclosureId,
    FabricId,
    ShardId,
    TenantId,
    drive_id,
    enclosure_of,
    shard_id,
)
from ostraca_fabric.model.outcome import Ack, BlockState, PutState, Reason
from ostraca_fabric.model.volume import Layout
from ostraca_fabric.policies.circuit_breaker import BreakerSettings
from ostraca_fabric.ports.transport import Direction, TransferEnd, Transport, WaveNews, WaveStream
from ostraca_fabric.tables.digests import TagCheck, tag_seeds, tags_of
from ostraca_fabric.tables.slots import Wave
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.handshake import Access
from ostraca_fabric.wire.messages import (
    ExtentsRead,
    Get,
    GetDone,
    GetExtents,
    GetProgress,
    OpenVolume,
    Put,
    PutDone,
    Settled,
)

_End = TypeVar("_End")

FAR_S = 30.0
"""A deadline that only a test that fails reaches."""

BLOCK_BYTES = 60_000
SLOT_BYTES = 15 * 4096
LAYOUT = Layout(model="test-model", dtype="bf16", page_tokens=16)
TENANT = TenantId("tenant")
FABRIC = FabricId(bytes(16))
ENCLOSURE = EnclosureId("e")
DRIVE = drive_id(ENCLOSURE, "d")
SHARD = shard_id(DRIVE, 0)

SETTINGS = AgentSettings(
    memory=MemorySettings(staging_bytes=8 * MIB, reserve_bytes=0, cache_bytes=0, chunk_bytes=2 * MIB),
    flow=FlowSettings(
        wave_bytes=2 * SLOT_BYTES,
        get_part_bytes=8 * SLOT_BYTES,
        put_group_bytes=2 * SLOT_BYTES,
        waves_ahead=2,
        reads_ahead=8,
    ),
    health=HealthSettings(overdue_s=FAR_S, write_overdue_s=FAR_S, breaker=BreakerSettings(failures_max=100)),
    owner=OwnerSettings(opening_wait_s=FAR_S, scrub=ScrubSettings(bytes_s=0)),
    drain_s=2.0,
)
"""What is held up here is held up by a test, and no drive is left alone for it."""

GROUPED = replace(
    SETTINGS, flow=replace(SETTINGS.flow, wave_bytes=SLOT_BYTES, put_group_bytes=4 * SLOT_BYTES)
)
"""Each block of a put is a wave, and four are a group."""


def with_cache(cache_bytes: int) -> AgentSettings:
    return replace(SETTINGS, memory=replace(SETTINGS.memory, cache_bytes=cache_bytes))


class HeldDrive(MemoryDrive):
    """A drive that does what is submitted while it is held only when it is let go."""

    def __init__(self, segments: int = 6, *, drive: DriveId = DRIVE) -> None:
        geometry = Geometry.planned((1 + segments) * MIB, segment_bytes=MIB)
        super().__init__(drive, geometry.shard_bytes)
        self.shard = shard_id(drive, 0)
        self.enclosure = enclosure_of(self.shard)
        superblock = Superblock(FABRIC, bytes(16), self.enclosure, drive, self.shard, 0, geometry)
        pages = encode_superblock(superblock)
        self.bytes[: len(pages)] = pages
        self.holds_reads = False
        self.holds_writes = False
        self.held: list[Callable[[], None]] = []
        self.holds_flushes = False
        self.fails_flushes = False
        self.writes: list[Pieces] = []
        self.asked: list[str] = []
        """Writes and flushes in the order they were submitted."""

    def record(self, *others: HeldDrive) -> EnclosureRecord:
        """Return the enclosure of this drive and others."""
        drives = (self, *others)
        shards = (ShardRecord(each.shard, each.id, 0, each.size_bytes, each.size_bytes) for each in drives)
        return EnclosureRecord(
            self.enclosure, tuple(DriveRecord(each.id, "memory") for each in drives), tuple(shards)
        )

    def submit_read(self, pieces: Pieces, check: TagCheck | None = None) -> asyncio.Future[NDArray[np.bool_]]:
        act = super().submit_read
        return self._perhaps(self.holds_reads, lambda: act(pieces, check))

    def submit_write(self, pieces: Pieces) -> asyncio.Future[NDArray[np.bool_]]:
        act = super().submit_write
        self.writes.append(pieces)
        self.asked.append("write")
        return self._perhaps(self.holds_writes, lambda: act(pieces))

    def submit_flush(self) -> asyncio.Future[bool]:
        self.asked.append("flush")
        if self.fails_flushes:
            flushed = super().submit_flush()
            flushed.set_result(False)
            return flushed
        return self._perhaps(self.holds_flushes, super().submit_flush)

    def let_go(self) -> None:
        """Hold nothing any more, and do what was held."""
        self.holds_reads = self.holds_writes = self.holds_flushes = False
        held, self.held = self.held, []
        for act in held:
            act()

    def _perhaps(self, is_held: bool, submit: Callable[[], asyncio.Future[_End]]) -> asyncio.Future[_End]:
        if not is_held:
            return submit()
        outer: asyncio.Future[_End] = asyncio.get_running_loop().create_future()

        def act() -> None:
            submit().add_done_callback(
                lambda inner: None if outer.done() else outer.set_result(inner.result())
            )

        self.held.append(act)
        return outer


class MemoryArena(SubmittedStreams):
    """A worker's arena in this process: implements ``ports.transport.Peer``."""

    def __init__(self, staging: memoryview, arena_bytes: int = 8 * MIB) -> None:
        self._staging = staging
        self.bytes = bytearray(arena_bytes)
        self.regions = bytearray()
        """Memory at the addresses from 0 on."""

        self.is_held = False
        self.tells = False
        self.fails = False
        self.held: list[Callable[[], None]] = []
        self.moved: list[Wave] = []

    def submit(self, direction: Direction, wave: Wave) -> asyncio.Future[TransferEnd]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[TransferEnd] = loop.create_future()

        def act() -> None:
            ended.set_result(self._move(direction, wave))

        self.moved.append(wave)
        if self.is_held:
            self.held.append(act)
        else:
            loop.call_soon(act)
        return ended

    def stream(
        self,
        blocks: Wave,
        states: NDArray[np.uint8] | None,
        *,
        per_wave: int,
        clock: Callable[[], float],
        report: Callable[[Sequence[WaveNews]], None],
        tell: Callable[[Sequence[WaveNews]], bool],
    ) -> WaveStream:
        def say(news: Sequence[WaveNews]) -> None:
            if not self.tells or not tell(news):
                report(news)

        return super().stream(blocks, states, per_wave=per_wave, clock=clock, report=say, tell=tell)

    def close(self) -> None:
        self.fails = True

    def let_go(self) -> None:
        self.is_held = False
        held, self.held = self.held, []
        for act in held:
            act()

    def _move(self, direction: Direction, wave: Wave) -> TransferEnd:
        there = self.regions if wave.in_regions else self.bytes
        if self.fails or not wave.fits(staging_bytes=len(self._staging), arena_bytes=len(there)):
            return TransferEnd.FAILED
        arena = memoryview(there)
        for staging, slot, length in zip(
            wave.staging.tolist(), wave.arena.tolist(), wave.lengths.tolist(), strict=True
        ):
            theirs, ours = arena[slot : slot + length], self._staging[staging : staging + length]
            if direction is Direction.TO_WORKER:
                theirs[:] = ours
            else:
                ours[:] = theirs
        return TransferEnd.DONE


@dataclass(eq=False)
class MemoryWorker:
    """A worker: implements ``datapath.requests.worker.WorkerConnection``."""

    arena: MemoryArena
    tenant: TenantId = TENANT
    said: list[GetProgress | GetExtents | Settled] = field(default_factory=list)
    direct_drives: dict[DriveId, int] = field(default_factory=dict)
    reads_memory: bool = False
    memory: ReadableMemory | None = None
    has_regions: bool = False
    reads: dict[int, ReadsEnded] = field(default_factory=dict)
    _stops: dict[int, asyncio.Future[None]] = field(default_factory=dict)

    def expect_reads(self, request: int, *, within_s: float, ended: ReadsEnded) -> None:
        self.reads[request] = ended
        asyncio.get_running_loop().call_later(within_s, self.end_reads, request)

    def end_reads(self, request: int, report: ExtentsRead | None = None) -> None:
        if request in self.reads:
            self.reads.pop(request)(report)

    def stopped(self, request: int) -> asyncio.Future[None]:
        if request not in self._stops:
            self._stops[request] = asyncio.get_running_loop().create_future()
        return self._stops[request]

    def send(self, message: GetProgress | GetExtents | Settled) -> None:
        self.said.append(message)

    def send_here(self, message: GetProgress) -> bool:
        self.said.append(message)
        return True

    @property
    def settled(self) -> list[int]:
        return [message.request for message in self.said if isinstance(message, Settled)]


def chain_of(numbers: Sequence[int]) -> tuple[Span, ...]:
    hashes = [number.to_bytes(32, "big") for number in numbers]
    return (Chain.of(hashes, hash_bytes=32, is_chained=False).span(),)


def content_of(number: int, length: int = BLOCK_BYTES) -> bytes:
    return np.random.default_rng(number).bytes(length)


@dataclass
class Assembly:
    """An agent that listens nowhere, one volume, and what to ask of it."""

    agent: Agent
    drive: HeldDrive
    owners: LoopbackOwners
    membership: MemoryMembership
    volume: ServedVolume
    requests: int = 0

    @property
    def data_path(self) -> DataPath:
        return self.agent._data_path

    @property
    def context(self) -> RequestContext:
        return self.data_path.context

    def ask_by_message(self) -> None:
        """Make the agent ask its own shards through ``owners``, like an agent elsewhere."""
        self.context.locator.agent = AgentId("elsewhere")

    @property
    def service(self) -> OwnerService:
        return self.agent._owner

    @property
    def shard(self) -> OwnedShard:
        return self.service.shards[ShardId(SHARD)]

    def worker(self) -> MemoryWorker:
        return MemoryWorker(MemoryArena(self.context.staging.memory.view))

    def put_message(
        self,
        worker: MemoryWorker,
        numbers: Sequence[int],
        *,
        deadline_s: float = FAR_S,
        ack: int = Ack.COMMITTED,
        length: int = BLOCK_BYTES,
    ) -> Put:
        """Fill the worker's slots with these blocks and say so."""
        spans, count = chain_of(numbers), len(numbers)
        lengths = np.full(count, length, np.uint32)
        seeds = tag_seeds(self.volume.identity, spans, lengths)
        slots = np.arange(count, dtype=np.uint64) * SLOT_BYTES
        for slot, number in zip(slots.tolist(), numbers, strict=True):
            worker.arena.bytes[slot : slot + length] = content_of(number, length)
        arena = np.frombuffer(worker.arena.bytes, np.uint8)
        tags = tags_of(arena, slots.astype(np.int64), lengths, seeds)
        self.requests += 1
        return Put(
            self.requests,
            0,
            deadline_s,
            ack,
            spans,
            lengths.tobytes(),
            tags.tobytes(),
            slots.tobytes(),
            SLOT_BYTES,
        )

    async def put(
        self,
        worker: MemoryWorker,
        numbers: Sequence[int],
        *,
        deadline_s: float = FAR_S,
        ack: int = Ack.COMMITTED,
    ) -> PutDone:
        message = self.put_message(worker, numbers, deadline_s=deadline_s, ack=ack)
        return await self.data_path.put(worker, self.volume, message)

    def get_message(self, numbers: Sequence[int], *, deadline_s: float = FAR_S) -> Get:
        count = len(numbers)
        self.requests += 1
        return Get(
            self.requests,
            0,
            deadline_s,
            chain_of(numbers),
            np.full(count, BLOCK_BYTES, np.uint32).tobytes(),
            (np.arange(count, dtype=np.uint64) * SLOT_BYTES).tobytes(),
            SLOT_BYTES,
        )

    async def get(
        self, worker: MemoryWorker, numbers: Sequence[int], *, deadline_s: float = FAR_S
    ) -> GetDone:
        return await self.data_path.get(worker, self.volume, self.get_message(numbers, deadline_s=deadline_s))

    async def ready(self) -> None:
        """Wait until the shard hands out space."""
        ring = self.shard.core.ring
        await until(lambda: bool(ring.ready or ring.pools.common.current))

    async def quiet(self) -> None:
        """Store block 9, and wait until nothing else is written."""
        ring = self.shard.core.ring
        await self.put(self.worker(), [9])
        await self.recorded()
        await until(lambda: ring.opening is None and not ring.wants_opening)
        self.drive.asked.clear()
        self.drive.writes.clear()

    async def recorded(self) -> None:
        """Wait until the volume is recorded on flash, which is written beside all else, or can't be now."""

        def is_recorded() -> bool:
            return all(
                owned.core.is_recovering or owned.is_failing or self._is_on_flash(shard)
                for shard, owned in self.service.shards.items()
            )

        await until(lambda: self.drive.holds_reads or self.drive.holds_writes or is_recorded())

    def _is_on_flash(self, shard: ShardId) -> bool:
        copy = self.agent._volume_copies.of(shard)
        return copy is not None and copy.recorded > 0

    async def at_rest(self) -> None:
        """Wait until no wave is under way, then check that nobody holds anything."""
        assert await self.context.tasks.finish(within_s=5)
        staging = self.context.staging
        assert staging.held_bytes == 0
        assert staging.quarantined_bytes == 0
        assert staging.quarantined_cached_blocks == staging.quarantined_cached_bytes == 0
        assert not staging._held_by
        assert not staging._quarantined
        assert not any(staging._held.values())
        assert not any(staging._queues.values())
        assert not any(queue.waiting_bytes for queue in self.context.estimator.drives.values())
        check_slots(staging._pool)
        check_cache(staging.cache)
        assert len(staging.cache._order.held) == 0
        check_core(self.shard.core)
        # An owner's answer that came too late for its data path is given back when it comes.
        counts = self.shard.core.counts
        await until(lambda: counts().reservations == 0 and counts().pins == 0)


@asynccontextmanager
async def assembled(
    settings: AgentSettings = SETTINGS,
    *,
    segments: int = 6,
    addresses: Sequence[str] = (),
    transport: Transport | None = None,
    drive: HeldDrive | None = None,
    others: Sequence[HeldDrive] = (),
    later: Sequence[HeldDrive] = (),
    behind: Callable[[MemoryMembership], MemoryMembership] | None = None,
) -> AsyncIterator[Assembly]:
    """Start an agent, and stop it in the end. Blocks cross inline, unless *transport* is another one.

    The enclosure has *drive* and *others*; the agent can reach drives of enclosures that come *later*. It
    reaches the store through what *behind* puts before it.
    """
    drive = drive or HeldDrive(segments)
    membership = MemoryMembership(FABRIC)
    await membership.put_enclosures([drive.record(*others)])
    owners = LoopbackOwners()
    seen = membership if behind is None else behind(membership)
    agent = another_agent(0, settings, addresses, seen, owners, (drive, *others, *later), transport)
    await agent.join()
    await agent.start()
    volumes = Volumes(membership, bytes(32))
    volume = await volumes.open(TENANT, OpenVolume(0, "v", LAYOUT, BLOCK_BYTES, create=True))
    fabric = Assembly(agent, drive, owners, membership, volume)
    await fabric.recorded()
    yield fabric
    drive.let_go()
    if await stop(agent):
        agent.unmap()


@asynccontextmanager
async def beside(
    fabric: Assembly,
    settings: AgentSettings,
    *,
    addresses: Sequence[str] = (),
    later: Sequence[HeldDrive] = (),
) -> AsyncIterator[Agent]:
    """Start a second agent in a fabric whose shard the first one owns, and stop it in the end."""
    agent = another_agent(1, settings, addresses, fabric.membership, fabric.owners, (fabric.drive, *later))
    await agent.join()
    await agent.start()
    yield agent
    assert await stop(agent)
    agent.unmap()


def another_agent(
    number: int,
    settings: AgentSettings,
    addresses: Sequence[str],
    membership: MemoryMembership,
    owners: LoopbackOwners,
    drives: Sequence[HeldDrive],
    transport: Transport | None = None,
) -> Agent:
    transport = transport or InlineTransport()

    def open_drive(record: DriveRecord) -> HeldDrive:
        found = next((drive for drive in drives if drive.id == record.id), None)
        if found is None:
            raise DriveError(f"there is no path to {record.id} from here")
        return found

    return Agent(
        AgentId(f"agent-{number}"),
        settings,
        addresses=addresses,
        access=Access(own_uid=os.getuid()),
        fabric_key=bytes(32),
        membership=membership,
        owners=owners,
        transports={transport.name: transport},
        open_drive=open_drive,
        clock=time.monotonic,
    )


async def stop(agent: Agent) -> bool:
    """Stop an agent as a process that runs it alone does; say whether all it began has ended."""
    has_drained = await agent.drain()
    return await agent.leave() and has_drained


async def reserved(shard: OwnedShard, numbers: list[int], *, hold_s: float = 5.0) -> Allocations:
    lengths = np.full(len(numbers), BLOCK_BYTES, np.uint32)
    return await shard.reserve(keys_of(numbers), lengths, hold_s=hold_s, within_s=2.0)


async def committed(shard: OwnedShard, made: Allocations, numbers: list[int]) -> list[PutState]:
    tags = rows16([tag_of(number) for number in numbers])
    states, _ = await shard.commit(made.reservations, tags, seeds_of(numbers), epoch=shard.epoch)
    return [PutState(state) for state in states]


def found(fabric: Assembly, numbers: list[int]) -> list[bool]:
    answer = fabric.shard.core.resolve(time.monotonic(), keys_of(numbers), pin_s=0)
    return [bool(is_found) for is_found in answer.found]


def put_states(done: PutDone) -> list[PutState]:
    return [PutState(state) for state in done.states]


def get_states(done: GetDone) -> list[BlockState]:
    return [BlockState(state) for state in done.states]


def reasons_of(done: GetDone | PutDone) -> list[Reason]:
    return [Reason(reason) for reason in done.reasons]


def unsettled_of(done: GetDone | PutDone) -> list[int]:
    found: list[int] = np.frombuffer(done.unsettled, codec.U32).tolist()
    return found


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something is so."""
    async with asyncio.timeout(FAR_S):
        while not condition():  # noqa: ASYNC110 (what is waited for sets no event)
            await asyncio.sleep(0.001)
