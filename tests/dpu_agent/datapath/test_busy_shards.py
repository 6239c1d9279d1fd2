"""A put waits for room until its deadline, and costs nobody else anything meanwhile."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.dpu_agent.shards.core.test_allocator import SCARCE
from tests.dpu_agent.shards.core.test_grants import PER_SEGMENT, among_others
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    ENCLOSURE,
    FAR_S,
    SETTINGS,
    SHARD,
    Assembly,
    HeldDrive,
    assembled,
    committed,
    get_states,
    put_states,
    reasons_of,
    reserved,
    until,
)
from tests.support.agent.owned_shard import OwnedShard as CoreShard
from tests.support.agent.owned_shard import key, keys_of
from tests.support.stalls import Stopwatch

from ostraca_dpu_agent.settings import BLOCKS_PER_SHARD_LEAST
from ostraca_dpu_agent.shards.core import ShardSettings, may_get_space
from ostraca_dpu_agent.shards.shard import OwnedShard
from ostraca_dpu_agent.tenants import Tenants
from ostraca_fabric.model.ids import AgentId, ShardId, TenantId, drive_id
from ostraca_fabric.model.outcome import Ack, BlockState, PutState, Reason
from ostraca_fabric.wire.messages import AgentRequest, AnswerToAgent, Reserve, Reserved, ShardWants

STEP = 4


class Hold:
    """What keeps a shard from emptying any segment: writers at work, or readers."""

    def __init__(self, shard: OwnedShard, *, by_readers: bool) -> None:
        self._shard = shard
        self._by_readers = by_readers
        self._pins: list[int] = []
        self._numbers: list[np.uint64] = []

    async def fill(self) -> None:
        """Take all the space there is."""
        for first in range(10_000, 20_000, STEP):
            numbers = list(range(first, first + STEP))
            made = await reserved(self._shard, numbers, hold_s=30.0)
            taken = np.flatnonzero(made.states == PutState.STAGED)
            if self._by_readers and len(taken):
                its = replace(made, reservations=made.reservations[taken])
                await committed(self._shard, its, [numbers[row] for row in taken])
                keys = keys_of(numbers)[taken]
                answer = self._shard.core.resolve(time.monotonic(), keys, pin_s=10.0)
                self._pins.append(answer.pin)
            else:
                self._numbers += list(made.reservations[taken])
            if len(taken) < STEP:
                return
        pytest.fail("a shard that others hold all of should be full")

    def end(self) -> None:
        """Let them be done."""
        self._shard.core.release(time.monotonic(), self._pins, np.array(self._numbers, np.uint64))
        self._shard.wake()


async def held(shard: OwnedShard, *, by_readers: bool = False) -> Hold:
    hold = Hold(shard, by_readers=by_readers)
    await hold.fill()
    return hold


async def waits(fabric: Assembly, puts: int = 1) -> None:
    await until(lambda: fabric.context.staging.tenants.waiting_puts.total() == puts)


@pytest.mark.parametrize("by_readers", [False, True])
@pytest.mark.parametrize("ack", [Ack.STAGED, Ack.COMMITTED])
async def test_a_put_waits_until_others_are_done(ack: Ack, *, by_readers: bool) -> None:
    async with assembled() as fabric:
        hold = await held(fabric.shard, by_readers=by_readers)
        worker = fabric.worker()
        put = asyncio.create_task(fabric.put(worker, [1, 2], ack=ack))
        await waits(fabric)
        assert not put.done()
        hold.end()
        done = await put
        assert set(put_states(done)) <= {PutState(ack), PutState.COMMITTED}
        await fabric.at_rest()
        assert get_states(await fabric.get(worker, [1, 2])) == [BlockState.HIT] * 2


async def test_many_puts_that_wait_for_each_other_all_end_well() -> None:
    async with assembled() as fabric:
        hold = await held(fabric.shard)
        blocks = [list(range(first, first + 20)) for first in range(0, 240, 20)]  # more than the shard holds
        puts = [asyncio.create_task(fabric.put(fabric.worker(), its)) for its in blocks]
        await waits(fabric, len(puts))
        hold.end()
        ends = [put_states(done) for done in await asyncio.gather(*puts)]
        assert ends == [[PutState.COMMITTED] * 20] * len(puts)
        await fabric.at_rest()


async def test_a_put_that_waits_in_vain_is_told_that_the_shard_was_busy_at_its_deadline() -> None:
    async with assembled() as fabric:
        hold = await held(fabric.shard)
        watch = Stopwatch()
        done = await fabric.put(fabric.worker(), [1, 2], deadline_s=0.2)
        assert 0.1 < watch.took_s < 0.35
        assert put_states(done) == [PutState.DECLINED] * 2
        assert reasons_of(done) == [Reason.BUSY] * 2
        hold.end()
        await fabric.at_rest()
        assert fabric.context.counters.tallies["put"].of(PutState.DECLINED, Reason.BUSY) == 2


async def test_a_put_that_is_cancelled_while_it_waits_ends_at_once() -> None:
    settings = replace(SETTINGS, flow=replace(SETTINGS.flow, space_retry_s=FAR_S))
    async with assembled(settings) as fabric:
        hold = await held(fabric.shard)
        worker = fabric.worker()
        message = fabric.put_message(worker, [1])
        put = asyncio.create_task(fabric.data_path.put(worker, fabric.volume, message))
        await waits(fabric)
        worker.stopped(message.request).set_result(None)
        assert put_states(await put) == [PutState.DECLINED]
        assert await fabric.context.tasks.finish(within_s=5)
        assert not fabric.context.staging.tenants.waiting_puts
        hold.end()


async def test_a_block_that_got_room_and_is_under_way_at_the_deadline_is_late() -> None:
    async with assembled() as fabric:
        hold = await held(fabric.shard)
        worker = fabric.worker()
        worker.arena.is_held = True
        put = asyncio.create_task(fabric.put(worker, [1], deadline_s=0.5))
        await waits(fabric)
        hold.end()
        await until(lambda: len(worker.arena.held) == 2)  # the first one was begun early
        done = await put
        assert (put_states(done), reasons_of(done)) == ([PutState.LATE], [Reason.DEADLINE])
        worker.arena.let_go()
        await fabric.at_rest()


async def test_blocks_that_wait_hold_nothing_and_hold_up_no_block_that_has_room() -> None:
    other = HeldDrive(drive=drive_id(ENCLOSURE, "other"))
    async with assembled(others=[other]) as fabric:
        await until(lambda: len(fabric.service.shards) == 2)
        free = fabric.service.shards[ShardId(other.shard)]
        await until(lambda: bool(free.core.ring.ready))
        hold = await held(fabric.shard)
        numbers = list(range(40))
        worker = fabric.worker()
        put = asyncio.create_task(fabric.put(worker, numbers))
        await waits(fabric)
        hits = fabric.context.counters.tallies["put"]
        await until(lambda: free.core.counts().blocks > 0 and not len(free.core.reservations))
        there = get_states(await fabric.get(fabric.worker(), numbers))
        assert there.count(BlockState.HIT) == free.core.counts().blocks > 0
        assert there.count(BlockState.MISS) > 0
        assert fabric.context.staging.held_bytes == 0
        assert not put.done()
        hold.end()
        assert put_states(await put) == [PutState.COMMITTED] * len(numbers)
        assert hits.of(PutState.COMMITTED) == len(numbers)
        await fabric.at_rest()


@pytest.mark.parametrize("most", [0, 1])
async def test_beyond_the_limit_of_puts_that_wait_blocks_are_declined_at_once(most: int) -> None:
    settings = replace(SETTINGS, flow=replace(SETTINGS.flow, waiting_puts_max=most))
    async with assembled(settings) as fabric:
        hold = await held(fabric.shard)
        puts = [asyncio.create_task(fabric.put(fabric.worker(), [number])) for number in range(most)]
        await waits(fabric, most)
        assert reasons_of(await fabric.put(fabric.worker(), [100])) == [Reason.BUSY]
        hold.end()
        for put in puts:
            assert put_states(await put) == [PutState.COMMITTED]
        await fabric.at_rest()


def test_tenants_share_the_places_of_puts_that_wait() -> None:
    first, second = TenantId("first"), TenantId("second")
    tenants = Tenants()
    for tenant in (first, second):
        tenants.add(tenants.connections, tenant)
    waiting, entered = tenants.waiting_puts, []
    for tenant in [first] * 4 + [second]:
        entered.append(tenants.may_add(waiting, tenant, 4))
        if entered[-1]:
            tenants.add(waiting, tenant)
    assert entered == [True, True, True, False, True]
    assert not tenants.may_add(waiting, second, 4)


async def test_a_full_index_is_waited_for_like_full_flash() -> None:
    settings = replace(SETTINGS, owner=replace(SETTINGS.owner, blocks_per_shard_max=BLOCKS_PER_SHARD_LEAST))
    async with assembled(settings) as fabric:
        await fabric.ready()
        numbers, lengths = (
            list(range(100, 100 + BLOCKS_PER_SHARD_LEAST)),
            np.full(BLOCKS_PER_SHARD_LEAST, 100),
        )
        made = await fabric.shard.reserve(
            keys_of(numbers), lengths.astype(np.uint32), hold_s=30.0, within_s=2.0
        )
        put = asyncio.create_task(fabric.put(fabric.worker(), [1]))
        await waits(fabric)
        fabric.shard.core.release(time.monotonic(), [], made.reservations[made.reservations > 0])
        assert put_states(await put) == [PutState.COMMITTED]


async def told(fabric: Assembly, *, waits: bool) -> Reason:
    """Ask an owner that is busy for space; return what it says."""
    wants = ShardWants(SHARD, keys_of([1]).tobytes(), np.full(1, BLOCK_BYTES, np.uint32).tobytes(), bytes(4))
    answer = await fabric.owners.ask(AgentId("agent-0"), Reserve(1, 1.0, 5.0, (wants,), waits=waits))
    assert isinstance(answer, Reserved)
    return Reason(answer.shards[0].reasons[0])


async def test_who_does_not_wait_is_told_what_releases_before_knew() -> None:
    async with assembled() as fabric:
        hold = await held(fabric.shard)
        assert await told(fabric, waits=False) is Reason.NO_SPACE
        assert await told(fabric, waits=True) is Reason.BUSY
        events = fabric.service.events.of(key(1))
        assert [event.reason for event in events] == ["NO_SPACE"], "a question that is asked often is none"
        hold.end()


async def test_an_owner_that_knows_no_waiting_is_not_asked_again() -> None:
    async with assembled() as fabric:
        hold = await held(fabric.shard)
        ask, asked = fabric.owners.ask, 0

        async def ask_of_before(agent: AgentId, request: AgentRequest) -> AnswerToAgent:
            nonlocal asked
            if isinstance(request, Reserve):
                asked += 1
                request = msgspec.structs.replace(request, waits=False, is_again=False)
            return await ask(agent, request)

        fabric.owners.ask = ask_of_before  # type: ignore[method-assign]
        fabric.ask_by_message()
        assert reasons_of(await fabric.put(fabric.worker(), [1])) == [Reason.NO_SPACE]
        assert asked == 1
        hold.end()


async def test_an_owner_that_falls_silent_until_the_deadline_was_busy_and_not_away() -> None:
    async with assembled() as fabric:
        hold = await held(fabric.shard)
        ask = fabric.owners.ask

        async def ask_in_vain(agent: AgentId, request: AgentRequest) -> AnswerToAgent:
            if isinstance(request, Reserve) and request.is_again:
                await asyncio.sleep(max(0.0, request.deadline_s - 0.05))
                raise TimeoutError
            return await ask(agent, request)

        fabric.owners.ask = ask_in_vain  # type: ignore[method-assign]
        assert reasons_of(await fabric.put(fabric.worker(), [1], deadline_s=0.2)) == [Reason.BUSY]
        hold.end()


def test_a_shard_that_others_may_write_all_of_is_full_and_not_busy() -> None:
    shard = among_others(withheld=frozenset(range(8)))
    assert not may_get_space(shard.core.ring, shard.core.grants, shard.now_s, within_s=1e6)
    shard.core.retire(shard.now_s, range(8))
    assert may_get_space(shard.core.ring, shard.core.grants, shard.now_s, within_s=0.0)


def test_segments_that_late_writes_may_reach_are_waited_for_as_long_as_there_is_time() -> None:
    shard = CoreShard(segments=2)
    shard.settle()
    made = shard.reserve(list(range(PER_SEGMENT)))
    shard.core.release(shard.now_s, [], made.reservations, may_land=True)
    shard.settle()
    more = shard.reserve(list(range(100, 100 + 2 * PER_SEGMENT)))
    shard.core.release(shard.now_s, [], more.reservations[more.reservations > 0], may_land=True)
    shard.pass_time(0.0)
    assert shard.reserve([200]).reasons[0] == Reason.NO_SPACE
    late_write_s = shard.core.settings.late_write_s
    assert not shard.core.ring.pools.common.sealed, "all is emptied"
    assert not may_get_space(shard.core.ring, shard.core.grants, shard.now_s, within_s=late_write_s - 1.0)
    assert may_get_space(shard.core.ring, shard.core.grants, shard.now_s, within_s=late_write_s + 1.0)


def test_a_put_that_waits_has_not_touched_its_blocks_a_second_time() -> None:
    shard = CoreShard(settings=ShardSettings(endurance=replace(SCARCE, burst_s=400.0)))
    shard.settle()
    numbers, deep = keys_of([1]), np.full(1, 1000, np.uint32)
    lengths = np.full(1, 64 << 10, np.uint32)

    def ask(*, is_again: bool) -> int:
        made = shard.core.reserve(shard.now_s, numbers, lengths, hold_s=1.0, depths=deep, is_again=is_again)
        shard.core.release(shard.now_s, [], made.reservations[made.reservations > 0])
        return int(made.reasons[0])

    assert ask(is_again=False) == Reason.ADMISSION
    assert ask(is_again=True) == Reason.NONE, "what was admitted before is not weighed again"
    shard.pass_time(SCARCE.retry_s + 1.0)
    numbers = keys_of([2])
    for _ in range(2):
        assert ask(is_again=True) == Reason.NONE
        shard.pass_time(SCARCE.retry_s + 1.0)
    assert ask(is_again=False) == Reason.ADMISSION, "it is wanted for the first time"
