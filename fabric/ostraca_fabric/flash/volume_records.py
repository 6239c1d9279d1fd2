"""Volume records: a copy of the fabric's volumes on every shard, beside the superblock.

Read only for the rebuild of a fabric without its membership store. The records hold no secret. Between the
superblock's copy and segment 0 there is room for two copies of equal size. Writes alternate and never touch
the newest copy, so that an interrupted write leaves the previous state. Each copy is bound to its shard, as
summary pages are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec
import xxhash

from ostraca_fabric.errors import UsageError
from ostraca_fabric.flash.superblock import ShardIdentity, Superblock
from ostraca_fabric.model.extent import PAGE_BYTES, SUPERBLOCK_COPIES, Geometry, rounded_up
from ostraca_fabric.model.ids import OwnerEpoch, TenantId, checked_name
from ostraca_fabric.model.volume import Layout, VolumeRecord

MAGIC = b"OSTRvols"
VERSION = 1
COPIES = 2
COPY_BYTES_MAX = 1 << 20
"""Read limit, independent of the superblock's values."""

_AREA_OFFSET = SUPERBLOCK_COPIES * PAGE_BYTES
_HEAD = struct.Struct("<Q8sII16sQQII")
"""Checksum, magic, version, records, shard digest, owner epoch, sequence, bytes of records, omitted
volumes."""

_CHECKSUM_BYTES = 8
_NEVER = OwnerEpoch(0)


class VolumesState(Enum):
    """State of one copy."""

    GOOD = "good"
    BLANK = "blank"
    OTHER = "another shard's"
    """Also for a copy of this shard from before its last formatting."""

    DAMAGED = "damaged"
    NEWER = "newer"
    """Format unknown to this release."""


@dataclass(frozen=True, slots=True)
class VolumesCopy:
    """Copy of the volume records, in any state."""

    state: VolumesState
    volumes: tuple[VolumeRecord, ...] = ()
    """The oldest first."""

    epoch: OwnerEpoch = _NEVER
    """Epoch of the owner that wrote the copy."""

    sequence: int = 0
    """Rises with every write."""

    left_out: int = 0
    """Volumes of the fabric without room in this copy."""

    refused: int = 0
    """Records with a valid checksum that this release can't read: written by a newer release."""

    @property
    def age(self) -> tuple[int, int]:
        """Return the sort key of copies: the newest copy of a shard has the highest."""
        return self.epoch, self.sequence


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    tenant: str
    name: str
    incarnation: int
    block_bytes: int
    layout_digest: str
    """In hexadecimal. A layout with fields unknown to this release has another digest."""

    layout: Layout
    erasable: bool = False


