"""Volume records beside the superblock: written, read back, and whatever a crash left of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.fabric.flash import small_reader
from tests.fabric.flash.golden_images import SUPERBLOCK
from tests.fabric.flash.golden_volumes import FULL, OTHER, PLAIN, ROOM, copy_of, images, stored

from ostraca_fabric.flash.superblock import encode_superblock
from ostraca_fabric.flash.volume_records import (
    VolumesState,
    copy_bytes,
    copy_offset,
    encode_volumes,
    examine_volumes,
    newest_copy,
)
from ostraca_fabric.model.extent import MIB, Geometry
from ostraca_fabric.model.ids import OwnerEpoch
from ostraca_fabric.model.volume import Layout, VolumeRecord

STORED = stored()
REFERENCE = (Path(__file__).parents[3] / "docs" / "reference" / "formats" / "flash-format.md").read_text()
GOOD, BLANK, OTHERS = VolumesState.GOOD, VolumesState.BLANK, VolumesState.OTHER
DAMAGED, NEWER = VolumesState.DAMAGED, VolumesState.NEWER
SAID: dict[str, tuple[tuple[VolumesState, VolumesState], list[VolumeRecord]]] = {
    "blank": ((BLANK, BLANK), []),
    "one": ((GOOD, BLANK), [PLAIN]),
    "two": ((GOOD, GOOD), [PLAIN, FULL]),
    "two-of-another-owner": ((GOOD, GOOD), [PLAIN, FULL]),
    "second-torn": ((GOOD, DAMAGED), [PLAIN]),
    "first-torn": ((DAMAGED, BLANK), []),
    "another-shard-s": ((OTHERS, BLANK), []),
    "newer": ((NEWER, GOOD), [PLAIN]),
    "none": ((GOOD, BLANK), []),
}


def volumes_in(area: bytes) -> list[VolumeRecord]:
    copies = examine_volumes(SUPERBLOCK, area)
    number = newest_copy(copies)
    return [] if number is None else list(copies[number].volumes)


def in_words(volume: VolumeRecord) -> dict[str, Any]:
    """Return what another reader finds of a volume."""
    layout = volume.layout
    groups = [
        {
            "layers": group.layers,
            "kv_heads": group.kv_heads,
            "head_dim": group.head_dim,
            "kind": group.kind,
        }
        for group in layout.groups
    ]
    fields = {name: getattr(layout, name) for name in layout.__dataclass_fields__}
    return {
        "tenant": volume.tenant,
        "name": volume.name,
        "incarnation": volume.incarnation,
        "block_bytes": volume.block_bytes,
        "layout_digest": layout.digest().hex(),
        "layout": {**fields, "groups": groups},
    }


def test_today_s_writer_writes_every_image_byte_by_byte() -> None:
    written = images()
    assert written.keys() == STORED.keys() == SAID.keys()
    assert [name for name, image in written.items() if STORED[name] != image] == []


@pytest.mark.parametrize(("name", "said"), SAID.items(), ids=SAID)
def test_both_readers_find_the_volumes_of_the_copy_that_counts(
    name: str, said: tuple[tuple[VolumesState, VolumesState], list[VolumeRecord]]
) -> None:
    states, volumes = said
    first, second = examine_volumes(SUPERBLOCK, STORED[name])
    assert (first.state, second.state) == states
    assert volumes_in(STORED[name]) == volumes
    if name != "newer":  # the small reader knows of one version
        image = encode_superblock(SUPERBLOCK) + STORED[name]
        assert small_reader.volumes(image) == [in_words(volume) for volume in volumes]


@given(cut=st.integers(0, 8), rot=st.binary(max_size=64), at=st.integers(0, 4095))
def test_whatever_is_written_over_the_older_copy_the_newer_one_stays(cut: int, rot: bytes, at: int) -> None:
    old, newest = copy_of(PLAIN, sequence=6), copy_of(PLAIN, FULL, sequence=7)
    following = copy_of(FULL, sequence=8)
    torn = bytearray(following[: cut * 512] + old[cut * 512 :])
    torn[at : at + len(rot)] = rot
    assert volumes_in(bytes(torn[:ROOM]) + newest) in ([PLAIN, FULL], [FULL])


def test_a_record_that_a_newer_release_wrote_is_refused_and_the_others_are_not() -> None:
    area = bytearray(copy_of(FULL, PLAIN, sequence=6))
    digest = PLAIN.layout.digest().hex().encode()
    # As if its layout had a field more: this release makes another digest of what it knows.
    forged = bytes(area).replace(digest, digest[::-1])
    end = 64 + int.from_bytes(forged[56:60], "little")
    checksum = xxhash.xxh3_64_intdigest(forged[8:end], seed=SUPERBLOCK.identity.seed)
    first, _ = examine_volumes(SUPERBLOCK, checksum.to_bytes(8, "little") + forged[8:])
    assert (first.state, first.volumes, first.refused) == (GOOD, (FULL,), 1)


def test_what_was_erased_gets_room_first_for_it_must_not_come_back_as_it_was() -> None:
    volumes = [replace(PLAIN, name=f"v{number}") for number in range(100)]
    erased = replace(PLAIN, name="z", is_erasable=True).erased()
    room = len(encode_volumes(SUPERBLOCK.identity, ROOM, volumes[:20], epoch=OwnerEpoch(1), sequence=1))
    pages = encode_volumes(SUPERBLOCK.identity, room, [*volumes, erased], epoch=OwnerEpoch(1), sequence=1)
    read = examine_volumes(SUPERBLOCK, pages.ljust(2 * ROOM, b"\0"))[0]
    assert read.left_out > 0
    assert read.volumes[0] == volumes[0]
    assert read.volumes[-1] == erased


def test_what_finds_no_room_is_left_out_and_counted() -> None:
    volumes = [
        VolumeRecord(PLAIN.tenant, f"v{number}", Layout("m", "bf16", 16), 4096) for number in range(100)
    ]
    huge = VolumeRecord(PLAIN.tenant, "huge", Layout("m" * 1024, "x" * 1024, 16, adapter="a" * 1024), 4096)
    some = (*volumes[:3], huge, *volumes[3:])
    pages = encode_volumes(SUPERBLOCK.identity, 4096, some, epoch=OwnerEpoch(1), sequence=1)
    assert len(pages) == 4096
    first, _ = examine_volumes(SUPERBLOCK, pages)
    assert first.volumes == tuple(volumes[: len(first.volumes)])
    assert 3 < len(first.volumes) < 100
    assert first.left_out == 101 - len(first.volumes)


def test_fourteen_hundred_ordinary_volumes_fit() -> None:
    layout = Layout("meta-llama/Llama-3-70B@a1b2c3", "bf16", 16, PLAIN.layout.groups)
    volumes = [VolumeRecord(PLAIN.tenant, f"volume-{number}", layout, 1 << 20) for number in range(1400)]
    pages = encode_volumes(SUPERBLOCK.identity, ROOM, volumes, epoch=OwnerEpoch(1), sequence=1)
    assert examine_volumes(SUPERBLOCK, pages)[0].left_out == 0


def test_copies_lie_between_superblock_and_segment_0_and_do_not_overlap() -> None:
    for first_segment in (8192, 12288, 16384, 20480, MIB, 64 * MIB):
        geometry = Geometry(128 * MIB, MIB, 2, 4, first_segment)
        room = copy_bytes(geometry)
        assert room % 4096 == 0
        assert copy_offset(geometry, 0) == 8192
        assert copy_offset(geometry, 1) == 8192 + room
        assert copy_offset(geometry, 1) + room <= first_segment
    assert copy_bytes(Geometry(3 * MIB, MIB, 2, 4, 8192)) == 0


@given(st.binary(max_size=300), st.sampled_from(sorted(SAID)), st.integers(0, 2 * ROOM))
def test_no_bytes_make_the_reader_raise(rot: bytes, name: str, at: int) -> None:
    area = bytearray(STORED[name])
    area[at : at + len(rot)] = rot
    examine_volumes(SUPERBLOCK, bytes(area))
    examine_volumes(SUPERBLOCK, bytes(area[:at]))
    no_room = replace(SUPERBLOCK, geometry=Geometry(3 * MIB, MIB, 2, 4, 8192))
    assert newest_copy(examine_volumes(no_room, bytes(area))) is None


def test_a_shard_formatted_anew_has_no_volumes_of_before() -> None:
    area = copy_of(PLAIN, sequence=6, of=OTHER) + copy_of(sequence=1)
    assert volumes_in(area) == []


def test_the_reference_page_describes_them() -> None:
    assert "`OSTRvols`" in REFERENCE
    assert "tests.fabric.flash.golden_volumes" in REFERENCE
