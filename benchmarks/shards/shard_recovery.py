"""S3: takeover of a shard of a terabyte: time until all blocks are found, and stalls meanwhile.

The shard lies in a sparse file, with summaries of 512 Ki blocks of 2 MiB, in segments of 64 MiB with summary
areas of 12 KiB. A controller recovers the shard as in an agent. Meanwhile a task on the same event loop runs
every millisecond. The comparison has O_DIRECT reads of the same summary areas by four threads, unexamined.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.support.big_shard import FABRIC, BigShard
from benchmarks.support.figure import Figure, Target
from benchmarks.support.full_index import keys_from

from ostraca_cli.tools.bench.series import Measurement, Series, seconds_of
from ostraca_cli.tools.bench.workload import MeasureError
from ostraca_dpu_agent.controller.controller import AgentController
from ostraca_dpu_agent.controller.drive_attachments import DriveOpener
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_dpu_agent.shards.service import OwnerService
from ostraca_fabric.drives.drive_health import HealthSettings
from ostraca_fabric.drives.file_drive import FileDrive
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.membership.memory_membership import MemoryMembership
from ostraca_fabric.model.fabric_map import AgentRecord, DriveRecord
from ostraca_fabric.model.ids import AgentId, DriveId, StartId
from ostraca_fabric.telemetry.requests import EventRing

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

MS = 1e3
_BEAT_S = 0.001
_ROUNDS = 5
_THREADS = 4


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovery, from the first map until every block is found."""

    seconds: float
    stall_s: float
    """Longest delay of a task ready to run."""


def run(conditions: Conditions) -> list[Figure]:
    """Recover several times, each by a new controller."""
    blocks, rounds = (1 << 10, 1) if conditions.is_short else (1 << 19, _ROUNDS)
    shard = BigShard.made(conditions.new_directory() / "drive.img", blocks)
    recovered, raw_s, idle_s = [], [], []
    for _ in range(rounds):
        raw_s.append(seconds_of(lambda: _read_areas(shard)))
        recovered.append(asyncio.run(_recovered(shard)))
        idle_s.append(asyncio.run(_idle_stall_s(recovered[-1].seconds)))
    shard.path.unlink()
    what = f"recovery of {blocks:,} blocks"
    reads = Measurement(
        "s", Series(tuple(each.seconds for each in recovered)), "O_DIRECT read", Series(tuple(raw_s))
    )
    stalls = Measurement(
        "ms",
        Series(tuple(MS * each.stall_s for each in recovered)),
        "idle loop",
        Series(tuple(MS * each for each in idle_s)),
    )
    return [
        Figure("S3", what, "s", reads, Target(value_at_most=2.0)),
        Figure("S3", f"{what}, longest the loop was not served", "ms", stalls, Target(value_at_most=20.0)),
    ]


async def _recovered(shard: BigShard) -> Recovery:
    membership = MemoryMembership(FABRIC)
    await membership.put_enclosures([shard.record()])
    agent = AgentRecord(AgentId("agent"), StartId(bytes(16)), ())
    await membership.join(agent)
    owner = OwnerService(time.monotonic, EventRing(agent.id, 16, time.monotonic))
    drives: dict[DriveId, GuardedDrive] = {}

    def open_drive(record: DriveRecord) -> GuardedDrive:
        drive = FileDrive.open(record.id, record.path)
        return GuardedDrive(drive, HealthSettings(), time.monotonic)

    controller = AgentController(
        agent,
        AgentSettings(),
        membership=membership,
        owner=owner,
        drives=drives,
        opener=DriveOpener(open_drive),
        clock=time.monotonic,
    )
    beats = _Beats()
    beating = asyncio.create_task(beats.run())
    started_s = time.perf_counter()
    await controller.turn()
    await _until_whole(owner, shard.blocks)
    seconds = time.perf_counter() - started_s
    beating.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await beating
    _check(owner, shard.blocks)
    await controller.close()
    for drive in drives.values():
        drive.close()
    return Recovery(seconds, beats.stall_s)


async def _until_whole(owner: OwnerService, blocks: int) -> None:
    while sum(len(owned.core.index) for owned in owner.shards.values()) < blocks:  # noqa: ASYNC110 (nothing says so)
        await asyncio.sleep(_BEAT_S)


def _check(owner: OwnerService, blocks: int) -> None:
    """Check for all blocks; without them, the measurement is void."""
    (owned,) = owner.shards.values()
    if (owned.core.index.find(keys_from(0, blocks)) < 0).any():
        raise MeasureError("a block that a summary lists was not found after recovery")


class _Beats:
    """Task due every millisecond, with a record of the longest delay."""

    def __init__(self) -> None:
        self.stall_s = 0.0

    async def run(self) -> None:
        while True:
            asked_s = time.perf_counter()
            await asyncio.sleep(_BEAT_S)
            self.stall_s = max(self.stall_s, time.perf_counter() - asked_s - _BEAT_S)


async def _idle_stall_s(seconds: float) -> float:
    beats = _Beats()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await beats.run()
    return beats.stall_s


def _read_areas(shard: BigShard) -> None:
    """Read every summary area past the page cache."""
    geometry = shard.geometry
    descriptor = os.open(shard.path, os.O_RDONLY | os.O_DIRECT)

    def read(first: int) -> None:
        with mmap.mmap(-1, geometry.summary_bytes) as memory:
            for segment in range(first, geometry.segments, _THREADS):
                os.preadv(descriptor, [memory], geometry.summary_offset(segment))

    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(read, range(_THREADS)))
    finally:
        os.close(descriptor)
