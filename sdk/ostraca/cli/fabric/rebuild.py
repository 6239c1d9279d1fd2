"""Rebuilding the directory of `ostraca up` from its drives.

What the drives say is put together by ``flash.rebuild``. Here is what is particular to a fabric of files: its
drives have fixed names and one size, and the key and the record lie beside them.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from ostraca.cli.doctor.drives import DriveFile, drives_of
from ostraca.cli.doctor.examine import shards_of
from ostraca.cli.doctor.volumes import volume_copies
from ostraca.cli.state import (
    KEY_FILE,
    RECORD_FILE,
    FabricShape,
    locked,
    read_key,
    recorded_volumes,
    write_fabric,
    write_key,
)
from ostraca_fabric.adapters.whole_files import write_whole
from ostraca_fabric.errors import DriveError, FormatError, MembershipError, UsageError
from ostraca_fabric.flash.rebuild import FoundShard, RebuiltFabric, rebuilt
from ostraca_fabric.flash.superblock import chosen_copy
from ostraca_fabric.flash.volume_records import merged
from ostraca_fabric.keys import FABRIC_KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ostraca_fabric.fabric_map import EnclosureRecord
    from ostraca_fabric.ids import FabricId
    from ostraca_fabric.volume import VolumeRecord

_PLACE = re.compile(r"enclosure-(0|[1-9][0-9]*)/drive-(0|[1-9][0-9]*)")
_KEPT_SUFFIX = ".replaced"


class KeyFate(Enum):
    """Where the fabric's key comes from."""

    KEPT = "it is in the directory still"
    GIVEN = "it is taken from --key"
    NEW = "it is lost, and a new one is made: every block becomes a miss"
    LOST = (
        "it is lost, and it is on no drive: without it no block can be found. Give a copy of it with --key, "
        "or give the blocks up with --new-key"
    )


@dataclass(frozen=True, slots=True)
class Keys:
    """What the caller has in place of a lost key."""

    file: Path | None = None
    is_new_allowed: bool = False

    def fate(self, directory: Path) -> KeyFate:
        """Say where the key comes from."""
        if (directory / KEY_FILE).exists():
            return KeyFate.KEPT
        if self.file is not None:
            return KeyFate.GIVEN
        return KeyFate.NEW if self.is_new_allowed else KeyFate.LOST

    def missing(self, directory: Path) -> bytes | None:
        """Return the key to write, None where it is there.

        Raises FormatError when what is there or given is no key, and when it is lost; UsageError when another
        one is given than the one that is there.
        """
        match self.fate(directory):
            case KeyFate.KEPT:
                there = read_key(directory / KEY_FILE)
                if self.file is not None and read_key(self.file) != there:
                    raise UsageError(
                        f"{directory / KEY_FILE} and {self.file} are two keys: move away the one that is not "
                        "this fabric's"
                    )
                return None
            case KeyFate.GIVEN:
                assert self.file is not None, "that is why it is given"
                return read_key(self.file)
            case KeyFate.NEW:
                return secrets.token_bytes(FABRIC_KEY_BYTES)
            case KeyFate.LOST:
                raise FormatError(f"{directory}/{KEY_FILE}: {KeyFate.LOST.value}")


@dataclass(frozen=True, slots=True)
class FoundFabric:
    """What a directory's drives say that their fabric is."""

    directory: Path
    fabric: FabricId | None
    shape: FabricShape | None
    """None while there are contradictions."""

    shards: tuple[FoundShard, ...]
    enclosures: tuple[EnclosureRecord, ...]
    volumes: tuple[VolumeRecord, ...]
    contradictions: tuple[str, ...]
    losses: tuple[str, ...]


