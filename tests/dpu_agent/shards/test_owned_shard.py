"""An owned shard on a drive: group commit, failed summary writes, damage, and its end."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable
from dataclasses import replace

import numpy as np
import pytest
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    FAR_S,
    SETTINGS,
    SHARD,
    Assembly,
    assembled,
    committed,
    content_of,
    found,
    get_states,
    put_states,
    reasons_of,
    reserved,
    stop,
    until,
)
from tests.support.agent.owned_shard import key, keys_of, rows16, seeds_of, tag_of
from tests.support.agent.shard_invariants import check_core
from tests.support.stalls import Stopwatch

from ostraca_dpu_agent.shards.service import OwnerService
from ostraca_fabric.errors import MalformedError
from ostraca_fabric.model.ids import AgentId, OwnerEpoch
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.wire.messages import (
    Commit,
    Committed,
    Damage,
    OwnerAnswer,
    OwnerNotice,
    OwnerRequest,
    Release,
    Reserve,
    Reserved,
    Resolve,
    Resolved,
    SessionEnded,
    ShardCommit,
    ShardExtents,
    ShardKeys,
    ShardRelease,
    ShardWants,
)


async def answered(service: OwnerService, request: OwnerRequest) -> OwnerAnswer:
    """Return the answer of a service, whether it comes at once or later."""
    answer = service.answer(request)
    return await answer if isinstance(answer, Awaitable) else answer


GROUPS_FOR_EVER = replace(SETTINGS, owner=replace(SETTINGS.owner, group_commit_s=FAR_S))
"""Commits that may get company wait longer for it than any test."""

NO_TIMES = [float("nan"), float("inf"), float("-inf"), -1.0, 0.0]


async def test_commits_of_many_share_one_summary_write() -> None:
    async with assembled() as fabric:
        shard = fabric.shard
        made = [await reserved(shard, [number]) for number in range(8)]
        before = len(fabric.drive.writes)
        ends = await asyncio.gather(*(committed(shard, each, [number]) for number, each in enumerate(made)))
        assert ends == [[PutState.COMMITTED]] * 8
        assert len(fabric.drive.writes) == before + 1
        assert found(fabric, list(range(8))) == [True] * 8


async def alone(fabric: Assembly) -> None:
    """Have a segment in use and the next one ready, so that nothing is written but what a test commits."""
    await committed(fabric.shard, await reserved(fabric.shard, [0]), [0])
    await until(lambda: bool(fabric.shard.core.ring.ready))


async def turn_the_loop() -> None:
    """Let everything happen that needs nobody else."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_a_commit_waits_for_no_others_when_nobody_holds_space() -> None:
    async with assembled(GROUPS_FOR_EVER) as fabric:
        shard = fabric.shard
        await alone(fabric)
        committing = asyncio.create_task(committed(shard, await reserved(shard, [1]), [1]))
        await turn_the_loop()
        assert committing.done()
        assert await committing == [PutState.COMMITTED]


@pytest.mark.parametrize("is_released", [True, False])
async def test_a_commit_waits_for_others_that_hold_space_until_they_commit_or_release(
    *, is_released: bool
) -> None:
    async with assembled(GROUPS_FOR_EVER) as fabric:
        shard = fabric.shard
        await alone(fabric)
        first, second = [await reserved(shard, [number]) for number in (1, 2)]
        before = shard.core.counts().summary_writes
        committing = asyncio.create_task(committed(shard, first, [1]))
        await turn_the_loop()
        assert shard.core.counts().summary_writes == before
        if is_released:
            fabric.service.notice(Release((ShardRelease(SHARD, (), second.reservations.tobytes()),)))
        else:
            assert await committed(shard, second, [2]) == [PutState.COMMITTED]
        assert await committing == [PutState.COMMITTED]
        assert found(fabric, [1, 2]) == [True, not is_released]
        assert shard.core.counts().summary_writes == before + 1


