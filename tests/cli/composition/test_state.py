"""Files of `ostraca up` in its directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from pathlib import Path
from typing import IO

import pytest

from ostraca_cli.composition.state import (
    LOCK_FILE,
    RECORD_FILE,
    FabricShape,
    FabricState,
    is_running,
    read_fabric,
)
from ostraca_fabric.errors import FormatError, MembershipError
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.volume import Layout, VolumeRecord

SHAPE = FabricShape(enclosures=1, drives=2, drive_bytes=1 << 30)
VOLUME = VolumeRecord(TenantId("t"), "v", Layout(model="m", dtype="bf16", page_tokens=16), 4096)


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    first = FabricState(tmp_path, SHAPE)
    first.store_volumes((VOLUME,))
    first.close()
    again = FabricState(tmp_path, SHAPE)
    assert (again.fabric, again.key, again.volumes) == (first.fabric, first.key, (VOLUME,))
    again.close()


def test_a_record_has_no_derived_values_and_needs_only_those_of_the_first_release(tmp_path: Path) -> None:
    first = FabricState(tmp_path, SHAPE)
    first.store_volumes((VOLUME,))
    first.close()
    stored = json.loads((tmp_path / RECORD_FILE).read_bytes())
    (volume,) = stored["volumes"]
    assert set(volume) == {"tenant", "name", "layout", "block_bytes", "incarnation", "is_erasable"}
    stored["volumes"] = [{name: volume[name] for name in ("tenant", "name", "layout", "block_bytes")}]
    (tmp_path / RECORD_FILE).write_text(json.dumps(stored))
    again = FabricState(tmp_path, SHAPE)
    assert again.volumes == (VOLUME,)
    again.close()


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    first = FabricState(tmp_path, SHAPE)
    with pytest.raises(MembershipError, match="another process"):
        FabricState(tmp_path, SHAPE)
    first.close()


def test_a_directory_in_use_is_refused_whatever_was_removed_or_renamed_there(tmp_path: Path) -> None:
    there, renamed = tmp_path / "there", tmp_path / "renamed"
    first = FabricState(there, SHAPE)
    for file in there.iterdir():
        file.unlink()
    assert is_running(there)
    with pytest.raises(MembershipError, match="another process"):
        FabricState(there, SHAPE)
    there.rename(renamed)
    with pytest.raises(MembershipError, match="another process"):
        FabricState(renamed, SHAPE)
    first.close()
    assert not is_running(renamed)
    FabricState(renamed, SHAPE).close()


def test_a_directory_is_refused_to_releases_that_lock_the_file_alone(tmp_path: Path) -> None:
    first = FabricState(tmp_path, SHAPE)
    with (tmp_path / LOCK_FILE).open("ab") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    first.close()
    with (tmp_path / LOCK_FILE).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(MembershipError, match="another process"):
            FabricState(tmp_path, SHAPE)
    FabricState(tmp_path, SHAPE).close()


def test_a_file_system_that_locks_no_directories_has_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def flock(file: int | IO[bytes], how: int) -> None:
        if isinstance(file, int) and stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))  # as NFS does
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    first = FabricState(tmp_path, SHAPE)
    assert is_running(tmp_path)
    with pytest.raises(MembershipError, match="another process"):
        FabricState(tmp_path, SHAPE)
    first.close()
    FabricState(tmp_path, SHAPE).close()


def test_a_drive_is_one_fabrics_wherever_it_is_linked_from(tmp_path: Path) -> None:
    drive, link, hard = tmp_path / "drive.img", tmp_path / "link.img", tmp_path / "hard.img"
    drive.write_bytes(b"drive")
    link.symlink_to(drive)
    hard.hardlink_to(drive)
    first, second = FabricState(tmp_path / "a", SHAPE), FabricState(tmp_path / "b", SHAPE)
    first.hold_drive(drive)
    for other in (drive, link, hard):
        with pytest.raises(MembershipError, match=f"another process uses the drive {other}"):
            second.hold_drive(other)
    second.hold_drive(tmp_path / "none.img")
    first.close()
    second.hold_drive(link)
    second.close()


def test_volumes_that_could_not_be_written_are_not_believed(tmp_path: Path) -> None:
    state = FabricState(tmp_path, SHAPE)
    (tmp_path / "fabric.json.partial").mkdir()
    with pytest.raises(MembershipError):
        state.store_volumes((VOLUME,))
    assert state.volumes == ()
    state.close()


def test_every_file_is_whole_when_it_is_made_durable_and_has_its_name_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut keeps synced bytes: a key synced while empty would be lost with all blocks."""
    synced: list[tuple[str, int]] = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((path.name, path.stat().st_size if path.is_file() else 0))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    state = FabricState(tmp_path, SHAPE)
    state.worker_token()
    state.close()
    wanted = []
    for name in ("fabric.key", "fabric.json", "worker.token"):
        wanted += [(f"{name}.partial", (tmp_path / name).stat().st_size), (tmp_path.name, 0)]
    assert synced == wanted
    assert (tmp_path / "fabric.key").stat().st_mode & 0o077 == 0
    assert (tmp_path / "worker.token").stat().st_mode & 0o077 == 0


