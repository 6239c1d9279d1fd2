"""Where placement epochs place the blocks of a history: what the fabric's map says, and nobody's belief."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.fabric import blocks

from ostraca_fabric.fabric_map import PlacementRecord, weights_of
from ostraca_fabric.placement import Placement

if TYPE_CHECKING:
    from ostraca_fabric.fabric_map import FabricMap
    from ostraca_fabric.ids import ShardId


class Placed:
    """The blocks of one history, by number."""

    def __init__(self, numbers: int) -> None:
        self._span = blocks.chain_of(list(range(numbers))).span()
        self._made: list[tuple[PlacementRecord, list[ShardId | None]]] = []

    def shards(self, fabric_map: FabricMap, number: int) -> list[ShardId]:
        """Return the shards where live epochs place a block, the current one's first."""
        weights = weights_of(fabric_map.enclosures.values())
        current = PlacementRecord(fabric_map.placement_epoch, weights)
        chosen = [self._chosen(record)[number] for record in (current, *fabric_map.earlier_placements)]
        return [shard for shard in dict.fromkeys(chosen) if shard is not None]

    def _chosen(self, record: PlacementRecord) -> list[ShardId | None]:
        """Return for each block where an epoch places it, None where nothing takes blocks."""
        for made, chosen in self._made:
            if made.weights == record.weights:
                return chosen
        placement = Placement.recorded(record)
        indexes = placement.shards(blocks.PLACEMENT_SECRET, [self._span]).tolist()
        chosen = [placement.shard_ids[index] if index >= 0 else None for index in indexes]
        self._made.append((record, chosen))
        return chosen
