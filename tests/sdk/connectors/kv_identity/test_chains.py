"""Chains of blocks from prefix keys."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from ostraca.connectors.kv_identity.chains import chain_after, unordered_chain
from ostraca_fabric.model.chain import Chain, Span

HASHES = [hashlib.sha256(f"{number}".encode()).digest() for number in range(150)]


def places(span: Span) -> list[bytes]:
    """Return the placement hash of each block."""
    size = span.hash_bytes
    units = [span.units[n * size : (n + 1) * size] for n in range(len(span.unit_blocks))]
    return [unit for unit, blocks in zip(units, span.unit_blocks, strict=True) for _ in range(blocks)]


@given(st.integers(0, 149), st.integers(1, 150), st.integers(0, 3), st.integers(0, 2))
def test_blocks_after_a_prefix_are_placed_as_in_the_whole_chain(
    known: int, count: int, rank: int, group: int
) -> None:
    stop = min(known + count, len(HASHES))
    span = chain_after(HASHES[:known], HASHES[known:stop], rank=rank, group=group).span()
    whole = Chain.of(HASHES[:stop], hash_bytes=32, rank=rank, group=group)[known:stop].span()
    assert (span.hashes, places(span)) == (whole.hashes, places(whole))
    assert (span.depth, span.rank, span.group) == (known, rank, group)


def test_blocks_without_an_order_are_placed_by_themselves() -> None:
    span = unordered_chain(HASHES[:3], rank=1, group=2).span()
    assert (places(span), span.rank, span.group) == (HASHES[:3], 1, 2)
