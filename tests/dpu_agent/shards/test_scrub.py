"""The scrub: what it reads when, and what it finds before anybody asks."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from tests.support.agent.assembly import (
    SETTINGS,
    Assembly,
    HeldDrive,
    assembled,
    content_of,
    put_states,
    until,
)

from ostraca_dpu_agent.settings import ScrubSettings
from ostraca_dpu_agent.shards.core import SegmentState
from ostraca_dpu_agent.shards.scrub_plan import ScrubProgress
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.outcome import PutState

EAGER = replace(
    SETTINGS, owner=replace(SETTINGS.owner, scrub=ScrubSettings(bytes_s=1e9, idle_s=0.01, pause_s=0.05))
)


def test_it_waits_until_the_drive_was_idle_for_a_while_and_for_what_it_read_last() -> None:
    scrub = ScrubProgress(10.0, bytes_s=1e6, idle_s=2.0, pause_s=60.0)
    assert scrub.wait_s(10.5, is_idle=True) == 1.5
    assert scrub.wait_s(11.0, is_idle=False) == 2.0
    assert scrub.wait_s(13.0, is_idle=True) == 0.0
    scrub.spend(13.0, 5_000_000, blocks=3)
    assert scrub.wait_s(14.0, is_idle=True) == 4.0
    assert (scrub.read_bytes, scrub.blocks) == (5_000_000, 3)


def test_a_pass_visits_every_sealed_segment_once_and_then_rests() -> None:
    scrub = ScrubProgress(0.0, bytes_s=20e6, idle_s=1.0, pause_s=60.0)
    assert [scrub.next_segment(1.0, [3, 0, 2]) for _ in range(4)] == [0, 2, 3, None]
    assert (scrub.passes, scrub.passed_s) == (1, 1.0)
    assert scrub.wait_s(11.0, is_idle=True) == 50.0
    assert scrub.next_segment(70.0, [1, 5]) == 1


def test_without_sealed_segments_there_is_no_pass() -> None:
    scrub = ScrubProgress(0.0, bytes_s=20e6, idle_s=1.0, pause_s=60.0)
    assert scrub.next_segment(1.0, []) is None
    assert (scrub.passes, scrub.passed_s) == (0, None)


def test_a_rate_below_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="bytes_s"):
        ScrubSettings(bytes_s=-1)


async def filled(fabric: Assembly) -> list[int]:
    """Fill some segments; returns the blocks that lie in sealed ones."""
    worker, numbers = fabric.worker(), range(48)
    for first in range(0, 48, 16):
        assert set(put_states(await fabric.put(worker, range(first, first + 16)))) == {PutState.COMMITTED}
    ring, geometry = fabric.shard.core.ring, fabric.shard.core.geometry
    sealed = [segment.number for segment in ring.segments if segment.state is SegmentState.SEALED]
    assert sealed
    spans = [(geometry.data_offset(number), geometry.data_bytes) for number in sealed]
    at = {number: fabric.drive.bytes.find(content_of(number)[:64]) for number in numbers}
    return [number for number in numbers if any(0 <= at[number] - begin < size for begin, size in spans)]


async def test_a_rotten_block_is_dropped_though_nobody_asks_for_it() -> None:
    async with assembled(EAGER, segments=8) as fabric:
        sealed = await filled(fabric)
        scrub = fabric.shard.scrub
        assert scrub is not None
        passes = scrub.passes
        await until(lambda: scrub.passes >= passes + 2)
        assert fabric.shard.core.counts().blocks_dropped == 0
        assert scrub.blocks >= len(sealed)
        fabric.drive.flip_bit(fabric.drive.bytes.find(content_of(sealed[3])[:64]) + 777)
        await until(lambda: fabric.shard.core.counts().blocks_dropped == 1)
        (drive,) = fabric.agent.status().drives
        assert (drive.damaged_blocks, drive.faults, drive.failed_reads) == (1, 1, 0)
        (shard,) = fabric.agent.status().shards
        assert shard.scrub_passes > 0
        assert shard.scrubbed_bytes > 0
        assert shard.scrubbed_ago_s is not None
        await fabric.at_rest()


async def test_a_summary_area_that_has_rotted_is_counted_and_its_blocks_stay() -> None:
    async with assembled(EAGER, segments=8) as fabric:
        await filled(fabric)
        core, scrub = fabric.shard.core, fabric.shard.scrub
        assert scrub is not None
        blocks = core.counts().blocks
        (number, *_) = (s.number for s in core.ring.segments if s.state is SegmentState.SEALED)
        begin = core.geometry.summary_offset(number)
        for page in range(begin, begin + core.geometry.summary_bytes, 4096):
            fabric.drive.flip_bit(page + 200)
        await until(lambda: fabric.agent.status().drives[0].damaged_blocks > 0)
        assert core.counts().blocks == blocks
        await fabric.at_rest()


async def test_an_owner_that_may_have_a_successor_says_nothing_of_what_its_summaries_list(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with assembled(EAGER, segments=8) as fabric:
        await filled(fabric)
        core, scrub = fabric.shard.core, fabric.shard.scrub
        assert scrub is not None
        fabric.shard.fence()
        (number, *_) = (s.number for s in core.ring.segments if s.state is SegmentState.SEALED)
        begin = core.geometry.summary_offset(number)
        fabric.drive.bytes[begin : begin + core.geometry.summary_bytes] = bytes(core.geometry.summary_bytes)
        passes = scrub.passes
        await until(lambda: scrub.passes >= passes + 2)
        assert fabric.agent.status().drives[0].damaged_blocks == 0
        assert "no longer lists" not in caplog.text
        await fabric.at_rest()


async def test_it_reads_nothing_while_the_drive_has_work() -> None:
    drive = HeldDrive(segments=8)
    async with assembled(EAGER, drive=drive) as fabric:
        await filled(fabric)
        scrub = fabric.shard.scrub
        assert scrub is not None
        await until(lambda: scrub.passes > 0)
        drive._queued += 1
        await until(lambda: drive.queued == 1)
        before, until_s = scrub.read_bytes, time.monotonic() + 0.3
        await until(lambda: time.monotonic() > until_s)
        assert scrub.read_bytes - before <= 3 << 20, "what was under way, and no pass"
        drive._queued -= 1
        passes = scrub.passes
        await until(lambda: scrub.passes > passes)
        await fabric.at_rest()
