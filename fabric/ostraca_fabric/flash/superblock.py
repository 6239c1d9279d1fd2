"""Superblock: identity and layout of a shard.

Page 0 of a shard, with a copy in page 1. All numbers are little-endian. Magic, version and checksum keep
their places in every version, so that each release can name a version beyond its reach.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import Enum

import xxhash

from ostraca_fabric.errors import FormatError, UsageError
from ostraca_fabric.model.extent import PAGE_BYTES, SUPERBLOCK_COPIES, Geometry
from ostraca_fabric.model.ids import ID_BYTES, DriveId, EnclosureId, FabricId, ShardId

MAGIC = b"OSTRACA\x1a"
VERSION = 1
VERSION_OLDEST = 1

_HEAD = struct.Struct("<8sIIQ")  # magic, version, zero, checksum
_BODY = struct.Struct("<16s16sQQQIIQ32x64s128s160s")
_CHECKSUM_AT = 16
_BODY_AT = _HEAD.size


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """Identity bound into every summary page of a shard.

    Pages of another shard, or of this shard before its last formatting, never match.
    """

    digest: bytes
    """16 bytes, in each page."""

    seed: int
    """64 bits, in each page's checksum."""


@dataclass(frozen=True, slots=True)
class Superblock:
    """Identity and measures of a shard."""

    fabric: FabricId
    format_id: bytes
    """16 random bytes, new at each formatting."""

    enclosure: EnclosureId
    drive: DriveId
    shard: ShardId
    drive_offset: int
    """Position of the shard on the drive, in bytes."""

    geometry: Geometry

    def __post_init__(self) -> None:
        """Refuse ids of a wrong size."""
        if len(self.fabric) != ID_BYTES or len(self.format_id) != ID_BYTES:
            raise UsageError(f"a fabric id and a format id have {ID_BYTES} bytes each")

    @property
    def identity(self) -> ShardIdentity:
        """Return the identity bound into summary pages."""
        names = self.fabric + self.format_id + self.shard.encode()
        digest = hashlib.blake2b(names, digest_size=24, person=b"ostraca-shard").digest()
        return ShardIdentity(digest[:16], int.from_bytes(digest[16:], "little"))


def encode_superblock(superblock: Superblock) -> bytes:
    """Return the first bytes of a shard: the page and its copy."""
    geometry = superblock.geometry
    body = _BODY.pack(
        superblock.fabric,
        superblock.format_id,
        geometry.shard_bytes,
        geometry.segment_bytes,
        geometry.first_segment_offset,
        geometry.segments,
        geometry.summary_pages,
        superblock.drive_offset,
        superblock.enclosure.encode(),
        superblock.drive.encode(),
        superblock.shard.encode(),
    )
    page = bytearray((_HEAD.pack(MAGIC, VERSION, 0, 0) + body).ljust(PAGE_BYTES, b"\0"))
    struct.pack_into("<Q", page, _CHECKSUM_AT, _checksum(page))
    return bytes(page) * SUPERBLOCK_COPIES


class CopyState(Enum):
    """State of one copy of a superblock."""

    GOOD = "good"
    CUT_SHORT = "cut short"
    BLANK = "blank"
    FOREIGN = "foreign"
    DAMAGED = "damaged"
    OLDER = "older"
    NEWER = "newer"
    SENSELESS = "senseless"
    """The checksum is valid, but the values are impossible."""


@dataclass(frozen=True, slots=True)
class SuperblockCopy:
    """Copy of a superblock, in any state."""

    state: CopyState
    superblock: Superblock | None = None
    """Decoded superblock of a good copy."""

    version: int | None = None
    """Format version, if covered by a valid checksum."""

    why: str = ""
    """For a bad copy: the finding and the remedy."""


def examine_superblock(pages: bytes) -> tuple[SuperblockCopy, SuperblockCopy]:
    """Return the state of both copies in a shard's first two pages. Never raises."""
    return _examined(pages[:PAGE_BYTES]), _examined(pages[PAGE_BYTES : SUPERBLOCK_COPIES * PAGE_BYTES])


