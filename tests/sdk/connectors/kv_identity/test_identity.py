"""Volume of an engine's KV: every fact changes the digest."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraca.connectors.kv_identity.identity import GroupIdentity, KvIdentity, volume_name
from ostraca_fabric.errors import UsageError

PLAIN = KvIdentity(
    model="meta/llama-3",
    dtype="fp8_e4m3",
    groups=(GroupIdentity(0, 16, ("layer.0", "layer.1")),),
    block_bytes=65536,
    packing={"release": "1.2", "device": "cuda"},
)

words = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), max_size=12)
counts = st.integers(1, 8)
groups = st.builds(
    GroupIdentity, st.integers(0, 3), st.sampled_from([16, 32]), st.lists(words, min_size=1).map(tuple)
)
identities = st.builds(
    KvIdentity,
    model=words.filter(bool),
    dtype=words.filter(bool),
    scales=words,
    weights=words,
    groups=st.lists(groups, min_size=1, max_size=3).map(tuple),
    block_bytes=st.integers(1, 1 << 24),
    tensor_parallel=counts,
    pipeline_parallel=counts,
    context_parallel=counts,
    adapter=words,
    cache_salt=words,
    packing=st.dictionaries(words, words, max_size=4),
    hash_bytes=st.integers(8, 64),
    is_chained=st.booleans(),
    format_version=counts,
)
OTHER: dict[str, Any] = {
    "model": "meta/llama-4",
    "dtype": "nvfp4",
    "scales": "per tensor",
    "weights": "b1",
    "groups": (GroupIdentity(0, 16, ("layer.1", "layer.0")),),
    "block_bytes": 131072,
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "context_parallel": 2,
    "adapter": "poet",
    "cache_salt": "s",
    "packing": {"release": "1.3", "device": "cuda"},
    "hash_bytes": 16,
    "is_chained": False,
    "format_version": 2,
}


def digest(identity: KvIdentity) -> bytes:
    return identity.layout().digest()


@pytest.mark.parametrize("name", [field.name for field in fields(KvIdentity)])
def test_each_fact_changes_the_digest(name: str) -> None:
    assert digest(replace(PLAIN, **{name: OTHER[name]})) != digest(PLAIN)


@pytest.mark.parametrize(
    "group",
    [
        GroupIdentity(1, 16, ("layer.0", "layer.1")),
        GroupIdentity(0, 32, ("layer.0", "layer.1")),
        GroupIdentity(0, 16, ("layer.0",)),
        GroupIdentity(0, 16, ("layer.0layer.1",)),
    ],
)
def test_each_fact_of_a_group_changes_the_digest(group: GroupIdentity) -> None:
    assert digest(replace(PLAIN, groups=(group,))) != digest(PLAIN)


@given(identities, identities)
def test_digests_are_equal_if_and_only_if_all_facts_are(one: KvIdentity, other: KvIdentity) -> None:
    assert (digest(one) == digest(other)) == (one == other)


@given(identities, st.randoms(use_true_random=False))
def test_the_order_of_packing_does_not_change_the_digest(identity: KvIdentity, dice: Any) -> None:
    listed = list(identity.packing.items())
    dice.shuffle(listed)
    assert digest(replace(identity, packing=dict(listed))) == digest(identity)


def test_facts_do_not_run_into_each_other() -> None:
    assert digest(replace(PLAIN, model="a@b")) != digest(replace(PLAIN, model="a", weights="b"))


def test_the_volumes_name_is_readable_and_unique_to_the_layout() -> None:
    name = volume_name("vllm", PLAIN.layout())
    assert name == f"vllm-llama-3-{digest(PLAIN)[:8].hex()}"
    assert volume_name("vllm", replace(PLAIN, weights="b1").layout()) != name


def test_an_engine_without_kv_groups_is_refused() -> None:
    with pytest.raises(UsageError, match="no KV groups"):
        replace(PLAIN, groups=())