def look(directory: Path, fabric: FabricId | None = None, *, is_of_up: bool = True) -> FoundFabric:
    """Say what the drives in *directory* are. Writes nothing, and locks nothing.

    A fabric of `ostraca up` has drives of one size, under names of its choice. Raises UsageError when
    there are none.
    """
    paths = drives_of(directory)
    found: list[FoundShard] = []
    unread: list[str] = []
    for path in paths:
        try:
            found += _shards(path)
        except (OSError, DriveError, FormatError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            unread.append(f"{path}: {why} (`ostraca doctor {path}` tells more)")
    said = rebuilt(found, fabric)
    ours = tuple(shard for shard in found if shard.superblock.fabric == said.fabric)
    contradictions = list(said.contradictions)
    if not ours and not contradictions:
        contradictions.append(f"no drive in {directory} has a superblock of this fabric that can be used")
    sizes = {shard.superblock.geometry.shard_bytes for shard in ours}
    if is_of_up:
        contradictions += _out_of_place(directory.resolve(), ours)
    if is_of_up and len(sizes) > 1:
        contradictions.append(
            f"the drives have {len(sizes)} sizes ({', '.join(map(str, sorted(sizes)))} bytes), and `ostraca "
            "up` makes them all of one: take away those that are not this fabric's"
        )
    shape, missing = _shape(directory, paths, max(sizes, default=0))
    losses = (*unread, *_strangers(found, said), *missing, *said.losses)
    return FoundFabric(
        directory,
        said.fabric,
        None if contradictions else shape,
        ours,
        said.enclosures,
        said.volumes,
        tuple(contradictions),
        losses,
    )


def rebuild(
    directory: Path, keys: Keys, fabric: FabricId | None = None, *, is_forced: bool = False
) -> FoundFabric:
    """Write the record of the fabric in *directory*, and its key where that is lost.

    With *is_forced* a record that is there is replaced, and kept beside the new one. What it alone says of
    volumes stays: else what was erased could be found again. Raises UsageError when one is there otherwise,
    or there are no drives; FormatError when drives contradict each other or the key
    is lost; MembershipError while the fabric runs, and when the directory can't be written.
    """
    if not directory.is_dir():
        raise UsageError(f"there is no directory {directory}: pass the --dir of `ostraca up`")
    with contextlib.closing(locked(directory)):
        record = directory / RECORD_FILE
        if record.exists() and not is_forced:
            raise UsageError(
                f"{record} is there: nothing has to be rebuilt. Look with --dry-run at what the drives say, "
                "or replace it with --force"
            )
        found = look(directory, fabric)
        if found.contradictions or found.fabric is None or found.shape is None:
            raise FormatError(f"nothing was rebuilt: {'; '.join(found.contradictions)}")
        key = keys.missing(directory)
        volumes = merged(found.volumes, recorded_volumes(directory, found.fabric))
        if record.exists():
            _keep_beside(record)
        if key is not None:
            write_key(directory / KEY_FILE, key)
        write_fabric(directory, found.fabric, found.shape, volumes)
    return replace(found, volumes=volumes)


def _keep_beside(record: Path) -> None:
    """Raises MembershipError when it can't."""
    try:
        write_whole(record.with_name(record.name + _KEPT_SUFFIX), record.read_bytes())
    except OSError as error:
        raise MembershipError(f"{record} can't be kept, and is not replaced: {error}") from error


def _shards(path: Path) -> Iterator[FoundShard]:
    """Read the shards of a drive. Raises FormatError when it begins with none that can be used."""
    with DriveFile(path) as drive:
        for offset, copies in shards_of(drive):
            chosen = chosen_copy(copies)
            if chosen.superblock is None:
                raise FormatError(chosen.why)
            yield FoundShard(
                str(path), offset, chosen.superblock, volume_copies(drive, chosen.superblock, offset)
            )


def _out_of_place(directory: Path, found: Sequence[FoundShard]) -> Iterator[str]:
    """Name the drives that `ostraca up` would not look for where they are."""
    for shard in found:
        superblock = shard.superblock
        if _PLACE.fullmatch(superblock.drive) is None or superblock.shard != f"{superblock.drive}/0":
            yield f"{shard.path} holds shard {superblock.shard}, which is none that `ostraca up` makes"
        elif shard.path != str(directory / f"{superblock.drive}.img"):
            yield (
                f"{shard.path} holds shard {superblock.shard}, which belongs at {superblock.drive}.img in "
                f"{directory}: move it there"
            )


def _strangers(found: Sequence[FoundShard], said: RebuiltFabric) -> Iterator[str]:
    if said.fabric is not None:
        yield from (
            f"{shard.path} is of fabric {shard.superblock.fabric.hex()}: move it away before you start"
            for shard in found
            if shard.superblock.fabric != said.fabric
        )


def _shape(directory: Path, paths: Sequence[Path], drive_bytes: int) -> tuple[FabricShape, tuple[str, ...]]:
    """Return the least shape that has a place for each drive, and name the places that are empty.

    Drives that can't be read count, too.
    """
    places = set()
    for path in paths:
        place = _PLACE.fullmatch(f"{path.parent.name}/{path.stem}")
        if place is not None and path.exists():
            places.add((int(place[1]), int(place[2])))
    enclosures, drives = (1 + max((place[axis] for place in places), default=0) for axis in (0, 1))
    missing = [
        f"drive enclosure-{enclosure}/drive-{drive} is missing from {directory}: put it back before you "
        "start, or `ostraca up` makes a new, empty one"
        for enclosure in range(enclosures)
        for drive in range(drives)
        if (enclosure, drive) not in places
    ]
    return FabricShape(enclosures, drives, drive_bytes), tuple(missing)
