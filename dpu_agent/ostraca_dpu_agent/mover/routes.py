"""Routes: which shard each key belongs to, and which owner to ask.

Built anew when the fabric map changes, and never changed: a request works from the routes it began with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.placement import Placement
from ostraca_fabric.rows import distinct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ostraca_fabric.chain import Span
    from ostraca_fabric.fabric_map import FabricMap
    from ostraca_fabric.ids import AgentId, DriveId, ShardId


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The blocks of a request that one shard holds, or would: their positions in the request."""

    shard: ShardId
    positions: NDArray[np.intp]


class Routes:
    """Where blocks are, under one fabric map."""

    def __init__(self, fabric_map: FabricMap) -> None:
        """Build the placement of this map."""
        self.map = fabric_map
        self._placement = Placement.of(fabric_map)
        self._records = {shard.id: shard for shard in fabric_map.shards()}

    def by_owner(
        self, secret: bytes, spans: Sequence[Span]
    ) -> tuple[dict[AgentId, list[ShardPart]], NDArray[np.intp]]:
        """Group the blocks of a request by owner and shard.

        Also returns the positions whose shard has no owner now, or that no shard takes. *secret* is the
        volume's placement secret.
        """
        chosen = self._placement.shards(secret, spans)
        parts: dict[AgentId, list[ShardPart]] = {}
        unowned = [np.flatnonzero(chosen < 0)]
        for index in distinct(chosen[chosen >= 0]).tolist():
            shard = self._placement.shard_ids[index]
            positions = np.flatnonzero(chosen == index)
            owner = self.map.owner(shard)
            if owner is None:
                unowned.append(positions)
            else:
                parts.setdefault(owner, []).append(ShardPart(shard, positions))
        return parts, np.concatenate(unowned)

    def shard(self, secret: bytes, spans: Sequence[Span]) -> ShardId | None:
        """Return the shard that the first block belongs to; None when no shard takes blocks."""
        index = int(self._placement.shards(secret, spans)[0])
        return None if index < 0 else self._placement.shard_ids[index]

    def place(self, shard: ShardId) -> tuple[DriveId, int]:
        """Return the drive a shard lies on, and its first byte there."""
        record = self._records[shard]
        return record.drive, record.offset