def copy_bytes(geometry: Geometry) -> int:
    """Return the room of one copy, in whole pages; 0 if none fits.

    A copy has half of the space before segment 0.
    """
    half = (geometry.first_segment_offset - _AREA_OFFSET) // COPIES
    return min(COPY_BYTES_MAX, half // PAGE_BYTES * PAGE_BYTES)


def copy_offset(geometry: Geometry, number: int) -> int:
    """Return the offset of copy 0 or 1 in the shard."""
    return _AREA_OFFSET + number * copy_bytes(geometry)


def encode_volumes(
    identity: ShardIdentity,
    room_bytes: int,
    volumes: Sequence[VolumeRecord],
    *,
    epoch: OwnerEpoch,
    sequence: int,
) -> bytes:
    """Return the pages of a copy: at least one page, at most *room_bytes*.

    *volumes* come oldest first and get room in this order; erased volumes come before all others. Without the
    record of an erased volume, a new volume of that name would get the first incarnation. Lookups would then
    find erased blocks again. Volumes without room are omitted; the copy counts them.
    """
    assert room_bytes >= PAGE_BYTES, "a shard without room has no copies"
    texts: dict[int, bytes] = {}
    used = _HEAD.size + len(b"[]")
    for place, volume in sorted(enumerate(volumes), key=lambda each: each[1].incarnation == 1):
        text = msgspec.json.encode(
            _Record(
                volume.tenant,
                volume.name,
                volume.incarnation,
                volume.block_bytes,
                volume.layout.digest().hex(),
                volume.layout,
                volume.is_erasable,
            )
        )
        if used + len(text) + len(b",") > room_bytes:
            continue
        used += len(text) + len(b",")
        texts[place] = text
    body = b"[" + b",".join(text for _, text in sorted(texts.items())) + b"]"
    head = _HEAD.pack(
        0,
        MAGIC,
        VERSION,
        len(texts),
        identity.digest,
        epoch,
        sequence,
        len(body),
        len(volumes) - len(texts),
    )
    covered = head[_CHECKSUM_BYTES:] + body
    checksum = xxhash.xxh3_64_intdigest(covered, seed=identity.seed)
    pages = struct.pack("<Q", checksum) + covered
    return pages.ljust(rounded_up(len(pages)), b"\0")


def examine_volumes(superblock: Superblock, area: bytes) -> tuple[VolumesCopy, VolumesCopy]:
    """Return the state of both copies. Never raises.

    *area*: the shard's bytes from ``copy_offset(geometry, 0)`` on, both copies; missing bytes count as blank.
    """
    room = copy_bytes(superblock.geometry)
    whole = area[: COPIES * room].ljust(COPIES * room, b"\0")
    return _examined(superblock.identity, whole[:room]), _examined(superblock.identity, whole[room:])


def newest_copy(copies: tuple[VolumesCopy, VolumesCopy]) -> int | None:
    """Return the number of the newest good copy, or None if neither is good."""
    good = [number for number, copy in enumerate(copies) if copy.state is VolumesState.GOOD]
    return max(good, key=lambda number: copies[number].age, default=None)


def merged(volumes: Sequence[VolumeRecord], recorded: Sequence[VolumeRecord]) -> tuple[VolumeRecord, ...]:
    """Return *volumes* and the volumes that only a shard has *recorded*.

    No volume gets a lower incarnation than the shard's record. Volumes and erasures are never taken back: if
    a store misses a volume of flash, the store has lost that volume, and the record may be the last.
    """
    known = {(volume.tenant, volume.name) for volume in volumes}
    incarnations = {(volume.tenant, volume.name): volume.incarnation for volume in recorded}
    return (
        *(volume.raised_to(incarnations.get((volume.tenant, volume.name), 1)) for volume in volumes),
        *(volume for volume in recorded if (volume.tenant, volume.name) not in known),
    )


def _examined(identity: ShardIdentity, pages: bytes) -> VolumesCopy:
    if not any(pages[:PAGE_BYTES]):
        return VolumesCopy(VolumesState.BLANK)
    checksum, magic, version, count, digest, epoch, sequence, body_bytes, left_out = _HEAD.unpack_from(pages)
    if magic == MAGIC and digest != identity.digest:
        return VolumesCopy(VolumesState.OTHER)
    body = pages[_HEAD.size : _HEAD.size + body_bytes]
    covered = pages[_CHECKSUM_BYTES : _HEAD.size] + body
    if magic != MAGIC or checksum != xxhash.xxh3_64_intdigest(covered, seed=identity.seed):
        return VolumesCopy(VolumesState.DAMAGED)
    if version != VERSION:
        return VolumesCopy(VolumesState.NEWER)
    try:
        texts = msgspec.json.decode(body, type=list[msgspec.Raw])
    except msgspec.DecodeError:
        return VolumesCopy(VolumesState.DAMAGED)
    found = [volume for volume in map(_volume_of, texts) if volume is not None]
    refused = max(count, len(texts)) - len(found)
    return VolumesCopy(VolumesState.GOOD, tuple(found), OwnerEpoch(epoch), sequence, left_out, refused)


def _volume_of(text: msgspec.Raw) -> VolumeRecord | None:
    """Decode one record; None for a record of another release."""
    try:
        record = msgspec.json.decode(text, type=_Record)
        volume = VolumeRecord(
            TenantId(checked_name("tenant", record.tenant)),
            checked_name("volume", record.name),
            record.layout,
            record.block_bytes,
            record.incarnation,
            is_erasable=record.erasable,
        )
    except (msgspec.DecodeError, UsageError):
        return None
    return volume if volume.layout.digest().hex() == record.layout_digest else None
