"""What the map is to say of a registered enclosure. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_fabric.fabric_map import DriveRecord, EnclosureRecord, ShardRecord
from ostraca_fabric.ids import EnclosureId, drive_id, shard_id

if TYPE_CHECKING:
    from ostraca_fabric.admin.model import EnclosureSpec, EnclosureStatus


def map_record(spec: EnclosureSpec, status: EnclosureStatus, *, is_draining: bool) -> EnclosureRecord:
    """Describe an enclosure with those of its drives that are formatted, one shard each."""
    enclosure = EnclosureId(spec.name)
    drives, shards = list[DriveRecord](), list[ShardRecord]()
    for drive in status.drives:
        if drive.shard_bytes:
            named = drive_id(enclosure, drive.name)
            drives.append(DriveRecord(named, nguid=drive.nguid))
            shards.append(
                ShardRecord(
                    shard_id(named, 0),
                    named,
                    0,
                    drive.shard_bytes,
                    drive.usable_bytes,
                    drive.block_bytes_max,
                    drive.usable_bytes,
                )
            )
    record = EnclosureRecord(enclosure, tuple(drives), tuple(shards), target=spec.target())
    return record.drained() if is_draining else record
