"""In which enclosure blocks lie: the fabric's own placement.

Blocks are placed a stripe unit at a time: so many consecutive blocks of a prompt, counted from its beginning,
lie together, by the hash of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.chain import Span
from ostraca_fabric.fabric_map import EnclosureRecord, ShardRecord
from ostraca_fabric.ids import DriveId, EnclosureId, PlacementEpoch, ShardId
from ostraca_fabric.keys import KEY_BYTES, SECRET_BYTES
from ostraca_fabric.placement import Placement


@dataclass(frozen=True, slots=True, eq=False)
class Homes:
    """In which enclosure a stripe unit lies, for every block that it may begin with."""

    of_first_block: NDArray[np.intp]
    unit_blocks: int

    def of(self, chain: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the enclosure of each block of a prompt."""
        places = np.arange(len(chain))
        homes: NDArray[np.intp] = self.of_first_block[chain[places - places % self.unit_blocks]]
        return homes


def homes_of(hashes: NDArray[np.uint8], enclosures: Sequence[int], *, unit_blocks: int, seed: int) -> Homes:
    """Place blocks among these enclosures, all of one size. *hashes*: shape (blocks, 16)."""
    records = [
        EnclosureRecord(
            EnclosureId(f"enclosure-{number}"),
            (),
            (ShardRecord(ShardId(f"enclosure-{number}/0/0"), DriveId(f"enclosure-{number}/0"), 0, 1, 1),),
        )
        for number in enclosures
    ]
    placement = Placement.among(PlacementEpoch(1), records)
    secret = np.random.default_rng(seed).bytes(SECRET_BYTES)
    raw = hashes.tobytes()
    found = placement.shards(secret, [Span(raw, KEY_BYTES, raw, (1,) * len(hashes), 0, 0)])
    number_of = np.array([int(shard.split("/")[0].split("-")[1]) for shard in placement.shard_ids], np.intp)
    return Homes(number_of[found], unit_blocks)
