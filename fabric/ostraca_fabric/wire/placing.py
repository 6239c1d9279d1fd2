"""Where a block belongs, in every placement epoch that is asked: bodies of ``Placed``.

Only where it would be: no owner is asked, and nothing tells whether the block is there.
"""

from __future__ import annotations

import msgspec

PLACING = "placing"
"""The feature of agents that answer ``Place``, and ``PrefetchFor`` of operators."""


class PlaceThen(msgspec.Struct, frozen=True):
    """Where one placement epoch places a block. Empty where no shard takes blocks, or its shard is gone."""

    placement_epoch: int
    enclosure: str = ""
    shard: str = ""
    owner: str = ""
    """Empty while nobody owns the shard."""

    owner_epoch: int = 0


class Places(msgspec.Struct, frozen=True):
    """Answer to ``Place``: the current placement epoch first, then earlier ones, the newest first."""

    agent: str
    map_revision: int
    places: tuple[PlaceThen, ...]
