"""What `ostraca up` keeps in its directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ostraca.cli.state import FabricShape, FabricState
from ostraca_fabric.errors import FormatError, MembershipError
from ostraca_fabric.ids import TenantId
from ostraca_fabric.layout import Layout
from ostraca_fabric.volume import VolumeRecord

SHAPE = FabricShape(enclosures=1, drives=2, drive_bytes=1 << 30)
VOLUME = VolumeRecord(TenantId("t"), "v", Layout(model="m", dtype="bf16", page_tokens=16), 4096)


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    first = FabricState(tmp_path, SHAPE)
    first.keep_volumes((VOLUME,))
    first.close()
    again = FabricState(tmp_path, SHAPE)
    assert (again.fabric, again.key, again.volumes) == (first.fabric, first.key, (VOLUME,))
    again.close()


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    first = FabricState(tmp_path, SHAPE)
    with pytest.raises(MembershipError, match="another process"):
        FabricState(tmp_path, SHAPE)
    first.close()


def test_volumes_that_could_not_be_written_are_not_believed(tmp_path: Path) -> None:
    state = FabricState(tmp_path, SHAPE)
    (tmp_path / "fabric.json.partial").mkdir()
    with pytest.raises(MembershipError):
        state.keep_volumes((VOLUME,))
    assert state.volumes == ()
    state.close()


def test_every_file_is_whole_when_it_is_made_durable_and_has_its_name_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut keeps what was synced: a key synced while it was empty would be lost with all blocks."""
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


def test_another_shape_and_a_damaged_record_are_refused(tmp_path: Path) -> None:
    FabricState(tmp_path, SHAPE).close()
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
