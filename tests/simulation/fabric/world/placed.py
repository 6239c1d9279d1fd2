"""Where placement epochs place the blocks of a history: what the fabric's map says, and nobody's belief."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_fabric.model.fabric_map import PlacementRecord, weights_of
from ostraca_fabric.policies.placement import Placement

if TYPE_CHECKING:
    from tests.simulation.fabric.world.blocks import Blocks

    from ostraca_fabric.model.fabric_map import FabricMap
    from ostraca_fabric.model.ids import ShardId


class Placed:
    """The blocks of one history, by number."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
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
        placed: list[ShardId | None] = [None] * self._blocks.numbers
        for volume in self._blocks.volumes:
            numbers = self._blocks.of_volume(volume)
            indexes = placement.shards(volume.placement_secret, self._blocks.spans(numbers)).tolist()
            for number, index in zip(numbers, indexes, strict=True):
                placed[number] = placement.shard_ids[index] if index >= 0 else None
        self._made.append((record, placed))
        return placed
