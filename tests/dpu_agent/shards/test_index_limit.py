"""The limit of a shard's index: what is kept at it, what is said of it, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from benchmarks.support.big_shard import FABRIC, BigShard
from benchmarks.support.full_index import keys_from
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.agent.assembly import until
from tests.support.agent.owned_shard import OwnedShard, keys_of
from tests.support.agent.shard_invariants import check_core
from tests.support.invariants import check_index

from ostraca_dpu_agent.controller.controller import AgentController
from ostraca_dpu_agent.controller.drive_attachments import DriveOpener
from ostraca_dpu_agent.settings import AgentSettings, OwnerSettings
from ostraca_dpu_agent.shards.core import ShardCore, ShardSettings
from ostraca_dpu_agent.shards.service import OwnerService
from ostraca_fabric.drives.drive_health import HealthSettings
from ostraca_fabric.drives.file_drive import FileDrive
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.errors import UsageError
from ostraca_fabric.membership.memory_membership import MemoryMembership
from ostraca_fabric.model.fabric_map import AgentRecord
from ostraca_fabric.model.ids import AgentId, DriveId, OwnerEpoch, StartId
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.telemetry.requests import EventRing

BLOCKS = 60
SMALL = 4096


def filled() -> OwnedShard:
    """Return a shard of 8 segments that lists blocks 0 to 59, the newest last, some in each of 6 segments."""
    shard = OwnedShard(segments=8)
    assert shard.put(list(range(BLOCKS)), 90_000) == [PutState.COMMITTED] * BLOCKS
    return shard


filled_once = cache(filled)


def listed_at(shard: OwnedShard, limit: int, order: list[list[int]]) -> ShardCore:
    core = ShardCore(shard.superblock, settings=ShardSettings(blocks_max=limit))
    for numbers in order:
        core.take_in(shard.recovered(numbers))
        check_index(core.index)
    return core


def found(core: ShardCore) -> list[int]:
    answer = core.resolve(0.0, keys_of(list(range(BLOCKS))), pin_s=0)
    return np.flatnonzero(answer.found).tolist()


@settings(max_examples=60)
@given(limit=st.integers(16, BLOCKS + 5), order=st.permutations(range(8)), cut=st.integers(1, 8))
def test_below_what_flash_lists_the_newest_stay_in_whatever_order_summaries_are_read(
    limit: int, order: list[int], cut: int
) -> None:
    shard = filled_once()
    core = listed_at(shard, limit, [order[:cut], order[cut:]] if cut < 8 else [order])
    kept = found(core)
    assert kept == list(range(BLOCKS - len(kept), BLOCKS))
    per_segment = max(len(segment.entries) for segment in shard.recovered().segments)
    assert min(limit, BLOCKS) - per_segment < len(kept) <= limit
    assert core.counts().blocks_beyond_limit == BLOCKS - len(kept)
    core.begin(0.0, epoch=OwnerEpoch(9))
    core.own_alone(0.0)
    check_core(core)


def test_segments_that_an_index_had_no_room_for_are_used_first() -> None:
    shard = filled()
    shard.settings = ShardSettings(blocks_max=40)
    shard.restart()
    kept = shard.found(list(range(BLOCKS)))
    more = list(range(BLOCKS, BLOCKS + 5))
    assert shard.put(more, 90_000) == [PutState.COMMITTED] * 5
    assert shard.found([*kept[-20:], *more]) == [*kept[-20:], *more]


def test_an_index_that_is_full_of_promised_blocks_says_so_and_takes_more_when_promises_end() -> None:
    shard = OwnedShard(segments=8, settings=ShardSettings(blocks_max=32, free_segments=0))
    put = 0
    while shard.put([put], SMALL) == [PutState.COMMITTED]:
        shard.core.resolve(shard.now_s, keys_of([put]), pin_s=20, promises=True)
        put += 1
    assert 0 < put <= 32
    answer = shard.reserve([1000], SMALL)
    assert [Reason(reason) for reason in answer.reasons] == [Reason.INDEX_FULL]
    shard.pass_time(31)
    assert shard.put([1000], SMALL) == [PutState.COMMITTED]


def test_flash_that_is_full_of_promised_blocks_is_not_called_a_full_index() -> None:
    shard = OwnedShard(segments=2)
    answers = []
    for number in range(40):
        answers.append(shard.reserve([number], 90_000, hold_s=1000))
        shard.settle()
    reasons = {Reason(reason) for answer in answers for reason in answer.reasons}
    assert reasons == {Reason.NONE, Reason.NO_SPACE}


@pytest.mark.parametrize("limit", [-1, 0, 1023, (1 << 31) + 1])
def test_a_limit_that_is_of_no_use_is_refused_before_anything_starts(limit: int) -> None:
    with pytest.raises(UsageError, match=f"owner.blocks_per_shard_max is {limit}: set it to"):
        OwnerSettings(blocks_per_shard_max=limit)


async def test_an_owner_says_what_its_index_had_no_room_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    big = BigShard.made(tmp_path / "drive.img", 4096)
    file = FileDrive.open(DriveId("enclosure/drive"), str(big.path))
    drive = GuardedDrive(file, HealthSettings(), lambda: 0.0)
    limited = replace(AgentSettings(), owner=OwnerSettings(blocks_per_shard_max=1024))
    membership = MemoryMembership(FABRIC)
    await membership.put_enclosures([big.record()])
    me = AgentRecord(AgentId("agent-0"), StartId(bytes(16)), ())
    await membership.join(me)
    owner = OwnerService(lambda: 0.0, EventRing("agent-0", 16, lambda: 0.0))
    drives = {drive.id: drive}
    controller = AgentController(
        me,
        limited,
        membership=membership,
        owner=owner,
        drives=drives,
        opener=DriveOpener(lambda _: drive),
        clock=lambda: 0.0,
    )
    try:
        await controller.turn()
        (owned,) = owner.shards.values()
        await until(lambda: not owned.core.is_recovering)
        counts = owned.core.counts()
        assert 768 <= counts.blocks <= 1024
        assert counts.blocks + counts.blocks_beyond_limit + counts.blocks_evicted == 4096
        newest = keys_from(4096 - counts.blocks, counts.blocks)
        assert (owned.core.index.find(newest) >= 0).all()
        assert f"has {counts.blocks_beyond_limit} blocks beyond the limit of its index" in caplog.text
        assert "raise owner.blocks_per_shard_max, 1024 now" in caplog.text
        assert await controller.close()
    finally:
        drive.close()
