"""How a batch is cut into requests that the agent accepts.

A batch may be larger than a request: the agent limits blocks and frame length per connection, and the arena
holds only so many slots. A window is the part of a batch that one request names; windows cover the batch in
order, without gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ostraca_fabric.chain import Chain
    from ostraca_fabric.wire.messages import ConnectionLimits

_MESSAGE_BYTES = 1024
"""What a request takes besides its blocks: ids, names of fields, the first stripe unit of each span, with
room to spare.
"""

_COLUMN_BYTES = 4 + 8 + 16 + 5
"""Per block: length, slot, tag, and the count of a stripe unit of one block."""


@dataclass(frozen=True, slots=True)
class Window:
    """Blocks ``first`` to ``first + blocks`` of a batch, and the slices of its chains that they are."""

    first: int
    blocks: int
    chains: tuple[Chain, ...]


def blocks_per_request(limits: ConnectionLimits, hash_bytes: int) -> int:
    """Return how many blocks fit one request at worst, each in a stripe unit of its own; at least 1."""
    per_block = 2 * hash_bytes + _COLUMN_BYTES
    return max(1, min(limits.blocks_max, (limits.frame_bytes_max - _MESSAGE_BYTES) // per_block))


def windows(chains: Sequence[Chain], blocks_max: int) -> Iterator[Window]:
    """Cut chains, laid end to end, into windows of at most *blocks_max* blocks."""
    first, part, room = 0, [], blocks_max
    for chain in chains:
        begin = 0
        while begin < len(chain):
            taken = min(room, len(chain) - begin)
            part.append(chain[begin : begin + taken])
            begin, room = begin + taken, room - taken
            if not room:
                yield Window(first, blocks_max, tuple(part))
                first, part, room = first + blocks_max, [], blocks_max
    if part:
        yield Window(first, blocks_max - room, tuple(part))


def window_blocks(*, left: int, blocks_max: int, arena_slots: int, windows_inflight: int) -> int:
    """Choose how many blocks the next request of a get names.

    All that is left where the arena can hold it, since the agent makes its own waves of it; else a share of
    the arena, so that one window is checked and copied while the others are on their way.
    """
    share = arena_slots if left <= arena_slots else max(1, arena_slots // windows_inflight)
    return min(left, blocks_max, share)
