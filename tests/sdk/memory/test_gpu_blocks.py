"""Blocks of CUDA tensors through the SDK, with tags of host and GPU, where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, hashes
from tests.sdk.scripted_agent import ScriptedAgent

import ostraca
from ostraca import BlockState

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU that torch can use here (make test-gpu)"
)

BLOCKS, LAYERS, TOKENS, HEADS, HEAD_SIZE = 40, 2, 16, 8, 64
FAR_S = 60.0


@pytest.fixture(params=[False, True], ids=["tags of the host", "tags of the GPU"])
def gpu_volume(agent: ScriptedAgent, request: pytest.FixtureRequest) -> Iterator[ostraca.Volume]:
    if request.param:
        pytest.importorskip("triton", reason="triton computes tags on GPUs (make test-gpu)")
    with ostraca.connect(agent.address, settings=replace(SETTINGS, gpu_tags=request.param)) as client:
        yield client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)


def paged_kv(content: float | None = None) -> list[torch.Tensor]:
    """Return a pool per layer, of keys and values by page, as an engine has them."""
    shape = 2, BLOCKS, TOKENS, HEADS, HEAD_SIZE
    if content is None:
        return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    return [torch.full(shape, content, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]


def pages(pools: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [[pool[side, page] for pool in pools for side in range(2)] for page in range(BLOCKS)]


def test_pages_of_kv_come_back_bit_for_bit(gpu_volume: ostraca.Volume) -> None:
    chain, source, into = gpu_volume.chain(hashes(BLOCKS)), paged_kv(), paged_kv(0)
    assert gpu_volume.put(chain, source=pages(source), deadline_s=FAR_S).accepted == BLOCKS
    assert gpu_volume.get(chain, into=pages(into), deadline_s=FAR_S).prefix == BLOCKS
    for stored, loaded in zip(source, into, strict=True):
        assert torch.equal(stored.view(torch.int16), loaded.view(torch.int16))


def test_a_damaged_page_is_a_miss_and_its_tensors_stay_as_they_were(
    gpu_volume: ostraca.Volume, agent: ScriptedAgent
) -> None:
    chain, source, into = gpu_volume.chain(hashes(BLOCKS)), paged_kv(), paged_kv(7)
    assert gpu_volume.put(chain, source=pages(source), deadline_s=FAR_S).accepted == BLOCKS
    for block, (tag, payload) in agent.blocks.items():
        if block[1] == hashes(BLOCKS)[5]:
            agent.blocks[block] = tag, payload[:-1] + bytes([payload[-1] ^ 1])
    got = gpu_volume.get(chain, into=pages(into), deadline_s=FAR_S)
    assert [page for page, state in enumerate(got.states) if state != BlockState.HIT] == [5]
    for stored, loaded in zip(source, into, strict=True):
        assert (loaded[:, 5] == 7).all()
        kept = [page for page in range(BLOCKS) if page != 5]
        assert torch.equal(stored[:, kept].view(torch.int16), loaded[:, kept].view(torch.int16))
