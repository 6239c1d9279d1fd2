from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ostraca_enclosure.files import FileEnclosure
from ostraca_fabric.errors import DriveError, FormatError, UsageError
from ostraca_fabric.flash.superblock import decode_superblock
from ostraca_fabric.model.extent import MIB, PAGE_BYTES
from ostraca_fabric.model.fabric_map import DriveRecord
from ostraca_fabric.model.ids import DriveId, EnclosureId, FabricId, ShardId

FABRIC = FabricId(b"f" * 16)
SHELF = EnclosureId("shelf")


def enclosure(
    directory: Path, *, drives: int = 2, drive_bytes: int = 9 * MIB, fabric: FabricId = FABRIC
) -> FileEnclosure:
    return FileEnclosure(
        SHELF, directory, fabric=fabric, drives=drives, drive_bytes=drive_bytes, segment_bytes=MIB
    )


def test_an_enclosure_describes_its_drives_and_shards(tmp_path: Path) -> None:
    record = enclosure(tmp_path).prepare()
    assert record.id == SHELF
    assert record.drives == (
        DriveRecord(DriveId("shelf/drive-0"), str(tmp_path / "drive-0.img")),
        DriveRecord(DriveId("shelf/drive-1"), str(tmp_path / "drive-1.img")),
    )
    assert [shard.id for shard in record.shards] == [ShardId("shelf/drive-0/0"), ShardId("shelf/drive-1/0")]
    for shard in record.shards:
        assert (shard.offset, shard.size_bytes) == (0, 9 * MIB)
        assert 7 * MIB < shard.weight < 8 * MIB


def test_drive_has_its_size_allocated(tmp_path: Path) -> None:
    enclosure(tmp_path).prepare()
    found = (tmp_path / "drive-0.img").stat()
    assert found.st_size == 9 * MIB
    assert found.st_blocks * 512 >= 9 * MIB


def test_drives_are_never_formatted_twice(tmp_path: Path) -> None:
    first = enclosure(tmp_path).prepare()
    before = (tmp_path / "drive-0.img").read_bytes()
    assert enclosure(tmp_path).prepare() == first
    assert (tmp_path / "drive-0.img").read_bytes() == before


def test_each_format_has_its_own_id(tmp_path: Path) -> None:
    enclosure(tmp_path).prepare()
    superblocks = [
        decode_superblock((tmp_path / f"drive-{number}.img").read_bytes()[: 2 * PAGE_BYTES])
        for number in range(2)
    ]
    assert superblocks[0].format_id != superblocks[1].format_id


def test_lost_drive_is_created_beside_the_others(tmp_path: Path) -> None:
    enclosure(tmp_path).prepare()
    kept = (tmp_path / "drive-1.img").read_bytes()
    (tmp_path / "drive-0.img").unlink()
    assert len(enclosure(tmp_path).prepare().shards) == 2
    assert (tmp_path / "drive-1.img").read_bytes() == kept


def _identity(path: Path) -> tuple[int, ...]:
    found = path.lstat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns


def _swap(directory: Path) -> None:
    (directory / "drive-0.img").rename(directory / "aside")
    (directory / "drive-1.img").rename(directory / "drive-0.img")
    (directory / "aside").rename(directory / "drive-1.img")


def _unmount(directory: Path) -> None:
    (directory / "drive-0.img").unlink()
    (directory / "drive-0.img").symlink_to(directory / "unmounted")


def _fifo(directory: Path) -> None:
    (directory / "drive-0.img").unlink()
    os.mkfifo(directory / "drive-0.img")


def _overwrite(directory: Path, head: bytes) -> None:
    with (directory / "drive-0.img").open("r+b") as drive:
        drive.write(head)


@pytest.mark.parametrize(
    ("change", "unusable", "said"),
    [
        (lambda there: (there / "drive-0.img").unlink(), 1, "is missing"),
        (_unmount, 1, "where nothing is: mount the disk"),
        (_fifo, 1, "is a FIFO"),
        (_swap, 2, "holds shard shelf/drive-1/0"),
        (lambda there: os.truncate(there / "drive-0.img", 0), 1, "was cut short"),
        (lambda there: os.truncate(there / "drive-0.img", 9 * MIB - 1), 1, "was truncated"),
        (lambda there: _overwrite(there, bytes(MIB)), 1, "the page is blank"),
        (lambda there: _overwrite(there, b"noise" * 4096), 1, "not a shard of Ostraca"),
        (lambda there: there.rename(there.with_name("unmounted")), 2, "is missing"),
        (lambda there: os.truncate(there / "drive-0.img", 10 * MIB), 0, ""),
        (lambda there: _overwrite(there, bytes(PAGE_BYTES)), 0, ""),
    ],
)
def test_recorded_drive_is_never_recreated(
    tmp_path: Path, change: Callable[[Path], object], unusable: int, said: str
) -> None:
    shelf = tmp_path / "shelf"
    made = enclosure(shelf).prepare()
    change(shelf)
    before = {path: _identity(path) for path in tmp_path.rglob("*")}
    again = enclosure(shelf)
    assert again.prepare({shard.drive: shard for shard in made.shards}) == made
    assert {path: _identity(path) for path in tmp_path.rglob("*")} == before, "nothing was made or written"
    assert len(again.unusable) == unusable
    assert said in again.unusable.get(DriveId("shelf/drive-0"), "")
    assert all("drive-" in why for why in again.unusable.values())


