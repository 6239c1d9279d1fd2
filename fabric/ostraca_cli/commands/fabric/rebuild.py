"""Rebuild the directory of `ostraca up` from its drives.

``flash.rebuild`` combines the superblocks and volume records. This module adds the specifics of a fabric of
files: drives have fixed names and a common size; the key and the record lie beside the drives.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from ostraca_cli.composition.state import (
    KEY_FILE,
    RECORD_FILE,
    FabricShape,
    lock_directory,
    read_key,
    read_recorded_volumes,
    write_fabric,
    write_key,
)
from ostraca_cli.terminal.units import size_text
from ostraca_cli.tools.doctor.drives import DriveFile, list_drives
from ostraca_cli.tools.doctor.examine import shards_of
from ostraca_cli.tools.doctor.volumes import volume_copies
from ostraca_fabric.errors import DriveError, FormatError, MembershipError, UsageError, shown
from ostraca_fabric.flash.rebuild import FoundShard, RebuiltFabric, rebuilt
from ostraca_fabric.flash.superblock import chosen_copy
from ostraca_fabric.flash.volume_records import merged
from ostraca_fabric.model.fabric_map import EnclosureRecord
from ostraca_fabric.model.ids import FabricId
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.runtime.atomic_files import write_whole
from ostraca_fabric.runtime.os_errors import explained
from ostraca_fabric.tables.digests import FABRIC_KEY_BYTES

_PLACE = re.compile(r"enclosure-(0|[1-9][0-9]*)/drive-(0|[1-9][0-9]*)")
_KEPT_SUFFIX = ".replaced"


class KeySource(Enum):
    """Source of the fabric's key."""

    KEPT = "present in the directory"
    GIVEN = "copied from --key"
    NEW = "lost, to be replaced by a new key: every block becomes a miss"
    LOST = (
        "lost, and no drive has a copy: no block can be found without the key. Give a copy with --key, or "
        "give up all blocks with --new-key"
    )


@dataclass(frozen=True, slots=True)
class KeyOptions:
    """Replacements for a lost key, as given by the caller."""

    file: Path | None = None
    is_new_allowed: bool = False

    def source(self, directory: Path) -> KeySource:
        """Return the source of the key."""
        if (directory / KEY_FILE).exists():
            return KeySource.KEPT
        if self.file is not None:
            return KeySource.GIVEN
        return KeySource.NEW if self.is_new_allowed else KeySource.LOST

    def missing(self, directory: Path) -> bytes | None:
        """Return the key to write, or None if the directory has the key.

        Raises FormatError if a key is invalid or lost, and UsageError if the given key differs from the
        existing key.
        """
        match self.source(directory):
            case KeySource.KEPT:
                existing = read_key(directory / KEY_FILE)
                if self.file is not None and read_key(self.file) != existing:
                    raise UsageError(
                        f"{directory / KEY_FILE} and {self.file} are different keys: move away the key of "
                        "another fabric"
                    )
                return None
            case KeySource.GIVEN:
                assert self.file is not None, "the source GIVEN implies a file"
                return read_key(self.file)
            case KeySource.NEW:
                return secrets.token_bytes(FABRIC_KEY_BYTES)
            case KeySource.LOST:
                raise FormatError(f"{directory}/{KEY_FILE}: {KeySource.LOST.value}")


@dataclass(frozen=True, slots=True)
class FoundFabric:
    """Fabric as described by the drives in a directory."""

    directory: Path
    fabric: FabricId | None
    shape: FabricShape | None
    """None in case of contradictions."""

    shards: tuple[FoundShard, ...]
    enclosures: tuple[EnclosureRecord, ...]
    volumes: tuple[VolumeRecord, ...]
    contradictions: tuple[str, ...]
    losses: tuple[str, ...]


