"""What an agent says of what nobody serves. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ostraca_fabric.ids import drive_of
from ostraca_fabric.unserved import TOLD_MAX, Unserved, UnservedShard, UnusedDrive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostraca_fabric.fabric_map import FabricMap
    from ostraca_fabric.ids import DriveId, ShardId


def unserved(
    fabric_map: FabricMap,
    unowned_s: Mapping[ShardId, float],
    *,
    why_shards: Mapping[ShardId, str],
    why_drives: Mapping[DriveId, str],
    in_trouble: Mapping[DriveId, str],
) -> Unserved:
    """Say what nobody serves. *unowned_s*: how long each shard had no owner when that was looked at last;
    *why_shards*: why shards could not be opened here, *why_drives*: why drives are not attached, and what
    attached ones *in_trouble* are, each as a clause.
    """
    without = [(seconds, shard) for shard, seconds in unowned_s.items() if fabric_map.owner(shard) is None]
    without.sort(key=lambda each: (-each[0], each[1]))

    def why(shard: ShardId) -> str:
        drive = drive_of(shard)
        return why_drives.get(drive) or why_shards.get(shard) or in_trouble.get(drive, "")

    return Unserved(
        len(without),
        tuple(UnservedShard(shard, seconds, why(shard)) for seconds, shard in without[:TOLD_MAX]),
        len(why_drives),
        tuple(UnusedDrive(drive, why_drives[drive]) for drive in sorted(why_drives)[:TOLD_MAX]),
    )


def owners_of(fabric_map: FabricMap) -> tuple[tuple[str, int], ...]:
    """Return how many shards each agent owns, of those that own any."""
    owners = (fabric_map.owner(shard.id) for shard in fabric_map.shards())
    return tuple(sorted(Counter(owner for owner in owners if owner is not None).items()))
