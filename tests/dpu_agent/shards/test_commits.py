"""Commits to an owned shard: each row is told its own end, also when askers leave or writing crashes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    assembled,
    committed,
    found,
    get_states,
    put_states,
    reasons_of,
    reserved,
    stop,
    until,
)
from tests.support.agent.owned_shard import keys_of, rows16, seeds_of, tag_of
from tests.support.stalls import Stopwatch

from ostraca_fabric.model.outcome import BlockState, PutState, Reason


async def test_a_commit_that_names_reservations_twice_or_unknown_ones_answers_each_row() -> None:
    async with assembled() as fabric:
        shard = fabric.shard
        first, second = (await reserved(shard, [1, 2])).reservations.tolist()
        numbers = np.array([first, first, 12345, second], np.uint64)
        tags = rows16([tag_of(number) for number in (1, 1, 3, 2)])
        fabric.drive.holds_writes = True
        committing = asyncio.create_task(
            shard.commit(numbers, tags, seeds_of([1, 1, 3, 2]), epoch=shard.epoch)
        )
        await until(lambda: len(fabric.drive.held) == 1)
        again = await shard.commit(numbers, tags, seeds_of([1, 1, 3, 2]), epoch=shard.epoch)
        assert again[0].tolist() == [PutState.DECLINED] * 4
        assert again[1].tolist() == [Reason.IN_FLIGHT, Reason.EXPIRED, Reason.EXPIRED, Reason.IN_FLIGHT]
        fabric.drive.let_go()
        states, reasons = await committing
        assert states.tolist() == [
            PutState.COMMITTED,
            PutState.DECLINED,
            PutState.DECLINED,
            PutState.COMMITTED,
        ]
        assert reasons.tolist() == [Reason.NONE, Reason.EXPIRED, Reason.EXPIRED, Reason.NONE]


async def test_of_a_commit_into_two_segments_that_part_is_declined_whose_summary_failed() -> None:
    async with assembled() as fabric:
        await fabric.ready()
        shard = fabric.shard
        geometry = shard.core.geometry
        per_segment = geometry.data_bytes // (15 * 4096)
        await reserved(shard, list(range(1000, 1000 + per_segment - 2)))
        await until(lambda: bool(shard.core.ring.ready))
        made = await reserved(shard, [1, 2, 3, 4])
        segments = shard.core.geometry.segment_of(made.offsets).tolist()
        assert segments == [segments[0]] * 2 + [segments[3]] * 2
        assert segments[0] != segments[3]
        fabric.drive.fail_writes(geometry.summary_offset(segments[0]), geometry.summary_bytes)
        tags = rows16([tag_of(number) for number in (1, 2, 3, 4)])
        # In any order: each row is told what became of its own segment.
        order = [2, 0, 3, 1]
        states, reasons = await shard.commit(
            made.reservations[order], tags[order], seeds_of(order), epoch=shard.epoch
        )
        assert states.tolist() == [PutState.COMMITTED, PutState.DECLINED] * 2
        assert reasons.tolist() == [Reason.NONE, Reason.DRIVE_ERROR] * 2
        assert found(fabric, [1, 2, 3, 4]) == [False, False, True, True]


async def test_an_asker_that_goes_away_leaves_the_commits_of_others_alone() -> None:
    async with assembled() as fabric:
        shard = fabric.shard
        made = [await reserved(shard, [number]) for number in (1, 2, 3)]
        fabric.drive.holds_writes = True
        leaving = asyncio.create_task(committed(shard, made[0], [1]))
        staying = asyncio.create_task(committed(shard, made[1], [2]))
        await until(lambda: len(fabric.drive.held) == 1)
        leaving.cancel()
        await asyncio.wait([leaving])
        fabric.drive.let_go()
        assert await staying == [PutState.COMMITTED]
        assert await committed(shard, made[2], [3]) == [PutState.COMMITTED]
        assert found(fabric, [1, 2, 3]) == [True] * 3


async def test_a_shard_whose_writing_crashes_declines_puts_at_once_and_goes_on_serving_gets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with assembled() as fabric:
        worker, shard = fabric.worker(), fabric.shard
        assert put_states(await fabric.put(worker, [1])) == [PutState.COMMITTED]
        await until(lambda: bool(shard.core.ring.ready))  # so that nothing else is written
        made = await reserved(shard, [2, 3])

        def crash(_runs: Sequence[object]) -> asyncio.Future[list[bool]]:
            raise AssertionError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr(fabric.drive, "submit_write", crash)
            states, reasons = await shard.commit(
                made.reservations[:1], rows16([tag_of(2)]), seeds_of([2]), epoch=shard.epoch
            )
        assert (states.tolist(), reasons.tolist()) == ([PutState.DECLINED], [Reason.DRIVE_ERROR])
        assert [status.is_failing for status in fabric.agent.status().shards] == [True]
        assert "stops writing" in caplog.text
        late = await shard.commit(
            made.reservations[1:], rows16([tag_of(3)]), seeds_of([3]), epoch=shard.epoch
        )
        assert (late[0].tolist(), late[1].tolist()) == ([PutState.DECLINED], [Reason.DRIVE_ERROR])
        watch = Stopwatch()
        done = await fabric.put(worker, [1, 2, 4])
        assert watch.took_s < 1
        assert put_states(done) == [PutState.EXISTS, PutState.DECLINED, PutState.DECLINED]
        assert reasons_of(done) == [Reason.NONE, Reason.DRIVE_ERROR, Reason.DRIVE_ERROR]
        assert get_states(await fabric.get(worker, [1, 2])) == [BlockState.HIT, BlockState.MISS]
        assert not await stop(fabric.agent), "whether its last write has ended is not known"


async def test_a_put_that_waits_for_space_hears_at_once_that_writing_has_crashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with assembled() as fabric:
        await fabric.ready()
        shard, drive = fabric.shard, fabric.drive
        drive.holds_writes = True
        count = 3 * (shard.core.geometry.data_bytes // (15 * 4096))
        filled = await shard.reserve(
            keys_of(list(range(count))),
            np.full(count, BLOCK_BYTES, np.uint32),
            hold_s=5.0,
            within_s=0.05,
        )
        assert filled.reasons[-1] == Reason.NO_SPACE
        waiting = asyncio.create_task(reserved(shard, [9999]))
        await until(lambda: len(drive.held) == 1)
        assert not waiting.done()

        def crash(*_: object, **__: object) -> None:
            raise AssertionError("a bug")

        monkeypatch.setattr(shard.core, "written", crash)
        drive.let_go()
        assert list((await asyncio.wait_for(waiting, 0.5)).reasons) == [Reason.DRIVE_ERROR]
