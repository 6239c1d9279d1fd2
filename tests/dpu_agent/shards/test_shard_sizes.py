"""Shards of every size, blocks of every size: two segments, full ones, and a terabyte in a sparse file."""

from __future__ import annotations

import itertools
import math
import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.agent.owned_shard import keys_of, rows16, seeds_of, tag_of
from tests.support.agent.shard_invariants import check_core

from ostraca_dpu_agent.controller.recovery import read_slices, read_superblock
from ostraca_dpu_agent.settings import OwnerSettings
from ostraca_dpu_agent.shards.shard import OwnedShard, core_of
from ostraca_fabric.drives.file_drive import FileDrive
from ostraca_fabric.flash.rebuild import shard_record
from ostraca_fabric.flash.superblock import Superblock, decode_superblock, encode_superblock
from ostraca_fabric.model.extent import MIB, Geometry, Pieces, rounded_up, segment_bytes_for
from ostraca_fabric.model.ids import EnclosureId, FabricId, OwnerEpoch, drive_id, shard_id
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.runtime.memory import HugeMemory
from ostraca_fabric.telemetry.requests import EventRing

FABRIC = FabricId(bytes(16))
ENCLOSURE = EnclosureId("e")
DRIVE = drive_id(ENCLOSURE, "d")
FAR_S = 30.0
KIB = 1 << 10
TERABYTE = 1 << 40


def formatted(path: Path, geometry: Geometry) -> Path:
    """Make a sparse drive of one shard."""
    superblock = Superblock(
        FABRIC, secrets.token_bytes(16), ENCLOSURE, DRIVE, shard_id(DRIVE, 0), 0, geometry
    )
    with path.open("wb") as file:
        file.truncate(geometry.shard_bytes)
        os.pwrite(file.fileno(), encode_superblock(superblock), 0)
    return path


@dataclass
class Store:
    """A shard on a file with its owner; blocks are known by a number and a length."""

    drive: FileDrive
    shard: OwnedShard
    lengths: dict[int, int] = field(default_factory=dict)

    async def put(self, numbers: list[int], lengths: list[int]) -> list[Reason]:
        """Reserve, write the first page of each block, commit; return why not, NONE where it was."""
        sizes = np.array(lengths, np.uint32)
        made = await self.shard.reserve(keys_of(numbers), sizes, hold_s=FAR_S, within_s=FAR_S)
        staged = np.flatnonzero(made.states == PutState.STAGED)
        if len(staged):
            await self._write([numbers[row] for row in staged], made.offsets[staged].astype(np.int64))
            taken = [numbers[row] for row in staged]
            states, _ = await self.shard.commit(
                made.reservations[staged],
                rows16([tag_of(number) for number in taken]),
                seeds_of(taken),
                epoch=self.shard.epoch,
            )
            assert list(states) == [PutState.COMMITTED] * len(taken)
            self.lengths |= {numbers[row]: lengths[row] for row in staged}
        return [Reason(reason) for reason in made.reasons]

    async def check(self) -> list[int]:
        """Find every block ever put; those that are there have their lengths, bytes and room."""
        core = self.shard.core
        check_core(core)
        numbers = list(self.lengths)
        answer = core.resolve(time.monotonic(), keys_of(numbers), pin_s=0)
        there = np.flatnonzero(answer.found)
        if len(there):
            await self._check_bytes([numbers[row] for row in there], answer.offsets[there].astype(np.int64))
        for row in there.tolist():
            assert answer.lengths[row] == self.lengths[numbers[row]]
            assert answer.tags[row].tobytes() == tag_of(numbers[row])
            first = core.geometry.segment_of(answer.offsets[row : row + 1])[0]
            end = int(answer.offsets[row]) + rounded_up(int(answer.lengths[row]))
            assert core.geometry.data_offset(first) <= answer.offsets[row]
            assert end <= core.geometry.summary_offset(first) + core.geometry.segment_bytes
        return [numbers[row] for row in there]

    async def _write(self, numbers: list[int], offsets: NDArray[np.int64]) -> None:
        memory = HugeMemory(4096 * len(numbers), prefault=False)
        pages = memory.array[: 4096 * len(numbers)].reshape(-1, 4096)
        pages[:, :16] = keys_of(numbers)
        ends = await self.drive.submit_write(_pages(memory, offsets))
        assert ends.all()
        del pages
        memory.close()

    async def _check_bytes(self, numbers: list[int], offsets: NDArray[np.int64]) -> None:
        memory = HugeMemory(4096 * len(numbers), prefault=False)
        ends = await self.drive.submit_read(_pages(memory, offsets))
        assert ends.all()
        pages = memory.array[: 4096 * len(numbers)].reshape(-1, 4096)
        assert (pages[:, :16] == keys_of(numbers)).all()
        del pages
        memory.close()


def _pages(memory: HugeMemory, offsets: NDArray[np.int64]) -> Pieces:
    order = np.argsort(offsets)
    places = np.arange(len(offsets), dtype=np.int64) * 4096
    return Pieces(memory.array, places[order], offsets[order], np.full(len(offsets), 4096, np.uint32))


@asynccontextmanager
async def owned(path: Path, lengths: dict[int, int] | None = None) -> AsyncIterator[Store]:
    """Recover the shard on a drive as an agent does, and own it until the end."""
    drive = FileDrive.open(DRIVE, str(path))
    settings = OwnerSettings()
    with path.open("rb") as file:
        record = shard_record(decode_superblock(file.read(8192)))
    superblock = await read_superblock(drive, record, FABRIC)
    core = core_of(superblock, settings)
    async with aclosing(read_slices(drive, record, superblock)) as slices:
        async for areas in slices:
            core.take_in(areas)
    shard = OwnedShard(
        record,
        drive,
        core,
        settings=settings,
        clock=time.monotonic,
        events=EventRing("a", 16, time.monotonic),
    )
    shard.begin(OwnerEpoch(core.highest_epoch + 1))
    shard.confirm(math.inf)
    shard.apply_grant(range(shard.core.geometry.segments))
    yield Store(drive, shard, dict(lengths or {}))
    assert await shard.close(within_s=FAR_S)
    drive.close()


