"""A small put for one drive: its blocks are fetched while its owner still decides where they go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import pytest
from tests.dpu_agent.datapath.test_busy_shards import held, waits
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    ENCLOSURE,
    FAR_S,
    GROUPED,
    SLOT_BYTES,
    TENANT,
    Assembly,
    HeldDrive,
    MemoryWorker,
    chain_of,
    content_of,
    get_states,
    put_states,
    reasons_of,
    unsettled_of,
    until,
)
from tests.support.agent.read_worker import NOWHERE, ReadWorker, read_worker

from ostraca_dpu_agent.datapath.location.routing import Routes
from ostraca_dpu_agent.datapath.staging import arrivals
from ostraca_dpu_agent.datapath.staging.leases import Purpose, StagingLease
from ostraca_dpu_agent.settings import MIB, AgentSettings
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.model.chain import Chain
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.ids import AgentId, drive_id
from ostraca_fabric.model.outcome import Ack, BlockState, PutState, Reason
from ostraca_fabric.tables.digests import TagCheck
from ostraca_fabric.wire.messages import AgentRequest, AnswerToAgent, Put, PutDone, Reserve

SOON_S = 0.1

SMALL = range(4)
"""Blocks of a put in a single group."""

ACKS = pytest.mark.parametrize("ack", Ack)
KINDS = pytest.mark.parametrize("is_read", [True, False], ids=["memory", "arena"])
ENDS = pytest.mark.parametrize("how", ["deadline", "cancelled"])


def as_it_is(answer: AnswerToAgent) -> AnswerToAgent:
    return answer


def crashes(_: AnswerToAgent) -> AnswerToAgent:
    raise RuntimeError("a bug")


class HeldOwners:
    """Owners that give space at once, and whose answers come when a test says so."""

    def __init__(
        self, fabric: Assembly, becomes: Callable[[AnswerToAgent], AnswerToAgent] = as_it_is
    ) -> None:
        self.asked = 0
        self._goes_on = asyncio.Event()
        ask = fabric.owners.ask
        fabric.ask_by_message()

        async def asked(agent: AgentId, request: AgentRequest) -> AnswerToAgent:
            answer = await ask(agent, request)
            if not isinstance(request, Reserve):
                return answer
            self.asked += 1
            await self._goes_on.wait()
            return becomes(answer)

        fabric.owners.ask = asked  # type: ignore[method-assign]  # it comes between

    def answer(self) -> None:
        self._goes_on.set()


@dataclass
class Putter:
    """A worker that puts, whose blocks the agent reads from memory, or lets the transport fetch."""

    fabric: Assembly
    worker: MemoryWorker
    message: Put = field(init=False)
    """Of the last put."""

    @property
    def fetched(self) -> int:
        """Blocks whose fetch has begun."""
        if isinstance(self.worker, ReadWorker):
            return sum(self.worker.copies.begun)
        return sum(len(wave.lengths) for wave in self.worker.arena.moved)

    def put(
        self, numbers: Sequence[int], *, deadline_s: float = FAR_S, ack: int = Ack.COMMITTED
    ) -> asyncio.Task[PutDone]:
        """Begin to put blocks."""
        worker = self.worker
        if isinstance(worker, ReadWorker):
            self.message = worker.put_message(numbers, deadline_s=deadline_s, ack=ack)
        else:
            self.message = self.fabric.put_message(worker, numbers, deadline_s=deadline_s, ack=ack)
        return asyncio.create_task(self.fabric.data_path.put(worker, self.fabric.volume, self.message))

    async def is_put(self, numbers: Sequence[int], *, ack: int = Ack.COMMITTED) -> list[PutState]:
        """Put blocks; return what they have become."""
        return put_states(await self.put(numbers, ack=ack))

    def hold(self) -> None:
        """Hold later fetches."""
        if isinstance(self.worker, ReadWorker):
            self.worker.copies.hold()
        self.worker.arena.is_held = True

    def let_go(self) -> None:
        if isinstance(self.worker, ReadWorker):
            self.worker.copies.let_go()
        self.worker.arena.let_go()

    async def all_checked(self) -> None:
        """Wait until all blocks of fetches have been copied and checked."""
        assert isinstance(self.worker, ReadWorker)
        copies = self.worker.copies
        await until(lambda: copies.ended == copies.begun != [])

    def end(self, how: str) -> None:
        """Cancel the last put, or leave its end to its deadline."""
        if how == "cancelled":
            self.worker.stopped(self.message.request).set_result(None)

    @staticmethod
    def deadline_s(how: str) -> float:
        return SOON_S if how == "deadline" else FAR_S

    @property
    def at_once(self) -> list[int]:
        """The blocks of a small put that are under way at once: copies can't be stopped, later waves can."""
        return [*SMALL] if isinstance(self.worker, ReadWorker) else [0, 1]