def look(directory: Path, fabric: FabricId | None = None, *, is_of_up: bool = True) -> FoundFabric:
    """Read the fabric from the drives in *directory*; neither writes nor locks.

    A fabric of `ostraca up` (*is_of_up*) has drives of a common size, with fixed names. Raises UsageError if
    there are no drives.
    """
    paths = list_drives(directory)
    found: list[FoundShard] = []
    unread: list[str] = []
    for path in paths:
        try:
            found += _shards(path)
        except (OSError, DriveError, FormatError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            unread.append(f"{path}: {why} (for details, run `ostraca doctor {path}`)")
    rebuilt_fabric = rebuilt(found, fabric)
    ours = tuple(shard for shard in found if shard.superblock.fabric == rebuilt_fabric.fabric)
    contradictions = list(rebuilt_fabric.contradictions)
    if not ours and not contradictions:
        contradictions.append(f"no drive in {directory} has a usable superblock of this fabric")
    sizes = {shard.superblock.geometry.shard_bytes for shard in ours}
    if is_of_up:
        contradictions += _out_of_place(directory.resolve(), ours)
    if is_of_up and len(sizes) > 1:
        contradictions.append(
            f"the drives have {len(sizes)} sizes ({', '.join(map(str, sorted(sizes)))} bytes), and `ostraca "
            "up` creates a single size: move away drives of other fabrics"
        )
    shape, missing = _shape(directory, paths, max(sizes, default=0))
    losses = (*unread, *_strangers(found, rebuilt_fabric), *missing, *rebuilt_fabric.losses)
    return FoundFabric(
        directory,
        rebuilt_fabric.fabric,
        None if contradictions else shape,
        ours,
        rebuilt_fabric.enclosures,
        rebuilt_fabric.volumes,
        tuple(contradictions),
        losses,
    )


def rebuild(
    directory: Path, keys: KeyOptions, fabric: FabricId | None = None, *, is_forced: bool = False
) -> FoundFabric:
    """Write the record of the fabric in *directory*, and the key if lost.

    With *is_forced*, replaces an existing record and keeps the old record beside the new record. Volumes
    known only to the old record stay, because lost volumes would make erased blocks visible again.

    Raises UsageError for an existing record without *is_forced*, or without drives; FormatError if drives
    contradict each other or the key is lost; MembershipError while the fabric runs, or if the directory is
    not writable.
    """
    if not directory.is_dir():
        raise UsageError(f"directory {directory} does not exist: give the --dir of `ostraca up`")
    with contextlib.closing(lock_directory(directory)):
        record = directory / RECORD_FILE
        if record.exists() and not is_forced:
            raise UsageError(
                f"{record} exists, so nothing needs a rebuild: inspect the drives with --dry-run, or "
                "replace the record with --force"
            )
        found = look(directory, fabric)
        if found.contradictions or found.fabric is None or found.shape is None:
            raise FormatError(f"nothing was rebuilt: {'; '.join(found.contradictions)}")
        key = keys.missing(directory)
        volumes = merged(found.volumes, read_recorded_volumes(directory, found.fabric))
        if record.exists():
            _keep_beside(record)
        if key is not None:
            write_key(directory / KEY_FILE, key)
        write_fabric(directory, found.fabric, found.shape, volumes)
    return replace(found, volumes=volumes)


def _keep_beside(record: Path) -> None:
    """Copy the record to a file beside; raises MembershipError on failure."""
    try:
        write_whole(record.with_name(record.name + _KEPT_SUFFIX), record.read_bytes())
    except OSError as error:
        raise MembershipError(
            f"cannot back up {record}, so the record is unchanged: {explained(error)}"
        ) from error


def _shards(path: Path) -> Iterator[FoundShard]:
    """Read the shards of a drive; raises FormatError without a usable first shard."""
    with DriveFile(path) as drive:
        for offset, copies in shards_of(drive):
            chosen = chosen_copy(copies)
            if chosen.superblock is None:
                raise FormatError(chosen.why)
            yield FoundShard(
                str(path), offset, chosen.superblock, volume_copies(drive, chosen.superblock, offset)
            )


def _out_of_place(directory: Path, found: Sequence[FoundShard]) -> Iterator[str]:
    """Name the drives outside the places where `ostraca up` looks."""
    for shard in found:
        superblock = shard.superblock
        if _PLACE.fullmatch(superblock.drive) is None or superblock.shard != f"{superblock.drive}/0":
            yield f"{shard.path} has shard {superblock.shard}, unknown to `ostraca up`: move the file away"
        elif shard.path != str(directory / f"{superblock.drive}.img"):
            yield (
                f"{shard.path} has shard {superblock.shard}: move the file to "
                f"{directory}/{superblock.drive}.img"
            )


def _strangers(found: Sequence[FoundShard], rebuilt_fabric: RebuiltFabric) -> Iterator[str]:
    if rebuilt_fabric.fabric is not None:
        yield from (
            f"{shard.path} belongs to fabric {shard.superblock.fabric.hex()}: move the file away before the "
            "start"
            for shard in found
            if shard.superblock.fabric != rebuilt_fabric.fabric
        )


def _shape(directory: Path, paths: Sequence[Path], drive_bytes: int) -> tuple[FabricShape, tuple[str, ...]]:
    """Return the smallest shape with a place for each drive, and the empty places.

    Unreadable drives count too.
    """
    places = set()
    for path in paths:
        place = _PLACE.fullmatch(f"{path.parent.name}/{path.stem}")
        if place is not None and path.exists():
            places.add((int(place[1]), int(place[2])))
    enclosures, drives = (1 + max((place[axis] for place in places), default=0) for axis in (0, 1))
    missing = [
        f"drive enclosure-{enclosure}/drive-{drive} is missing from {directory}: restore the file, or "
        f"create an empty drive by `ostraca doctor {directory}/enclosure-{enclosure}/drive-{drive}.img "
        f"--format enclosure-{enclosure}/drive-{drive}/0`"
        for enclosure in range(enclosures)
        for drive in range(drives)
        if (enclosure, drive) not in places
    ]
    return FabricShape(enclosures, drives, drive_bytes), tuple(missing)


_MIB = 1 << 20


def found_lines(found: FoundFabric, key: KeySource) -> Iterator[str]:
    """Describe the drives, the volumes on the drives, and missing parts."""
    if found.fabric is not None:
        yield f"fabric {found.fabric.hex()}"
    width = max((len(shard.superblock.shard) for shard in found.shards), default=0)
    for shard in found.shards:
        size = size_text(shard.superblock.geometry.shard_bytes)
        yield f"  {shard.superblock.shard:<{width}}  {size:>10}  {_recorded(shard)}"
    yield f"volumes: {len(found.volumes) or 'none'}"
    width = max((len(f"{volume.tenant}/{volume.name}") for volume in found.volumes), default=0)
    for volume in found.volumes:
        name = f"{volume.tenant}/{volume.name}"
        yield (
            f"  {name:<{width}}  blocks of up to {size_text(volume.block_bytes)}, model "
            f"{shown(volume.layout.model)}"
        )
    yield f"key: {key.value}"
    yield from (f"LOST: {loss}" for loss in found.losses)
    yield from (f"CONTRADICTION: {contradiction}" for contradiction in found.contradictions)


def start_line(found: FoundFabric) -> str:
    """Return the command that starts the rebuilt fabric."""
    shape = found.shape
    assert shape is not None, "a rebuilt fabric has a shape"
    capacity = shape.enclosures * shape.drives * shape.drive_bytes
    size = f"{capacity // _MIB}MiB" if capacity % _MIB == 0 else str(capacity)
    return (
        f"Rebuilt. Start the fabric by: ostraca up --dir {found.directory} --enclosures {shape.enclosures} "
        f"--drives {shape.drives} --capacity {size}"
    )


def _recorded(shard: FoundShard) -> str:
    if shard.volumes is None:
        return "no volumes recorded"
    count = len(shard.volumes.volumes)
    return f"{count} volume{'s' * (count != 1)} recorded"
