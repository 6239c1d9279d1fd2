"""Keys, secrets and what must never make two of them equal."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fabric import second_implementation as second

from ostraca_fabric.chain import RANK_MAX, Chain, Span
from ostraca_fabric.errors import UsageError
from ostraca_fabric.ids import TenantId
from ostraca_fabric.keys import KEY_BYTES, SECRET_BYTES, derive_keys, placement_secret, volume_secret

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
