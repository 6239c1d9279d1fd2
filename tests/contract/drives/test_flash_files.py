"""Opening what lies at a drive's path, and noticing what happens to it while it is open."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ostraca_fabric.drives.file_drive import FileDrive
from ostraca_fabric.drives.flash_files import FlashFileError, displacement, open_flash
from ostraca_fabric.errors import DriveError
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.runtime.atomic_files import make_private_folder, write_whole
from ostraca_fabric.runtime.os_errors import explained

SIZE_BYTES = 1 << 16


def nothing(_: Path) -> None:
    pass


def dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "unmounted" / "drive.img")


def circle(path: Path) -> None:
    path.symlink_to(path)


def zeroes(path: Path) -> None:
    path.symlink_to("/dev/zero")


def full(path: Path) -> None:
    path.symlink_to("/dev/full")


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


def below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_bytes(b"")


STRANGERS: dict[Callable[[Path], object], str] = {
    nothing: "is missing: put the drive back",
    dangling_link: "unmounted/drive.img, where nothing is: mount the disk",
    circle: "its links lead in a circle",
    zeroes: "is a character device, not a file",
    full: "is a character device, not a file",
    listener: "is a socket, not a file",
    below_a_file: "a part of its path is not a folder",
    os.mkfifo: "is a FIFO, not a file",
    Path.mkdir: "is a folder, not a file",
}


@pytest.mark.parametrize("make", STRANGERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_DIRECT | os.O_CREAT])
def test_what_is_no_drive_is_refused_at_once_with_path_state_and_remedy(
    make: Callable[[Path], object], flags: int, tmp_path: Path
) -> None:
    path = tmp_path / "enclosure" / "drive.img"
    path.parent.mkdir()
    make(path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FlashFileError) as refused:
        open_flash(path, flags)
    assert str(refused.value).startswith(f"{path} ")
    assert STRANGERS[make] in str(refused.value)
    assert refused.value.is_missing is (make is nothing)
    with pytest.raises(DriveError, match=r"drive e/d can't be used: .*doctor"):
        FileDrive.open(DriveId("e/d"), str(path))
    assert sorted(tmp_path.rglob("*")) == before, "nothing is made in its place"


def test_a_file_is_opened_as_it_is_and_waits_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "drive").write_bytes(b"d" * SIZE_BYTES)
    (tmp_path / "link").symlink_to(tmp_path / "drive")
    descriptor = open_flash(tmp_path / "link", os.O_RDONLY)
    assert (os.get_blocking(descriptor), os.read(descriptor, 1)) == (True, b"d")
    os.close(descriptor)


def test_a_link_is_no_drive_if_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "drive").write_bytes(b"d" * SIZE_BYTES)
    (tmp_path / "link").symlink_to(tmp_path / "drive")
    with pytest.raises(FlashFileError, match=r"/link is a link, not a file or a block device"):
        open_flash(tmp_path / "link", os.O_RDONLY | os.O_NOFOLLOW)
    os.close(open_flash(tmp_path / "drive", os.O_RDONLY | os.O_NOFOLLOW))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "drive"
    path.write_bytes(b"d" * SIZE_BYTES)
    return path


@pytest.fixture
def opened(path: Path) -> Iterator[int]:
    descriptor = open_flash(path, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    path.with_name("other").write_bytes(b"o" * SIZE_BYTES)
    path.with_name("other").rename(path)


def move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def displace(path: Path) -> None:
    move(path)
    path.write_bytes(b"o" * SIZE_BYTES)


def lead_nowhere(path: Path) -> None:
    move(path)
    path.symlink_to(path.with_name("unmounted"))


def cut(path: Path) -> None:
    os.truncate(path, SIZE_BYTES - 1)


@pytest.mark.parametrize(
    ("happen", "said"),
    [
        (delete, "was deleted at {} while it is in use, and its blocks go with the last user: stop, and"),
        (replace, "was deleted at {} while it is in use"),
        (move, "is no longer found at {} (nothing is there): put it back there"),
        (lead_nowhere, "is no longer found at {} (nothing is there): put it back there"),
        (displace, "is not what lies at {} any more: put it back there"),
        (cut, "was cut short at {}, from 65536 to 65535 bytes: stop, and restore it"),
    ],
)
def test_what_happens_to_a_file_in_use_is_told_with_its_remedy(
    happen: Callable[[Path], object], said: str, path: Path, opened: int
) -> None:
    assert displacement(opened, str(path), SIZE_BYTES) == ""
    happen(path)
    assert displacement(opened, str(path), SIZE_BYTES).startswith(said.format(path))


def test_another_name_more_mode_and_size_displace_nothing(path: Path, opened: int) -> None:
    path.with_name("backup").hardlink_to(path)
    path.with_name("backup").unlink()
    path.chmod(0)
    os.truncate(opened, 2 * SIZE_BYTES)
    assert displacement(opened, str(path), SIZE_BYTES) == ""


@pytest.mark.parametrize("umask", [0, 0o022, 0o277])
def test_what_is_made_is_private_whatever_the_umask_and_what_was_left_over(
    umask: int, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    folder = tmp_path / "a" / "b"
    before = os.umask(umask)
    try:
        make_private_folder(folder)
        (folder / "record.partial").write_bytes(b"left over by a crash")
        (folder / "record.partial").chmod(0o666)
        write_whole(folder / "record", b"secret")
    finally:
        os.umask(before)
    modes = [each.stat().st_mode & 0o777 for each in (folder.parent, folder, folder / "record")]
    assert modes == [0o700, 0o700, 0o600]
    assert (folder / "record").read_bytes() == b"secret"
    make_private_folder(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755, "a folder that was there stays as it was"


def test_a_left_over_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"somebody's")
    (tmp_path / "record.partial").symlink_to(tmp_path / "other")
    write_whole(tmp_path / "record", b"ours")
    assert (tmp_path / "other").read_bytes() == b"somebody's"


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.EROFS, errno.ENOENT, errno.EIO])
def test_an_error_of_the_system_is_told_without_its_number(number: int) -> None:
    told = explained(OSError(number, os.strerror(number), "/f/fabric.json"))
    assert told.startswith("/f/fabric.json: ")
    assert "; " in told, "it says what to do"
    assert "Errno" not in told


def test_an_error_that_is_not_known_is_told_as_the_system_tells_it() -> None:
    assert explained(OSError("by somebody")) == "by somebody"
    assert explained(OSError(errno.EPROTO, os.strerror(errno.EPROTO))) == os.strerror(errno.EPROTO)
    assert explained(TimeoutError()) == "TimeoutError"
