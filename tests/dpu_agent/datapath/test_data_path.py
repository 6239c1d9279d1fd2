"""Gets and puts through a data path: what is answered, what is held, and what is given back."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    SLOT_BYTES,
    HeldDrive,
    assembled,
    content_of,
    get_states,
    put_states,
    reasons_of,
    unsettled_of,
    until,
    with_cache,
)
from tests.support.invariants import evict_all
from tests.support.stalls import Stopwatch

from ostraca_dpu_agent.settings import MIB
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.model.outcome import Ack, BlockState, PutState, Reason
from ostraca_fabric.tables.digests import TagCheck
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import Settled

LATE_S = 0.1
SOON_S = 0.5
"""A deadline that comes when all that can begin has begun."""


async def test_what_was_put_can_be_got() -> None:
    async with assembled() as fabric:
        writer, reader = fabric.worker(), fabric.worker()
        assert put_states(await fabric.put(writer, range(7))) == [PutState.COMMITTED] * 7
        done = await fabric.get(reader, range(8))
        assert get_states(done) == [BlockState.HIT] * 7 + [BlockState.MISS]
        for number in range(7):
            slot = number * SLOT_BYTES
            assert reader.arena.bytes[slot : slot + BLOCK_BYTES] == content_of(number)
        await fabric.at_rest()
        counters = fabric.context.counters.snapshot()
        assert (counters.put_committed, counters.get_hits, counters.get_misses) == (7, 7, 1)


async def test_a_put_that_was_staged_goes_on_to_flash() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.ready()
        fabric.drive.holds_writes = True
        assert put_states(await fabric.put(worker, range(4), ack=Ack.STAGED)) == [PutState.STAGED] * 4
        assert fabric.shard.core.counts().blocks_committed == 0
        fabric.drive.let_go()
        await fabric.at_rest()
        assert fabric.shard.core.counts().blocks_committed == 4
        assert get_states(await fabric.get(worker, range(4))) == [BlockState.HIT] * 4


@pytest.mark.parametrize("numbers", [range(4), range(8, 12), range(2, 6)])
@pytest.mark.parametrize("is_by_message", [False, True])
async def test_a_get_pins_blocks_no_longer_than_it_lasts(numbers: range, is_by_message: bool) -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        assert put_states(await fabric.put(worker, range(4))) == [PutState.COMMITTED] * 4
        if is_by_message:
            fabric.ask_by_message()
        fabric.drive.holds_reads = True
        getting = asyncio.create_task(fabric.get(worker, numbers))
        if any(number < 4 for number in numbers):
            await until(lambda: len(fabric.shard.core.pins) == 1)
        fabric.drive.let_go()
        await getting
        assert await fabric.context.tasks.finish(within_s=5.0)
        assert not len(fabric.shard.core.pins), "released, and not expired"


async def test_a_fetch_that_reads_a_slot_after_its_reuse_fails_its_tag_and_is_not_stored() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        worker.arena.is_held = True
        message = fabric.put_message(worker, range(2))
        putting = asyncio.create_task(fabric.data_path.put(worker, fabric.volume, message))
        await until(lambda: len(worker.arena.held) == 1)
        worker.arena.bytes[:BLOCK_BYTES] = content_of(9)
        worker.arena.let_go()
        done = await putting
        assert put_states(done) == [PutState.DECLINED, PutState.COMMITTED]
        assert reasons_of(done) == [Reason.DAMAGED, Reason.NONE]
        assert reasons_of(await fabric.get(fabric.worker(), range(2))) == [Reason.NOT_FOUND, Reason.NONE]
        assert fabric.drive.bytes.find(content_of(9)[:64]) < 0
        await fabric.at_rest()


async def test_a_put_late_for_its_commit_says_late_and_why() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.ready()
        fabric.drive.holds_writes = True
        watch = Stopwatch()
        done = await fabric.put(worker, range(2), deadline_s=0.05)
        assert watch.took_s < 0.05 + LATE_S
        assert put_states(done) == [PutState.LATE] * 2
        assert reasons_of(done) == [Reason.DEADLINE] * 2
        fabric.drive.let_go()
        await fabric.at_rest()


async def test_declined_blocks_of_a_put_are_counted_whatever_declined_them() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        message = fabric.put_message(worker, range(3))
        worker.arena.bytes[0] ^= 1
        done = await fabric.data_path.put(worker, fabric.volume, message)
        assert reasons_of(done)[0] == Reason.DAMAGED
        worker.arena.fails = True
        done = await fabric.put(worker, range(10, 12))
        assert reasons_of(done) == [Reason.TRANSFER_FAILED] * 2
        await fabric.at_rest()
        counters = fabric.context.counters.snapshot()
        assert (counters.put_committed, counters.put_declined) == (2, 3)


async def test_waves_that_never_began_give_their_space_back_when_the_put_is_over() -> None:
    async with assembled() as fabric:
        await fabric.ready()
        worker = fabric.worker()
        worker.arena.is_held = True
        done = await fabric.put(worker, range(10), deadline_s=SOON_S)
        assert put_states(done) == [PutState.LATE] * 10
        assert unsettled_of(done) == [0, 1, 2, 3]
        assert fabric.context.staging.quarantined_bytes == 4 * SLOT_BYTES
        assert worker.settled == []
        await until(lambda: fabric.shard.core.counts().reservations == 4)
        worker.arena.let_go()
        await fabric.at_rest()
        assert worker.settled == [done.request]
        assert fabric.shard.core.counts().blocks_committed == 0, "nor is what comes after the end stored"


async def test_a_get_that_is_over_starts_no_transfer_and_keeps_what_is_under_way_in_quarantine() -> None:
    async with assembled() as fabric:
        worker, reader = fabric.worker(), fabric.worker()
        await fabric.put(worker, range(10))
        reader.arena.is_held = True
        watch = Stopwatch()
        done = await fabric.get(reader, range(10), deadline_s=SOON_S)
        assert watch.took_s < SOON_S + LATE_S
        assert get_states(done) == [BlockState.LATE] * 10
        assert unsettled_of(done) == [0, 1, 2, 3, 4, 5], "a wave of the first part, and two of the other"
        assert fabric.context.staging.quarantined_bytes == 10 * SLOT_BYTES, "both parts"
        assert reader.settled == []
        reader.arena.let_go()
        await fabric.at_rest()
        assert len(reader.arena.moved) == 3
        assert worker.settled == []
        assert reader.settled == [done.request]


async def test_staging_is_not_reused_while_a_late_read_may_still_land_in_it() -> None:
    async with assembled() as fabric:
        worker, reader = fabric.worker(), fabric.worker()
        await fabric.put(worker, range(4))
        fabric.drive.holds_reads = True
        done = await fabric.get(reader, range(4), deadline_s=SOON_S)
        assert get_states(done) == [BlockState.LATE] * 4
        assert unsettled_of(done) == []
        assert fabric.context.staging.quarantined_bytes == 4 * SLOT_BYTES
        fabric.drive.let_go()
        await fabric.at_rest()
        assert reader.arena.moved == [], "all slots were said to be settled, so none is written any more"


async def test_a_cancelled_get_ends_soon_also_while_an_owner_does_not_answer() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        hears = asyncio.Event()
        never = asyncio.Event()

        class Silent:
            async def answer(self, request: object) -> object:
                hears.set()
                await never.wait()
                raise AssertionError("unreachable")

            def notice(self, notice: object) -> None:
                pass

        fabric.ask_by_message()
        fabric.owners.register(fabric.agent.id, Silent())  # type: ignore[arg-type]  # never answers
        message = fabric.get_message(range(3), deadline_s=3.0)
        asking = asyncio.create_task(fabric.data_path.get(worker, fabric.volume, message))
        await hears.wait()
        watch = Stopwatch()
        worker.stopped(message.request).set_result(None)
        done = await asking
        assert watch.took_s < LATE_S
        assert reasons_of(done) == [Reason.CANCELLED] * 3
        put = fabric.put_message(worker, range(3), deadline_s=3.0)
        hears.clear()
        putting = asyncio.create_task(fabric.data_path.put(worker, fabric.volume, put))
        await hears.wait()
        watch = Stopwatch()
        worker.stopped(put.request).set_result(None)
        assert put_states(await putting) == [PutState.LATE] * 3
        assert watch.took_s < LATE_S
        fabric.owners.register(fabric.agent.id, fabric.agent._dispatcher)


async def test_a_get_that_fails_at_once_raises_and_says_that_its_slots_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with assembled() as fabric:
        worker = fabric.worker()

        async def fail(*_: object, **__: object) -> None:
            raise MemoryError("no memory to locate blocks")

        monkeypatch.setattr(fabric.context.locator, "locate", fail)
        with pytest.raises(MemoryError):
            await fabric.get(worker, range(2))
        await until(lambda: any(isinstance(each, Settled) for each in worker.said))
        await fabric.at_rest()


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("-inf")])
async def test_a_deadline_that_is_over_or_no_time_makes_every_block_late(deadline_s: float) -> None:
    async with assembled(with_cache(2 * MIB)) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, range(2))
        reader = fabric.worker()
        done = await fabric.get(reader, range(4), deadline_s=deadline_s)
        assert get_states(done) == [BlockState.LATE] * 4
        moving = {slot // SLOT_BYTES for wave in reader.arena.moved for slot in wave.arena.tolist()}
        assert moving <= set(unsettled_of(done)), "blocks of the cache may be under way already"
        reader.arena.moved.clear()
        assert put_states(await fabric.put(reader, range(4), deadline_s=deadline_s)) == [PutState.LATE] * 4
        await fabric.at_rest()
        assert reader.arena.moved == []


async def test_an_endless_deadline_is_cut_to_the_longest_one() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        assert put_states(await fabric.put(worker, [1], deadline_s=float("inf"))) == [PutState.COMMITTED]
        assert get_states(await fabric.get(worker, [1], deadline_s=float("inf"))) == [BlockState.HIT]


async def test_no_blocks_are_answered_for_with_nothing() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        assert (await fabric.put(worker, [])).states == b""
        assert (await fabric.get(worker, [])).states == b""
        await fabric.at_rest()


async def test_blocks_from_the_cache_count_as_such_only_when_they_arrived() -> None:
    async with assembled(with_cache(2 * MIB)) as fabric:
        worker, broken = fabric.worker(), fabric.worker()
        await fabric.put(worker, range(2))
        broken.arena.fails = True
        assert reasons_of(await fabric.get(broken, range(2))) == [Reason.TRANSFER_FAILED] * 2
        assert fabric.context.counters.snapshot().get_hits_from_cache == 0
        assert get_states(await fabric.get(worker, range(2))) == [BlockState.HIT] * 2
        assert fabric.context.counters.snapshot().get_hits_from_cache == 2
        await fabric.at_rest()


@pytest.mark.parametrize("cache_bytes", [0, 2 * MIB])
@pytest.mark.parametrize("written_bytes", [0, 4096])
async def test_a_block_whose_write_failed_is_declined_and_nobody_gets_it(
    cache_bytes: int, written_bytes: int
) -> None:
    async with assembled(with_cache(cache_bytes)) as fabric:
        worker = fabric.worker()
        geometry = fabric.shard.core.geometry
        for segment in range(geometry.segments):
            begin = geometry.data_offset(segment)
            fabric.drive.fail_writes(begin, geometry.data_bytes, written_bytes=written_bytes)
        done = await fabric.put(worker, range(3))
        assert put_states(done) == [PutState.DECLINED] * 3
        assert reasons_of(done) == [Reason.DRIVE_ERROR] * 3
        current = fabric.shard.core.ring.pools.common.current
        assert current is not None
        assert current.quiet_at_s > time.monotonic() + 60, "a path may deliver the write yet"
        assert reasons_of(await fabric.get(worker, range(3))) == [Reason.NOT_FOUND] * 3
        fabric.drive.mend()
        assert put_states(await fabric.put(worker, range(3))) == [PutState.COMMITTED] * 3
        assert get_states(await fabric.get(worker, range(3))) == [BlockState.HIT] * 3
        await fabric.at_rest()


@pytest.mark.parametrize("slow", ["transfer", "write"])
async def test_space_that_was_held_for_too_long_is_not_written_any_more_nor_committed(slow: str) -> None:
    """The owner, whose clock does not jump here, would still take the commit."""
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.ready()
        jumped_s = 0.0
        fabric.context.clock = lambda: time.monotonic() + jumped_s
        worker.arena.is_held, fabric.drive.holds_writes = slow == "transfer", slow == "write"
        putting = asyncio.create_task(fabric.put(worker, [1]))
        # The drive also holds the opening of the next segment.
        await until(lambda: len(worker.arena.held) == 1 or len(fabric.drive.held) == 2)
        jumped_s = fabric.context.hold_s
        worker.arena.let_go()
        fabric.drive.let_go()
        assert reasons_of(await putting) == [Reason.EXPIRED]
        assert (fabric.drive.bytes.find(content_of(1)[:64]) >= 0) == (slow == "write")
        assert fabric.shard.core.counts().blocks == 0


async def test_without_its_drive_a_shards_blocks_are_misses_and_puts_are_declined() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.put(worker, range(2))
        drive = fabric.agent._drives.pop(fabric.drive.id)
        assert reasons_of(await fabric.get(worker, range(2))) == [Reason.DRIVE_ERROR] * 2
        assert reasons_of(await fabric.put(worker, range(5, 7))) == [Reason.DRIVE_ERROR] * 2
        await fabric.at_rest()
        fabric.agent._drives[fabric.drive.id] = drive


async def test_a_damaged_block_is_a_miss_and_leaves_the_index() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.put(worker, range(2))
        fabric.drive.flip_bit(fabric.drive.bytes.find(content_of(0)[:64]) + 100)
        done = await fabric.get(worker, range(2))
        assert get_states(done) == [BlockState.MISS, BlockState.HIT]
        assert reasons_of(done)[0] == Reason.DAMAGED
        await until(lambda: fabric.shard.core.counts().blocks_dropped == 1)
        assert reasons_of(await fabric.get(worker, [0])) == [Reason.NOT_FOUND]
        assert put_states(await fabric.put(worker, [0])) == [PutState.COMMITTED]
        await fabric.at_rest()


class HangingDrive(HeldDrive):
    """Hangs after so many reads."""

    reads_left = 1 << 30

    def submit_read(self, pieces: Pieces, check: TagCheck | None = None) -> asyncio.Future[NDArray[np.bool_]]:
        self.holds_reads = self.reads_left <= 0
        self.reads_left -= 1
        return super().submit_read(pieces, check)

    def let_go(self) -> None:
        self.reads_left = 1 << 30
        super().let_go()


async def test_a_block_is_put_again_right_after_the_get_that_found_its_damage() -> None:
    async with assembled(drive=(drive := HangingDrive())) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, range(3))
        for number in range(2):
            drive.flip_bit(drive.bytes.find(content_of(number)[:64]) + 100)
        drive.reads_left = 1
        assert reasons_of(await fabric.get(worker, range(2))) == [Reason.DAMAGED] * 2
        putting = asyncio.create_task(fabric.put(worker, range(3)))
        await until(lambda: len(drive.held) == 2)
        assert put_states(await fabric.put(worker, [2])) == [PutState.EXISTS], "not under check"
        assert not putting.done()
        drive.let_go()
        assert put_states(await putting) == [PutState.COMMITTED, PutState.COMMITTED, PutState.EXISTS]
        await fabric.at_rest()


async def test_a_put_waits_only_briefly_for_the_check_of_a_block_on_a_drive_that_hangs() -> None:
    async with assembled(drive=(drive := HangingDrive())) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, range(1))
        drive.flip_bit(drive.bytes.find(content_of(0)[:64]) + 100)
        drive.reads_left = 1
        assert reasons_of(await fabric.get(worker, range(1))) == [Reason.DAMAGED]
        assert put_states(await fabric.put(worker, range(1))) == [PutState.EXISTS]
        drive.let_go()
        await until(lambda: fabric.shard.core.counts().blocks_dropped == 1)
        assert put_states(await fabric.put(worker, range(1))) == [PutState.COMMITTED]
        await fabric.at_rest()


async def test_a_worker_whose_transfers_never_end_cannot_use_up_the_agent() -> None:
    async with assembled(segments=40) as fabric:
        stopped, other = fabric.worker(), fabric.worker()
        stopped.arena.is_held = True
        asked = [fabric.put_message(stopped, range(at, at + 8)) for at in range(0, 160, 8)]
        putting = [asyncio.create_task(fabric.data_path.put(stopped, fabric.volume, each)) for each in asked]
        share_bytes = 2 * MIB
        await until(lambda: len(stopped.arena.held) == share_bytes // (2 * SLOT_BYTES))
        for each in asked:
            stopped.stopped(each.request).set_result(None)
        for late in await asyncio.gather(*putting):
            assert set(put_states(late)) == {PutState.LATE}
        watch = Stopwatch()
        done = await fabric.put(other, range(1000, 1008))
        assert put_states(done) == [PutState.COMMITTED] * 8
        assert get_states(await fabric.get(other, range(1000, 1008))) == [BlockState.HIT] * 8
        assert watch.took_s < 1.0
        refused = await fabric.put(stopped, range(2000, 2002))
        assert set(reasons_of(refused)) == {Reason.QUARANTINED}
        stopped.arena.let_go()
        await fabric.at_rest()


async def test_a_worker_whose_transfers_never_end_cannot_keep_the_cache_from_the_others() -> None:
    share_bytes = 2 * MIB
    async with assembled(with_cache(6 * MIB), segments=40) as fabric:
        stopped, other = fabric.worker(), fabric.worker()
        staging = fabric.context.staging
        for first in range(0, 96, 32):
            assert set((await fabric.put(other, range(first, first + 32))).states) == {PutState.COMMITTED}
        stopped.arena.is_held = True
        asked = [fabric.get_message(range(at, at + 8)) for at in range(0, 96, 8)]
        getting = [asyncio.create_task(fabric.data_path.get(stopped, fabric.volume, each)) for each in asked]
        parts = share_bytes // (8 * SLOT_BYTES)
        blocks, waves = 8 * parts, 2 * parts
        await until(lambda: len(stopped.arena.held) == waves)
        for each in asked:
            stopped.stopped(each.request).set_result(None)
        for done in await asyncio.gather(*getting):
            assert set(get_states(done)) == {BlockState.LATE}
        assert len(stopped.arena.held) == waves, "no more began"
        assert staging.quarantined_cached_bytes == blocks * SLOT_BYTES
        assert staging.quarantined_cached_blocks == len(staging.cache._order.held) == blocks
        status = fabric.agent.status()
        assert status.quarantined_cached_blocks == blocks
        refused = await fabric.get(stopped, range(32))
        assert set(get_states(refused)) == {BlockState.DECLINED}
        assert set(reasons_of(refused)) == {Reason.QUARANTINED}
        assert set((await fabric.put(other, range(1000, 1128))).states) == {PutState.COMMITTED}
        assert set(get_states(await fabric.get(other, range(1000, 1128)))) == {BlockState.HIT}
        stopped.arena.let_go()
        await fabric.at_rest()
        assert set(get_states(await fabric.get(stopped, range(32)))) == {BlockState.HIT}


async def test_blocks_that_leave_the_cache_before_their_turn_come_from_flash() -> None:
    async with assembled(with_cache(2 * MIB)) as fabric:
        writer, reader = fabric.worker(), fabric.worker()
        staging = fabric.context.staging
        await fabric.put(writer, range(10))
        reader.arena.is_held = True
        getting = asyncio.create_task(fabric.get(reader, range(10)))
        await until(lambda: len(reader.arena.held) == 2)
        assert len(staging.cache._order.held) == 8
        staging._pool.drop(evict_all(staging.cache))
        assert len(staging.cache) == 8
        reader.arena.let_go()
        assert get_states(await getting) == [BlockState.HIT] * 10
        for number in range(10):
            slot = number * SLOT_BYTES
            assert reader.arena.bytes[slot : slot + BLOCK_BYTES] == content_of(number)
        assert fabric.context.counters.snapshot().get_hits_from_cache == 8
        said = [message for message in (*reader.said, getting.result()) if not isinstance(message, Settled)]
        told = np.frombuffer(b"".join(message.positions for message in said), codec.U32)
        assert sorted(told.tolist()) == list(range(10)), "each block is said to have landed once"
        await fabric.at_rest()


@pytest.mark.parametrize("cache_bytes", [0, 2 * MIB])
@pytest.mark.parametrize("more_bytes", [-1, 1])
async def test_lengths_in_a_get_that_are_not_the_stored_ones_are_misses_and_move_nothing(
    more_bytes: int, cache_bytes: int
) -> None:
    """What lies behind a block in staging may be another tenant's."""
    async with assembled(with_cache(cache_bytes)) as fabric:
        worker, reader = fabric.worker(), fabric.worker()
        stored_bytes = BLOCK_BYTES - 8
        message = fabric.put_message(worker, range(2), length=stored_bytes)
        assert (
            put_states(await fabric.data_path.put(worker, fabric.volume, message)) == [PutState.COMMITTED] * 2
        )
        asked = fabric.get_message(range(2))
        lengths = np.array([stored_bytes + more_bytes, stored_bytes], np.uint32).tobytes()
        changed = type(asked)(asked.request, 0, 5.0, asked.spans, lengths, asked.slots, asked.slot_bytes)
        done = await fabric.data_path.get(reader, fabric.volume, changed)
        assert reasons_of(done) == [Reason.WRONG_LENGTH, Reason.NONE]
        assert not any(reader.arena.bytes[:SLOT_BYTES])
        await fabric.at_rest()