async def test_a_shard_of_two_segments_goes_round_and_round_with_blocks_of_all_sizes(tmp_path: Path) -> None:
    geometry = Geometry.planned(3 * MIB, segment_bytes=MIB)
    assert geometry.segments == 2
    path = formatted(tmp_path / "drive.img", geometry)
    lengths = itertools.cycle([1, 4096, 4097, 100 * KIB, 5 * KIB, 300 * KIB, geometry.data_bytes])
    async with owned(path) as store:
        for number, length in zip(range(100), lengths, strict=False):
            assert await store.put([number], [length]) == [Reason.NONE], number
            assert number in await store.check()
        there = await store.check()
        assert store.shard.core.counts().segments_evicted > 20
    async with owned(path, store.lengths) as again:
        assert set(await again.check()) <= set(there)
        assert await again.put([1000], [geometry.data_bytes]) == [Reason.NONE]


@pytest.mark.parametrize("segment_bytes", [MIB, 64 * MIB])
async def test_a_block_larger_than_a_data_area_is_declined_and_one_as_large_is_not(
    segment_bytes: int, tmp_path: Path
) -> None:
    geometry = Geometry.planned(MIB + 3 * segment_bytes, segment_bytes=segment_bytes)
    async with owned(formatted(tmp_path / "drive.img", geometry)) as store:
        most = geometry.data_bytes
        assert await store.put([1, 2, 3], [most, most + 1, most]) == [
            Reason.NONE,
            Reason.BAD_LENGTH,
            Reason.NONE,
        ]


async def test_a_segment_is_sealed_when_its_summary_is_full_though_it_has_data_room_left(
    tmp_path: Path,
) -> None:
    geometry = Geometry.planned(257 * MIB, segment_bytes=64 * MIB)
    async with owned(formatted(tmp_path / "drive.img", geometry)) as store:
        numbers = list(range(geometry.entries_max))
        assert set(await store.put(numbers, [4096] * len(numbers))) == {Reason.NONE}
        first = store.shard.core.ring.pools.common.current
        assert first is not None
        assert (first.entries_used, first.bytes_used) == (geometry.entries_max, geometry.entries_max * 4096)
        assert first.bytes_used < geometry.data_bytes / 10
        assert await store.put([-1 % 2**32], [4096]) == [Reason.NONE]
        assert store.shard.core.ring.pools.common.current is not first
        assert await store.check() == list(store.lengths)


async def test_a_segment_is_sealed_when_its_data_area_is_full_though_its_summary_has_room_left(
    tmp_path: Path,
) -> None:
    geometry = Geometry.planned(257 * MIB, segment_bytes=64 * MIB)
    async with owned(formatted(tmp_path / "drive.img", geometry)) as store:
        fit = geometry.data_bytes // (16 * MIB)
        assert await store.put(list(range(fit)), [16 * MIB] * fit) == [Reason.NONE] * fit
        first = store.shard.core.ring.pools.common.current
        assert await store.put([fit], [16 * MIB]) == [Reason.NONE]
        assert first is not None
        assert store.shard.core.ring.pools.common.current is not first
        assert first.entries_used == fit < geometry.entries_max
        assert await store.check() == list(store.lengths)


async def test_a_full_shard_takes_every_put_and_keeps_the_newest(tmp_path: Path) -> None:
    geometry = Geometry.planned(81 * MIB, segment_bytes=segment_bytes_for(81 * MIB))
    path = formatted(tmp_path / "drive.img", geometry)
    rng = np.random.default_rng(7)
    sizes = [int(2 ** rng.uniform(12, 22)) for _ in range(600)]
    async with owned(path) as store:
        for first in range(0, 600, 8):
            numbers = list(range(first, first + 8))
            assert await store.put(numbers, sizes[first : first + 8]) == [Reason.NONE] * 8
        there = await store.check()
        assert there[-1] == 599
        counts = store.shard.core.counts()
        assert counts.segments_evicted > 10
        assert sum(sizes) > 3 * geometry.shard_bytes
    async with owned(path, store.lengths) as again:
        assert set(there[-20:]) <= set(await again.check())


async def test_a_sparse_shard_of_a_terabyte_takes_blocks_of_4_kib_to_16_mib_and_is_found_again(
    tmp_path: Path,
) -> None:
    geometry = Geometry.planned(TERABYTE, segment_bytes=256 * MIB)
    path = formatted(tmp_path / "drive.img", geometry)
    assert path.stat().st_size == TERABYTE
    rng = np.random.default_rng(3)
    sizes = [4096, 16 * MIB, 1, 16 * MIB - 1, *(int(2 ** rng.uniform(12, 24)) for _ in range(1020))]
    began_s = time.monotonic()
    async with owned(path) as store:
        for first in range(0, len(sizes), 64):
            numbers = list(range(first, first + 64))
            assert await store.put(numbers, sizes[first : first + 64]) == [Reason.NONE] * 64
        assert await store.check() == sorted(store.lengths)
        assert len(store.lengths) == len(sizes)
    async with owned(path, store.lengths) as again:
        assert await again.check() == list(store.lengths)
        assert len({*again.shard.core.ring.generations.tolist()}) > 8
    assert path.stat().st_blocks * 512 < 100 * MIB
    assert time.monotonic() - began_s < FAR_S
