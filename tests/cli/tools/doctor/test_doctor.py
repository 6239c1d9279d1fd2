"""`ostraca doctor`: reports on drives, and writes only to a named shard."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fabric.flash.golden_images import LISTED, SUPERBLOCK, images, of_version

from ostraca_cli.composition.state import FabricShape, FabricState
from ostraca_cli.program import main
from ostraca_cli.tools.doctor.drives import DriveFile
from ostraca_cli.tools.doctor.examine import examine_drive
from ostraca_enclosure.files import FileEnclosure
from ostraca_fabric.flash.superblock import decode_superblock
from ostraca_fabric.model.ids import EnclosureId

DRIVE_BYTES = 3 << 20
IMAGES = images()
SEGMENT = SUPERBLOCK.geometry.summary_offset(0)


class Shown:
    """Output and exit code of a command."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *argv: object) -> None:
        self.code = main(["doctor", *map(str, argv)])
        self.out, self.err = capsys.readouterr()


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """Return a drive with the golden shard, outside of any fabric's directory."""
    path = tmp_path / "drive.img"
    path.write_bytes(IMAGES["shard"])
    return path


@pytest.fixture
def fabric(tmp_path: Path) -> Path:
    """Return the directory of a stopped fabric of two empty drives."""
    state = FabricState(tmp_path / "f", FabricShape(enclosures=1, drives=2, drive_bytes=DRIVE_BYTES))
    FileEnclosure(
        EnclosureId("enclosure-0"),
        tmp_path / "f" / "enclosure-0",
        fabric=state.fabric,
        drives=2,
        drive_bytes=DRIVE_BYTES,
    ).prepare()
    state.close()
    return tmp_path / "f"


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def test_a_good_drive_is_explained(drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Shown(capsys, drive)
    assert (shown.code, shown.err) == (0, "")
    for said in (
        "shard        shelf-7/nvme0/0, at byte 0",
        "superblock   good; its copy: good",
        "filled       2 segments, 128 blocks",
        "generations 3.1 to 3.1: 1 segment, 125 blocks",
        "generations 4.3 to 4.3: 1 segment, 3 blocks",
        "`ostraca up` can use the drive.",
        "1 drive, no problems.",
    ):
        assert said in shown.out


def test_looking_changes_nothing_on_a_drive(drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive.chmod(0o400)
    for options in ([], ["--verify"], ["--json"], *(["--dump", what] for what in ("superblock", "entries"))):
        assert Shown(capsys, drive, *options).code == 0
    assert drive.read_bytes() == IMAGES["shard"]


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("superblock-blank", "the page is blank: format the drive first"),
        ("superblock-foreign", "not a shard of Ostraca"),
        ("superblock-older", "flash format 0 is older"),
        ("superblock-newer", "flash format 2 is newer than this release reads (1 to 1): upgrade"),
        ("superblock-damaged-fabric", "the superblock is damaged"),
        ("superblock-copy-wiped", "the superblock's copy is blank, and the other is good"),
        ("superblock-first-page-wiped", "the superblock's first page is blank, and the other is good"),
    ],
)
def test_a_superblock_that_is_not_good_is_named_with_what_to_do(
    image: str, said: str, drive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overwrite(drive, 0, IMAGES[image])
    shown = Shown(capsys, drive)
    assert shown.code == 1
    assert said in shown.out
    assert "remedy" in shown.out
    assert ("can't use the drive" in shown.out) == ("wiped" not in image)


def test_a_damaged_summary_page_is_counted_with_what_it_takes_along(drive: Path) -> None:
    overwrite(drive, SEGMENT + 2 * 4096 + 500, b"rot")
    (shard,) = examine_drive(drive).shards
    first = shard.segments_found[0]
    assert (first.pages_damaged, first.pages_missing, first.entries) == (1, 1, 75)
    assert shard.can_be_used
    assert "1 summary pages are damaged, and 1 required pages" in shard.problems[0].description


def test_a_drive_that_ends_before_its_shard_says_by_how_much(drive: Path) -> None:
    os.truncate(drive, DRIVE_BYTES - 1 - (1 << 20))
    found = examine_drive(drive, is_verifying=True)
    (shard,) = found.shards
    assert f"ends {(1 << 20) + 1} bytes before" in shard.problems[0].description
    assert [segment.is_readable for segment in shard.segments_found] == [True, False]
    assert shard.read_back is not None
    assert shard.read_back.blocks_unreadable == 0


def test_a_block_that_can_not_be_read_is_named(drive: Path) -> None:
    os.truncate(drive, SUPERBLOCK.geometry.data_offset(1) + 100)
    (shard,) = examine_drive(drive, is_verifying=True).shards
    assert shard.read_back is not None
    assert shard.read_back.blocks_unreadable == 3
    assert shard.read_back.first_bad == tuple(block.key.hex() for block in LISTED[-3:])


def test_verifying_checks_every_block_by_its_tag(drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Shown(capsys, drive, "--verify")
    assert shown.code == 0
    assert "128 of 128 blocks have correct tags" in shown.out
    overwrite(drive, SUPERBLOCK.geometry.data_offset(0), b"another block's bytes")
    shown = Shown(capsys, drive, "--verify")
    assert shown.code == 1
    assert "127 of 128 blocks have correct tags" in shown.out
    assert f"not good: key {LISTED[0].key.hex()}" in shown.out
    assert "1 of 128 listed blocks have wrong content" in shown.out


def test_shards_that_lie_end_to_end_are_all_found(tmp_path: Path) -> None:
    path = tmp_path / "two.img"
    path.write_bytes(IMAGES["shard"] * 2 + bytes(5000))
    found = examine_drive(path)
    assert [shard.offset for shard in found.shards] == [0, DRIVE_BYTES]
    assert [shard.can_be_used for shard in found.shards] == [True, False]
    assert "was copied from another place" in found.shards[1].problems[0].description
    assert found.bytes_behind == 5000


def test_a_fabric_s_drives_are_compared_with_its_record(
    fabric: Path, drive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Shown(capsys, fabric).code == 0
    drive.rename(fabric / "enclosure-0" / "drive-0.img")
    (fabric / "enclosure-0" / "drive-1.img").unlink()
    shown = Shown(capsys, fabric)
    assert shown.code == 1
    assert "the drive holds shard shelf-7/nvme0/0 of fabric 000102" in shown.out
    assert "it is missing: shard enclosure-0/drive-1/0 belongs here" in shown.out
    assert shown.out.endswith("2 drives, 2 with problems.\n")


def test_json_tells_the_same(fabric: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(Shown(capsys, fabric, "--json").out)
    assert told["is_good"] is True
    assert [drive["shards"][0]["shard"] for drive in told["drives"]] == [
        "enclosure-0/drive-0/0",
        "enclosure-0/drive-1/0",
    ]


def test_entries_are_dumped_as_they_were_listed(drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Shown(capsys, drive, "--dump", "entries", "--json")
    rows = [json.loads(line) for line in shown.out.splitlines()]
    assert [(row["key"], row["tag"], row["length"]) for row in rows] == [
        (block.key.hex(), block.tag.hex(), len(block.data)) for block in LISTED
    ]


def test_a_reader_that_stops_early_is_no_fault_of_the_drive(drive: Path) -> None:
    command = [sys.executable, "-m", "ostraca_cli", "doctor", str(drive), "--dump", "entries"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # less than the output
        assert process.stdout.read(1)
        process.stdout.close()  # as `head` does
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_summary_pages_are_dumped_with_their_places(drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Shown(capsys, drive, "--dump", "summary", "--segment", 0)
    places = [line.split("  is_newest")[0].strip() for line in shown.out.splitlines()[1:]]
    assert places == [
        f"shard=shelf-7/nvme0/0  segment=0  place={place}  state=good"
        for place in ("tail 0", "tail 1", "full 0", "full 1")
    ]


@pytest.mark.parametrize("state", ["blank", "older", "damaged-checksum"])
def test_formatting_makes_an_unusable_drive_of_a_fabric_an_empty_shard(
    state: str, fabric: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drive = fabric / "enclosure-0" / "drive-1.img"
    before = decode_superblock(drive.read_bytes())
    overwrite(drive, 0, IMAGES[f"superblock-{state}"])
    assert Shown(capsys, drive, "--format", before.shard).code == 0
    after = decode_superblock(drive.read_bytes())
    assert (after.fabric, after.shard, after.geometry) == (before.fabric, before.shard, before.geometry)
    assert after.format_id != before.format_id
    assert Shown(capsys, fabric).code == 0


def test_formatting_forgets_every_block(drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Shown(capsys, drive, "--format", "shelf-7/nvme0/0").code == 0
    shown = Shown(capsys, drive)
    assert shown.code == 0
    assert "empty" in shown.out
    assert "6 pages from before the last format" in shown.out


@pytest.mark.parametrize(
    ("image", "named", "code", "said"),
    [
        ("superblock-good", "shelf-7/nvme0/1", 2, "holds shelf-7/nvme0/0, not shelf-7/nvme0/1: nothing was"),
        ("superblock-foreign", "shelf-7/nvme0/0", 1, "Nothing was written"),
        ("superblock-newer", "shelf-7/nvme0/0", 1, "Nothing was written"),
        ("superblock-blank", "shelf-7/nvme0/0", 1, "the shard to format is unknown"),
    ],
)
def test_formatting_is_refused_and_writes_nothing(
    image: str, named: str, code: int, said: str, drive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overwrite(drive, 0, IMAGES[image])
    before = drive.read_bytes()
    shown = Shown(capsys, drive, "--format", named)
    assert (shown.code, shown.out) == (code, "")
    assert said in shown.err
    assert drive.read_bytes() == before


def test_a_newer_copy_behind_a_damaged_page_is_not_formatted_over(
    fabric: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drive = fabric / "enclosure-0" / "drive-0.img"
    overwrite(drive, 0, IMAGES["superblock-damaged-fabric"][:4096] + of_version(2)[:4096])
    shown = Shown(capsys, drive, "--format", "enclosure-0/drive-0/0")
    assert shown.code == 1
    assert "newer" in shown.err


def test_a_running_fabric_can_be_read_and_not_formatted(
    fabric: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = FabricState(fabric, FabricShape(1, 2, DRIVE_BYTES))
    drive = fabric / "enclosure-0" / "drive-0.img"
    before = drive.read_bytes()
    shown = Shown(capsys, fabric)
    assert shown.code == 0
    assert "a fabric uses this drive now" in shown.out
    refused = Shown(capsys, drive, "--format", "enclosure-0/drive-0/0")
    assert refused.code == 1
    assert "another process runs a fabric" in refused.err
    assert drive.read_bytes() == before
    running.close()


def test_a_drive_that_is_a_link_is_its_fabric_s_all_the_same(
    fabric: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = fabric / "enclosure-0" / "drive-0.img"
    link.rename(fabric.parent / "device")
    link.symlink_to(fabric.parent / "device")
    running = FabricState(fabric, FabricShape(1, 2, DRIVE_BYTES))
    shown = Shown(capsys, fabric)
    assert (shown.code, shown.out.count("a fabric uses this drive now")) == (0, 2)
    assert "another process" in Shown(capsys, link, "--format", "enclosure-0/drive-0/0").err
    running.close()


NAMED = "enclosure-0/drive-0/0"


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize(
    ("lay", "said", "is_missing"),
    [
        (lambda path: None, "it is missing: shard enclosure-0/drive-0/0 belongs here", True),
        (lambda path: path.symlink_to("unmounted"), "it is a link to unmounted, where nothing is", False),
        (os.mkfifo, "it is a FIFO, not a file", False),
        (Path.mkdir, "it is a folder, not a file", False),
        (lambda path: path.symlink_to("/dev/zero"), "it is a character device, not a file", False),
    ],
)
def test_what_lies_in_a_drive_s_place_is_told_with_how_to_replace_it(
    fabric: Path,
    capsys: pytest.CaptureFixture[str],
    lay: Callable[[Path], object],
    said: str,
    *,
    is_missing: bool,
    is_alone: bool,
) -> None:
    drive = fabric / "enclosure-0" / "drive-0.img"
    drive.unlink()
    lay(drive)
    shown = Shown(capsys, drive if is_alone else fabric)
    assert shown.code == 1
    assert said in shown.out
    assert f"run `ostraca doctor {drive} --format {NAMED}`" in shown.out
    assert ("move away what lies there" in shown.out) is not is_missing


def test_a_drive_is_replaced_on_purpose_once_nothing_lies_in_its_place(
    fabric: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drive = fabric / "enclosure-0" / "drive-0.img"
    before = decode_superblock(drive.read_bytes()[:8192])
    drive.unlink()
    drive.symlink_to("unmounted")
    refused = Shown(capsys, drive, "--format", NAMED)
    assert (refused.code, refused.out) == (1, "")
    drive.unlink()
    assert Shown(capsys, drive, "--format", "enclosure-0/drive-1/0").code == 2
    assert not os.path.lexists(drive)
    made = Shown(capsys, drive, "--format", NAMED)
    assert (made.code, made.err) == (0, "")
    after = decode_superblock(drive.read_bytes()[:8192])
    assert replace(after, format_id=before.format_id) == before
    assert after.format_id != before.format_id
    assert after.format_id.hex() in made.out
    assert drive.stat().st_mode & 0o777 == 0o600
    assert Shown(capsys, fabric).code == 0


def test_a_drive_too_short_for_a_superblock_is_trouble(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.img").write_bytes(b"x" * 100)
    shown = Shown(capsys, tmp_path / "short.img")
    assert shown.code == 1
    assert "the drive has 100 bytes, and the smallest shard has 3145728" in shown.out


@pytest.mark.skipif(os.getuid() == 0, reason="root may search everything")
def test_a_folder_that_may_not_be_searched_is_not_taken_for_an_empty_one(
    fabric: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fabric.chmod(0)
    for argv in ([fabric], [fabric / "enclosure-0" / "drive-0.img", "--format", NAMED]):
        shown = Shown(capsys, *argv)
        assert shown.code == 2
        assert "run this as" in shown.err
        assert "Errno" not in shown.err
    fabric.chmod(0o700)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_drive_that_may_not_be_read_is_trouble_and_hides_no_other(
    fabric: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fabric / "enclosure-0" / "drive-0.img").chmod(0)
    shown = Shown(capsys, fabric)
    assert shown.code == 1
    assert "it can't be opened (permission denied)" in shown.out
    assert "run this as the owner, or give its user access" in shown.out
    assert "shard        enclosure-0/drive-1/0" in shown.out


def test_what_is_no_drive_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(tmp_path)  # a socket's path is short
        listening.bind("agent.sock")
        os.chdir(here)
        for path, said in (
            (tmp_path / "nowhere", "does not exist"),
            (tmp_path, "holds no drives"),
            (tmp_path / "agent.sock", "is neither a file nor a block device nor a directory"),
        ):
            shown = Shown(capsys, path)
            assert (shown.code, shown.out) == (2, "")
            assert said in shown.err


@pytest.mark.parametrize(
    "options",
    [
        ["--segment", "0"],
        ["--verify", "--dump", "summary"],
        ["--dump", "entries", "--segment", "99"],
        ["--dump", "entries", "--segment", "-1"],
        ["--format", "shelf-7/nvme0/0", "--json"],
    ],
)
def test_options_that_make_no_sense_are_bad_usage(
    options: list[str], drive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Shown(capsys, drive, *options)
    assert shown.code == 2
    assert shown.err


def test_a_sparse_drive_of_a_terabyte_is_read_a_piece_at_a_time(tmp_path: Path) -> None:
    """Memory holds a summary area or a block at a time, whatever the size of the drive."""
    path = tmp_path / "large.img"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with DriveFile(path) as drive:
        assert drive.read((1 << 40) - 4096, 8192) == bytes(4096)
        assert drive.read(1 << 39, 4 << 20) == bytes(4 << 20)
