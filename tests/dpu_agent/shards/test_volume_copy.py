"""The fabric's volumes, recorded on every shard by its owner."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    LAYOUT,
    SETTINGS,
    TENANT,
    Assembly,
    HeldDrive,
    assembled,
    put_states,
    until,
)

from ostraca_fabric.flash.superblock import Superblock, decode_superblock
from ostraca_fabric.flash.volume_records import (
    COPIES,
    VolumesCopy,
    VolumesState,
    copy_bytes,
    copy_offset,
    encode_volumes,
    examine_volumes,
    newest_copy,
)
from ostraca_fabric.model.ids import OwnerEpoch
from ostraca_fabric.model.outcome import PutState
from ostraca_fabric.model.volume import VolumeRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca_fabric.model.extent import Pieces

FAST = replace(SETTINGS, turn_s=0.02)


class LateDrive(HeldDrive):
    """One on which writes that have failed land when it is let go."""

    fails_writes = False

    def submit_write(self, pieces: Pieces) -> asyncio.Future[NDArray[np.bool_]]:
        if not self.fails_writes:
            return super().submit_write(pieces)
        copied, write = replace(pieces, memory=pieces.memory.copy()), super().submit_write

        def land() -> None:
            write(copied)

        self.held.append(land)
        failed: asyncio.Future[NDArray[np.bool_]] = asyncio.get_running_loop().create_future()
        failed.set_result(np.zeros(len(pieces), np.bool_))
        return failed


def named(name: str) -> VolumeRecord:
    return VolumeRecord(TENANT, name, LAYOUT, BLOCK_BYTES)


def superblock_of(drive: HeldDrive) -> Superblock:
    return decode_superblock(bytes(drive.bytes[:8192]))


def copies_on(drive: HeldDrive) -> tuple[VolumesCopy, VolumesCopy]:
    superblock = superblock_of(drive)
    begin = copy_offset(superblock.geometry, 0)
    return examine_volumes(
        superblock, bytes(drive.bytes[begin : begin + COPIES * copy_bytes(superblock.geometry)])
    )


def names_on(drive: HeldDrive) -> list[str]:
    copies = copies_on(drive)
    number = newest_copy(copies)
    return [] if number is None else [volume.name for volume in copies[number].volumes]


def recorded(fabric: Assembly) -> tuple[int, int]:
    (shard,) = fabric.agent.status().shards
    return shard.volumes_recorded, shard.volumes_left_out


async def test_a_volume_is_on_flash_soon_after_it_was_made() -> None:
    async with assembled() as fabric:
        await until(lambda: names_on(fabric.drive) == ["v"])
        await fabric.membership.create_volume(named("w"))
        await until(lambda: names_on(fabric.drive) == ["v", "w"])
        await until(lambda: recorded(fabric) == (2, 0))
        first, second = copies_on(fabric.drive)
        assert (first.state, second.state) == (VolumesState.GOOD, VolumesState.GOOD)
        assert {first.volumes, second.volumes} == {(named("v"),), (named("v"), named("w"))}


async def test_volumes_made_at_once_take_few_writes() -> None:
    async with assembled() as fabric:
        await until(lambda: names_on(fabric.drive) == ["v"])
        writes = len(fabric.drive.writes)
        for number in range(100):
            await fabric.membership.create_volume(named(f"v{number}"))
        await until(lambda: len(names_on(fabric.drive)) == 101)
        assert len(fabric.drive.writes) - writes < 10


async def test_a_shard_whose_copy_is_behind_is_brought_up_by_its_next_owner_and_one_that_is_not_stays() -> (
    None
):
    drive = HeldDrive()
    async with assembled(FAST, drive=drive):
        await until(lambda: names_on(drive) == ["v"])
    before = copies_on(drive)
    async with assembled(FAST, drive=drive) as fabric:
        await until(lambda: recorded(fabric) == (1, 0))
        assert copies_on(drive) == before
        await fabric.membership.create_volume(named("w"))
        await until(lambda: names_on(drive) == ["v", "w"])
        assert sorted(copy.epoch for copy in copies_on(drive)) == [1, fabric.shard.epoch]


async def test_a_store_that_has_forgotten_a_volume_does_not_take_it_off_flash() -> None:
    drive = HeldDrive()
    async with assembled(FAST, drive=drive) as fabric:
        await fabric.membership.create_volume(named("w"))
        await until(lambda: names_on(drive) == ["v", "w"])
    async with assembled(FAST, drive=drive) as fabric:  # its store begins anew, and knows of "v" alone
        await fabric.membership.create_volume(named("x"))
        await until(lambda: set(names_on(drive)) == {"v", "w", "x"})


async def test_a_store_that_has_forgotten_an_erasure_does_not_take_it_off_flash() -> None:
    drive, erased = HeldDrive(), replace(named("w"), is_erasable=True).erased()
    async with assembled(FAST, drive=drive) as fabric:
        await fabric.membership.create_volume(erased)
        await until(lambda: names_on(drive) == ["v", "w"])
    async with assembled(FAST, drive=drive) as fabric:  # its store begins anew, and a worker makes it again
        await fabric.membership.create_volume(named("w"))
        await fabric.membership.create_volume(named("x"))
        await until(lambda: set(names_on(drive)) == {"v", "w", "x"})
        for copy in copies_on(drive):
            assert erased in copy.volumes


async def test_a_drive_that_does_not_take_them_fails_its_shard_and_no_put() -> None:
    async with assembled(FAST) as fabric:
        await until(lambda: names_on(fabric.drive) == ["v"])
        fabric.drive.fail_writes(8192, (1 << 20) - 8192)
        await fabric.membership.create_volume(named("w"))
        await until(lambda: fabric.shard.is_failing)
        assert names_on(fabric.drive) == ["v"]
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]


async def test_what_has_failed_and_lands_late_is_made_good_by_the_same_owner() -> None:
    drive = LateDrive()
    quick = replace(FAST, owner=replace(FAST.owner, late_write_s=0.3, pause_max_s=0.1))
    async with assembled(quick, drive=drive) as fabric:
        await until(lambda: names_on(drive) == ["v"])
        drive.fails_writes = True
        await fabric.membership.create_volume(named("w"))
        await until(lambda: len(drive.held) == 1)
        drive.fails_writes = False
        await fabric.membership.create_volume(named("x"))
        copy = fabric.agent._volume_copies.of(drive.shard)
        assert copy is not None
        await until(lambda: copy._wanted is not None and len(copy._wanted.volumes) == 3)
        await until(lambda: not copy._is_writing)
        drive.let_go()
        assert names_on(drive) == ["v", "w"]
        await until(lambda: names_on(drive) == ["v", "w", "x"])


async def test_they_are_flushed_where_the_drive_s_cache_is_volatile() -> None:
    drive = HeldDrive()
    drive.has_volatile_cache = True
    async with assembled(FAST, drive=drive) as fabric:
        await until(lambda: recorded(fabric) == (1, 0))
        await fabric.ready()
        del drive.asked[:]
        await fabric.membership.create_volume(named("w"))
        await until(lambda: recorded(fabric) == (2, 0))
        assert drive.asked == ["write", "flush"]


async def test_a_put_does_not_wait_for_volume_records() -> None:
    async with assembled(FAST) as fabric:
        await until(lambda: names_on(fabric.drive) == ["v"])
        await fabric.ready()
        fabric.drive.holds_writes = True
        await fabric.membership.create_volume(named("w"))
        await until(lambda: len(fabric.drive.held) == 1)
        fabric.drive.holds_writes = False
        assert put_states(await fabric.put(fabric.worker(), [1])) == [PutState.COMMITTED]
        assert names_on(fabric.drive) == ["v"]
        fabric.drive.let_go()
        await until(lambda: names_on(fabric.drive) == ["v", "w"])


async def test_what_finds_no_room_is_said_in_the_status_and_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drive = HeldDrive()
    superblock = superblock_of(drive)
    many = tuple(named(f"old-{number}") for number in range(3000))
    pages = encode_volumes(
        superblock.identity, copy_bytes(superblock.geometry), many, epoch=OwnerEpoch(1), sequence=1
    )
    drive.bytes[8192 : 8192 + len(pages)] = pages
    kept = copies_on(drive)[0].volumes
    async with assembled(FAST, drive=drive) as fabric:
        for volume in many:
            await fabric.membership.create_volume(volume)
        await until(lambda: recorded(fabric)[1] == 3001 - recorded(fabric)[0] > 0)
        assert abs(recorded(fabric)[0] - len(kept)) < 5
    assert "have no room in the volume records" in caplog.text