def test_drive_is_replaced_only_without_a_file(tmp_path: Path) -> None:
    before = enclosure(tmp_path).prepare()
    drive, path = DriveId("shelf/drive-1"), tmp_path / "drive-1.img"
    with pytest.raises(DriveError, match="move the file away"):
        enclosure(tmp_path).replace(drive)
    path.unlink()
    path.symlink_to("unmounted")
    with pytest.raises(DriveError, match="move the file away"):
        enclosure(tmp_path).replace(drive)
    path.unlink()
    made = enclosure(tmp_path).replace(drive)
    assert (made.shard, path.stat().st_mode & 0o777) == (ShardId("shelf/drive-1/0"), 0o600)
    assert enclosure(tmp_path).prepare({each.id: None for each in before.drives}) == before


def test_a_disk_without_headroom_keeps_no_drive_from_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = enclosure(tmp_path).prepare()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 0))
    assert enclosure(tmp_path).prepare() == made
    with pytest.raises(DriveError, match="choose a smaller capacity"):
        enclosure(tmp_path, drives=3).prepare()


def test_drives_and_their_folder_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        enclosure(tmp_path / "shelf").prepare()
    finally:
        os.umask(before)
    assert (tmp_path / "shelf").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "shelf" / "drive-0.img").stat().st_mode & 0o777 == 0o600


def test_partial_drive_after_a_crash_is_recreated(tmp_path: Path) -> None:
    (tmp_path / "drive-0.img.partial").write_bytes(b"half")
    assert len(enclosure(tmp_path, drives=1).prepare().shards) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "drive-0.img"]


def test_drive_of_another_fabric_is_refused(tmp_path: Path) -> None:
    enclosure(tmp_path).prepare()
    before = (tmp_path / "drive-0.img").read_bytes()
    with pytest.raises(FormatError, match="move the file away, or start the other fabric"):
        enclosure(tmp_path, fabric=FabricId(b"g" * 16)).prepare()
    assert (tmp_path / "drive-0.img").read_bytes() == before


def test_swapped_drives_are_refused(tmp_path: Path) -> None:
    enclosure(tmp_path).prepare()
    (tmp_path / "drive-0.img").rename(tmp_path / "aside")
    (tmp_path / "drive-1.img").rename(tmp_path / "drive-0.img")
    (tmp_path / "aside").rename(tmp_path / "drive-1.img")
    with pytest.raises(FormatError, match="holds shard shelf/drive-1/0"):
        enclosure(tmp_path).prepare()


def test_other_file_is_refused_with_its_path(tmp_path: Path) -> None:
    stranger = tmp_path / "drive-0.img"
    stranger.write_bytes(b"holiday pictures" * 1000)
    with pytest.raises(FormatError, match=f"{stranger}: this is not a shard of Ostraca"):
        enclosure(tmp_path).prepare()
    assert stranger.read_bytes() == b"holiday pictures" * 1000


def test_oversized_drives_are_refused_before_any_write(tmp_path: Path) -> None:
    with pytest.raises(DriveError, match="choose a smaller capacity or another directory"):
        enclosure(tmp_path, drive_bytes=1 << 44).prepare()
    assert list(tmp_path.iterdir()) == []


def test_too_small_drive_names_the_least_size(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"at least {3 * MIB} bytes"):
        enclosure(tmp_path, drive_bytes=2 * MIB)


@pytest.mark.parametrize(
    ("drive_bytes", "segment_bytes"),
    [(4 << 30, 64 * MIB), (300 * MIB, 32 * MIB), (12 * MIB, MIB), (3 * MIB, MIB)],
)
def test_small_drives_have_small_segments(tmp_path: Path, drive_bytes: int, segment_bytes: int) -> None:
    planned = FileEnclosure(SHELF, tmp_path, fabric=FABRIC, drives=1, drive_bytes=drive_bytes)
    assert planned._geometry.segment_bytes == segment_bytes
