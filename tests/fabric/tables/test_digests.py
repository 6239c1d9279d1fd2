"""Keys, secrets and tags of blocks agree with a second implementation."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.fabric import second_implementation as second

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.chain import RANK_MAX, Chain, Span
from ostraca_fabric.model.extent import PAGE_BYTES, Pieces, whole_pages
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.volume import VolumeIdentity
from ostraca_fabric.tables.digests import (
    KEY_BYTES,
    SECRET_BYTES,
    TAG_BYTES,
    CheckState,
    TagCheck,
    are_good,
    blake2b_rows,
    derive_keys,
    matches,
    placement_secret,
    tag_of,
    tag_seeds,
    tags_of,
    volume_secret,
)

FABRIC_KEY = bytes(range(32))
SECRET = volume_secret(FABRIC_KEY, tenant=TenantId("acme"), name="llama-70b", incarnation=1)
HASHES = [bytes([number]) * 32 for number in range(40)]

u32 = st.integers(0, RANK_MAX)
names = st.text(max_size=12)


def span(hashes: list[bytes], *, rank: int = 0, group: int = 0, width: int = 32) -> Span:
    return Chain.of(hashes, hash_bytes=width, rank=rank, group=group).span()


def test_secrets_and_keys_are_what_they_always_were() -> None:
    assert SECRET.hex() == "a020524ef593b3c92a62b89b829f1ce05f2d526169fa4d2bf1c7d25bf065129b"
    assert (
        placement_secret(SECRET).hex() == "6ae9bc2de712f95ba0794f0e559c72032f72b6101a4b768d258fd08fa272ef8d"
    )
    assert [row.tobytes().hex() for row in derive_keys(SECRET, [span(HASHES[:2], rank=3, group=1)])] == [
        "775992fbd897d69adf078274145a76e7",
        "574877f90d0d037f5cb183c6cbf9c516",
    ]


@given(st.binary(min_size=32, max_size=32), names, names, st.integers(0, 2**64 - 1))
@settings(deadline=None, max_examples=40)
def test_a_second_implementation_derives_the_same_secrets(
    fabric_key: bytes, tenant: str, name: str, incarnation: int
) -> None:
    secret = volume_secret(fabric_key, tenant=TenantId(tenant), name=name, incarnation=incarnation)
    assert secret == second.volume_secret(fabric_key, tenant, name, incarnation)
    assert placement_secret(secret) == second.placement_secret(secret)


@given(st.integers(8, 64), st.lists(st.tuples(st.integers(0, 5), u32, u32), max_size=4), st.randoms())
@settings(deadline=None, max_examples=40)
def test_a_second_implementation_derives_the_same_keys(
    width: int, shapes: list[tuple[int, int, int]], dice: Random
) -> None:
    named = [([dice.randbytes(width) for _ in range(blocks)], rank, group) for blocks, rank, group in shapes]
    keys = derive_keys(
        SECRET, [span(hashes, rank=rank, group=group, width=width) for hashes, rank, group in named]
    )
    expected = [second.key(SECRET, each, rank, group) for hashes, rank, group in named for each in hashes]
    assert keys.shape == (len(expected), KEY_BYTES)
    assert [row.tobytes() for row in keys] == expected


def test_no_two_volumes_share_a_secret_however_their_names_are_cut() -> None:
    volumes = [
        ("a", "bc", 1),
        ("ab", "c", 1),
        ("abc", "", 1),
        ("", "abc", 1),
        ("a", "bc", 2),
        ("a", "bc", 256),
    ]
    secrets = {
        volume_secret(FABRIC_KEY, tenant=TenantId(tenant), name=name, incarnation=incarnation)
        for tenant, name, incarnation in volumes
    }
    assert len(secrets) == len(volumes)
    assert {len(secret) for secret in secrets} == {SECRET_BYTES}


def test_another_fabric_key_gives_another_secret() -> None:
    other = volume_secret(bytes(32), tenant=TenantId("acme"), name="llama-70b", incarnation=1)
    assert other != SECRET


@pytest.mark.parametrize("length", [0, 16, 31, 33, 64])
def test_a_fabric_key_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(UsageError, match="32"):
        volume_secret(bytes(length), tenant=TenantId("acme"), name="v", incarnation=1)


def test_hash_rank_group_and_secret_each_make_another_key() -> None:
    one = span(HASHES[:1], rank=1, group=2)
    others = [span(HASHES[1:2], rank=1, group=2), span(HASHES[:1], rank=2, group=1), span(HASHES[:1], rank=1)]
    keys = (
        derive_keys(SECRET, [one, *others]).tolist() + derive_keys(placement_secret(SECRET), [one]).tolist()
    )
    assert len({bytes(each) for each in keys}) == 5


def test_a_blocks_key_does_not_depend_on_the_rest_of_the_request() -> None:
    whole = derive_keys(SECRET, [span(HASHES)])
    chain = Chain.of(HASHES, hash_bytes=32)
    apart = derive_keys(SECRET, [chain[30:35].span(), chain[3:5].span()])
    np.testing.assert_array_equal(apart, np.concatenate([whole[30:35], whole[3:5]]))


def test_no_blocks_have_no_keys() -> None:
    assert derive_keys(SECRET, []).shape == (0, KEY_BYTES)
    assert derive_keys(SECRET, [span([])]).shape == (0, KEY_BYTES)


DICE = Random(7)


@pytest.mark.parametrize("key_bytes", [0, 32])
@pytest.mark.parametrize("prefix_bytes", [0, 3, 128])
@pytest.mark.parametrize("row_bytes", [8, 120, 127, 300])
@pytest.mark.parametrize("has_one_suffix", [True, False])
def test_each_row_is_hashed_as_if_it_were_alone_however_many_there_are(
    key_bytes: int, prefix_bytes: int, row_bytes: int, has_one_suffix: bool
) -> None:
    key, prefix = DICE.randbytes(key_bytes), DICE.randbytes(prefix_bytes)
    for count in range(10):
        rows = DICE.randbytes(count * row_bytes)
        suffixes = [b"suffix-0"] * count if has_one_suffix else [DICE.randbytes(8) for _ in range(count)]
        column = np.frombuffer(b"".join(suffixes), np.uint8).reshape(count, 8)
        made = blake2b_rows(
            prefix,
            rows,
            b"suffix-0" if has_one_suffix else column,
            count=count,
            digest_bytes=20,
            person=b"for-tests",
            key=key,
        )
        assert [row.tobytes() for row in made] == [
            hashlib.blake2b(
                prefix + rows[row * row_bytes : (row + 1) * row_bytes] + suffixes[row],
                key=key,
                digest_size=20,
                person=b"for-tests",
            ).digest()
            for row in range(count)
        ]


IDENTITY = VolumeIdentity(TenantId("acme"), "llama-70b", bytes(range(16)))
HASH = bytes(range(100, 132))

seeds = st.integers(0, 2**64 - 1)


def tag_span(*hashes: bytes, rank: int = 0, group: int = 0) -> Span:
    return Chain.of(hashes, hash_bytes=len(hashes[0]), rank=rank, group=group).span()


def seed_of(identity: VolumeIdentity, one: Span, length: int) -> int:
    (seed,) = tag_seeds(identity, [one], np.array([length], np.uint32)).tolist()
    return int(seed)


def test_seeds_and_tags_are_what_they_always_were() -> None:
    seed = seed_of(IDENTITY, tag_span(HASH, rank=3, group=1), 5)
    assert f"{seed:016x}" == "4839fc2cfef71e3d"
    assert tag_of(b"shard", seed).hex() == "d29258e4417de9473a74106f245ad1b5"


def test_the_tag_of_nothing_under_seed_zero_is_the_published_xxh3_value() -> None:
    assert tag_of(b"", 0).hex() == "99aa06d3014798d86001c324468d497f"


@given(
    st.tuples(st.text(max_size=9), st.text(max_size=9), st.binary(min_size=16, max_size=16)),
    st.lists(st.tuples(st.integers(8, 64), st.integers(1, 4), u32, u32, u32), max_size=4),
    st.randoms(),
)
@settings(deadline=None, max_examples=40)
def test_a_second_implementation_makes_the_same_seeds(
    volume: tuple[str, str, bytes], shapes: list[tuple[int, int, int, int, int]], dice: Random
) -> None:
    spans, lengths, expected = [], [], []
    for width, blocks, rank, group, length in shapes:
        hashes = [dice.randbytes(width) for _ in range(blocks)]
        spans.append(tag_span(*hashes, rank=rank, group=group))
        lengths += [length] * blocks
        expected += [second.seed(volume, each, rank, group, length) for each in hashes]
    identity = VolumeIdentity(TenantId(volume[0]), volume[1], volume[2])
    assert tag_seeds(identity, spans, np.array(lengths, np.uint32)).tolist() == expected


def test_every_part_of_the_identity_makes_another_seed() -> None:
    one = tag_span(HASH, rank=1, group=2)
    found = [
        seed_of(IDENTITY, one, 4096),
        seed_of(replace(IDENTITY, tenant=TenantId("acm")), one, 4096),
        seed_of(replace(IDENTITY, tenant=TenantId("acmel"), name="lama-70b"), one, 4096),
        seed_of(replace(IDENTITY, name="llama-70c"), one, 4096),
        seed_of(replace(IDENTITY, layout_digest=bytes(16)), one, 4096),
        seed_of(IDENTITY, tag_span(HASH[:-1] + b"x", rank=1, group=2), 4096),
        seed_of(IDENTITY, tag_span(HASH, rank=2, group=1), 4096),
        seed_of(IDENTITY, tag_span(HASH, rank=1, group=3), 4096),
        seed_of(IDENTITY, one, 4095),
    ]
    assert len(set(found)) == len(found)


def test_seeds_come_in_the_order_of_blocks_each_with_its_own_length() -> None:
    first, last = tag_span(HASH, HASH[::-1]), tag_span(HASH, rank=7)
    found = tag_seeds(IDENTITY, [first, last], np.array([10, 20, 30], np.uint32)).tolist()
    assert found == [
        seed_of(IDENTITY, tag_span(HASH), 10),
        seed_of(IDENTITY, tag_span(HASH[::-1]), 20),
        seed_of(IDENTITY, last, 30),
    ]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_lengths_that_are_not_one_for_each_block_are_refused(count: int) -> None:
    with pytest.raises(UsageError, match="2 blocks"):
        tag_seeds(IDENTITY, [tag_span(HASH, HASH)], np.ones(count, np.uint32))


@given(st.lists(st.tuples(st.binary(max_size=600), seeds, st.integers(0, 9)), max_size=6), st.data())
@settings(deadline=None, max_examples=60)
def test_a_batch_of_tags_is_the_tags_one_by_one(
    blocks: list[tuple[bytes, int, int]], data: st.DataObject
) -> None:
    memory, offsets = laid_out([(block, gap) for block, _, gap in blocks])
    lengths = np.array([len(block) for block, _, _ in blocks], np.uint32)
    batch = np.array([seed for _, seed, _ in blocks], np.uint64)
    made = tags_of(memory, offsets, lengths, batch)
    assert made.shape == (len(blocks), TAG_BYTES)
    assert [row.tobytes() for row in made] == [second.tag(block, seed) for block, seed, _ in blocks]
    assert are_good(memory, offsets, lengths, batch, made).all()
    if blocks:
        wrong = data.draw(st.integers(0, len(blocks) - 1))
        made[wrong, data.draw(st.integers(0, TAG_BYTES - 1))] ^= 1
        good = are_good(memory, offsets, lengths, batch, made)
        assert np.flatnonzero(~good).tolist() == [wrong]


def laid_out(blocks: list[tuple[bytes, int]]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Lay blocks out, each after a gap; return the memory and where each block begins."""
    memory, offsets = bytearray(), []
    for block, gap in blocks:
        memory += b"\xa5" * gap
        offsets.append(len(memory))
        memory += block
    return np.frombuffer(bytes(memory), np.uint8), np.array(offsets, np.int64)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (57, 8), (64, 1), (1 << 62, 1), (-(1 << 63), 4)])
