"""`ostraca fabric rebuild`: the record of a fabric, made again from its drives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.tools.doctor.volume_drives import record_volumes
from tests.fabric.flash.golden_volumes import FULL, PLAIN

from ostraca_cli.commands.fabric import rebuild
from ostraca_cli.composition.state import FabricShape, FabricState, lock_directory
from ostraca_cli.program import main
from ostraca_enclosure.files import FileEnclosure
from ostraca_fabric.errors import FormatError, MembershipError
from ostraca_fabric.model.ids import EnclosureId, FabricId
from ostraca_fabric.model.volume import VolumeRecord

DRIVE_BYTES = 3 << 20
SHAPE = FabricShape(enclosures=2, drives=2, drive_bytes=DRIVE_BYTES)


class Shown:
    """What a command printed, and its exit code."""

    def __init__(self, capsys: pytest.CaptureFixture[str], directory: Path, *argv: object) -> None:
        self.code = main(["fabric", "rebuild", "--dir", str(directory), *map(str, argv)])
        self.out, self.err = capsys.readouterr()


@pytest.fixture
def fabric(tmp_path: Path) -> Path:
    """Return the directory of a fabric of two enclosures with two drives each, which does not run."""
    directory = tmp_path / "f"
    state = FabricState(directory, SHAPE)
    for number in range(2):
        name = f"enclosure-{number}"
        FileEnclosure(
            EnclosureId(name), directory / name, fabric=state.fabric, drives=2, drive_bytes=DRIVE_BYTES
        ).prepare()
    state.store_volumes((PLAIN, FULL))
    state.close()
    record_volumes(directory / "enclosure-0" / "drive-0.img", PLAIN)
    record_volumes(directory / "enclosure-1" / "drive-1.img", PLAIN, FULL)
    return directory


def opened(directory: Path) -> tuple[bytes, bytes, tuple[VolumeRecord, ...]]:
    """Return what `ostraca up` would find there."""
    state = FabricState(directory, SHAPE)
    state.close()
    return state.fabric, state.key, state.volumes


def test_a_lost_record_is_made_again_and_everything_is_found(
    fabric: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = opened(fabric)
    (fabric / "fabric.json").unlink()
    shown = Shown(capsys, fabric)
    assert (shown.code, shown.err) == (0, "")
    assert opened(fabric) == before
    for said in (
        f"fabric {before[0].hex()}",
        "enclosure-0/drive-0/0     3.0 MiB  1 volume recorded",
        "enclosure-0/drive-1/0     3.0 MiB  no volumes recorded",
        "enclosure-1/drive-1/0     3.0 MiB  2 volumes recorded",
        "volumes: 2",
        "tenant/volume        blocks of up to 1.0 MiB, model 'model@1'",
        "key: present in the directory",
        f"ostraca up --dir {fabric} --enclosures 2 --drives 2 --capacity 12MiB",
    ):
        assert said in shown.out


def test_up_says_that_a_record_is_lost_and_leaves_the_key_alone(fabric: Path) -> None:
    key = (fabric / "fabric.key").read_bytes()
    (fabric / "fabric.json").unlink()
    with pytest.raises(FormatError, match="ostraca fabric rebuild"):
        FabricState(fabric, SHAPE)
    assert (fabric / "fabric.key").read_bytes() == key
    assert not (fabric / "fabric.json").exists()


def test_a_lost_key_is_asked_for_and_taken_from_a_copy(
    fabric: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = opened(fabric)
    (fabric / "fabric.json").unlink()
    copy = (fabric / "fabric.key").rename(tmp_path / "copy.key")
    shown = Shown(capsys, fabric)
    assert shown.code == 1
    assert "no block can be found without the key. Give a copy with --key" in shown.err
    assert not (fabric / "fabric.json").exists()
    assert Shown(capsys, fabric, "--key", copy).code == 0
    assert opened(fabric) == before
    assert (fabric / "fabric.key").stat().st_mode & 0o777 == 0o600


def test_with_a_new_key_blocks_are_given_up_and_it_says_so(
    fabric: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, key, volumes = opened(fabric)
    (fabric / "fabric.json").unlink()
    (fabric / "fabric.key").unlink()
    shown = Shown(capsys, fabric, "--new-key")
    assert shown.code == 0
    _, after, found = opened(fabric)
    assert after != key
    assert found == volumes


@pytest.mark.parametrize("size", [0, 31])
def test_what_is_no_key_is_not_taken_for_one(
    size: int, fabric: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fabric / "fabric.json").unlink()
    (fabric / "fabric.key").unlink()
    (tmp_path / "short").write_bytes(bytes(size))
    assert "and a fabric key has 32" in Shown(capsys, fabric, "--key", tmp_path / "short").err
    assert not (fabric / "fabric.key").exists()


def test_a_key_that_is_there_is_never_replaced(
    fabric: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fabric / "fabric.json").unlink()
    (tmp_path / "other").write_bytes(bytes(32))
    assert "are different keys" in Shown(capsys, fabric, "--key", tmp_path / "other").err
    assert Shown(capsys, fabric, "--key", fabric / "fabric.key").code == 0


def test_a_record_that_is_there_is_replaced_only_when_told(
    fabric: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = opened(fabric)
    refused = Shown(capsys, fabric)
    assert refused.code == 2
    assert "nothing needs a rebuild" in refused.err
    (fabric / "fabric.json").write_text("{")
    assert Shown(capsys, fabric, "--force").code == 0
    assert opened(fabric) == before
    assert (fabric / "fabric.json.replaced").read_text() == "{"


def test_what_the_record_alone_knows_of_volumes_stays_so_that_nothing_erased_comes_back(
    fabric: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The owners had not yet written it to their drives."""
    late = replace(PLAIN, name="late", is_erasable=True).erased()
    state = FabricState(fabric, SHAPE)
    state.store_volumes((PLAIN, FULL.erased(), late))
    state.close()
    shown = Shown(capsys, fabric, "--force")
    assert shown.code == 0
    assert "volumes: 3" in shown.out
    assert {(each.name, each.incarnation) for each in opened(fabric)[2]} == {
        (PLAIN.name, 1),
        (FULL.name, FULL.incarnation + 1),
        ("late", 2),
    }


