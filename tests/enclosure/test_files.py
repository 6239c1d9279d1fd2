from __future__ import annotations

from pathlib import Path

import pytest

from ostraca_enclosure.files import FileEnclosure
from ostraca_fabric.errors import DriveError, FormatError, UsageError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.fabric_map import DriveRecord
from ostraca_fabric.flash.geometry import MIB
from ostraca_fabric.flash.superblock import decode_superblock
from ostraca_fabric.ids import DriveId, EnclosureId, FabricId, ShardId

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


def test_a_drive_is_as_large_as_asked_and_has_all_of_it_on_disk(tmp_path: Path) -> None:
    enclosure(tmp_path).prepare()
    found = (tmp_path / "drive-0.img").stat()
    assert found.st_size == 9 * MIB
    assert found.st_blocks * 512 >= 9 * MIB


def test_drives_are_found_again_and_never_formatted_twice(tmp_path: Path) -> None:
    first = enclosure(tmp_path).prepare()
    before = (tmp_path / "drive-0.img").read_bytes()
    assert enclosure(tmp_path).prepare() == first
    assert (tmp_path / "drive-0.img").read_bytes() == before


def test_each_formatting_has_an_id_of_its_own(tmp_path: Path) -> None:
    enclosure(tmp_path).prepare()
    superblocks = [
        decode_superblock((tmp_path / f"drive-{number}.img").read_bytes()[: 2 * PAGE_BYTES])
        for number in range(2)
    ]
    assert superblocks[0].format_id != superblocks[1].format_id


def test_a_lost_drive_is_made_anew_beside_those_that_remain(tmp_path: Path) -> None:
    enclosure(tmp_path).prepare()
    kept = (tmp_path / "drive-1.img").read_bytes()
    (tmp_path / "drive-0.img").unlink()
    assert len(enclosure(tmp_path).prepare().shards) == 2
    assert (tmp_path / "drive-1.img").read_bytes() == kept


def test_a_drive_left_half_made_by_a_crash_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "drive-0.partial").write_bytes(b"half")
    assert len(enclosure(tmp_path, drives=1).prepare().shards) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "drive-0.img"]


def test_a_drive_of_another_fabric_is_refused_and_left_alone(tmp_path: Path) -> None:
    enclosure(tmp_path).prepare()
    before = (tmp_path / "drive-0.img").read_bytes()
    with pytest.raises(FormatError, match="left alone"):
        enclosure(tmp_path, fabric=FabricId(b"g" * 16)).prepare()
    assert (tmp_path / "drive-0.img").read_bytes() == before


def test_two_drives_in_each_other_s_place_are_refused(tmp_path: Path) -> None:
    enclosure(tmp_path).prepare()
    (tmp_path / "drive-0.img").rename(tmp_path / "aside")
    (tmp_path / "drive-1.img").rename(tmp_path / "drive-0.img")
    (tmp_path / "aside").rename(tmp_path / "drive-1.img")
    with pytest.raises(FormatError, match="holds shard shelf/drive-1/0"):
        enclosure(tmp_path).prepare()


def test_a_file_that_is_no_drive_is_refused_by_its_path(tmp_path: Path) -> None:
    stranger = tmp_path / "drive-0.img"
    stranger.write_bytes(b"holiday pictures" * 1000)
    with pytest.raises(FormatError, match=f"{stranger}: this is not a shard of Ostraca"):
        enclosure(tmp_path).prepare()
    assert stranger.read_bytes() == b"holiday pictures" * 1000


def test_more_than_the_disk_holds_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DriveError, match="take a smaller capacity or another directory"):
        enclosure(tmp_path, drive_bytes=1 << 44).prepare()
    assert list(tmp_path.iterdir()) == []


def test_a_drive_too_small_for_a_shard_says_how_large_it_has_to_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"at least {3 * MIB} bytes"):
        enclosure(tmp_path, drive_bytes=2 * MIB)


@pytest.mark.parametrize(
    ("drive_bytes", "segment_bytes"),
    [(4 << 30, 64 * MIB), (300 * MIB, 32 * MIB), (12 * MIB, MIB), (3 * MIB, MIB)],
)
def test_small_drives_have_small_segments(tmp_path: Path, drive_bytes: int, segment_bytes: int) -> None:
    planned = FileEnclosure(SHELF, tmp_path, fabric=FABRIC, drives=1, drive_bytes=drive_bytes)
    assert planned._geometry.segment_bytes == segment_bytes
