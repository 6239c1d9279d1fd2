"""Chains of blocks from an engine's prefix keys.

Writer and reader must place a block alike, or the reader never finds the block. Stripe units are counted from
the root of a prefix. So a chain needs the hashes from the start of the unit of its first block, and the
number of blocks before that unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ostraca_fabric.model.chain import STRIPE_UNIT_BLOCKS, Chain


class Run(NamedTuple):
    """Blocks named by one chain, with the caller's keys in order."""

    chain: Chain
    keys: tuple[bytes, ...]


def unit_start(position: int) -> int:
    """Return the position of the first block in the stripe unit of *position*."""
    return position - position % STRIPE_UNIT_BLOCKS


def chain_at(
    position: int, unit: Sequence[bytes], hashes: Sequence[bytes], *, rank: int = 0, group: int = 0
) -> Chain:
    """Build the chain of consecutive blocks, the first at *position* of the prefix.

    *unit* is the hashes from ``unit_start(position)`` up to *position*.
    """
    begin = unit_start(position)
    assert len(unit) == position - begin, "all earlier hashes of the unit are needed"
    named = [*unit, *hashes]
    return Chain(
        b"".join(named),
        len(named[0]),
        rank=rank,
        group=group,
        start=len(unit),
        stop=len(named),
        before=begin,
    )


def chain_after(prefix: Sequence[bytes], hashes: Sequence[bytes], *, rank: int = 0, group: int = 0) -> Chain:
    """Build the chain of the blocks that follow *prefix*, all hashes of the prompt before them."""
    return chain_at(len(prefix), prefix[unit_start(len(prefix)) :], hashes, rank=rank, group=group)


def unordered_chain(hashes: Sequence[bytes], *, rank: int = 0, group: int = 0) -> Chain:
    """Build the chain of blocks without a known order: each is placed by its own hash."""
    return Chain(
        b"".join(hashes),
        len(hashes[0]),
        rank=rank,
        group=group,
        start=0,
        stop=len(hashes),
        is_chained=False,
    )