@asynccontextmanager
async def putter(
    settings: AgentSettings = GROUPED, *, is_read: bool = True, others: Sequence[HeldDrive] = ()
) -> AsyncIterator[Putter]:
    async with read_worker(settings, others=others) as (fabric, reading):
        yield Putter(fabric, reading if is_read else fabric.worker())


async def assert_stored(fabric: Assembly, numbers: Sequence[int]) -> None:
    """Assert that blocks can be read, with their bytes."""
    reader = fabric.worker()
    assert get_states(await fabric.get(reader, numbers)) == [BlockState.HIT] * len(numbers)
    for slot, number in enumerate(numbers):
        assert reader.arena.bytes[slot * SLOT_BYTES :][:BLOCK_BYTES] == content_of(number)


async def assert_not_stored(fabric: Assembly, numbers: Sequence[int]) -> None:
    """Assert that blocks have never been written, staged or committed."""
    assert get_states(await fabric.get(fabric.worker(), numbers)) == [BlockState.MISS] * len(numbers)
    assert fabric.shard.core.counts().blocks_committed == 1, "the block before the test"
    assert fabric.drive.asked == []


async def assert_at_rest(fabric: Assembly) -> None:
    """Assert that all work has given space and staging back, not left them to their time."""
    assert await fabric.context.tasks.finish(within_s=5)
    assert fabric.shard.core.counts().reservations == 0
    await fabric.at_rest()


@KINDS
@ACKS
async def test_blocks_are_fetched_before_the_owner_answers_and_promised_by_nobody(
    ack: Ack, *, is_read: bool
) -> None:
    async with putter(is_read=is_read) as source:
        fabric = source.fabric
        owners = HeldOwners(fabric)
        putting = source.put(SMALL, ack=ack)
        await until(lambda: owners.asked == 1 and source.fetched == len(SMALL))
        if is_read:
            await source.all_checked()
        await assert_not_stored(fabric, SMALL)
        assert not putting.done()
        assert fabric.context.staging.held_bytes == len(SMALL) * SLOT_BYTES
        owners.answer()
        done = await putting
        assert put_states(done) == [PutState(ack)] * len(SMALL)
        assert (unsettled_of(done), source.worker.settled) == ([], [])
        await assert_at_rest(fabric)
        assert source.fetched == len(SMALL), "once"
        await assert_stored(fabric, SMALL)


@KINDS
async def test_a_fetch_that_outlasts_the_owners_answer_is_waited_for(*, is_read: bool) -> None:
    async with putter(is_read=is_read) as source:
        source.hold()
        putting = source.put(SMALL)
        await until(lambda: source.fabric.shard.core.counts().reservations == len(SMALL))
        assert not putting.done()
        source.let_go()
        assert put_states(await putting) == [PutState.COMMITTED] * len(SMALL)
        await assert_at_rest(source.fabric)
        await assert_stored(source.fabric, SMALL)


# --- blocks that exist -------------------------------------------------------------------------------------


@KINDS
@ACKS
async def test_blocks_that_exist_are_not_written_again_and_leave_no_staging(
    ack: Ack, *, is_read: bool
) -> None:
    async with putter(is_read=is_read) as source:
        fabric = source.fabric
        assert await source.is_put(SMALL) == [PutState.COMMITTED] * len(SMALL)
        await assert_at_rest(fabric)
        fabric.drive.asked.clear()
        assert await source.is_put(SMALL, ack=ack) == [PutState.EXISTS] * len(SMALL)
        await assert_at_rest(fabric)
        assert source.fetched == len(SMALL) + len(source.at_once)
        assert fabric.drive.asked == []
        await assert_stored(fabric, SMALL)


