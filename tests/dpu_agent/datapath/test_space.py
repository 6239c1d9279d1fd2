from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.support.agent.assembly import (
    LAYOUT,
    TENANT,
    Assembly,
    assembled,
    put_states,
    reasons_of,
)

from ostraca_dpu_agent.datapath.space import depths_of
from ostraca_dpu_agent.volumes import ServedVolume
from ostraca_fabric.model.chain import DEPTH_UNKNOWN, Chain
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.model.volume import VolumeIdentity, VolumeRecord
from ostraca_fabric.ports.owners import GivenSpace, WantedSpace
from ostraca_fabric.wire.messages import Reserve

VOLUME = ServedVolume(
    VolumeRecord(TENANT, "v", LAYOUT, 4096), VolumeIdentity(TENANT, "v", LAYOUT.digest()), b"", b""
)


def chain(blocks: int, *, is_chained: bool = True) -> Chain:
    return Chain.of([bytes([n]) * 32 for n in range(blocks)], hash_bytes=32, is_chained=is_chained)


def test_depths_count_from_the_root_whatever_slice_is_named() -> None:
    spans = [chain(5)[3:].span(), chain(2, is_chained=False).span(), replace(chain(1), before=64).span()]
    assert depths_of(spans).tolist() == [3, 4, DEPTH_UNKNOWN, DEPTH_UNKNOWN, 64]
    assert depths_of([]).tolist() == []


def test_a_chain_is_too_short_by_its_whole_length_and_not_by_the_slice() -> None:
    volume = replace(VOLUME, break_even_tokens=10 * LAYOUT.page_tokens)
    spans = [chain(10)[:2].span(), chain(9).span(), chain(3, is_chained=False).span()]
    assert volume.are_too_short(spans).tolist() == [False] * 2 + [True] * 9 + [False] * 3
    assert not VOLUME.are_too_short(spans).any()
    assert volume.are_too_short([]).tolist() == []


@pytest.mark.parametrize("is_by_message", [False, True])
async def test_an_owner_gives_the_same_space_with_and_without_a_message(*, is_by_message: bool) -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.put(worker, [1, 2])
        if is_by_message:
            fabric.ask_by_message()
        done = await fabric.put(worker, [1, 3, 3, 2, 4])
        exists, declined, new = PutState.EXISTS, PutState.DECLINED, PutState.COMMITTED
        assert put_states(done) == [exists, new, declined, exists, new]
        assert reasons_of(done) == [Reason.NONE, Reason.NONE, Reason.IN_FLIGHT, Reason.NONE, Reason.NONE]


async def test_space_that_comes_after_the_end_of_a_put_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with assembled() as fabric:
        await fabric.ready()
        is_time = late_space(fabric, monkeypatch)
        done = await fabric.put(fabric.worker(), [1, 2], deadline_s=0.05)
        assert reasons_of(done) == [Reason.DEADLINE] * 2
        assert not len(fabric.shard.core.reservations)
        is_time.set()
        assert await fabric.context.tasks.finish(within_s=5)
        assert fabric.shard.core.counts().blocks_reserved == 2
        assert not len(fabric.shard.core.reservations)


def late_space(fabric: Assembly, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Make the owner's answers late: they come after the event."""
    is_time, reserve = asyncio.Event(), fabric.service.reserve

    async def late(wanted: Sequence[WantedSpace], terms: Reserve) -> list[GivenSpace]:
        await is_time.wait()
        given = reserve(wanted, terms)
        return given if isinstance(given, list) else await given

    monkeypatch.setattr(fabric.service, "reserve", late)
    return is_time