async def test_nothing_is_committed_before_its_summary_is_on_flash() -> None:
    async with assembled() as fabric:
        shard = fabric.shard
        made = await reserved(shard, [1])
        fabric.drive.holds_writes = True
        committing = asyncio.create_task(committed(shard, made, [1]))
        await until(lambda: len(fabric.drive.held) == 1)
        assert not committing.done()
        assert found(fabric, [1]) == [False]
        fabric.drive.let_go()
        assert await committing == [PutState.COMMITTED]
        assert found(fabric, [1]) == [True]


async def test_a_summary_that_could_not_be_written_declines_its_blocks_and_the_next_segment_goes_on() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.ready()
        geometry = fabric.shard.core.geometry
        ring = fabric.shard.core.ring
        assert put_states(await fabric.put(worker, [1])) == [PutState.COMMITTED]
        assert ring.pools.common.current is not None
        fabric.drive.fail_writes(
            geometry.summary_offset(ring.pools.common.current.number), geometry.summary_bytes
        )
        done = await fabric.put(worker, [2, 3])
        assert reasons_of(done) == [Reason.DRIVE_ERROR] * 2
        assert put_states(done) == [PutState.DECLINED] * 2
        assert fabric.shard.is_failing
        assert put_states(await fabric.put(worker, [2, 3])) == [PutState.COMMITTED] * 2
        assert get_states(await fabric.get(worker, [1, 2, 3])) == [BlockState.HIT] * 3
        await fabric.at_rest()


async def test_a_volatile_cache_is_flushed_between_blocks_and_their_summary_and_before_the_answer() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.put(worker, [1])
        ring = fabric.shard.core.ring
        await until(lambda: bool(ring.ready))  # so that nothing else is written
        fabric.drive.has_volatile_cache = True
        fabric.drive.asked.clear()
        assert put_states(await fabric.put(worker, [2])) == [PutState.COMMITTED]
        assert fabric.drive.asked == ["write", "flush", "write", "flush"]


async def test_blocks_that_could_not_be_flushed_are_declined() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.ready()
        fabric.drive.has_volatile_cache = fabric.drive.fails_flushes = True
        (reason,) = reasons_of(await fabric.put(worker, [1]))
        # The flush before the next segment's opening page may fail first, and then nothing more is written.
        assert reason in (Reason.DRIVE_ERROR, Reason.DRIVE_SUSPECT)
        assert reasons_of(await fabric.get(worker, [1])) == [Reason.NOT_FOUND]


async def test_a_put_waits_for_a_segment_that_is_being_opened() -> None:
    async with assembled() as fabric:
        await fabric.ready()
        fabric.drive.holds_writes = True
        shard = fabric.shard
        ring = shard.core.ring
        per_segment = shard.core.geometry.data_bytes // (15 * 4096)
        filling = await reserved(shard, list(range(2 * per_segment)))
        assert (filling.states == PutState.STAGED).sum() >= per_segment
        if ring.opening is None:
            fabric.drive.let_go()
            pytest.fail("the shard should be opening its next segment")
        watch = Stopwatch()
        lengths = np.full(1, BLOCK_BYTES, np.uint32)
        late = await shard.reserve(keys_of([7777]), lengths, hold_s=5.0, within_s=0.05)
        assert list(late.reasons) == [Reason.NO_SPACE]
        assert watch.took_s < 0.15
        waiting = asyncio.create_task(reserved(shard, [8888]))
        await asyncio.sleep(0)
        fabric.drive.let_go()
        assert list((await waiting).states) == [PutState.STAGED]


@pytest.mark.parametrize("turns", range(8))
async def test_a_put_that_asks_just_as_a_segment_opens_gets_space(turns: int) -> None:
    async with assembled() as fabric:
        await fabric.ready()
        fabric.drive.holds_writes = True
        shard = fabric.shard
        per_segment = shard.core.geometry.data_bytes // (15 * 4096)
        await reserved(shard, list(range(2 * per_segment)))
        assert shard.core.ring.opening is not None
        fabric.drive.let_go()
        for _ in range(turns):
            await asyncio.sleep(0)
        assert list((await reserved(shard, [8888])).states) == [PutState.STAGED]