def test_what_the_record_of_another_fabric_says_of_volumes_counts_for_nothing(
    fabric: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = opened(fabric)
    other = FabricState(tmp_path / "other", SHAPE)
    other.store_volumes((PLAIN.erased(), replace(PLAIN, name="other")))
    other.close()
    (fabric / "fabric.json").write_bytes((tmp_path / "other" / "fabric.json").read_bytes())
    assert Shown(capsys, fabric, "--force").code == 0
    assert opened(fabric) == before


def test_a_rebuild_that_dies_leaves_the_record_that_it_was_to_replace(
    fabric: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = FabricState(fabric, SHAPE)
    state.store_volumes((PLAIN, FULL.erased()))
    state.close()
    before = (fabric / "fabric.json").read_bytes()

    def fails(*_: object) -> None:
        raise MembershipError("as if it had died")

    with monkeypatch.context() as dying:
        dying.setattr(rebuild, "write_fabric", fails)
        assert Shown(capsys, fabric, "--force").code == 1
    assert (fabric / "fabric.json").read_bytes() == before
    assert Shown(capsys, fabric, "--force").code == 0
    assert {each.incarnation for each in opened(fabric)[2]} == {1, FULL.incarnation + 1}


def test_a_dry_run_writes_nothing_and_says_what_would_be_done(
    fabric: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fabric / "fabric.json").unlink()
    (fabric / "fabric.key").unlink()
    before = {path: path.stat().st_mtime_ns for path in fabric.rglob("*")}
    shown = Shown(capsys, fabric, "--dry-run")
    assert shown.code == 0
    assert "volumes: 2" in shown.out
    assert "key: lost" in shown.out
    assert {path: path.stat().st_mtime_ns for path in fabric.rglob("*")} == before


def test_a_fabric_that_runs_is_left_alone(fabric: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_directory(fabric):
        assert "another process runs a fabric" in Shown(capsys, fabric, "--force").err


def test_a_drive_in_another_one_s_place_is_a_contradiction(
    fabric: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fabric / "fabric.json").unlink()
    first, second = (fabric / "enclosure-0" / f"drive-{number}.img" for number in range(2))
    second.write_bytes(first.read_bytes())
    shown = Shown(capsys, fabric)
    assert shown.code == 1
    assert f"{first} and {second} both hold shard enclosure-0/drive-0/0" in shown.err
    assert f"{second} has shard enclosure-0/drive-0/0: move the file to" in shown.err
    assert not (fabric / "fabric.json").exists()
    dry = Shown(capsys, fabric, "--dry-run")
    assert (dry.code, dry.out.count("CONTRADICTION")) == (1, 2)


def test_drives_of_two_fabrics_are_told_apart_by_the_id_that_is_given(
    fabric: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = opened(fabric)
    (fabric / "fabric.json").unlink()
    FileEnclosure(
        EnclosureId("enclosure-1"),
        tmp_path / "x",
        fabric=FabricId(before[0][::-1]),
        drives=1,
        drive_bytes=DRIVE_BYTES,
    ).prepare()
    stranger = fabric / "enclosure-1" / "drive-0.img"
    stranger.write_bytes((tmp_path / "x" / "drive-0.img").read_bytes())
    assert "these are drives of 2 fabrics" in Shown(capsys, fabric).err
    shown = Shown(capsys, fabric, "--fabric", before[0].hex())
    assert shown.code == 0
    assert f"LOST: {stranger} belongs to fabric {before[0][::-1].hex()}: move the file away" in shown.out
    assert opened(fabric) == before


def test_missing_and_unreadable_drives_are_named_and_keep_their_places(
    fabric: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = opened(fabric)
    (fabric / "fabric.json").unlink()
    (fabric / "enclosure-0" / "drive-1.img").unlink()
    damaged = fabric / "enclosure-1" / "drive-0.img"
    damaged.write_bytes(bytes(DRIVE_BYTES))
    shown = Shown(capsys, fabric)
    assert shown.code == 0
    assert "LOST: drive enclosure-0/drive-1 is missing" in shown.out
    assert f"LOST: {damaged}: there is no shard here" in shown.out
    assert opened(fabric) == before


def test_where_no_drive_says_anything_nothing_is_rebuilt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Shown(capsys, tmp_path).code == 2
    assert Shown(capsys, tmp_path / "nowhere").code == 2
    (tmp_path / "enclosure-0").mkdir()
    (tmp_path / "enclosure-0" / "drive-0.img").write_bytes(bytes(DRIVE_BYTES))
    assert "no drive" in Shown(capsys, tmp_path).err


def test_doctor_shows_what_volumes_a_drive_records(fabric: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive = fabric / "enclosure-1" / "drive-1.img"
    assert main(["doctor", str(drive)]) == 0
    assert "volumes      2 volume records; the first copy: good; the second: blank" in capsys.readouterr().out
    assert main(["doctor", str(drive), "--dump", "volumes", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("name") for row in rows] == [None, "volume", "second", None]
    assert rows[0]["is_newest"]


def test_doctor_names_volume_records_that_are_damaged(
    fabric: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drive = fabric / "enclosure-1" / "drive-1.img"
    with drive.open("r+b") as file:
        file.seek(8192 + 100)
        file.write(b"rot")
    assert main(["doctor", str(drive)]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 copies of the volume records can't be used: damaged" in said
    assert "`ostraca up` can use the drive" in said
