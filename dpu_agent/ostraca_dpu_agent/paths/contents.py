"""Contents of a drive, and formatting it as a shard. Blocks: call in a thread.

A drive is *blank* if every checked place is zero: the first and last MiB, with the marks of partition
tables, file systems and volume managers, and a page in each of 64 parts between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ostraca_fabric.errors import DriveError, FormatError
from ostraca_fabric.flash.rebuild import shard_record
from ostraca_fabric.flash.superblock import (
    CopyState,
    Superblock,
    SuperblockCopy,
    chosen_copy,
    encode_superblock,
    examine_superblock,
    is_blank,
)
from ostraca_fabric.model.extent import MIB, PAGE_BYTES, SUPERBLOCK_COPIES, Geometry, segment_bytes_for
from ostraca_fabric.model.fabric_map import ShardRecord
from ostraca_fabric.model.ids import DriveId, FabricId, enclosure_of, shard_id
from ostraca_fabric.ports.opener import NamespaceOpener, RawDrive
from ostraca_fabric.ports.paths import Namespace
from ostraca_fabric.wire.flash_work import Content, DiscoveredDrive

_EDGE_BYTES = MIB
_PARTS_BETWEEN = 64


def inspect_drive(opener: NamespaceOpener, namespace: Namespace, fabric: FabricId) -> DiscoveredDrive:
    """Describe the contents of a drive. Never raises."""
    content, details, superblock = Content.UNREADABLE, "", None
    try:
        with _open_checked(opener, namespace) as drive:
            content, details, superblock = _content(drive, fabric)
    except DriveError as error:
        details = str(error)
    return DiscoveredDrive(
        namespace.nguid,
        namespace.size_bytes,
        namespace.lba_bytes,
        namespace.model,
        namespace.serial,
        content,
        details,
        superblock.format_id.hex() if superblock and content is Content.OURS else "",
        superblock.shard if superblock and content is Content.OURS else "",
    )


def format_drive(
    opener: NamespaceOpener,
    namespace: Namespace,
    fabric: FabricId,
    drive: DriveId,
    format_id: bytes,
    *,
    replaces: frozenset[Content],
    segment_bytes: int,
    may_begin: Callable[[], bool],
) -> ShardRecord:
    """Format a drive as one shard of the fabric; return the shard's record.

    A drive with both copies of this shard's superblock is left as it is. Only the superblock is written,
    durably: with a new format id, any older contents belong to no shard. The same format writes the same
    bytes, so a late write is harmless.

    Raises FormatError for contents not listed in *replaces*, or if *may_begin* refuses just before the
    write. Raises DriveError for a failure of the drive and UsageError for a drive that is too small.
    """
    shard = shard_id(drive, 0)
    geometry = Geometry.planned(
        namespace.size_bytes // PAGE_BYTES * PAGE_BYTES,
        segment_bytes=segment_bytes or segment_bytes_for(namespace.size_bytes),
    )
    wanted = Superblock(fabric, format_id, enclosure_of(shard), drive, shard, 0, geometry)
    pages = encode_superblock(wanted)
    with _open_checked(opener, namespace, is_writable=True) as opened:
        content, details, found = _content(opened, fabric)
        if opened.read(0, len(pages)) == pages:
            return shard_record(wanted)
        if found != wanted and content not in replaces:  # else an interrupted format left one copy
            raise FormatError(f"not formatted, because the drive is not empty: {details or content.value}")
        if not may_begin():
            raise FormatError("not formatted, because the drive has joined the map meanwhile")
        opened.write(0, pages)
        if opened.read(0, len(pages)) != pages:
            raise DriveError("the written superblock reads back differently: replace the drive")
    return shard_record(wanted)


@contextmanager
def _open_checked(
    opener: NamespaceOpener, namespace: Namespace, *, is_writable: bool = False
) -> Iterator[RawDrive]:
    with opener.open_raw(namespace, is_writable=is_writable) as drive:
        if drive.size_bytes < 2 * _EDGE_BYTES:
            raise DriveError(f"the drive has {drive.size_bytes} bytes, too few for a shard")
        yield drive


def _content(drive: RawDrive, fabric: FabricId) -> tuple[Content, str, Superblock | None]:
    begin = drive.read(0, _EDGE_BYTES)
    chosen = chosen_copy(examine_superblock(begin[: SUPERBLOCK_COPIES * PAGE_BYTES]))
    if chosen.state not in (CopyState.BLANK, CopyState.FOREIGN):
        return _shard_content(chosen, fabric)
    details = "" if is_blank(begin) else f"the drive has other contents: {_known_contents(begin)}"
    details = details or _describe_rest(drive)
    return (Content.FOREIGN if details else Content.BLANK), details, None


def _shard_content(copy: SuperblockCopy, fabric: FabricId) -> tuple[Content, str, Superblock | None]:
    superblock = copy.superblock
    if superblock is None:
        return Content.OTHER, f"the drive holds a shard of an unknown fabric: {copy.why}", None
    if superblock.fabric != fabric:
        details = f"the drive holds shard {superblock.shard} of fabric {superblock.fabric.hex()}"
        return Content.OTHER, details, superblock
    return Content.OURS, f"the drive holds shard {superblock.shard} of this fabric", superblock


def _describe_rest(drive: RawDrive) -> str:
    """Describe data found behind an empty first MiB; empty if none."""
    if not is_blank(drive.read(drive.size_bytes - _EDGE_BYTES, _EDGE_BYTES)):
        return "the last MiB is not empty, as with a RAID or a GPT"
    part_bytes = drive.size_bytes // (_PARTS_BETWEEN + 1) // PAGE_BYTES * PAGE_BYTES
    for number in range(1, _PARTS_BETWEEN + 1):
        if not is_blank(drive.read(number * part_bytes, PAGE_BYTES)):
            return f"byte {number * part_bytes} is not empty"
    return ""


_MARKS = (
    (512, b"EFI PART", "a partition table (GPT)"),
    (1024 + 56, b"\x53\xef", "an ext file system"),
    (0, b"XFSB", "an XFS file system"),
    (64 * 1024 + 64, b"_BHRfS_M", "a Btrfs file system"),
    (512 + 24, b"LVM2 001", "a physical volume of LVM"),
    (0, b"LUKS\xba\xbe", "an encrypted volume (LUKS)"),
    (4096, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID"),
    (510, b"\x55\xaa", "a partition table or boot sector"),
)
"""Positions of some formats' marks, in 512-byte sectors."""


def _known_contents(begin: bytes) -> str:
    for offset, mark, name in _MARKS:
        if begin[offset : offset + len(mark)] == mark:
            return name
    first = next(at for at, byte in enumerate(begin) if byte)
    return f"byte {first} and following are {begin[first : first + 8].hex()}"
