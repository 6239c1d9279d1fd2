"""Volume records: a copy of what volumes the fabric has, on every shard, beside its superblock.

For rebuilding a fabric whose membership store is lost; nothing reads them otherwise. They hold no secret.
Between the superblock's copy and segment 0 there is room for two copies of equal size. They are written in
turn, never the one that holds the newest, so that an interrupted write leaves what was there before. Each is
bound to its shard, as summary pages are.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import msgspec
import xxhash

from ostraca_fabric.errors import UsageError
from ostraca_fabric.extent import PAGE_BYTES, rounded_up
from ostraca_fabric.flash.geometry import SUPERBLOCK_COPIES, Geometry
from ostraca_fabric.ids import OwnerEpoch, TenantId, checked_name
from ostraca_fabric.layout import Layout
from ostraca_fabric.volume import VolumeRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostraca_fabric.flash.superblock import ShardIdentity, Superblock

MAGIC = b"OSTRvols"
VERSION = 1
COPIES = 2
COPY_BYTES_MAX = 1 << 20
"""Whatever a superblock says, no more is read."""

_AREA_OFFSET = SUPERBLOCK_COPIES * PAGE_BYTES
_HEAD = struct.Struct("<Q8sII16sQQII")
"""Checksum, magic, version, records, shard digest, owner epoch, sequence, bytes of records, volumes that are
left out."""

_CHECKSUM_BYTES = 8
_NEVER = OwnerEpoch(0)


class VolumesState(Enum):
    """What one copy is."""

    GOOD = "good"
    BLANK = "blank"
    OTHER = "another shard's"
    """Or this one's, before it was formatted anew."""

    DAMAGED = "damaged"
    NEWER = "newer"
    """Of a format that this release does not read."""


@dataclass(frozen=True, slots=True)
class VolumesCopy:
    """One copy of the volume records, whatever it is."""

    state: VolumesState
    volumes: tuple[VolumeRecord, ...] = ()
    """The oldest first."""

    epoch: OwnerEpoch = _NEVER
    """Of the owner that wrote it."""

    sequence: int = 0
    """Rises with every write."""

    left_out: int = 0
    """Volumes of the fabric that found no room in it."""

    refused: int = 0
    """Records that this release can't read, though the checksum holds: a newer one wrote them."""

    @property
    def age(self) -> tuple[int, int]:
        """Return what the newest copy of a shard has the highest of."""
        return self.epoch, self.sequence


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    tenant: str
    name: str
    incarnation: int
    block_bytes: int
    layout_digest: str
    """In hexadecimal. A layout with a field that this release does not know has another."""

    layout: Layout
    erasable: bool = False


def copy_bytes(geometry: Geometry) -> int:
    """Return the room of one copy: half of what lies before segment 0, in whole pages; 0 where none fits."""
    half = (geometry.first_segment_offset - _AREA_OFFSET) // COPIES
    return min(COPY_BYTES_MAX, half // PAGE_BYTES * PAGE_BYTES)


def copy_offset(geometry: Geometry, number: int) -> int:
    """Return where copy 0 or 1 begins in the shard."""
    return _AREA_OFFSET + number * copy_bytes(geometry)


def encode_volumes(
    identity: ShardIdentity,
    room_bytes: int,
    volumes: Sequence[VolumeRecord],
    *,
    epoch: OwnerEpoch,
    sequence: int,
) -> bytes:
    """Return the pages of a copy, at most *room_bytes* of them, at least one page.

    *volumes* come the oldest first, and get room in that order, but those that were erased get it before all
    others: one that was forgotten would be made again in its first incarnation, and what was erased be found
    again. What finds no room is left out; the copy says how many that are.
    """
    assert room_bytes >= PAGE_BYTES, "a shard without room has no copies"
    texts: dict[int, bytes] = {}
    used = _HEAD.size + len(b"[]")
    for place, volume in sorted(enumerate(volumes), key=lambda each: each[1].incarnation == 1):
        text = msgspec.json.encode(_record_of(volume))
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
    """Say of each copy what it is. Never raises.

    *area*: the shard's bytes from ``copy_offset(geometry, 0)`` on, both copies; what is cut off counts as
    blank.
    """
    room = copy_bytes(superblock.geometry)
    whole = area[: COPIES * room].ljust(COPIES * room, b"\0")
    return _examined(superblock.identity, whole[:room]), _examined(superblock.identity, whole[room:])


def newest_copy(copies: tuple[VolumesCopy, VolumesCopy]) -> int | None:
    """Return which copy counts: the good one that was written last. None when neither is good."""
    good = [number for number, copy in enumerate(copies) if copy.state is VolumesState.GOOD]
    return max(good, key=lambda number: copies[number].age, default=None)


def merged(volumes: Sequence[VolumeRecord], recorded: Sequence[VolumeRecord]) -> tuple[VolumeRecord, ...]:
    """Return the fabric's *volumes* and those that only a shard has *recorded*; none in a lower incarnation
    than the shard has it.

    Volumes are never taken back, nor is an erasure. A store that does not know of one that is on flash has
    lost it, and the record may be the last there is.
    """
    known = {(volume.tenant, volume.name) for volume in volumes}
    incarnations = {(volume.tenant, volume.name): volume.incarnation for volume in recorded}
    return (
        *(volume.raised_to(incarnations.get((volume.tenant, volume.name), 1)) for volume in volumes),
        *(volume for volume in recorded if (volume.tenant, volume.name) not in known),
    )


def _record_of(volume: VolumeRecord) -> _Record:
    return _Record(
        volume.tenant,
        volume.name,
        volume.incarnation,
        volume.block_bytes,
        volume.layout.digest().hex(),
        volume.layout,
        volume.is_erasable,
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
    """Read one record; None when it is not one that this release writes."""
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
