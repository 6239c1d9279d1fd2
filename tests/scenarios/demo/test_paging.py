"""Arithmetic of the demo: paging only moves bytes, and recomputing gives equal bits."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from demo.document import PAGE_TOKENS, QUESTIONS, ModelSize, document
from demo.model import CHUNK_TOKENS, build_model, continue_from, fix_arithmetic, kv_shape, prefill
from demo.paging import KvCache, block_digest
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.slow

TOKENS = document(3 * CHUNK_TOKENS + 2 * PAGE_TOKENS)
PAGES = range(len(TOKENS) // PAGE_TOKENS)
CHUNK_PAGES = CHUNK_TOKENS // PAGE_TOKENS
VECTOR_MATH = {
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log"),
    *("log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
}
"""What torch leaves to MKL's vector library, by its `ATen/cpu/vml.h`."""


class VectorMath(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]  # torch's class is untyped
    """Keeps which functions of `VECTOR_MATH` are called, and on how many numbers at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.numbers_max: dict[str, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name in VECTOR_MATH:
            self.numbers_max[name] = max(self.numbers_max.get(name, 0), args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Return a model so small that a chunk takes milliseconds."""
    fix_arithmetic()
    size = ModelSize(layers=2, heads=2, head_dim=32, hidden=64, feed_forward=128, weight_spread=0.3)
    return build_model(size)


def empty(model: LlamaForCausalLM) -> KvCache:
    """Return a cache with room for the document, a question and its answer."""
    return KvCache(kv_shape(model), tokens_max=len(TOKENS) + 256)


@pytest.fixture(scope="module")
def computed(model: LlamaForCausalLM) -> KvCache:
    """Return the fully computed cache of the document. Tests leave the cache unchanged."""
    cache = empty(model)
    assert prefill(model, TOKENS, cache) == list(PAGES)
    return cache


def load(source: KvCache, pages: list[int], into: KvCache) -> None:
    """Copy pages from a cache to another as bytes, as the fabric does."""
    into.resize(len(TOKENS))
    for page in pages:
        for part, target in zip(source.block(page), into.block(page), strict=True):
            carried = bytearray(part.contiguous().view(torch.uint8).numpy().tobytes())
            target.copy_(torch.frombuffer(carried, dtype=part.dtype).view(part.shape))


def digests(cache: KvCache) -> list[bytes]:
    """Return the digest of each page."""
    return [block_digest(block) for block in cache.blocks(PAGES)]


def test_a_loaded_cache_is_equal_and_answers_alike(model: LlamaForCausalLM, computed: KvCache) -> None:
    loaded = empty(model)
    load(computed, list(PAGES), loaded)
    assert digests(loaded) == digests(computed)
    for question in QUESTIONS:
        answer = continue_from(model, loaded, question)
        assert answer.is_equal(continue_from(model, computed, question))
    assert digests(loaded) == digests(computed)


@pytest.mark.parametrize(
    ("lost", "chunks"),
    [
        ([0], [0]),
        ([CHUNK_PAGES + 3], [1]),
        ([2 * CHUNK_PAGES - 1, 2 * CHUNK_PAGES], [1, 2]),
        ([PAGES[-1]], [3]),
        (list(PAGES[1::2]), [0, 1, 2, 3]),
        ([], []),
    ],
)
def test_only_chunks_with_holes_are_recomputed_to_the_same_bits(
    model: LlamaForCausalLM, computed: KvCache, lost: list[int], chunks: list[int]
) -> None:
    holed = empty(model)
    present = [page for page in PAGES if page not in lost]
    load(computed, present, holed)
    recomputed = prefill(model, TOKENS, holed, present=present)
    assert recomputed == [page for page in PAGES if page // CHUNK_PAGES in chunks]
    assert digests(holed) == digests(computed)
    assert continue_from(model, holed, QUESTIONS[0]).is_equal(continue_from(model, computed, QUESTIONS[0]))


def test_no_function_of_the_vector_library_is_called_first_by_several_threads(
    model: LlamaForCausalLM,
) -> None:
    with VectorMath() as called_before:
        fix_arithmetic()
    cache = empty(model)
    with VectorMath() as called:
        prefill(model, TOKENS, cache)
        continue_from(model, cache, QUESTIONS[0])
    assert called_before.numbers_max == dict.fromkeys(called.numbers_max, 1)


def test_an_answer_depends_on_every_page(model: LlamaForCausalLM, computed: KvCache) -> None:
    whole = continue_from(model, computed, QUESTIONS[0], answer_tokens=1)
    for page in PAGES:
        kept = [part.clone() for part in computed.block(page)]
        for part in computed.block(page):
            part.zero_()
        assert not continue_from(model, computed, QUESTIONS[0], answer_tokens=1).is_equal(whole)
        for part, bits in zip(computed.block(page), kept, strict=True):
            part.copy_(bits)
    assert continue_from(model, computed, QUESTIONS[0], answer_tokens=1).is_equal(whole)


def test_a_page_nobody_filled_poisons_the_answer(model: LlamaForCausalLM, computed: KvCache) -> None:
    holed = empty(model)
    load(computed, list(PAGES[1:]), holed)
    assert continue_from(model, holed, QUESTIONS[0]).logits.isnan().all()


def test_blocks_are_views_of_the_memory_the_model_reads(model: LlamaForCausalLM, computed: KvCache) -> None:
    shape = kv_shape(model)
    block = computed.block(1)
    assert len(block) == 2 * shape.layers
    assert sum(part.nbytes for part in block) == shape.block_bytes
    keys = computed.kv_layers[0].keys
    assert keys is not None
    assert block[0].data_ptr() == keys[:, :, PAGE_TOKENS:, :].data_ptr()


def test_a_page_beyond_the_filled_tokens_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="call resize first"):
        empty(model).block(0)


def test_a_cache_refuses_more_tokens_than_it_has_room_for(model: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        empty(model).resize(len(TOKENS) + 257)
