"""Drives that are files: made, found again, and never taken for each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostraca_enclosure.adapters.file_drives import FileDrives
from ostraca_enclosure.ports import InventoryError
from ostraca_fabric.errors import DriveError, FormatError

MIB = 1 << 20


def prepared(directory: Path, drives: int = 2, drive_bytes: int = MIB) -> FileDrives:
    made = FileDrives(directory)
    made.prepare(drives, drive_bytes)
    return made


def nguids(drives: FileDrives) -> dict[str, str]:
    return {each.name: each.nguid for each in drives.look()}


def test_drives_are_made_raw_each_with_an_nguid_of_its_own(tmp_path: Path) -> None:
    found = prepared(tmp_path / "shelf").look()
    assert [(each.name, each.size_bytes, each.is_file) for each in found] == [
        ("drive-0", MIB, True),
        ("drive-1", MIB, True),
    ]
    assert found[0].nguid != found[1].nguid
    assert {Path(each.device).read_bytes() for each in found} == {bytes(MIB)}


def test_they_are_found_again_as_they_were(tmp_path: Path) -> None:
    before = prepared(tmp_path)
    (tmp_path / "drive-1.img").write_bytes(b"blocks")
    after = prepared(tmp_path, 3, 2 * MIB)
    assert nguids(before) | nguids(after) == nguids(after)
    assert (tmp_path / "drive-1.img").read_bytes() == b"blocks"
    assert [each.size_bytes for each in after.look()] == [MIB, 6, 2 * MIB]


def test_one_that_has_gone_comes_back_as_another_drive(tmp_path: Path) -> None:
    before = nguids(prepared(tmp_path))
    (tmp_path / "drive-0.img").unlink()
    assert set(nguids(FileDrives(tmp_path))) == {"drive-1"}
    after = nguids(prepared(tmp_path))
    assert after["drive-0"] != before["drive-0"]
    assert after["drive-1"] == before["drive-1"]


def test_files_that_were_there_are_drives_too(tmp_path: Path) -> None:
    (tmp_path / "drive-7.img").write_bytes(bytes(MIB))
    (tmp_path / "drive-x.img").write_bytes(bytes(MIB))
    assert len(nguids(prepared(tmp_path, 0))["drive-7"]) == 32


def test_there_has_to_be_room(tmp_path: Path) -> None:
    with pytest.raises(DriveError, match="to spare: take a smaller --drive-size"):
        prepared(tmp_path, 2, 1 << 60)
    assert list(tmp_path.glob("*.img")) == []
    with pytest.raises(DriveError, match="take a multiple of 4096"):
        prepared(tmp_path, 1, 1000)


def test_a_damaged_record_is_told_and_not_made_anew(tmp_path: Path) -> None:
    drives = prepared(tmp_path)
    (tmp_path / "drives.json").write_text('{"version":1,"nguids":{"drive-0":"?"}}')
    with pytest.raises(InventoryError, match="is damaged"):
        drives.look()
    with pytest.raises(FormatError, match="restore it"):
        prepared(tmp_path)