def test_a_block_outside_of_memory_is_refused_before_a_byte_is_read(offset: int, length: int) -> None:
    memory = np.zeros(64, np.uint8)
    offsets, lengths = np.array([0, offset], np.int64), np.array([64, length], np.uint32)
    numbers = np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match="block 1"):
        tags_of(memory, offsets, lengths, numbers)
    with pytest.raises(ValueError, match="block 1"):
        are_good(memory, offsets, lengths, numbers, np.zeros((2, TAG_BYTES), np.uint8))


PAGES = 5


def expected_blocks(memory: NDArray[np.uint8]) -> TagCheck:
    """Three blocks in five pages of *memory*, with the tags of their bytes there."""
    places = np.array([0, PAGE_BYTES, 4 * PAGE_BYTES], np.int64)
    lengths, numbers = np.array([PAGE_BYTES, PAGE_BYTES + 1, 1], np.uint32), np.arange(3, dtype=np.uint64)
    tags = tags_of(memory, places, lengths, numbers)
    return TagCheck(Pieces(memory, places, places, whole_pages(lengths)), lengths, numbers, tags)


def test_what_follows_a_block_in_its_last_page_is_blanked_and_nothing_else() -> None:
    memory = np.full(PAGES * PAGE_BYTES, 7, np.uint8)
    check = expected_blocks(memory)
    check.receive(slice(0, 3))
    assert check.states.tolist() == [CheckState.GOOD] * 3
    expected = np.full(PAGES * PAGE_BYTES, 7, np.uint8)
    expected[2 * PAGE_BYTES + 1 : 3 * PAGE_BYTES] = 0
    expected[4 * PAGE_BYTES + 1 :] = 0
    assert np.array_equal(memory, expected)


