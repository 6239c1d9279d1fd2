"""Shards of which a part crashes, for want of memory or by a mistake: they cost themselves, not for good."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.dpu_agent.controller.test_takeover import QUICK, SECOND, THE_SHARD, pair
from tests.support.agent.assembly import (
    SETTINGS,
    HeldDrive,
    assembled,
    committed,
    get_states,
    put_states,
    reserved,
    until,
)

from ostraca_dpu_agent.controller import recovery, served_shard
from ostraca_dpu_agent.controller import served_shards as shards
from ostraca_dpu_agent.controller.served_shard import ServedShard
from ostraca_dpu_agent.shards.shard import core_of
from ostraca_fabric.model.outcome import BlockState, PutState
from ostraca_fabric.runtime.memory import HugeMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.agent.assembly import Assembly

    from ostraca_dpu_agent.shards.core import ShardCore

SOON = replace(SETTINGS, turn_s=0.02, reopen_backoff_s=0.2)


class NoMemory:
    """Stands for ``HugeMemory`` where the machine has none left, *times* in all."""

    def __init__(self, *, times: int, least_bytes: int = 0) -> None:
        self.times = times
        self._least_bytes = least_bytes

    def __call__(self, size_bytes: int, **more: Any) -> HugeMemory:
        if self.times and size_bytes >= self._least_bytes:
            self.times -= 1
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return HugeMemory(size_bytes, **more)


async def test_crashed_recovery_is_repeated_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drive = HeldDrive()
    async with assembled(SOON, drive=drive) as fabric:
        await fabric.ready()
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]
        crashes = NoMemory(times=1, least_bytes=5 * 4096)  # and the superblock can be read
        monkeypatch.setattr(recovery, "HugeMemory", crashes)
        controller, shard = fabric.agent._controller, fabric.shard
        await controller.shards.hand_over(THE_SHARD)
        await until(lambda: not crashes.times)
        await until(lambda: "crashed" in controller.shards.failure_reasons.get(THE_SHARD, ""))
        await until(lambda: THE_SHARD in fabric.service.shards and fabric.shard is not shard)
        await until(lambda: not fabric.shard.core.is_recovering)
        assert get_states(await fabric.get(fabric.worker(), [1])) == [BlockState.HIT]
        assert not fabric.agent.crashed.is_set()
    assert f"recovery of shard {THE_SHARD} crashed" in caplog.text


@pytest.mark.parametrize("where", ["the superblock", "the index"])
async def test_shard_without_memory_is_released_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    tries = 0

    def no_index(*given: Any, **more: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries <= 2:
            raise MemoryError
        return core_of(*given, **more)

    async with assembled(SOON) as fabric:
        await fabric.ready()
        controller, shard = fabric.agent._controller, fabric.shard
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]
        if where == "the index":
            monkeypatch.setattr(shards, "core_of", no_index)
        else:
            monkeypatch.setattr(recovery, "HugeMemory", NoMemory(times=2))
        await controller.shards.hand_over(THE_SHARD)
        await until(lambda: "crashed" in controller.shards.failure_reasons.get(THE_SHARD, ""))
        assert THE_SHARD not in fabric.membership.map.claims, "others may have it"
        await until(lambda: THE_SHARD in fabric.service.shards and fabric.shard is not shard)
        await until(lambda: not fabric.shard.core.is_recovering)
        assert get_states(await fabric.get(fabric.worker(), [1])) == [BlockState.HIT]
        assert not fabric.agent.crashed.is_set()
    assert f"recovery of shard {THE_SHARD} crashed" in caplog.text


async def test_restarted_shard_after_failed_listing_keeps_no_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        logging.getLogger("ostraca_fabric.runtime.tasks"), "disabled", True
    )  # pytest keeps tracebacks
    async with assembled(SOON, segments=12) as fabric:
        await fabric.ready()
        cores = []
        for number in range(2):
            cores.append(weakref.ref(fabric.shard.core))
            await _crash_writing(fabric, number)
        await until(lambda: _are_gone(cores))
        assert fabric.agent._controller.shards.is_idle


async def _crash_writing(fabric: Assembly, number: int) -> None:
    shard = fabric.shard

    async def crashes(*_: object) -> None:
        raise AssertionError("a mistake")

    shard._commits._write = crashes  # type: ignore[method-assign, assignment]
    assert put_states(await fabric.put(fabric.worker(), [number])) == [PutState.DECLINED]
    await until(lambda: THE_SHARD in fabric.service.shards and fabric.shard is not shard)
    await until(lambda: bool(fabric.shard.core.ring.ready))


def _are_gone(cores: list[weakref.ref[ShardCore]]) -> bool:
    gc.collect()
    return all(core() is None for core in cores)


async def test_ending_agent_reports_pending_writes_of_a_stopping_shard() -> None:
    drive = HeldDrive()
    async with assembled(replace(SETTINGS, turn_s=0.02, drain_s=60.0), drive=drive) as fabric:
        await fabric.ready()
        shard = fabric.shard
        made = await reserved(shard, [1])
        drive.holds_writes = True
        committing = asyncio.create_task(committed(shard, made, [1]))
        await until(lambda: bool(drive.held))
        shard.has_crashed = True
        await until(lambda: shard.is_closed)
        said = await fabric.agent.leave()
        drive.let_go()
        await committing
        assert not said


async def test_shard_restarts_after_failed_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with assembled(SOON, segments=12) as fabric:
        await fabric.ready()
        shard, worker = fabric.shard, fabric.worker()
        assert put_states(await fabric.put(worker, [1])) == [PutState.COMMITTED]

        async def crashes(*_: object) -> None:
            raise AssertionError("a mistake")

        monkeypatch.setattr(shard._commits, "_write", crashes)
        assert put_states(await fabric.put(worker, [2])) == [PutState.DECLINED]
        await until(lambda: THE_SHARD in fabric.service.shards and fabric.shard is not shard)
        await until(lambda: bool(fabric.shard.core.ring.ready))
        assert fabric.shard.epoch == shard.epoch + 1
        assert put_states(await fabric.put(worker, [2])) == [PutState.COMMITTED]
        assert get_states(await fabric.get(worker, [1, 2])) == [BlockState.HIT] * 2


async def test_shard_restarts_after_failed_adoption_and_retires_earlier_grants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair(replace(QUICK, reopen_backoff_s=0.2)) as agents:
        assert put_states(await agents.fabric.put(agents.fabric.worker(), [1])) == [PutState.COMMITTED]
        crashes = NoMemory(times=1)
        monkeypatch.setattr(served_shard, "adopt_late_commits", crashing(crashes))
        agents.lease_runs_out()
        await agents.taken_over()
        await until(lambda: not crashes.times)
        await until(lambda: [grant.agent for grant in agents.grants] in ([SECOND], [agents.fabric.agent.id]))


def crashing(instead: NoMemory) -> Callable[..., Any]:
    adopt = served_shard.adopt_late_commits

    async def adopting(*given: Any) -> int:
        instead(4096, prefault=False).close()
        return await adopt(*given)

    return adopting


@pytest.mark.parametrize("is_over", [True, False])
async def test_ending_agent_reports_pending_writes_of_a_stopped_shard(*, is_over: bool) -> None:
    drive = HeldDrive()
    async with assembled(replace(SETTINGS, turn_s=60.0, drain_s=0.05), drive=drive) as fabric:
        await fabric.ready()
        made = await reserved(fabric.shard, [1])
        drive.holds_writes = True
        committing = asyncio.create_task(committed(fabric.shard, made, [1]))
        await until(lambda: bool(drive.held))
        has_ended = await fabric.agent._controller.shards.stop(THE_SHARD)
        if is_over:
            drive.let_go()
            await until(lambda: fabric.agent._controller.shards.is_idle)
        said = await fabric.agent._controller.close()
        drive.let_go()
        await committing
        assert (has_ended, said) == (False, is_over)


async def test_shard_recovers_again_after_a_crash_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async with assembled(SOON) as fabric:
        await fabric.ready()
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]
        begin, crashes = ServedShard.begin, [True]

        def begins(serving: ServedShard, spawn: Any) -> None:
            if crashes:
                crashes.pop()
                raise AssertionError("a mistake")
            begin(serving, spawn)

        monkeypatch.setattr(ServedShard, "begin", begins)
        await fabric.agent._controller.shards.hand_over(THE_SHARD)
        await until(lambda: not crashes)
        shards = fabric.service.shards
        await until(lambda: THE_SHARD in shards and not shards[THE_SHARD].core.is_recovering)
        assert get_states(await fabric.get(fabric.worker(), [1])) == [BlockState.HIT]