def test_drives_count_as_made_once_it_is_said_and_for_records_of_the_release_before(tmp_path: Path) -> None:
    state = FabricState(tmp_path, SHAPE)
    assert not state.are_drives_created
    state.close()
    state = FabricState(tmp_path, SHAPE)
    assert not state.are_drives_created, "the first start was interrupted"
    state.record_drives_created()
    state.close()
    again = FabricState(tmp_path, SHAPE)
    assert again.are_drives_created
    again.close()
    record = json.loads((tmp_path / "fabric.json").read_text())
    del record["is_making_drives"]
    (tmp_path / "fabric.json").write_text(json.dumps(record))
    older = FabricState(tmp_path, SHAPE)
    assert older.are_drives_created
    older.close()


def test_a_fabric_without_drives_takes_another_shape(tmp_path: Path) -> None:
    first = FabricState(tmp_path, SHAPE)
    first.close()
    smaller = FabricShape(enclosures=1, drives=2, drive_bytes=1 << 20)
    again = FabricState(tmp_path, smaller)
    again.close()
    assert (again.fabric, again.key) == (first.fabric, first.key)
    assert read_fabric(tmp_path) == (first.fabric, smaller)


def test_a_fabric_of_unfinished_drives_keeps_its_shape(tmp_path: Path) -> None:
    FabricState(tmp_path, SHAPE).close()
    (tmp_path / "enclosure-0").mkdir()
    (tmp_path / "enclosure-0" / "drive-0.img").touch()
    with pytest.raises(FormatError, match="holds a fabric of 1 enclosure with 2 drives"):
        FabricState(tmp_path, FabricShape(enclosures=1, drives=3, drive_bytes=1 << 30))


def test_a_later_start_writes_nothing_so_that_a_full_disk_keeps_no_fabric_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FabricState(tmp_path, SHAPE)
    first.record_drives_created()
    first.close()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    again = FabricState(tmp_path, SHAPE)
    again.record_drives_created()
    with pytest.raises(MembershipError, match=r"fabric.json can't be written: the file system is full; free"):
        again.store_volumes((VOLUME,))
    again.close()


def test_every_file_is_private_whatever_the_umask_and_the_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0)
    try:
        state = FabricState(tmp_path, SHAPE)
        state.store_volumes((VOLUME,))
        state.worker_token()
        state.close()
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == dict.fromkeys(
        ("fabric.json", "fabric.key", "lock", "worker.token"), 0o600
    )


def test_what_an_earlier_release_let_others_read_becomes_private(tmp_path: Path) -> None:
    FabricState(tmp_path, SHAPE).close()
    drive = tmp_path / "enclosure-0" / "drive-0.img"
    drive.parent.mkdir()
    drive.write_bytes(b"blocks")
    (tmp_path / "enclosure-0" / "drive-1.img").symlink_to(tmp_path / "unmounted")
    for path in (drive, tmp_path / "fabric.json"):
        path.chmod(0o644)
    FabricState(tmp_path, SHAPE).close()
    assert {path.stat().st_mode & 0o777 for path in (drive, tmp_path / "fabric.json")} == {0o600}


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["fabric.json", "fabric.key", "lock"])
def test_a_file_that_may_not_be_read_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    FabricState(tmp_path, SHAPE).close()
    (tmp_path / name).chmod(0)
    with pytest.raises((FormatError, MembershipError), match=f"{name}: permission denied; run this as"):
        FabricState(tmp_path, SHAPE)


@pytest.mark.parametrize("name", ["fabric.json", "fabric.key", "lock"])
def test_a_folder_in_place_of_a_file_is_told_without_an_error_number(tmp_path: Path, name: str) -> None:
    FabricState(tmp_path, SHAPE).close()
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises((FormatError, MembershipError)) as refused:
        FabricState(tmp_path, SHAPE)
    assert f"{tmp_path / name}: it is a folder, not a file; move it away" in str(refused.value)


def test_another_shape_and_a_damaged_record_are_refused(tmp_path: Path) -> None:
    first = FabricState(tmp_path, SHAPE)
    first.record_drives_created()
    first.close()
    with pytest.raises(FormatError, match="2 drives"):
        FabricState(tmp_path, FabricShape(1, 3, 1 << 30))
    (tmp_path / "fabric.json").write_bytes(b"{}")
    with pytest.raises(FormatError, match="damaged"):
        FabricState(tmp_path, SHAPE)


def test_a_lost_key_is_said_to_be_lost_and_not_made_anew(tmp_path: Path) -> None:
    FabricState(tmp_path, SHAPE).close()
    (tmp_path / "fabric.key").unlink()
    with pytest.raises(FormatError, match="key"):
        FabricState(tmp_path, SHAPE)
    assert not (tmp_path / "fabric.key").exists()


def test_a_token_file_that_is_no_text_is_an_error_that_names_it(tmp_path: Path) -> None:
    state = FabricState(tmp_path, SHAPE)
    (tmp_path / "worker.token").write_bytes(b"\xff\xfe" + bytes(32))
    with pytest.raises(FormatError, match=r"worker\.token is no text: remove the file"):
        state.worker_token()
    state.close()
