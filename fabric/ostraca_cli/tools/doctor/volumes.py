"""Volume records on a drive: reads, findings and rows."""

from __future__ import annotations

from collections.abc import Iterator

from ostraca_cli.tools.doctor.drives import DriveFile
from ostraca_cli.tools.doctor.findings import DriveProblem, VolumesFinding
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.flash.volume_records import (
    COPIES,
    VolumesCopy,
    VolumesState,
    copy_bytes,
    copy_offset,
    examine_volumes,
    newest_copy,
)
from ostraca_fabric.runtime.sentences import counted

Row = dict[str, int | str | bool | None]
"""Row of output: values by field name."""


def volume_copies(drive: DriveFile, superblock: Superblock, offset: int) -> tuple[VolumesCopy, VolumesCopy]:
    """Read both copies of the shard at *offset*; unreadable copies count as damaged."""
    geometry = superblock.geometry
    room = copy_bytes(geometry)
    try:
        area = drive.read(offset + copy_offset(geometry, 0), COPIES * room) if room else b""
    except OSError:
        area = b"\xff" * (COPIES * room)
    return examine_volumes(superblock, area)


def volumes_finding(drive: DriveFile, superblock: Superblock, offset: int) -> VolumesFinding:
    """Return the finding of the volume records at *offset*."""
    copies = volume_copies(drive, superblock, offset)
    states = tuple(copy.state.value for copy in copies)
    number = newest_copy(copies)
    if number is None:
        return VolumesFinding(states)
    newest = copies[number]
    names = tuple(f"{volume.tenant}/{volume.name}" for volume in newest.volumes)
    return VolumesFinding(states, newest.epoch, newest.sequence, names, newest.left_out, newest.refused)


def volumes_problems(found: VolumesFinding) -> Iterator[DriveProblem]:
    """Report problems of volume records, which serve only the rebuild of a fabric."""
    bad = [state for state in found.copies if state in (VolumesState.DAMAGED.value, VolumesState.NEWER.value)]
    if bad:
        is_one_good = VolumesState.GOOD.value in found.copies
        yield DriveProblem(
            f"{len(bad)} of {COPIES} copies of the volume records can't be used: {', '.join(bad)}",
            ("no action is needed: an interrupted write leaves a damaged copy, and the other copy is used")
            if is_one_good
            else (
                "start the fabric: the shard's owner writes the records again. Until then "
                "`ostraca fabric rebuild` finds no volumes on this shard"
            ),
        )
    if found.left_out:
        yield DriveProblem(
            f"{counted(found.left_out, 'volume')} found no room in the volume records",
            ("after a rebuild of the fabric, create these volumes again: workers with create=True do so"),
        )
    if found.refused:
        yield DriveProblem(
            f"{found.refused} volume records were written by a newer release",
            "upgrade this release before a rebuild of the fabric from these records",
        )


def volume_rows(drive: DriveFile, superblock: Superblock, offset: int) -> Iterator[Row]:
    """Yield both copies, field by field, each followed by its records."""
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
