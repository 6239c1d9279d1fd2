"""Drives that are files: made, found again, and never taken for each other."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ostraca_enclosure.adapters.file_drives import FileDrives
from ostraca_enclosure.ports import InventoryError
from ostraca_fabric.errors import DriveError, FormatError
from ostraca_fabric.model.extent import Geometry, segment_bytes_for

MIB = 1 << 20


def prepared(directory: Path, drives: int = 2, drive_bytes: int = 3 * MIB) -> FileDrives:
    made = FileDrives(directory)
    made.prepare(drives, drive_bytes)
    return made


def nguids(drives: FileDrives) -> dict[str, str]:
    return {each.name: each.nguid for each in drives.look()}


def test_drives_are_created_raw_with_own_nguids(tmp_path: Path) -> None:
    found = prepared(tmp_path / "shelf").look()
    assert [(each.name, each.size_bytes, each.is_file) for each in found] == [
        ("drive-0", 3 * MIB, True),
        ("drive-1", 3 * MIB, True),
    ]
    assert found[0].nguid != found[1].nguid
    assert {Path(each.device).read_bytes() for each in found} == {bytes(3 * MIB)}


def test_drives_are_found_unchanged(tmp_path: Path) -> None:
    before = prepared(tmp_path)
    (tmp_path / "drive-1.img").write_bytes(b"blocks")
    after = prepared(tmp_path, 3, 4 * MIB)
    assert nguids(before) | nguids(after) == nguids(after)
    assert (tmp_path / "drive-1.img").read_bytes() == b"blocks"
    assert [each.size_bytes for each in after.look()] == [3 * MIB, 6, 4 * MIB]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: None, "is missing"),
        (lambda path: path.symlink_to(path.with_name("unmounted")), "where nothing is: mount the disk"),
        (os.mkfifo, "is a FIFO"),
        (Path.mkdir, "is a folder"),
        (lambda path: path.symlink_to("/dev/zero"), "is a character device"),
    ],
)
def test_missing_recorded_drive_is_reported_and_others_are_exported(
    tmp_path: Path, change: Callable[[Path], object], said: str
) -> None:
    before = nguids(prepared(tmp_path))
    (tmp_path / "drive-0.img").unlink()
    change(tmp_path / "drive-0.img")
    drives = prepared(tmp_path, 3)
    gone, here, new = drives.look()
    assert (gone.nguid, here.nguid, new.name) == (before["drive-0"], before["drive-1"], "drive-2")
    (obstacle,) = gone.obstacles
    assert obstacle.is_final
    assert said in obstacle.sentence
    assert "remove drive-0 from" in obstacle.sentence
    assert (here.obstacles, new.obstacles) == ((), ())
    assert not (tmp_path / "drive-0.img").is_file()
    assert not (tmp_path / "unmounted").exists()


def test_drive_removed_from_the_record_is_created_anew(tmp_path: Path) -> None:
    before = nguids(prepared(tmp_path))
    (tmp_path / "drive-0.img").unlink()
    record = json.loads((tmp_path / "drives.json").read_text())
    del record["nguids"]["drive-0"]
    (tmp_path / "drives.json").write_text(json.dumps(record))
    after = nguids(prepared(tmp_path))
    assert after["drive-0"] != before["drive-0"]
    assert after["drive-1"] == before["drive-1"]


def test_files_are_private_and_a_full_disk_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0)
    try:
        made = nguids(prepared(tmp_path / "shelf"))
    finally:
        os.umask(before)
    assert (tmp_path / "shelf").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "shelf").iterdir()} == {0o600}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 0))
    assert nguids(prepared(tmp_path / "shelf")) == made


def test_existing_files_are_drives(tmp_path: Path) -> None:
    (tmp_path / "drive-7.img").write_bytes(bytes(MIB))
    (tmp_path / "drive-x.img").write_bytes(bytes(MIB))
    assert len(nguids(prepared(tmp_path, 0))["drive-7"]) == 32


def test_missing_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=66 * MIB)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(DriveError) as raised:
            prepared(tmp_path, 1)
    assert str(raised.value) == (
        f"there is no room for 1 drive of {3 * MIB} bytes in {tmp_path}: {66 * MIB} bytes are free, and "
        "64 MiB of them stay free: choose a smaller --drive-size or another directory"
    )
    with pytest.raises(DriveError, match="free: choose a smaller --drive-size"):
        prepared(tmp_path, 2, 1 << 60)
    assert list(tmp_path.glob("*.img")) == []
    with pytest.raises(DriveError, match="choose a multiple of 4096"):
        prepared(tmp_path, 1, 1000)


def test_a_size_without_room_for_a_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DriveError, match=r"choose a --drive-size of at least 3145728 bytes \(3MiB\)"):
        prepared(tmp_path, 2, 3 * MIB - 4096)
    assert not list(tmp_path.iterdir())
    assert Geometry.planned(3 * MIB, segment_bytes=segment_bytes_for(3 * MIB)).segments == 2


def test_damaged_record_is_reported_and_kept(tmp_path: Path) -> None:
    drives = prepared(tmp_path)
    (tmp_path / "drives.json").write_text('{"version":1,"nguids":{"drive-0":"?"}}')
    with pytest.raises(InventoryError, match="is damaged"):
        drives.look()
    with pytest.raises(FormatError, match="restore the file"):
        prepared(tmp_path)
