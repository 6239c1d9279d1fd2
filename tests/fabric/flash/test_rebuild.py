"""What fabric a set of drives is, said by superblocks and volume records alone."""

from __future__ import annotations

from dataclasses import replace

from tests.fabric.flash.golden_images import SUPERBLOCK
from tests.fabric.flash.golden_volumes import FULL, PLAIN

from ostraca_fabric.flash.rebuild import FoundShard, RebuiltFabric, rebuilt, shard_record
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.flash.volume_records import VolumesCopy, VolumesState
from ostraca_fabric.model.fabric_map import DriveRecord, EnclosureRecord
from ostraca_fabric.model.ids import EnclosureId, FabricId, OwnerEpoch, drive_id, shard_id
from ostraca_fabric.model.volume import Layout, VolumeRecord

BLANK = VolumesCopy(VolumesState.BLANK)


def superblock(enclosure: str, drive: str, *, fabric: bytes = bytes(16)) -> Superblock:
    name = drive_id(EnclosureId(enclosure), drive)
    return replace(
        SUPERBLOCK,
        fabric=FabricId(fabric),
        enclosure=EnclosureId(enclosure),
        drive=name,
        shard=shard_id(name, 0),
    )


def good(*volumes: VolumeRecord, epoch: int = 1, sequence: int = 1) -> VolumesCopy:
    return VolumesCopy(VolumesState.GOOD, volumes, OwnerEpoch(epoch), sequence)


def found(of: Superblock, *copies: VolumesCopy, path: str = "") -> FoundShard:
    first, second = (*copies, BLANK, BLANK)[:2]
    return FoundShard(path or of.drive, of.drive_offset, of, (first, second))


def test_the_map_and_the_volumes_are_found_again() -> None:
    a0, a1, b0 = superblock("a", "d0"), superblock("a", "d1"), superblock("b", "d0")
    assert rebuilt([found(b0), found(a1, good(PLAIN, FULL)), found(a0, good(PLAIN))]) == RebuiltFabric(
        FabricId(bytes(16)),
        (
            EnclosureRecord(
                a0.enclosure,
                (DriveRecord(a0.drive, a0.drive), DriveRecord(a1.drive, a1.drive)),
                (shard_record(a0), shard_record(a1)),
            ),
            EnclosureRecord(b0.enclosure, (DriveRecord(b0.drive, b0.drive),), (shard_record(b0),)),
        ),
        (PLAIN, FULL),
        contradictions=(),
        losses=(),
    )


def test_no_drive_is_no_fabric() -> None:
    assert rebuilt([]) == RebuiltFabric(None, (), (), (), ())


def test_of_a_shard_s_two_copies_the_newer_counts() -> None:
    shard = superblock("a", "d0")
    of_later_owner = good(PLAIN, FULL, epoch=2, sequence=1)
    assert rebuilt([found(shard, good(PLAIN, sequence=9), of_later_owner)]).volumes == (PLAIN, FULL)


def test_of_a_volume_that_was_erased_the_newest_incarnation_counts() -> None:
    erased = replace(PLAIN, incarnation=2)
    found_volumes = rebuilt(
        [found(superblock("a", "d0"), good(PLAIN)), found(superblock("a", "d1"), good(erased))]
    )
    assert (found_volumes.volumes, found_volumes.contradictions) == ((erased,), ())


def test_two_drives_with_the_same_shard_are_named() -> None:
    shard = superblock("a", "d0")
    said = rebuilt([found(shard, path="/x.img"), found(shard, path="/y.img")])
    assert len(said.contradictions) == 1
    assert said.contradictions[0].startswith("/x.img and /y.img both hold shard a/d0/0")


def test_drives_of_several_fabrics_are_named_unless_one_is_chosen() -> None:
    ours, theirs = superblock("a", "d0"), superblock("a", "d1", fabric=b"x" * 16)
    said = rebuilt([found(ours, path="/x.img"), found(theirs, path="/y.img")])
    assert (said.fabric, said.enclosures) == (None, ())
    assert f"{ours.fabric.hex()} on /x.img; {theirs.fabric.hex()} on /y.img" in said.contradictions[0]
    chosen = rebuilt([found(ours), found(theirs)], theirs.fabric)
    assert chosen.fabric == theirs.fabric
    assert [enclosure.shards for enclosure in chosen.enclosures] == [(shard_record(theirs),)]
    assert chosen.contradictions == ()


def test_a_volume_of_which_drives_say_different_things_is_named() -> None:
    other = replace(PLAIN, layout=Layout("another", "bf16", 16))
    said = rebuilt(
        [
            found(superblock("a", "d0"), good(PLAIN), path="/x.img"),
            found(superblock("a", "d1"), good(other), path="/y.img"),
        ]
    )
    assert "/x.img and /y.img disagree about volume 'volume'" in said.contradictions[0]


def test_a_shard_that_lies_at_another_place_than_it_says_is_named() -> None:
    shard = replace(found(superblock("a", "d0")), offset=1 << 30)
    assert "the drive is a copy" in rebuilt([shard]).contradictions[0]


def test_what_the_copies_do_not_say_any_more_is_told_and_is_no_contradiction() -> None:
    damaged = VolumesCopy(VolumesState.DAMAGED)
    said = rebuilt(
        [
            found(superblock("a", "d0"), damaged),
            found(superblock("a", "d1"), replace(good(PLAIN), left_out=3)),
            found(superblock("a", "d2"), replace(good(PLAIN), refused=1)),
        ]
    )
    assert said.volumes == (PLAIN,)
    assert said.contradictions == ()
    for words, loss in zip(("damaged", "no room", "newer release"), said.losses, strict=True):
        assert words in loss