@KINDS
@pytest.mark.parametrize("how", ["staged", "deadline", "cancelled"])
async def test_an_answer_that_blocks_exist_names_those_still_being_fetched(
    how: str, *, is_read: bool
) -> None:
    """A put that waits for all to be staged is answered at once: each block exists."""
    async with putter(is_read=is_read) as source:
        fabric = source.fabric
        await source.is_put(SMALL)
        await assert_at_rest(fabric)
        fabric.drive.asked.clear()
        source.hold()
        ack = Ack.STAGED if how == "staged" else Ack.COMMITTED
        putting = source.put(SMALL, ack=ack, deadline_s=source.deadline_s(how))
        exists = fabric.context.counters.tallies["put"]
        await until(lambda: source.fetched > len(SMALL))
        source.end(how)
        done = await putting
        assert put_states(done) == [PutState.EXISTS] * len(SMALL)
        assert unsettled_of(done) == source.at_once
        assert source.worker.settled == [], "blocks may land yet"
        assert fabric.context.staging.quarantined_bytes == len(SMALL) * SLOT_BYTES
        source.let_go()
        await assert_at_rest(fabric)
        assert source.worker.settled == [done.request]
        assert exists.of(PutState.EXISTS) == len(SMALL)
        assert fabric.drive.asked == []


@KINDS
@ACKS
async def test_blocks_beside_those_that_exist_are_fetched_again_and_stored(
    ack: Ack, *, is_read: bool
) -> None:
    async with putter(is_read=is_read) as source:
        fabric = source.fabric
        assert await source.is_put([1, 2]) == [PutState.COMMITTED] * 2
        await assert_at_rest(fabric)
        fabric.drive.writes.clear()
        new = PutState(ack)
        assert await source.is_put(SMALL, ack=ack) == [new, PutState.EXISTS, PutState.EXISTS, new]
        await assert_at_rest(fabric)
        assert source.fetched == 2 + len(source.at_once) + 2
        (blocks,) = (each for each in fabric.drive.writes if (each.lengths > PAGE_BYTES).any())
        assert len(blocks) == 2
        await assert_stored(fabric, SMALL)


async def test_staging_of_blocks_that_exist_outlasts_their_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with putter(is_read=False) as source:
        fabric = source.fabric
        await source.is_put(SMALL[:1])
        await assert_at_rest(fabric)
        monkeypatch.setattr(arrivals, "_SMALL_BYTES", 0)
        begun, goes_on, receive = threading.Event(), threading.Event(), TagCheck.receive

        def receive_late(check: TagCheck, rows: slice) -> None:
            begun.set()
            assert goes_on.wait(FAR_S)
            receive(check, rows)

        monkeypatch.setattr(TagCheck, "receive", receive_late)
        assert await source.is_put(SMALL[:1], ack=Ack.STAGED) == [PutState.EXISTS]
        await until(begun.is_set)
        assert not await fabric.context.tasks.finish(within_s=SOON_S)
        assert fabric.context.staging.held_bytes == SLOT_BYTES
        goes_on.set()
        await assert_at_rest(fabric)


async def test_blocks_that_exist_need_not_be_readable() -> None:
    async with putter() as source:
        fabric, worker = source.fabric, source.worker
        assert isinstance(worker, ReadWorker)
        await source.is_put(SMALL)
        nowhere = np.full(len(SMALL), NOWHERE, np.int64)
        message = msgspec.structs.replace(worker.put_message(SMALL), addresses=nowhere.tobytes())
        done = await fabric.data_path.put(worker, fabric.volume, message)
        assert put_states(done) == [PutState.EXISTS] * len(SMALL)
        await assert_at_rest(fabric)


# --- owners that give no space -----------------------------------------------------------------------------


