"""The volume records on a drive: reading them, and what `ostraca doctor` says of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca.cli.doctor.findings import Trouble, VolumesFinding
from ostraca_fabric.flash.volume_records import (
    COPIES,
    VolumesState,
    copy_bytes,
    copy_offset,
    examine_volumes,
    newest_copy,
)
from ostraca_fabric.sentences import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ostraca.cli.doctor.drives import DriveFile
    from ostraca_fabric.flash.superblock import Superblock
    from ostraca_fabric.flash.volume_records import VolumesCopy

Row = dict[str, int | str | bool | None]


def volume_copies(drive: DriveFile, superblock: Superblock, offset: int) -> tuple[VolumesCopy, VolumesCopy]:
    """Read both copies of the shard at *offset*. Where the drive can't be read they are damaged."""
    geometry = superblock.geometry
    room = copy_bytes(geometry)
    try:
        area = drive.read(offset + copy_offset(geometry, 0), COPIES * room) if room else b""
    except OSError:
        area = b"\xff" * (COPIES * room)
    return examine_volumes(superblock, area)


def volumes_finding(drive: DriveFile, superblock: Superblock, offset: int) -> VolumesFinding:
    """Say what volume records lie there."""
    copies = volume_copies(drive, superblock, offset)
    states = tuple(copy.state.value for copy in copies)
    number = newest_copy(copies)
    if number is None:
        return VolumesFinding(states)
    newest = copies[number]
    names = tuple(f"{volume.tenant}/{volume.name}" for volume in newest.volumes)
    return VolumesFinding(states, newest.epoch, newest.sequence, names, newest.left_out, newest.refused)


def volumes_troubles(found: VolumesFinding) -> Iterator[Trouble]:
    """Say what is wrong with them. Blocks need none of it: volume records are there to rebuild a fabric."""
    bad = [state for state in found.copies if state in (VolumesState.DAMAGED.value, VolumesState.NEWER.value)]
    if bad:
        is_one_good = VolumesState.GOOD.value in found.copies
        yield Trouble(
            f"{len(bad)} of {COPIES} copies of the volume records can't be used: {', '.join(bad)}",
            "nothing has to be done: an interrupted write leaves one, and the other counts"
            if is_one_good
            else "start the fabric: the shard's owner writes them again. Until then `ostraca fabric rebuild` "
            "finds no volumes on this shard",
        )
    if found.left_out:
        yield Trouble(
            f"{counted(found.left_out, 'volume')} found no room in the volume records",
            "should the fabric ever be rebuilt, those have to be made again: workers that open them with "
            "create=True do",
        )
    if found.refused:
        yield Trouble(
            f"{found.refused} volume records were written by a release that knows more than this one",
            "upgrade this release before a fabric is rebuilt from them",
        )


def volume_rows(drive: DriveFile, superblock: Superblock, offset: int) -> Iterator[Row]:
    """Give both copies, field by field, each followed by its records."""
    copies = volume_copies(drive, superblock, offset)
    counting = newest_copy(copies)
    for number, copy in enumerate(copies):
        is_good = copy.state is VolumesState.GOOD
        of_copy: Row = {"shard": superblock.shard, "copy": number}
        yield {
            **of_copy,
            "state": copy.state.value,
            "is_newest": number == counting,
            "owner_epoch": copy.epoch if is_good else None,
            "sequence": copy.sequence if is_good else None,
            "volumes": len(copy.volumes) if is_good else None,
            "left_out": copy.left_out if is_good else None,
            "refused": copy.refused if is_good else None,
        }
        for volume in copy.volumes:
            yield {
                **of_copy,
                "tenant": volume.tenant,
                "name": volume.name,
                "incarnation": volume.incarnation,
                "block_bytes": volume.block_bytes,
                "model": volume.layout.model,
                "layout_digest": volume.layout.digest().hex(),
            }
