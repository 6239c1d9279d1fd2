"""Report of unavailable shards and drives. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ostraca_fabric.model.fabric_map import FabricMap
from ostraca_fabric.model.ids import DriveId, ShardId, drive_of
from ostraca_fabric.telemetry.unavailable import TOLD_MAX, Unavailable, UnownedShard, UnusedDrive


def find_unavailable(
    fabric_map: FabricMap,
    unowned_s: Mapping[ShardId, float],
    *,
    why_shards: Mapping[ShardId, str],
    why_drives: Mapping[DriveId, str],
    in_trouble: Mapping[DriveId, str],
) -> Unavailable:
    """Return unowned shards and unusable drives, with reasons.

    *unowned_s*: time of each shard without an owner. *why_shards*, *why_drives* and *in_trouble*: clauses on
    shards that could not be opened here, on unattached drives, and on attached drives in trouble.
    """
    without = [(seconds, shard) for shard, seconds in unowned_s.items() if fabric_map.owner(shard) is None]
    without.sort(key=lambda each: (-each[0], each[1]))

    def why(shard: ShardId) -> str:
        drive = drive_of(shard)
        return why_drives.get(drive) or why_shards.get(shard) or in_trouble.get(drive, "")

    return Unavailable(
        len(without),
        tuple(UnownedShard(shard, seconds, why(shard)) for seconds, shard in without[:TOLD_MAX]),
        len(why_drives),
        tuple(UnusedDrive(drive, why_drives[drive]) for drive in sorted(why_drives)[:TOLD_MAX]),
    )


def shard_counts(fabric_map: FabricMap) -> tuple[tuple[str, int], ...]:
    """Return the number of shards of each agent with shards."""
    owners = (fabric_map.owner(shard.id) for shard in fabric_map.shards())
    return tuple(sorted(Counter(owner for owner in owners if owner is not None).items()))