@KINDS
@ACKS
async def test_blocks_of_a_busy_shard_leave_staging_and_are_fetched_again_once_it_has_room(
    ack: Ack, *, is_read: bool
) -> None:
    async with putter(is_read=is_read) as source:
        fabric = source.fabric
        hold = await held(fabric.shard)
        putting = source.put(SMALL, ack=ack)
        await waits(fabric)
        await until(lambda: fabric.context.staging.held_bytes == 0)
        assert source.fetched == len(source.at_once)
        assert not putting.done()
        hold.end()
        assert put_states(await putting) == [PutState(ack)] * len(SMALL)
        await assert_at_rest(fabric)
        assert source.fetched == len(source.at_once) + len(SMALL)
        await assert_stored(fabric, SMALL)


@KINDS
async def test_an_owner_that_crashes_leaves_no_staging(*, is_read: bool) -> None:
    async with putter(is_read=is_read) as source:
        owners = HeldOwners(source.fabric, crashes)
        owners.answer()
        with pytest.raises(RuntimeError, match="a bug"):
            await source.put(SMALL)
        assert source.fetched == len(source.at_once)
        assert await until_released(source.fabric)
        assert source.worker.settled == [source.message.request], "the put ended without an answer"


async def until_released(fabric: Assembly) -> bool:
    """Wait for the end of all work; return whether no staging is held."""
    assert await fabric.context.tasks.finish(within_s=5)
    return fabric.context.staging.held_bytes == 0


@KINDS
@ENDS
async def test_staging_outlasts_an_owner_that_crashes_as_long_as_blocks_are_fetched(
    how: str, *, is_read: bool
) -> None:
    async with putter(is_read=is_read) as source:
        fabric = source.fabric
        owners = HeldOwners(fabric, crashes)
        source.hold()
        putting = source.put(SMALL, deadline_s=source.deadline_s(how))
        await until(lambda: owners.asked == 1)
        owners.answer()
        source.end(how)
        done = await putting
        assert put_states(done) == [PutState.LATE] * len(SMALL)
        assert unsettled_of(done) == source.at_once
        assert fabric.context.staging.quarantined_bytes == len(SMALL) * SLOT_BYTES
        assert source.worker.settled == []
        source.let_go()
        assert await until_released(fabric)
        assert source.worker.settled == [done.request]


# --- puts that are over before their owner answers ---------------------------------------------------------


@ENDS
@ACKS
async def test_blocks_that_are_checked_when_their_put_ends_are_late_and_not_stored(
    how: str, ack: Ack
) -> None:
    """STAGED would say that a get finds them."""
    async with putter() as source:
        fabric = source.fabric
        owners = HeldOwners(fabric)
        putting = source.put(SMALL, deadline_s=source.deadline_s(how), ack=ack)
        await until(lambda: owners.asked == 1)
        await source.all_checked()
        source.end(how)
        done = await putting
        assert put_states(done) == [PutState.LATE] * len(SMALL)
        assert {*reasons_of(done)} == {Reason.DEADLINE if how == "deadline" else Reason.CANCELLED}
        assert unsettled_of(done) == []
        owners.answer()
        await assert_at_rest(fabric)
        assert source.worker.settled == []
        await assert_not_stored(fabric, SMALL)


@KINDS
@ENDS
@pytest.mark.parametrize("first", ["owner", "fetch"])
async def test_a_put_that_ends_during_its_fetch_stores_nothing_whichever_comes_first(
    how: str, first: str, *, is_read: bool
) -> None:
    async with putter(is_read=is_read) as source:
        fabric, staging = source.fabric, source.fabric.context.staging
        owners = HeldOwners(fabric)
        source.hold()
        putting = source.put(SMALL, deadline_s=source.deadline_s(how), ack=Ack.STAGED)
        await until(lambda: owners.asked == 1 and source.fetched > 0)
        source.end(how)
        done = await putting
        assert put_states(done) == [PutState.LATE] * len(SMALL)
        assert unsettled_of(done) == source.at_once
        if first == "owner":
            owners.answer()
            await until(lambda: fabric.shard.core.counts().reservations == 0)
            assert source.worker.settled == []
            assert staging.quarantined_bytes == len(SMALL) * SLOT_BYTES
            source.let_go()
        else:
            source.let_go()
            if is_read:
                await source.all_checked()
            owners.answer()
        await assert_at_rest(fabric)
        assert source.worker.settled == [done.request]
        await assert_not_stored(fabric, SMALL)