def chosen_copy(copies: tuple[SuperblockCopy, SuperblockCopy]) -> SuperblockCopy:
    """Return the copy that counts.

    The first copy counts, unless only the second is good or says more.
    """
    first, second = copies
    if first.superblock is not None:
        return first
    # If only the first page was wiped, the second says more.
    says_more = first.state is CopyState.BLANK and second.state is not CopyState.BLANK
    return second if second.superblock is not None or says_more else first


def decode_superblock(pages: bytes) -> Superblock:
    """Decode a shard's first two pages: the superblock, or its copy if only that is good.

    Raises FormatError with the finding and the remedy.
    """
    chosen = chosen_copy(examine_superblock(pages))
    if chosen.superblock is None:
        raise FormatError(chosen.why)
    return chosen.superblock


def is_blank(page: bytes) -> bool:
    """Tell whether a page was never written."""
    return page == bytes(len(page))


def _checksum(page: bytes | bytearray) -> int:
    return xxhash.xxh3_64_intdigest(bytes(page[:_CHECKSUM_AT]) + bytes(page[_CHECKSUM_AT + 8 :]))


def _examined(page: bytes) -> SuperblockCopy:
    if len(page) != PAGE_BYTES:
        return SuperblockCopy(
            CopyState.CUT_SHORT,
            why=f"a superblock has {PAGE_BYTES} bytes, and {len(page)} were there: the drive was cut short",
        )
    if is_blank(page):
        return SuperblockCopy(
            CopyState.BLANK, why="there is no shard here, the page is blank: format the drive first"
        )
    magic, version, _, checksum = _HEAD.unpack_from(page)
    if magic != MAGIC:
        return SuperblockCopy(
            CopyState.FOREIGN,
            why=f"this is not a shard of Ostraca (it begins with {bytes(magic).hex()}): something else may "
            "live on this drive; choose another, or wipe it first",
        )
    if checksum != _checksum(page):
        return SuperblockCopy(
            CopyState.DAMAGED,
            why="the superblock is damaged: its checksum does not match; format the drive anew, which "
            "empties it",
        )
    return _of_version(page, version)


def _of_version(page: bytes, version: int) -> SuperblockCopy:
    """Return the state of a page with a valid checksum."""
    if version < VERSION_OLDEST:
        return SuperblockCopy(
            CopyState.OLDER,
            version=version,
            why=f"flash format {version} is older than this release reads ({VERSION_OLDEST} to {VERSION}): "
            "format the drive anew, which empties it, or run an older release",
        )
    if version > VERSION:
        return SuperblockCopy(
            CopyState.NEWER,
            version=version,
            why=f"flash format {version} is newer than this release reads ({VERSION_OLDEST} to {VERSION}): "
            "upgrade this release",
        )
    try:
        return SuperblockCopy(CopyState.GOOD, _superblock(page), version)
    except (UsageError, UnicodeDecodeError) as error:
        return SuperblockCopy(
            CopyState.SENSELESS,
            version=version,
            why=f"the superblock makes no sense ({error}): format the drive anew, which empties it",
        )


def _superblock(page: bytes) -> Superblock:
    """Decode a page with a valid checksum.

    Raises UsageError or UnicodeDecodeError for impossible values.
    """
    (
        fabric,
        format_id,
        shard_bytes,
        segment_bytes,
        first_segment_offset,
        segments,
        summary_pages,
        drive_offset,
        *names,
    ) = _BODY.unpack_from(page, _BODY_AT)
    enclosure, drive, shard = (name.rstrip(b"\0").decode() for name in names)
    return Superblock(
        FabricId(fabric),
        format_id,
        EnclosureId(enclosure),
        DriveId(drive),
        ShardId(shard),
        drive_offset,
        Geometry(shard_bytes, segment_bytes, segments, summary_pages, first_segment_offset),
    )
