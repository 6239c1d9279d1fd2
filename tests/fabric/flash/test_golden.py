"""Golden images: today's writer writes them; today's reader and one without shared code read them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import xxhash
from tests.fabric.flash import small_reader
from tests.fabric.flash.golden_images import FIELDS, LISTED, SUPERBLOCK, images, stored

from ostraca_fabric.errors import FormatError
from ostraca_fabric.flash.recovery import RecoveredAreas, recover
from ostraca_fabric.flash.summary import offsets_of
from ostraca_fabric.flash.superblock import CopyState, chosen_copy, decode_superblock, examine_superblock

STORED = stored()
PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "formats" / "flash-format.md").read_text()
STATES = {
    "superblock-good": CopyState.GOOD,
    "superblock-blank": CopyState.BLANK,
    "superblock-foreign": CopyState.FOREIGN,
    "superblock-older": CopyState.OLDER,
    "superblock-newer": CopyState.NEWER,
    "superblock-first-page-wiped": CopyState.GOOD,
    "superblock-copy-wiped": CopyState.GOOD,
    "superblock-damaged-magic": CopyState.FOREIGN,
    **{f"superblock-damaged-{field}": CopyState.DAMAGED for field in FIELDS if field != "magic"},
}


def test_today_s_writer_writes_every_image_byte_by_byte() -> None:
    written = images()
    assert written.keys() == STORED.keys()
    assert [name for name, image in written.items() if STORED[name] != image] == []


@pytest.mark.parametrize(("name", "state"), STATES.items(), ids=STATES)
def test_both_readers_say_what_a_superblock_is(name: str, state: CopyState) -> None:
    image = STORED[name]
    assert chosen_copy(examine_superblock(image)).state is state
    if state is CopyState.GOOD:
        assert decode_superblock(image) == SUPERBLOCK
        assert small_reader.superblock(image).shard == SUPERBLOCK.shard
        return
    with pytest.raises(FormatError, match=r"format|choose another|upgrade"):
        decode_superblock(image)
    with pytest.raises(small_reader.NoShardError, match=state.value):
        small_reader.superblock(image)


def test_both_readers_find_the_same_identity_and_measures() -> None:
    found, geometry = small_reader.superblock(STORED["shard"]), SUPERBLOCK.geometry
    assert decode_superblock(STORED["shard"]) == SUPERBLOCK
    assert dataclasses.astuple(found) == (
        SUPERBLOCK.fabric,
        SUPERBLOCK.format_id,
        geometry.shard_bytes,
        geometry.segment_bytes,
        geometry.first_segment_offset,
        geometry.segments,
        geometry.summary_pages,
        SUPERBLOCK.drive_offset,
        SUPERBLOCK.enclosure,
        SUPERBLOCK.drive,
        SUPERBLOCK.shard,
    )


def recovered(image: bytes) -> RecoveredAreas:
    geometry = SUPERBLOCK.geometry
    begins = [geometry.summary_offset(segment) for segment in range(geometry.segments)]
    areas = b"".join(image[begin : begin + geometry.summary_bytes] for begin in begins)
    rows = np.frombuffer(areas, np.uint8).reshape(geometry.segments, -1)
    return recover(SUPERBLOCK, np.arange(geometry.segments), rows)


def test_both_readers_find_the_same_blocks_and_each_under_its_tag() -> None:
    image = STORED["shard"]
    ours = [
        (
            entry["key"].tobytes(),
            entry["tag"].tobytes(),
            int(entry["seed"]),
            image[offset : offset + int(entry["length"])],
        )
        for segment in recovered(image).segments
        for entry, offset in zip(segment.entries, offsets_of(segment.entries).tolist(), strict=True)
    ]
    theirs = [(block.key, block.tag, block.seed, block.data) for block in small_reader.blocks(image)]
    assert ours == theirs == [(block.key, block.tag, block.seed, block.data) for block in LISTED]
    assert all(xxhash.xxh3_128_digest(data, seed) == tag for _, tag, seed, data in theirs)


def test_both_readers_find_the_same_blocks_when_any_page_of_a_summary_is_damaged() -> None:
    geometry, roll = SUPERBLOCK.geometry, np.random.default_rng(7)
    for segment in range(geometry.segments):
        for place in range(geometry.summary_pages):
            image = bytearray(STORED["shard"])
            image[geometry.summary_offset(segment) + place * 4096 + int(roll.integers(4096))] ^= 1
            found = recovered(bytes(image)).segments
            ours = [entry["key"].tobytes() for each in found for entry in each.entries]
            theirs = [block.key for block in small_reader.blocks(bytes(image))]
            assert sorted(ours) == sorted(theirs), (segment, place)


def test_the_reference_page_names_the_images_and_the_reader() -> None:
    assert "tests/fabric/flash/golden" in PAGE
    assert "tests/fabric/flash/small_reader.py" in PAGE
