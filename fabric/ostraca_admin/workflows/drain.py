"""Progress of a drain: complete once no searched placement needs the enclosure. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostraca_admin.workflows.preflight import StepDone, StepPending
from ostraca_fabric.model.fabric_map import FabricMap
from ostraca_fabric.model.ids import EnclosureId, enclosure_of
from ostraca_fabric.telemetry.status import AgentStatus

_DAY_S = 86_400.0


def drain_verdict(
    fabric_map: FabricMap,
    enclosure: EnclosureId,
    statuses: Sequence[AgentStatus],
    before: Mapping[str, Any],
    *,
    retry_s: float,
) -> StepDone | StepPending:
    """Return whether a drain is complete, or else the remaining hits and time.

    *before* is the detail of the last call; hits are counted since then.

    Estimate: earlier placements end after every shard open for new blocks is written over once. The slowest
    shard at the rate of the last day gives an upper bound; None if a shard is idle.
    """
    epochs = [record.epoch for record in fabric_map.earlier_placements if enclosure in record.weights]
    if not epochs:
        return StepDone("no lookup needs the enclosure any more: ready to retire")
    hits = [(drive.drive, drive.hits) for status in statuses for drive in status.drives]
    all_hits = sum(count for _, count in hits)
    own_hits = sum(count for drive, count in hits if drive.partition("/")[0] == enclosure)
    own_before, all_before = before.get("own_hits", 0), before.get("all_hits", 0)
    share = before.get("hits_share", 0.0)
    if all_hits > all_before and own_hits >= own_before:  # a restarted agent counts from zero
        share = (own_hits - own_before) / (all_hits - all_before)
    detail = {
        "hits_share": round(share, 4),
        "own_hits": own_hits,
        "all_hits": all_hits,
        "placement_epochs": epochs,
    }
    return StepPending(
        f"{share:.0%} of flash hits are in this enclosure; earlier placement epochs: {len(epochs)}",
        retry_s,
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
