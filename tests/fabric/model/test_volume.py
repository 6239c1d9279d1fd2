"""Layouts: their digest commits to every field, and they travel whole."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.volume import (
    BLOCK_BYTES_MAX,
    DIGEST_BYTES,
    GROUPS_MAX,
    HASH_BYTES_MAX,
    HASH_BYTES_MIN,
    WORD_CHARACTERS_MAX,
    KvGroup,
    Layout,
    VolumeRecord,
)
from ostraca_fabric.wire.messages import AnyMessage, OpenVolume

GROUP = KvGroup(layers=80, kv_heads=8, head_dim=128)
LAYOUT = Layout("meta-llama/Llama-3-70B@a1b2c3", "bf16", 16, groups=(GROUP,), tensor_parallel=8)

ANOTHER: dict[str, Any] = {
    "model": "meta-llama/Llama-3-70B@a1b2c4",
    "dtype": "fp8_e4m3",
    "page_tokens": 32,
    "groups": (GROUP, GROUP),
    "tensor_parallel": 4,
    "pipeline_parallel": 2,
    "context_parallel": 2,
    "adapter": "sql@1",
    "cache_salt": "tenant-7",
    "hash_bytes": 16,
    "format_version": 2,
}
ANOTHER_GROUP: dict[str, Any] = {"layers": 79, "kv_heads": 4, "head_dim": 64, "kind": "sliding"}


def test_the_digest_is_what_it_always_was() -> None:
    assert LAYOUT.digest().hex() == "a3b9899d4fb2fadef588fbfebd40cb30"
    assert len(LAYOUT.digest()) == DIGEST_BYTES


def test_every_field_is_tried_below() -> None:
    assert set(ANOTHER) == {field.name for field in fields(Layout)}
    assert set(ANOTHER_GROUP) == {field.name for field in fields(KvGroup)}


@pytest.mark.parametrize("field", sorted(ANOTHER))
def test_another_value_of_a_field_makes_another_layout(field: str) -> None:
    other = replace(LAYOUT, **{field: ANOTHER[field]})
    assert other != LAYOUT
    assert other.digest() != LAYOUT.digest()


@pytest.mark.parametrize("field", sorted(ANOTHER_GROUP))
def test_another_value_in_a_group_makes_another_layout(field: str) -> None:
    other = replace(LAYOUT, groups=(replace(GROUP, **{field: ANOTHER_GROUP[field]}),))
    assert other.digest() != LAYOUT.digest()


def test_fields_do_not_run_into_each_other() -> None:
    one, other = replace(LAYOUT, adapter="ab", cache_salt="c"), replace(LAYOUT, adapter="a", cache_salt="bc")
    assert one.digest() != other.digest()


def test_the_order_of_groups_counts() -> None:
    sliding = replace(GROUP, kind="sliding")
    assert (
        replace(LAYOUT, groups=(GROUP, sliding)).digest() != replace(LAYOUT, groups=(sliding, GROUP)).digest()
    )


def test_a_layout_arrives_as_it_was_sent() -> None:
    asked = OpenVolume(7, "llama-70b", replace(LAYOUT, **ANOTHER), 1 << 20, create=True)
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=AnyMessage)
    assert arrived == asked
    assert isinstance(arrived, OpenVolume)
    assert arrived.layout.digest() == asked.layout.digest()


UNUSABLE: list[dict[str, Any]] = [
    {"model": ""},
    {"dtype": ""},
    {"page_tokens": 0},
    {"tensor_parallel": 0},
    {"pipeline_parallel": -1},
    {"context_parallel": 0},
    {"hash_bytes": HASH_BYTES_MIN - 1},
    {"hash_bytes": HASH_BYTES_MAX + 1},
]


@pytest.mark.parametrize("unusable", UNUSABLE)
def test_a_layout_that_no_engine_can_mean_is_refused(unusable: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        replace(LAYOUT, **unusable)


@pytest.mark.parametrize("unusable", UNUSABLE)
def test_an_unusable_layout_is_refused_off_the_wire_too(unusable: dict[str, Any]) -> None:
    sent = msgspec.to_builtins(LAYOUT) | unusable
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(sent, Layout)


@pytest.mark.parametrize("block_bytes", [1, PAGE_BYTES, BLOCK_BYTES_MAX])
def test_a_volume_takes_blocks_up_to_its_limit(block_bytes: int) -> None:
    record = VolumeRecord(TenantId("acme"), "llama-70b", LAYOUT, block_bytes)
    assert record.slot_bytes % PAGE_BYTES == 0
    assert block_bytes <= record.slot_bytes < block_bytes + PAGE_BYTES


@pytest.mark.parametrize("block_bytes", [-1, 0, BLOCK_BYTES_MAX + 1])
def test_a_block_size_that_flash_cannot_hold_is_refused(block_bytes: int) -> None:
    with pytest.raises(UsageError, match="block_bytes"):
        VolumeRecord(TenantId("acme"), "llama-70b", LAYOUT, block_bytes)


def test_a_layout_beyond_any_model_is_refused_before_it_costs_anything() -> None:
    with pytest.raises(UsageError, match="KV groups"):
        replace(LAYOUT, groups=(GROUP,) * (GROUPS_MAX + 1))
    groups = [{"layers": 1, "kv_heads": 1, "head_dim": 1}] * (GROUPS_MAX + 1)
    with pytest.raises(msgspec.ValidationError, match="length"):
        msgspec.convert({"model": "m", "dtype": "d", "page_tokens": 1, "groups": groups}, Layout)


@pytest.mark.parametrize("field", ["model", "dtype", "adapter", "cache_salt"])
def test_a_text_of_a_layout_is_no_document(field: str) -> None:
    long: dict[str, Any] = {field: "x" * (WORD_CHARACTERS_MAX + 1)}
    with pytest.raises(UsageError, match="characters"):
        replace(LAYOUT, **long)
    with pytest.raises(UsageError, match="characters"):
        replace(LAYOUT, groups=(replace(GROUP, kind="x" * (WORD_CHARACTERS_MAX + 1)),))


@pytest.mark.parametrize(
    "sizes",
    [{}, {"tensor_parallel": 8}, {"pipeline_parallel": 2}, {"tensor_parallel": 2, "context_parallel": 3}],
)
def test_a_layout_has_as_many_ranks_as_its_parallel_sizes_make(sizes: dict[str, int]) -> None:
    layout = Layout("model", "bf16", 16, **sizes)  # type: ignore[arg-type]  # numbers alone
    ranks = math.prod(sizes.values())
    assert layout.ranks == ranks
    for rank in range(ranks):
        layout.check_part(rank=rank, group=0)
    for rank in (-1, ranks, 2 * ranks):
        with pytest.raises(UsageError, match=f"rank {rank} of a layout with {ranks} .*take 0 to {ranks - 1}"):
            layout.check_part(rank=rank, group=0)


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_a_layout_has_the_groups_that_it_names_and_one_where_it_names_none(groups: int) -> None:
    layout = Layout("model", "bf16", 16, groups=(GROUP,) * groups)
    last = max(1, groups) - 1
    layout.check_part(rank=0, group=last)
    with pytest.raises(
        UsageError, match=f"KV group {last + 1} of a layout with {groups} groups: take 0 to {last}"
    ):
        layout.check_part(rank=0, group=last + 1)
