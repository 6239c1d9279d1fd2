"""Chains, their slices and what they say about placement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fabric import second_implementation as second

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.chain import DEPTH_UNKNOWN, RANK_MAX, STRIPE_UNIT_BLOCKS, Chain, Span


def engine_hashes(count: int, width: int = 8) -> list[bytes]:
    return [number.to_bytes(width, "big") for number in range(count)]


def placement_of_blocks(span: Span) -> list[bytes]:
    width = span.hash_bytes
    units = [span.units[at : at + width] for at in range(0, len(span.units), width)]
    return [unit for unit, blocks in zip(units, span.unit_blocks, strict=True) for _ in range(blocks)]


@given(st.integers(0, 200), st.data())
@settings(deadline=None)
def test_a_slice_names_its_own_blocks_and_places_them_as_the_whole_chain_does(
    blocks: int, data: st.DataObject
) -> None:
    hashes = engine_hashes(blocks)
    first = data.draw(st.integers(0, blocks))
    last = data.draw(st.integers(first, blocks))
    span = Chain.of(hashes, hash_bytes=8, rank=2, group=1)[first:last].span()
    assert (span.hashes, span.rank, span.group, len(span)) == (
        b"".join(hashes[first:last]),
        2,
        1,
        last - first,
    )
    assert placement_of_blocks(span) == second.placement_hashes(hashes, first, last)


@given(st.integers(0, 100), st.data())
@settings(deadline=None)
def test_slices_of_slices_select_as_slices_of_lists_do(blocks: int, data: st.DataObject) -> None:
    hashes = engine_hashes(blocks)
    chain = Chain.of(hashes, hash_bytes=8)
    edge = st.none() | st.integers(-blocks - 3, blocks + 3)
    for _ in range(3):
        first, last = data.draw(edge), data.draw(edge)
        chain, hashes = chain[first:last], hashes[first:last]
        assert len(chain) == len(hashes)
        assert chain.span().hashes == b"".join(hashes)


def test_units_end_at_multiples_of_32_from_the_root() -> None:
    chain = Chain.of(engine_hashes(100), hash_bytes=8)
    assert STRIPE_UNIT_BLOCKS == 32
    assert chain.span().unit_blocks == (32, 32, 32, 4)
    assert chain[31:33].span().unit_blocks == (1, 1)
    assert chain[32:64].span().unit_blocks == (32,)
    assert chain[40:70].span().units == b"".join(engine_hashes(100)[32:65:32])
    assert chain[50:50].span() == Span(b"", 8, b"", (), 0, 0, 50, 100)


def test_a_slice_says_how_deep_it_lies_and_how_long_its_chain_is() -> None:
    chain = Chain.of(engine_hashes(100), hash_bytes=8)
    assert (chain[40:70].span().depth, chain[40:70].span().chain_blocks) == (40, 100)
    later = replace(Chain.of(engine_hashes(40), hash_bytes=8), before=64)[8:]
    assert (later.span().depth, later.span().chain_blocks) == (72, 104)
    unordered = Chain.of(engine_hashes(40), hash_bytes=8, is_chained=False)[3:].span()
    assert (unordered.depth, unordered.chain_blocks) == (DEPTH_UNKNOWN, 0)


def test_blocks_without_order_are_each_placed_by_their_own_hash() -> None:
    hashes = engine_hashes(40)
    span = Chain.of(hashes, hash_bytes=8, is_chained=False)[3:38].span()
    assert span == Span(b"".join(hashes[3:38]), 8, b"".join(hashes[3:38]), (1,) * 35, 0, 0)


def test_chains_of_the_same_blocks_are_equal() -> None:
    assert Chain.of(engine_hashes(5), hash_bytes=8)[1:] == Chain.of(engine_hashes(5), hash_bytes=8)[1:5]


def test_hashes_may_be_any_bytes_like_value() -> None:
    plain = Chain.of([b"12345678"], hash_bytes=8)
    alike: list[Any] = [bytearray(b"12345678"), memoryview(b"12345678")]
    assert [Chain.of([each], hash_bytes=8) for each in alike] == [plain, plain]


@pytest.mark.parametrize("unusable", [8, "12345678", None, [1, 2, 3, 4, 5, 6, 7, 8]])
def test_a_hash_that_is_not_bytes_is_refused(unusable: Any) -> None:
    with pytest.raises(UsageError, match="engine hashes are bytes"):
        Chain.of([unusable], hash_bytes=8)


def test_a_hash_of_another_length_is_refused_by_its_position() -> None:
    with pytest.raises(UsageError, match="engine hash 1 has 7 bytes"):
        Chain.of([b"12345678", b"1234567"], hash_bytes=8)


@pytest.mark.parametrize("width", [0, -8, 7, 65])
def test_a_hash_width_that_no_engine_has_is_refused(width: int) -> None:
    with pytest.raises(UsageError, match="8 to 64"):
        Chain.of([], hash_bytes=width)


@pytest.mark.parametrize(("rank", "group"), [(-1, 0), (0, -1), (RANK_MAX + 1, 0), (0, RANK_MAX + 1)])
def test_rank_and_group_must_fit_32_bits(rank: int, group: int) -> None:
    with pytest.raises(UsageError, match="pass a whole number from 0 to"):
        Chain.of([], hash_bytes=8, rank=rank, group=group)


@pytest.mark.parametrize("part", [3, slice(0, 8, 2), slice(None, None, -1)])
def test_a_chain_is_only_sliced_without_a_step(part: Any) -> None:
    with pytest.raises(UsageError, match="without a step"):
        Chain.of(engine_hashes(10), hash_bytes=8)[part]


def test_a_span_travels_as_it_is() -> None:
    span = Chain.of(engine_hashes(70), hash_bytes=8, rank=RANK_MAX, group=3)[5:70].span()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(span), type=Span) == span


@pytest.mark.parametrize(
    "fields",
    [
        (b"", 0, b"", (), 0, 0),
        (b"", 65, b"", (), 0, 0),
        (bytes(9), 8, bytes(8), (1,), 0, 0),
        (bytes(16), 8, bytes(8), (1,), 0, 0),
        (bytes(16), 8, bytes(8), (3,), 0, 0),
        (bytes(16), 8, bytes(15), (1, 1), 0, 0),
        (bytes(16), 8, bytes(8), (1, 1), 0, 0),
        (bytes(16), 8, bytes(16), (0, 2), 0, 0),
        (bytes(16), 8, bytes(24), (-1, 2, 1), 0, 0),
        (bytes(33 * 8), 8, bytes(8), (33,), 0, 0),
        (bytes(8), 8, bytes(8), (1,), -1, 0),
        (bytes(8), 8, bytes(8), (1,), 0, RANK_MAX + 1),
        (bytes(8), 8, bytes(8), (1,), 0, 0, -1, 1),
        (bytes(8), 8, bytes(8), (1,), 0, 0, 1 << 32, 1),
        (bytes(8), 8, bytes(8), (1,), 0, 0, 5, 5),
        (bytes(8), 8, bytes(8), (1,), 0, 0, 5, 1 << 32),
        (bytes(8), 8, bytes(8), (1,), 0, 0, DEPTH_UNKNOWN, -1),
    ],
)
def test_a_span_whose_columns_contradict_each_other_is_refused_here_and_off_the_wire(
    fields: tuple[Any, ...],
) -> None:
    with pytest.raises(UsageError):
        Span(*fields)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Span)


def test_a_prefix_that_leaves_no_room_for_the_hashes_is_refused() -> None:
    fits = replace(Chain.of(engine_hashes(40), hash_bytes=8), before=DEPTH_UNKNOWN - 40)
    assert fits.span().chain_blocks == DEPTH_UNKNOWN
    with pytest.raises(UsageError, match=f"before is {DEPTH_UNKNOWN - 39}: pass a whole number from 0 to"):
        replace(fits, before=DEPTH_UNKNOWN - 39)