async def test_a_put_goes_on_waiting_for_a_segment_when_another_write_ends_first() -> None:
    async with assembled() as fabric:
        await fabric.ready()
        fabric.drive.holds_writes = True
        shard = fabric.shard
        per_segment = shard.core.geometry.data_bytes // (15 * 4096)
        await reserved(shard, list(range(2 * per_segment)))
        waiting = asyncio.create_task(reserved(shard, [8888]))
        await turn_the_loop()
        shard._commits._wake_waiting()
        await turn_the_loop()
        assert not waiting.done()
        fabric.drive.let_go()
        assert list((await waiting).states) == [PutState.STAGED]


async def test_nothing_lists_blocks_that_could_not_be_flushed() -> None:
    async with assembled() as fabric:
        await alone(fabric)
        fabric.drive.has_volatile_cache = fabric.drive.fails_flushes = True
        fabric.drive.asked.clear()
        assert reasons_of(await fabric.put(fabric.worker(), [1])) == [Reason.DRIVE_ERROR]
        assert fabric.drive.asked.count("write") == 1, "the block's, and no summary's"


@pytest.mark.parametrize("turns", range(8))
async def test_a_put_that_is_cancelled_just_as_its_segment_is_open_is_cancelled(turns: int) -> None:
    async with assembled() as fabric:
        await fabric.ready()
        fabric.drive.holds_writes = True
        shard = fabric.shard
        per_segment = shard.core.geometry.data_bytes // (15 * 4096)
        waiting = asyncio.create_task(reserved(shard, list(range(2 * per_segment))))
        await until(lambda: bool(fabric.drive.held))
        fabric.drive.let_go()
        for _ in range(turns):
            await asyncio.sleep(0)
        is_cancelled = waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled() is is_cancelled


