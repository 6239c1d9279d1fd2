"""When an enclosure is drained: when no placement that is still asked puts anything there. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostraca_fabric.admin.judging import Again, Done
from ostraca_fabric.ids import enclosure_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ostraca_fabric.fabric_map import FabricMap
    from ostraca_fabric.ids import EnclosureId
    from ostraca_fabric.status import AgentStatus

_DAY_S = 86_400.0


def drained(
    fabric_map: FabricMap,
    enclosure: EnclosureId,
    statuses: Sequence[AgentStatus],
    before: Mapping[str, Any],
    *,
    again_s: float,
) -> Done | Again:
    """Say whether nothing of an enclosure is looked up any more, and else how much of what is got is still
    got there, and how long it may take. *before* is the detail of when that was said last: hits are counted
    since then.

    The estimate: earlier placements end when every shard that takes blocks has been written over once; at the
    rate of the last day the slowest takes this long. It is an upper bound, and none where a shard is idle.
    """
    asked = [record.epoch for record in fabric_map.earlier_placements if enclosure in record.weights]
    if not asked:
        return Done("nothing of it is looked up any more: it can be retired")
    hits = [(drive.drive, drive.hits) for status in statuses for drive in status.drives]
    all_hits = sum(count for _, count in hits)
    own_hits = sum(count for drive, count in hits if drive.partition("/")[0] == enclosure)
    own_before, all_before = before.get("own_hits", 0), before.get("all_hits", 0)
    share = before.get("hits_share", 0.0)
    if all_hits > all_before and own_hits >= own_before:  # agents that start anew count anew
        share = (own_hits - own_before) / (all_hits - all_before)
    detail = {
        "hits_share": round(share, 4),
        "own_hits": own_hits,
        "all_hits": all_hits,
        "placement_epochs": asked,
    }
    return Again(
        f"{share:.0%} of what is got from flash is got here; {len(asked)} earlier placements are still asked",
        again_s,
        progress=min(0.99, 0.5 + (1 - share) / 2),
        ends_in_s=_written_over_s(fabric_map, enclosure, statuses),
        detail=detail,
    )


def _written_over_s(
    fabric_map: FabricMap, enclosure: EnclosureId, statuses: Sequence[AgentStatus]
) -> float | None:
    rates = {shard.shard: shard.written_bytes_per_day for status in statuses for shard in status.shards}
    writable = [
        shard for shard in fabric_map.shards() if shard.weight > 0 and enclosure_of(shard.id) != enclosure
    ]
    if not writable or any(not rates.get(shard.id) for shard in writable):
        return None
    return max(shard.size_bytes / rates[shard.id] for shard in writable) * _DAY_S
