"""Finding and opening the drives that a worker may read itself."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.sdk.direct.drive_files import (
    DRIVE_BYTES,
    FABRIC,
    SUPERBLOCK_BYTES,
    as_another_user,
    create_drive,
    superblock_of,
)

from ostraca._direct.host_drives import HostDrive, open_host_drives
from ostraca_fabric.model.extent import PAGE_BYTES


def open_files(folder: Path) -> list[str]:
    """Name the open files below *folder*, by descriptor; a garbage collection may close others meanwhile."""
    targets = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this very list
            targets.append(str(descriptor.readlink()))
    return sorted(each for each in targets if each.startswith(f"{folder}/"))


@contextmanager
def found(*patterns: str) -> Iterator[list[HostDrive]]:
    drives = open_host_drives(patterns)
    try:
        yield list(drives)
    finally:
        for drive in drives:
            os.close(drive.descriptor)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder that every user may list."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_drives_are_opened_for_reading_in_the_order_of_patterns_and_paths(tmp_path: Path) -> None:
    for name in ("c.img", "a.img", "b.raw"):
        create_drive(tmp_path / name)
    with found(f"{tmp_path}/*.raw", f"{tmp_path}/*.img") as drives:
        expected = [
            (FABRIC, f"shelf/{name[0]}", f"{tmp_path}/{name}") for name in ("b.raw", "a.img", "c.img")
        ]
        assert [(each.fabric, each.drive, each.path) for each in drives] == expected
        for each in drives:
            flags = fcntl.fcntl(each.descriptor, fcntl.F_GETFL)
            assert flags & os.O_ACCMODE == os.O_RDONLY
            assert not os.get_inheritable(each.descriptor)
            assert each.size_bytes == DRIVE_BYTES


def test_a_drive_of_several_paths_is_opened_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    create_drive(tmp_path / "a.img")
    (tmp_path / "b.img").hardlink_to(tmp_path / "a.img")
    with found(f"{tmp_path}/*", f"{tmp_path}/a.img", f"{tmp_path}/./a.img") as drives:
        assert [each.path for each in drives] == [f"{tmp_path}/a.img"]
        assert open_files(tmp_path) == [f"{tmp_path}/a.img"]
    assert not caplog.records


def test_of_two_copies_of_a_drive_the_first_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    create_drive(tmp_path / "a.img")
    create_drive(tmp_path / "b.img", "a")
    with found(f"{tmp_path}/*") as drives:
        assert [each.path for each in drives] == [f"{tmp_path}/a.img"]
        assert open_files(tmp_path) == [f"{tmp_path}/a.img"]
    assert "b.img' is not read directly: drive 'shelf/a' is also at" in caplog.text


def link(path: Path) -> None:
    create_drive(path.parent.parent / "drive")
    path.symlink_to(path.parent.parent / "drive")


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def foreign(path: Path) -> None:
    path.write_bytes(b"\x7fELF" * PAGE_BYTES)


def blank(path: Path) -> None:
    path.write_bytes(bytes(DRIVE_BYTES))


def damaged(path: Path) -> None:
    content = bytearray(create_drive(path))
    content[100] ^= 1
    content[PAGE_BYTES + 100] ^= 1
    path.write_bytes(content)


def moved(path: Path) -> None:
    path.write_bytes(superblock_of("moved", drive_offset=DRIVE_BYTES) + bytes(DRIVE_BYTES))


def short(path: Path) -> None:
    create_drive(path)
    os.truncate(path, 100)


STRANGERS: dict[Callable[[Path], object], str] = {
    link: "is a link, not a file or a block device",
    link_to_nothing: "is a link, not a file or a block device",
    os.mkfifo: "is a FIFO, not a file or a block device",
    Path.mkdir: "is a folder, not a file or a block device",
    foreign: "this is not a shard of Ostraca",
    blank: "the page is blank",
    damaged: "the superblock is damaged",
    moved: f"its first shard belongs at byte {DRIVE_BYTES} of a drive",
    short: "the drive was cut short",
}


@pytest.mark.parametrize("make", STRANGERS, ids=lambda make: make.__name__)
def test_what_is_no_drive_is_left_out_with_a_line(
    make: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "drives"
    folder.mkdir()
    make(folder / "a.img")
    create_drive(folder / "b.img")
    with found(f"{folder}/*") as drives:
        assert [each.path for each in drives] == [f"{folder}/b.img"]
        assert open_files(tmp_path) == [f"{folder}/b.img"], "the other one is closed"
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"'{folder}/a.img' is not read directly: ")
    assert STRANGERS[make] in record.getMessage()


def test_the_copy_of_a_superblock_is_enough(tmp_path: Path) -> None:
    content = create_drive(tmp_path / "a.img")
    (tmp_path / "a.img").write_bytes(bytes(PAGE_BYTES) + content[PAGE_BYTES:SUPERBLOCK_BYTES])
    with found(f"{tmp_path}/*") as drives:
        assert [(each.drive, each.size_bytes) for each in drives] == [("shelf/a", SUPERBLOCK_BYTES)]


def test_a_drive_of_another_user_is_left_out_quietly(
    open_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    create_drive(open_folder / "a.img")
    (open_folder / "a.img").chmod(0)
    with as_another_user(), found(f"{open_folder}/*") as drives:
        assert drives == []
    [record] = caplog.records
    assert record.levelno == logging.INFO
    assert "a.img' is not read directly: can't be opened (permission denied)" in record.getMessage()


def test_a_pattern_without_a_match_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with found(f"{tmp_path}/nvme*") as drives:
        assert drives == []
    assert f"No drive to read directly is at '{tmp_path}/nvme*'" in caplog.text