async def test_a_put_that_waits_in_vain_gives_back_what_it_had() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.ready()
        fabric.drive.holds_writes = True
        count = 3 * (fabric.shard.core.geometry.data_bytes // (15 * 4096))
        watch = Stopwatch()
        await fabric.put(worker, range(count), deadline_s=0.1)
        assert watch.took_s < 0.2
        fabric.drive.let_go()
        await fabric.at_rest()


async def damaged(fabric: Assembly, number: int, **changed: object) -> Damage:
    """Put a block and return the report that says its bytes are damaged."""
    worker = fabric.worker()
    message = fabric.put_message(worker, [number])
    assert put_states(await fabric.data_path.put(worker, fabric.volume, message)) == [PutState.COMMITTED]
    reports: list[Damage] = []
    tell = fabric.owners.tell

    def tell_apart(agent: AgentId, notice: OwnerNotice) -> None:
        if isinstance(notice, Damage):
            reports.append(notice)
        else:
            tell(agent, notice)

    fabric.owners.tell = tell_apart  # type: ignore[method-assign]
    at = fabric.drive.bytes.find(content_of(number)[:64])
    fabric.drive.flip_bit(at)
    await fabric.get(fabric.worker(), [number])
    fabric.drive.flip_bit(at)
    fabric.owners.tell = tell  # type: ignore[method-assign]
    (report,) = reports
    fields = {name: getattr(report, name) for name in report.__struct_fields__} | changed
    return Damage(**fields)


async def test_a_block_that_reads_well_the_second_time_stays() -> None:
    async with assembled() as fabric:
        report = await damaged(fabric, 1)
        fabric.service.notice(report)
        await until(lambda: not fabric.shard._damage.checks)
        assert fabric.shard.core.counts().blocks_dropped == 0
        assert get_states(await fabric.get(fabric.worker(), [1])) == [BlockState.HIT]


@pytest.mark.parametrize("is_fenced", [False, True])
async def test_damage_counts_against_the_drive_unless_a_successor_may_have_written_there(
    *, is_fenced: bool
) -> None:
    async with assembled() as fabric:
        report = await damaged(fabric, 1)
        fabric.drive.flip_bit(fabric.drive.bytes.find(content_of(1)[:64]))
        if is_fenced:
            fabric.shard.fence()
        fabric.service.notice(report)
        await until(lambda: fabric.shard.core.counts().blocks_dropped == 1)
        assert fabric.agent.status().drives[0].damaged_blocks == int(not is_fenced)


@pytest.mark.parametrize("length", [0, -1, 4096, BLOCK_BYTES - 1, 1 << 45])
async def test_a_damage_report_with_another_length_is_ignored(length: int) -> None:
    async with assembled() as fabric:
        report = await damaged(fabric, 1, length=length)
        fabric.service.notice(report)
        assert fabric.shard._damage.checks == {}
        assert await fabric.shard._tasks.finish(within_s=0.05) is False, "only the shard's own loops run"
        assert get_states(await fabric.get(fabric.worker(), [1])) == [BlockState.HIT]


async def test_a_damage_report_whose_read_fails_changes_nothing() -> None:
    async with assembled() as fabric:
        report = await damaged(fabric, 1)
        fabric.drive.fail_reads(0, fabric.drive.size_bytes)
        fabric.service.notice(report)
        await until(lambda: not fabric.shard._damage.checks)
        fabric.drive.mend()
        assert get_states(await fabric.get(fabric.worker(), [1])) == [BlockState.HIT]


@pytest.mark.parametrize("hold_s", NO_TIMES)
async def test_a_hold_that_is_no_time_harms_no_other_reservation(hold_s: float) -> None:
    async with assembled() as fabric:
        shard = fabric.shard
        lengths = np.full(1, BLOCK_BYTES, np.uint32).tobytes()
        wants = (ShardWants(SHARD, key(1), lengths),)
        await answered(fabric.service, Reserve(1, 1.0, hold_s, wants))
        await reserved(shard, [2], hold_s=0.01)
        shard.core.expire(time.monotonic() + 1000)
        assert shard.core.counts().reservations == 0


@pytest.mark.parametrize("ttl_s", NO_TIMES)
async def test_a_time_to_live_that_is_no_time_is_none(ttl_s: float) -> None:
    async with assembled() as fabric:
        await fabric.ready()
        lengths = np.full(1, BLOCK_BYTES, np.uint32).tobytes()
        wants = (ShardWants(SHARD, key(1), lengths),)
        made = await answered(fabric.service, Reserve(1, 1.0, 5.0, wants, ttl_s=ttl_s))
        assert isinstance(made, Reserved)
        assert made.shards[0].states == bytes([PutState.STAGED])
        table = fabric.shard.core.reservations
        assert table.kept_until_s[table.in_flight.find(keys_of([1]))].tolist() == [math.inf]


@pytest.mark.parametrize("deadline_s", NO_TIMES)
@pytest.mark.parametrize("pin_s", NO_TIMES)
async def test_owners_take_any_times(deadline_s: float, pin_s: float) -> None:
    async with assembled() as fabric:
        answer = await answered(fabric.service, Resolve(1, deadline_s, pin_s, (ShardKeys(SHARD, key(1)),)))
        assert isinstance(answer, Resolved)
        fabric.drive.holds_writes = True
        count = 4 * (fabric.shard.core.geometry.data_bytes // (15 * 4096))
        lengths = np.full(count, BLOCK_BYTES, np.uint32).tobytes()
        wants = (ShardWants(SHARD, keys_of(list(range(count))).tobytes(), lengths),)
        if deadline_s != float("inf"):
            made = await answered(fabric.service, Reserve(1, deadline_s, 1.0, wants))
            assert isinstance(made, Reserved)


async def test_a_commit_that_names_a_reservation_twice_is_refused_and_the_shard_goes_on() -> None:
    async with assembled() as fabric:
        shard = fabric.shard
        made = await reserved(shard, [1])
        number = made.reservations.tobytes()
        twice = (ShardCommit(SHARD, shard.epoch, 2 * number, 2 * tag_of(1), bytes(16)),)
        with pytest.raises(MalformedError):
            await answered(fabric.service, Commit(1, 1.0, twice))
        check_core(shard.core)
        assert await committed(shard, made, [1]) == [PutState.COMMITTED]


async def test_a_release_that_names_a_reservation_twice_ends_it_once() -> None:
    async with assembled() as fabric:
        shard = fabric.shard
        made = await reserved(shard, [1, 2])
        number = made.reservations[:1].tobytes()
        fabric.service.notice(Release((ShardRelease(SHARD, (7, 7), 2 * number),)))
        check_core(shard.core)
        assert shard.core.counts().reservations == 1


async def test_a_request_that_is_malformed_in_part_does_nothing_in_the_other_parts() -> None:
    async with assembled() as fabric:
        await fabric.ready()
        good = ShardWants(SHARD, key(1), np.full(1, BLOCK_BYTES, np.uint32).tobytes())
        with pytest.raises(MalformedError):
            await answered(fabric.service, Reserve(1, 1.0, 1.0, (good, ShardWants(SHARD, key(2)[:7], b""))))
        assert fabric.shard.core.counts().reservations == 0
        for keys in (key(1) + b"x", key(1)[:15]):
            with pytest.raises(MalformedError):
                await answered(fabric.service, Resolve(1, 1.0, 1.0, (ShardKeys(SHARD, keys),)))
            with pytest.raises(MalformedError):
                fabric.service.notice(SessionEnded((ShardKeys(SHARD, keys),)))
        with pytest.raises(MalformedError):
            await answered(fabric.service, Commit(1, 1.0, (ShardCommit(SHARD, 1, b"1234567", b"", b""),)))


@pytest.mark.parametrize("pin_s", [0.0, 1.0])
async def test_a_brief_question_is_a_read_and_its_answer_does_not_say_where(
    pin_s: float,
) -> None:
    async with assembled() as fabric:
        shard = fabric.shard
        assert await committed(shard, await reserved(shard, [1, 2]), [1, 2]) == [PutState.COMMITTED] * 2
        asked = (ShardKeys(SHARD, keys_of([1, 3]).tobytes()),)
        brief = await answered(fabric.service, Resolve(1, 1.0, pin_s, asked, is_brief=True))
        assert isinstance(brief, Resolved)
        (said,) = brief.shards
        pin = 1 if pin_s else 0
        assert said == ShardExtents(
            SHARD, is_owner=True, owner_epoch=shard.epoch, found=bytes([True, False]), pin=pin
        )
        assert shard.core.index.is_read(shard.core.index.find(keys_of([1, 2]))).tolist() == [True, False]
        assert (shard.core.counts().keys_asked, shard.core.counts().keys_found) == (2, 1)
        full = await answered(fabric.service, Resolve(2, 1.0, pin_s, asked))
        assert isinstance(full, Resolved)
        assert full.shards[0].found == said.found
        assert len(full.shards[0].tags) == 2 * 16


async def test_owners_answer_for_no_keys_with_nothing() -> None:
    async with assembled() as fabric:
        service = fabric.service
        resolved = await answered(service, Resolve(1, 1.0, 1.0, (ShardKeys(SHARD, b""),)))
        made = await answered(service, Reserve(1, 1.0, 1.0, (ShardWants(SHARD, b"", b""),)))
        listed = await answered(service, Commit(1, 1.0, (ShardCommit(SHARD, 1, b"", b"", b""),)))
        assert isinstance(resolved, Resolved)
        assert isinstance(made, Reserved)
        assert isinstance(listed, Committed)
        assert (resolved.shards[0].found, made.shards[0].states, listed.shards[0].states) == (b"", b"", b"")
        service.notice(Release((ShardRelease(SHARD, (), b""),)))
        service.notice(SessionEnded((ShardKeys(SHARD, b""), ShardKeys("e/other/0", key(1)))))


async def test_a_shard_that_ends_answers_every_commit_that_waits() -> None:
    async with assembled() as fabric:
        shard = fabric.shard
        made = await reserved(shard, [1, 2])
        tags = rows16([tag_of(1)])
        first = asyncio.create_task(
            shard.commit(made.reservations[:1], tags, seeds_of([1]), epoch=shard.epoch)
        )
        await asyncio.sleep(0)
        closing = asyncio.create_task(shard.close(within_s=2.0))
        await asyncio.sleep(0)
        late = await asyncio.wait_for(
            shard.commit(made.reservations[1:], tags, seeds_of([1]), epoch=shard.epoch), 1
        )
        assert list((await first)[0]) == [PutState.COMMITTED]
        assert (list(late[0]), list(late[1])) == ([PutState.DECLINED], [Reason.NO_OWNER])
        assert await closing
        del fabric.service.shards[SHARD], fabric.agent._controller.shards.served[SHARD]


async def test_a_shard_whose_drive_hangs_ends_all_the_same_and_keeps_its_pages() -> None:
    async with assembled() as fabric:
        shard = fabric.shard
        made = await reserved(shard, [1])
        fabric.drive.holds_writes = True
        committing = asyncio.create_task(committed(shard, made, [1]))
        await until(lambda: len(fabric.drive.held) == 1)
        watch = Stopwatch()
        assert not await shard.close(within_s=0.1)
        assert watch.took_s < 0.3
        fabric.drive.let_go()
        assert await committing == [PutState.COMMITTED]
        del fabric.service.shards[SHARD], fabric.agent._controller.shards.served[SHARD]


async def test_an_agent_whose_drive_hangs_stops_all_the_same_and_says_so() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.ready()
        fabric.drive.holds_writes = True
        await fabric.put(worker, [1], deadline_s=0.05)
        watch = Stopwatch()
        assert not await stop(fabric.agent)
        assert watch.took_s < 5
        fabric.drive.let_go()
        assert await fabric.context.tasks.finish(within_s=2)


async def test_a_commit_under_another_epoch_is_declined() -> None:
    async with assembled() as fabric:
        shard = fabric.shard
        made = await reserved(shard, [1])
        states, reasons = await shard.commit(
            made.reservations, rows16([tag_of(1)]), seeds_of([1]), epoch=OwnerEpoch(shard.epoch - 1)
        )
        assert (list(states), list(reasons)) == ([PutState.DECLINED], [Reason.EXPIRED])


async def test_a_shard_that_is_being_stilled_hands_out_nothing_and_lets_what_it_handed_out_end() -> None:
    async with assembled() as fabric:
        shard = fabric.shard
        made = await reserved(shard, [1])
        stilling = asyncio.create_task(shard.quiesce(within_s=5.0))
        await asyncio.sleep(0)
        refused = await reserved(shard, [2])
        assert list(refused.states) == [PutState.DECLINED]
        assert list(refused.reasons) == [Reason.NO_OWNER]
        assert await committed(shard, made, [1]) == [PutState.COMMITTED]
        assert await stilling


async def test_a_put_that_waits_for_a_segment_gets_none_of_a_shard_that_was_found_still_meanwhile() -> None:
    async with assembled() as fabric:
        await fabric.ready()
        fabric.drive.holds_writes = True
        shard = fabric.shard
        per_segment = shard.core.geometry.data_bytes // (15 * 4096)
        filling = await reserved(shard, list(range(2 * per_segment)))
        assert shard.core.ring.opening is not None
        waiting = asyncio.create_task(reserved(shard, [8888]))
        await asyncio.sleep(0)
        shard.core.release(0.0, (), filling.reservations[filling.states == PutState.STAGED])
        assert await shard.quiesce(within_s=5.0)
        fabric.drive.let_go()
        made = await waiting
        assert (list(made.states), list(made.reasons)) == ([PutState.DECLINED], [Reason.NO_OWNER])
        assert not len(shard.core.reservations)
