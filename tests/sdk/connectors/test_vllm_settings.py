"""Entries of vLLM's configuration, and the volume of an engine's rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ostraca.connectors.vllm.settings import TierSettings
from ostraca.connectors.vllm.shape import EngineShape, GroupShape, volume_name
from ostraca_fabric.errors import UsageError

SHAPE = EngineShape(
    model="meta/llama-3",
    dtype="bfloat16",
    groups=(GroupShape(0, 16, ("layer.0", "layer.1")),),
    row_bytes=65536,
    tensor_parallel=1,
    pipeline_parallel=1,
    context_parallel=1,
    packing="vllm-0.32/cuda/NHD/direct/each worker's",
    has_positions=True,
)


def name(shape: EngineShape, revision: str = "") -> str:
    return volume_name("vllm", shape.layout(revision=revision, hash_bytes=32))


def test_an_unknown_setting_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(UsageError, match="no setting 'lookup_deadline'; did you mean lookup_deadline_s"):
        TierSettings.of({"lookup_deadline": 1})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"load_deadline_s": "5"}, "load_deadline_s"),
        ({"load_deadline_s": 0}, "load_deadline_s is 0"),
        ({"pin_s": -1}, "pin_s is -1"),
        ({"locality": "NEAR"}, "LOCAL or REMOTE"),
        ({"transports": ["rdma"]}, "transports"),
        ({"agents": 7}, "agents"),
        ({"agents": "http://host"}, "http://host"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(config: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TierSettings.of(config)


def test_one_agent_may_be_named_without_a_list() -> None:
    assert TierSettings.of({"agents": "unix:///a"}) == TierSettings.of({"agents": ["unix:///a"]})
    assert TierSettings.of({}) == TierSettings()


def test_engines_that_are_alike_share_a_volume() -> None:
    assert name(SHAPE) == name(replace(SHAPE))
    assert name(SHAPE).startswith("vllm-llama-3-")


@pytest.mark.parametrize(
    "other",
    [
        replace(SHAPE, model="meta/llama-4"),
        replace(SHAPE, dtype="fp8_e4m3"),
        replace(SHAPE, row_bytes=131072),
        replace(SHAPE, tensor_parallel=2),
        replace(SHAPE, pipeline_parallel=2),
        replace(SHAPE, context_parallel=2),
        replace(SHAPE, packing="vllm-0.32/cuda/HND/direct/each worker's"),
        replace(SHAPE, has_positions=False),
        replace(SHAPE, groups=(GroupShape(0, 32, ("layer.0", "layer.1")),)),
        replace(SHAPE, groups=(GroupShape(1, 16, ("layer.0", "layer.1")),)),
        replace(SHAPE, groups=(GroupShape(0, 16, ("layer.0", "layer.2")),)),
        replace(SHAPE, groups=(*SHAPE.groups, GroupShape(1, 16, ("layer.2",)))),
    ],
)
def test_engines_whose_rows_mean_different_things_have_different_volumes(other: EngineShape) -> None:
    assert name(other) != name(SHAPE)


def test_a_revision_and_another_hash_keep_engines_apart() -> None:
    assert name(SHAPE, "b1") != name(SHAPE)
    assert (
        SHAPE.layout(revision="", hash_bytes=16).digest() != SHAPE.layout(revision="", hash_bytes=32).digest()
    )


def test_chunks_that_are_too_large_for_a_block_are_refused_with_what_to_change() -> None:
    with pytest.raises(UsageError, match="lower blocks_per_chunk or block_size"):
        replace(SHAPE, row_bytes=(16 << 20) + 4096)