@KINDS
async def test_a_put_without_time_leaves_nothing(*, is_read: bool) -> None:
    async with putter(is_read=is_read) as source:
        done = await source.put(SMALL, deadline_s=0.0)
        assert put_states(done) == [PutState.LATE] * len(SMALL)
        await assert_at_rest(source.fabric)
        await assert_not_stored(source.fabric, SMALL)


# --- puts that are not fetched early -----------------------------------------------------------------------

WIDE = replace(
    GROUPED,
    memory=replace(GROUPED.memory, staging_bytes=32 * MIB),
    flow=replace(GROUPED.flow, put_group_bytes=16 * MIB),
)
EARLY_BLOCKS = 4 * MIB // SLOT_BYTES


@pytest.mark.parametrize(
    ("settings", "count", "is_early"),
    [
        (GROUPED, 4, True),
        (GROUPED, 5, False),
        (WIDE, EARLY_BLOCKS, True),
        (WIDE, EARLY_BLOCKS + 1, False),
    ],
    ids=["a group", "two groups", "4 MiB", "more"],
)
async def test_only_a_put_of_one_group_and_few_bytes_is_fetched_early(
    settings: AgentSettings, count: int, *, is_early: bool
) -> None:
    async with putter(settings) as source:
        numbers = range(10, 10 + count)
        await until(lambda: len(source.fabric.shard.core.ring.ready) > 0)
        owners = HeldOwners(source.fabric)
        putting = source.put(numbers)
        await until(lambda: owners.asked == 1)
        assert source.fetched == (count if is_early else 0)
        owners.answer()
        assert put_states(await putting) == [PutState.COMMITTED] * count
        await assert_at_rest(source.fabric)
        assert source.fetched == count


@pytest.fixture
def other() -> HeldDrive:
    return HeldDrive(drive=drive_id(ENCLOSURE, "other"))


def spread_numbers(fabric: Assembly) -> list[int]:
    """Return blocks of a put that go to two drives."""
    secret, routes = fabric.volume.placement_secret, fabric.context.routes()
    return next(
        [first, first + 1, first + 2]
        for first in range(100, 1000)
        if len(set(routes.runs(secret, chain_of([first, first + 1, first + 2]))[0])) > 1
    )


async def until_ready(fabric: Assembly) -> None:
    await until(lambda: len(fabric.service.shards) == 2)
    await until(lambda: all(owned.core.ring.ready for owned in fabric.service.shards.values()))


async def test_blocks_for_several_drives_are_not_fetched_early(other: HeldDrive) -> None:
    async with putter(others=[other]) as source:
        fabric = source.fabric
        await until_ready(fabric)
        numbers = spread_numbers(fabric)
        owners = HeldOwners(fabric)
        putting = source.put(numbers)
        await until(lambda: owners.asked == 1)
        assert source.fetched == 0
        owners.answer()
        assert put_states(await putting) == [PutState.COMMITTED] * 3
        await assert_at_rest(fabric)
        await assert_stored(fabric, numbers)


async def lease_all_but(fabric: Assembly, slots: int) -> StagingLease:
    """Take the staging of puts, as another worker, but for some slots."""
    staging = fabric.context.staging
    lease = await staging.lease(
        staging.put_bytes_max // SLOT_BYTES - slots,
        SLOT_BYTES,
        Purpose.PUT,
        holder="another",
        tenant=TENANT,
        within_s=FAR_S,
    )
    assert isinstance(lease, StagingLease)
    return lease


@KINDS
async def test_without_room_in_staging_owners_are_asked_first(*, is_read: bool) -> None:
    async with putter(is_read=is_read) as source:
        fabric = source.fabric
        lease = await lease_all_but(fabric, len(SMALL) - 1)
        owners = HeldOwners(fabric)
        putting = source.put(SMALL)
        await until(lambda: owners.asked == 1)
        assert source.fetched == 0
        assert not any(fabric.context.staging._queues.values()), "owners first, then staging"
        owners.answer()
        await until(lambda: any(fabric.context.staging._queues.values()))
        fabric.context.staging.release(lease)
        assert put_states(await putting) == [PutState.COMMITTED] * len(SMALL)
        await assert_at_rest(fabric)
        await assert_stored(fabric, SMALL)


