"""What lies on a drive, and making it a shard. Blocks: call it in a thread.

A drive is *blank* where everything is zero that anything would be known by: its first and last MiB, where
partition tables, file systems and volume managers have their marks, and a page in each of 64 parts between.
"""

from __future__ import annotations

import mmap
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ostraca_fabric.errors import DriveError, FormatError, UsageError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.flash.geometry import MIB, SUPERBLOCK_COPIES, Geometry, segment_bytes_for
from ostraca_fabric.flash.rebuild import shard_record
from ostraca_fabric.flash.superblock import (
    CopyState,
    Superblock,
    chosen_copy,
    encode_superblock,
    examine_superblock,
    is_blank,
)
from ostraca_fabric.ids import enclosure_of, shard_id
from ostraca_fabric.wire.flash_work import Content, SeenDrive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ostraca_fabric.fabric_map import ShardRecord
    from ostraca_fabric.flash.superblock import SuperblockCopy
    from ostraca_fabric.ids import DriveId, FabricId
    from ostraca_fabric.ports.paths import Namespace

_EDGE_BYTES = MIB
_PARTS_BETWEEN = 64


def contents_of(namespace: Namespace, fabric: FabricId) -> SeenDrive:
    """Say what lies on a drive. Never raises."""
    content, says, superblock = Content.UNREADABLE, "", None
    try:
        with _opened(namespace, os.O_RDONLY) as drive:
            content, says, superblock = _content(drive, fabric)
    except DriveError as error:
        says = str(error)
    return SeenDrive(
        namespace.nguid,
        namespace.size_bytes,
        namespace.lba_bytes,
        namespace.model,
        namespace.serial,
        content,
        says,
        superblock.format_id.hex() if superblock and content is Content.OURS else "",
        superblock.shard if superblock and content is Content.OURS else "",
    )


def formatted(
    namespace: Namespace,
    fabric: FabricId,
    drive: DriveId,
    format_id: bytes,
    *,
    replaces: frozenset[Content],
    segment_bytes: int,
    may_begin: Callable[[], bool],
) -> ShardRecord:
    """Make a drive one shard of the fabric, unless it is that already; return how the map describes it.

    Written is the superblock alone, and durably: a new format id makes whatever else lies there nobody's. The
    same format writes the same bytes, so one that comes late harms nothing.

    Raises FormatError where something lies there that *replaces* does not name, or *may_begin* says no just
    before it is written; DriveError where the drive does not do it; UsageError where it is too small.
    """
    shard = shard_id(drive, 0)
    geometry = Geometry.planned(
        namespace.size_bytes // PAGE_BYTES * PAGE_BYTES,
        segment_bytes=segment_bytes or segment_bytes_for(namespace.size_bytes),
    )
    wanted = Superblock(fabric, format_id, enclosure_of(shard), drive, shard, 0, geometry)
    with _opened(namespace, os.O_RDWR) as opened:
        content, says, found = _content(opened, fabric)
        if found == wanted:
            return shard_record(wanted)
        if content not in replaces:
            raise FormatError(f"it is not formatted, for it is not empty: {says or content.value}")
        if not may_begin():
            raise FormatError("it has come into the map meanwhile, and is left alone")
        opened.write(0, encode_superblock(wanted))
        if opened.read(0, SUPERBLOCK_COPIES * PAGE_BYTES) != encode_superblock(wanted):
            raise DriveError("what was written to it reads back as something else")
    return shard_record(wanted)


class _Opened:
    """A drive read and written past the page cache, in whole pages."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor = descriptor
        self.size_bytes = size_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Read whole pages. Raises DriveError."""
        with mmap.mmap(-1, length) as memory:
            try:
                count = os.preadv(self._descriptor, [memory], offset)
            except OSError as error:
                raise DriveError(f"it can't be read at {offset}: {error.strerror}") from error
            if count != length:
                raise DriveError(f"it ends at {offset + count}, before its size")
            return memory[:]

    def write(self, offset: int, data: bytes) -> None:
        """Write whole pages durably. Raises DriveError."""
        with mmap.mmap(-1, len(data)) as memory:
            memory[:] = data
            try:
                count = os.pwritev(self._descriptor, [memory], offset)
                os.fsync(self._descriptor)
            except OSError as error:
                raise DriveError(f"it can't be written at {offset}: {error.strerror}") from error
        if count != len(data):
            raise DriveError(f"of {len(data)} bytes {count} were written")


@contextmanager
def _opened(namespace: Namespace, flags: int) -> Iterator[_Opened]:
    try:
        descriptor = os.open(namespace.device, flags | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        try:  # a file system that knows no O_DIRECT
            descriptor = os.open(namespace.device, flags | os.O_CLOEXEC)
        except OSError as error:
            raise DriveError(f"it can't be opened at {namespace.device}: {error.strerror}") from error
    try:
        size_bytes = os.lseek(descriptor, 0, os.SEEK_END)
        if size_bytes < 2 * _EDGE_BYTES:
            raise UsageError(f"it has {size_bytes} bytes, which is too little for anything")
        yield _Opened(descriptor, size_bytes // PAGE_BYTES * PAGE_BYTES)
    finally:
        os.close(descriptor)


def _content(drive: _Opened, fabric: FabricId) -> tuple[Content, str, Superblock | None]:
    begin = drive.read(0, _EDGE_BYTES)
    chosen = chosen_copy(examine_superblock(begin[: SUPERBLOCK_COPIES * PAGE_BYTES]))
    if chosen.state not in (CopyState.BLANK, CopyState.FOREIGN):
        return _of_shard(chosen, fabric)
    says = "" if is_blank(begin) else f"it holds something else: {_known_by(begin)}"
    says = says or _behind(drive)
    return (Content.FOREIGN if says else Content.BLANK), says, None


def _of_shard(copy: SuperblockCopy, fabric: FabricId) -> tuple[Content, str, Superblock | None]:
    superblock = copy.superblock
    if superblock is None:
        return Content.OTHER, f"it holds a shard of Ostraca, and nobody can tell whose: {copy.why}", None
    if superblock.fabric != fabric:
        whose = f"it holds shard {superblock.shard} of fabric {superblock.fabric.hex()}"
        return Content.OTHER, whose, superblock
    return Content.OURS, f"it holds shard {superblock.shard} of this fabric", superblock


def _behind(drive: _Opened) -> str:
    """Say what is found behind a first MiB that is empty; nothing where nothing is."""
    if not is_blank(drive.read(drive.size_bytes - _EDGE_BYTES, _EDGE_BYTES)):
        return "its last MiB is not empty, as of a RAID, or of a disk with a GPT"
    part_bytes = drive.size_bytes // (_PARTS_BETWEEN + 1) // PAGE_BYTES * PAGE_BYTES
    for number in range(1, _PARTS_BETWEEN + 1):
        if not is_blank(drive.read(number * part_bytes, PAGE_BYTES)):
            return f"it is not empty at byte {number * part_bytes}"
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
"""Where some things have their marks, at 512-byte sectors."""


def _known_by(begin: bytes) -> str:
    for offset, mark, what in _MARKS:
        if begin[offset : offset + len(mark)] == mark:
            return what
    first = next(at for at, byte in enumerate(begin) if byte)
    return f"byte {first} and following are {begin[first : first + 8].hex()}"