@given(st.binary(min_size=1, max_size=5000), seeds, st.data())
@settings(deadline=None, max_examples=60)
def test_a_flipped_bit_a_lost_byte_and_another_seed_do_not_match(
    block: bytes, seed: int, data: st.DataObject
) -> None:
    tag = tag_of(block, seed)
    bit = data.draw(st.integers(0, 8 * len(block) - 1))
    flipped = bytearray(block)
    flipped[bit // 8] ^= 1 << bit % 8
    assert matches(block, seed, tag)
    assert matches(np.frombuffer(block, np.uint8).data, seed, np.frombuffer(tag, np.uint8).data)
    assert not matches(flipped, seed, tag)
    assert not matches(block[:-1], seed, tag)
    assert not matches(block + b"\0", seed, tag)
    assert not matches(block, seed ^ 1, tag)


def test_blocks_of_zeros_under_two_identities_have_two_tags() -> None:
    zeros = bytes(1 << 20)
    one, other = (seed_of(IDENTITY, tag_span(HASH, rank=rank), len(zeros)) for rank in (0, 1))
    assert tag_of(zeros, one) != tag_of(zeros, other)


def test_a_view_with_gaps_is_refused_and_not_silently_copied() -> None:
    with pytest.raises(BufferError):
        tag_of(memoryview(bytes(64))[::2], 0)