@pytest.mark.parametrize("is_early", [True, False])
async def test_fetches_before_an_answer_leave_half_of_the_staging_to_other_puts(*, is_early: bool) -> None:
    async with putter() as source:
        fabric = source.fabric
        slots = fabric.context.staging.put_bytes_max // SLOT_BYTES
        lease = await lease_all_but(fabric, slots - (slots // 2 - len(SMALL) + (not is_early)))
        owners = HeldOwners(fabric)
        putting = source.put(SMALL)
        await until(lambda: owners.asked == 1)
        assert source.fetched == (len(SMALL) if is_early else 0)
        owners.answer()
        assert put_states(await putting) == [PutState.COMMITTED] * len(SMALL)
        fabric.context.staging.release(lease)
        await assert_at_rest(fabric)


@KINDS
async def test_a_put_that_is_cancelled_while_it_waits_for_staging_fetches_nothing(*, is_read: bool) -> None:
    async with putter(is_read=is_read) as source:
        fabric = source.fabric
        lease = await lease_all_but(fabric, 0)
        putting = source.put(SMALL)
        await until(lambda: any(fabric.context.staging._queues.values()))
        source.end("cancelled")
        done = await putting
        assert put_states(done) == [PutState.LATE] * len(SMALL)
        fabric.context.staging.release(lease)
        await assert_at_rest(fabric)
        assert (source.fetched, source.worker.settled) == (0, [])


async def test_blocks_for_a_suspect_drive_are_not_fetched() -> None:
    settings = replace(GROUPED, health=replace(GROUPED.health, suspect_faults=1))
    async with putter(settings) as source:
        fabric = source.fabric
        drive = fabric.context.drives[fabric.drive.id]
        assert isinstance(drive, GuardedDrive)
        drive.note_damage(0)
        assert reasons_of(await source.put(SMALL)) == [Reason.DRIVE_SUSPECT] * len(SMALL)
        assert source.fetched == 0
        await assert_at_rest(fabric)


async def test_blocks_of_a_chain_below_break_even_are_not_fetched() -> None:
    async with putter() as source:
        fabric = source.fabric
        volume = replace(
            fabric.volume, break_even_tokens=fabric.volume.record.layout.page_tokens * (len(SMALL) + 1)
        )
        assert isinstance(source.worker, ReadWorker)
        hashes = [bytes([number]) * 32 for number in SMALL]
        message = msgspec.structs.replace(
            source.worker.put_message(SMALL),
            spans=(Chain.of(hashes, hash_bytes=32, is_chained=True).span(),),
        )
        done = await fabric.data_path.put(source.worker, volume, message)
        assert reasons_of(done) == [Reason.TOO_SHORT] * len(SMALL)
        assert source.fetched == 0
        await assert_at_rest(fabric)


async def test_a_new_map_during_the_wait_for_staging_sends_no_block_to_another_drive(
    other: HeldDrive,
) -> None:
    """The staging was leased, and the group made, for the drive of the map before."""
    async with putter(others=[other]) as source:
        fabric = source.fabric
        await until_ready(fabric)
        other.writes.clear()
        numbers, after = spread_numbers(fabric), fabric.context.routes()
        before = Routes(replace(after.map, enclosures={fabric.drive.enclosure: fabric.drive.record()}))
        fabric.context.routes = lambda: before
        lease = await lease_all_but(fabric, 0)
        putting = source.put(numbers)
        while not any(fabric.context.staging._queues.values()):  # noqa: ASYNC110 (not a turn more)
            await asyncio.sleep(0)
        fabric.context.staging.release(lease)
        fabric.context.routes = lambda: after
        assert put_states(await putting) == [PutState.COMMITTED] * len(numbers)
        assert source.fetched == len(numbers), "early: staging came in time"
        await assert_at_rest(fabric)
        assert not any((each.lengths > PAGE_BYTES).any() for each in other.writes)
