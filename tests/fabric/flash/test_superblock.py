from __future__ import annotations

import dataclasses
import struct

import pytest
import xxhash

from ostraca_fabric.errors import FormatError, UsageError
from ostraca_fabric.flash.superblock import Superblock, decode_superblock, encode_superblock
from ostraca_fabric.model.extent import MIB, PAGE_BYTES, Geometry
from ostraca_fabric.model.ids import DriveId, EnclosureId, FabricId, ShardId

SUPERBLOCK = Superblock(
    FabricId(bytes(range(16))),
    bytes(range(16, 32)),
    EnclosureId("shelf-7"),
    DriveId("shelf-7/nvme0"),
    ShardId("shelf-7/nvme0/3"),
    5 * MIB,
    Geometry.planned(200 * MIB, segment_bytes=16 * MIB),
)


def with_version(version: int) -> bytes:
    page = bytearray(encode_superblock(SUPERBLOCK)[:PAGE_BYTES])
    struct.pack_into("<I", page, 8, version)
    struct.pack_into("<Q", page, 16, xxhash.xxh3_64_intdigest(bytes(page[:16] + page[24:])))
    return bytes(page) * 2


def test_a_superblock_is_read_back_as_written() -> None:
    assert decode_superblock(encode_superblock(SUPERBLOCK)) == SUPERBLOCK


def test_the_longest_names_fit() -> None:
    enclosure = "e" * 63
    drive = f"{enclosure}/{'d' * 63}"
    named = dataclasses.replace(
        SUPERBLOCK,
        enclosure=EnclosureId(enclosure),
        drive=DriveId(drive),
        shard=ShardId(f"{drive}/{10**18}"),
    )
    assert decode_superblock(encode_superblock(named)) == named


@pytest.mark.parametrize("page", [0, 1])
def test_one_damaged_page_of_the_two_is_survived(page: int) -> None:
    pages = bytearray(encode_superblock(SUPERBLOCK))
    pages[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = b"\xa5" * PAGE_BYTES
    assert decode_superblock(bytes(pages)) == SUPERBLOCK


def flipped_bit() -> bytes:
    pages = bytearray(encode_superblock(SUPERBLOCK))
    pages[60] ^= 1
    pages[PAGE_BYTES + 60] ^= 1
    return bytes(pages)


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        (bytes(2 * PAGE_BYTES), "page is blank: format the drive first"),
        (b"\x53\xef" * PAGE_BYTES, "not a shard of Ostraca .* choose another, or wipe it first"),
        (flipped_bit(), "superblock is damaged.*format the drive anew"),
        (with_version(0), "flash format 0 is older .* format the drive anew"),
        (with_version(2), "flash format 2 is newer .* upgrade this release"),
        (encode_superblock(SUPERBLOCK)[:100], "cut short"),
    ],
    ids=["blank", "foreign", "damaged", "older", "newer", "short"],
)
def test_what_is_no_superblock_is_named_and_the_message_says_what_to_do(pages: bytes, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        decode_superblock(pages)


def test_a_wiped_first_page_does_not_hide_what_the_copy_says() -> None:
    with pytest.raises(FormatError, match="newer"):
        decode_superblock(bytes(PAGE_BYTES) + with_version(9)[:PAGE_BYTES])


def test_measures_that_can_not_be_true_are_refused_though_the_checksum_holds() -> None:
    page = bytearray(encode_superblock(SUPERBLOCK)[:PAGE_BYTES])
    struct.pack_into("<Q", page, 56, 7)  # shard_bytes
    struct.pack_into("<Q", page, 16, xxhash.xxh3_64_intdigest(bytes(page[:16] + page[24:])))
    with pytest.raises(FormatError, match="makes no sense"):
        decode_superblock(bytes(page) * 2)


def test_a_shard_formatted_anew_has_another_identity() -> None:
    anew = dataclasses.replace(SUPERBLOCK, format_id=bytes(16))
    assert anew.identity.digest != SUPERBLOCK.identity.digest
    assert anew.identity.seed != SUPERBLOCK.identity.seed


@pytest.mark.parametrize("block_bytes", [1, 4096, 65536, 70_000, 1 << 20, 16 << 20])
def test_a_planned_summary_area_lists_a_data_area_full_of_expected_blocks(block_bytes: int) -> None:
    geometry = Geometry.planned(1 << 30, block_bytes=block_bytes)
    blocks = geometry.data_bytes // (-(-block_bytes // PAGE_BYTES) * PAGE_BYTES)
    assert blocks <= geometry.entries_max < blocks + 60


def test_a_shard_too_small_for_a_ring_says_how_large_it_has_to_be() -> None:
    with pytest.raises(UsageError, match=str(3 * MIB)):
        Geometry.planned(2 * MIB, segment_bytes=MIB)
    assert Geometry.planned(3 * MIB, segment_bytes=MIB).segments == 2


@pytest.mark.parametrize("segment_bytes", [0, MIB // 2, MIB + PAGE_BYTES, 257 * MIB])
def test_a_segment_of_an_odd_size_is_refused(segment_bytes: int) -> None:
    with pytest.raises(UsageError, match="whole MiB"):
        Geometry(1 << 30, segment_bytes, 2, 3)
