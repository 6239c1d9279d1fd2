"""Prefixes of prompts of a small model of transformers, on a real fabric."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fabric.fabric_host import FabricThread
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicCache, StaticCache

import ostraca
from ostraca import Ack, PutState
from ostraca.connectors.transformers import ModelPages, PrefixCache, page_hashes
from ostraca.connectors.transformers.prefix_cache import states_of
from ostraca_cli.testing import small_plan

PAGE_TOKENS = 8
PROMPT = [int(token) for token in torch.randint(0, 64, (45,), generator=torch.Generator().manual_seed(3))]


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def tiny(seed: int = 0, rope: dict[str, object] | None = None) -> LlamaForCausalLM:
    config = LlamaConfig(**SIZES, rope_parameters=rope)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.train(mode=False)
    return model


@pytest.fixture
def client(tmp_path: Path) -> Iterator[ostraca.Client]:
    with FabricThread(small_plan(tmp_path / "fabric")) as fabric, fabric.connect() as connected:
        yield connected


def prefixes(
    client: ostraca.Client, model: PreTrainedModel, weights: str = "seed-0", cache_salt: str = ""
) -> PrefixCache:
    return PrefixCache(client, model, weights=weights, page_tokens=PAGE_TOKENS, cache_salt=cache_salt)


@torch.no_grad()
def computed(model: LlamaForCausalLM, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
    """Compute the tokens beyond the cache; return the logits of the next token."""
    rest = torch.tensor([tokens[cache.get_seq_length() :]])
    logits: torch.Tensor = model(rest, past_key_values=cache).logits
    return logits[0, -1]


def test_a_prompt_continues_from_the_stored_pages(client: ostraca.Client) -> None:
    model = tiny()
    shared, cache = prefixes(client, model), DynamicCache(config=model.config)
    expected = computed(model, PROMPT, cache)
    assert shared.load(PROMPT).get_seq_length() == 0
    put = shared.store(PROMPT, cache, ack=Ack.COMMITTED)
    assert list(put.states) == [PutState.COMMITTED] * 5

    loaded = prefixes(client, tiny()).load(PROMPT)
    assert loaded.get_seq_length() == 40
    for ours, theirs in zip(states_of(loaded), states_of(cache), strict=True):
        assert torch.equal(ours, theirs[:, :, :40])
    assert torch.allclose(computed(model, PROMPT, loaded), expected, atol=1e-5)


def test_a_longer_prompt_loads_what_it_shares_and_stores_the_rest(client: ostraca.Client) -> None:
    model = tiny()
    shared, cache = prefixes(client, model), DynamicCache(config=model.config)
    computed(model, PROMPT, cache)
    shared.store(PROMPT, cache, ack=Ack.COMMITTED)
    longer = [*PROMPT[:30], *reversed(PROMPT)]
    loaded = shared.load(longer)
    assert loaded.get_seq_length() == 24
    computed(model, longer, loaded)
    assert list(shared.store(longer, loaded, ack=Ack.COMMITTED).states) == [PutState.COMMITTED] * 6
    assert shared.load(longer).get_seq_length() == 72
    assert shared.load(longer[:72]).get_seq_length() == 64, "the last token is left to compute"


def test_a_store_right_before_a_load_is_found(client: ostraca.Client) -> None:
    model = tiny()
    shared, cache = prefixes(client, model), DynamicCache(config=model.config)
    computed(model, PROMPT, cache)
    shared.store(PROMPT, cache)
    assert shared.load(PROMPT).get_seq_length() == 40


def test_tokens_may_be_a_tokenizer_s_tensor(client: ostraca.Client) -> None:
    model = tiny()
    shared, cache = prefixes(client, model), DynamicCache(config=model.config)
    computed(model, PROMPT, cache)
    assert len(shared.store(torch.tensor([PROMPT]), cache).states) == 5
    for tokens in (PROMPT, torch.tensor(PROMPT), torch.tensor([PROMPT])):
        assert shared.load(tokens).get_seq_length() == 40
    for other in (torch.tensor([PROMPT, PROMPT]), torch.tensor(7)):
        with pytest.raises(ostraca.UsageError, match="each prompt alone"):
            shared.load(other)


def test_short_prompts_have_no_pages(client: ostraca.Client) -> None:
    model = tiny()
    shared, cache = prefixes(client, model), DynamicCache(config=model.config)
    short = PROMPT[: PAGE_TOKENS - 1]
    assert shared.store(short, cache).states == ()
    computed(model, short, cache)
    assert shared.store(short, cache).states == ()
    assert shared.load(short).get_seq_length() == 0
    assert shared.load([]).get_seq_length() == 0


@pytest.mark.parametrize("other", [{"weights": "seed-1"}, {"cache_salt": "user"}])
def test_other_weights_and_other_users_share_nothing(client: ostraca.Client, other: dict[str, str]) -> None:
    model = tiny()
    cache = DynamicCache(config=model.config)
    computed(model, PROMPT, cache)
    prefixes(client, model).store(PROMPT, cache, ack=Ack.COMMITTED)
    assert prefixes(client, model, **other).load(PROMPT).get_seq_length() == 0


def test_what_can_not_be_stored_is_refused(client: ostraca.Client) -> None:
    model = tiny()
    with pytest.raises(ostraca.UsageError, match="no weights are named"):
        prefixes(client, model, weights="")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([PROMPT, PROMPT]), past_key_values=cache)
    with pytest.raises(ostraca.UsageError, match="a batch of 2 prompts"):
        prefixes(client, model).store(PROMPT, cache)


def test_caches_of_another_form_are_refused(client: ostraca.Client) -> None:
    model = tiny()
    shared = prefixes(client, model)
    failed = DynamicCache(config=model.config)
    static: Any = StaticCache(config=model.config, max_cache_len=64)
    computed(model, PROMPT[:20], failed)
    failed.update(torch.zeros(1, 2, 25, 128), torch.zeros(1, 2, 25, 128), 0)  # then the first layer failed
    halved = DynamicCache(config=model.config)
    computed(model.bfloat16(), PROMPT, halved)
    computed(tiny(), PROMPT, static)
    for cache, why in ((failed, r"\(1, 2, 20, 128\)"), (halved, "bfloat16"), (static, "StaticLayer")):
        with pytest.raises(ostraca.UsageError, match=why):
            shared.store(PROMPT, cache)
    assert shared.load(PROMPT).get_seq_length() == 0


def test_models_with_other_states_are_refused(client: ostraca.Client) -> None:
    factors = {"short_factor": [1.0] * 64, "long_factor": [8.0] * 64}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    for model, why in (
        (MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)), "SlidingWindow"),
        (tiny(rope={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}), "the prompt's length"),
        (tiny(rope=longrope | {"factor": 4.0}), "the prompt's length"),
        (T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_ff=32, num_layers=1)), "encoder"),
    ):
        with pytest.raises(ostraca.UsageError, match=why):
            ModelPages(client, model, weights="w")


def test_models_with_the_same_weights_and_other_positions_share_nothing(client: ostraca.Client) -> None:
    model, cache = tiny(), DynamicCache()
    computed(model, PROMPT, cache)
    prefixes(client, model).store(PROMPT, cache, ack=Ack.COMMITTED)
    scaled = tiny(rope={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})
    assert prefixes(client, scaled).load(PROMPT).get_seq_length() == 0


def test_pages_end_before_the_first_picture(client: ostraca.Client) -> None:
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8
    )
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**SIZES), image_token_index=60)
    model = LlavaForConditionalGeneration(config)
    pages = ModelPages(client, model, weights="w", page_tokens=PAGE_TOKENS)
    text = [token for token in PROMPT if token != 60]
    assert len(pages.chain(text)) == len(text) // PAGE_TOKENS
    assert len(pages.chain([*text[:17], 60, *text])) == 2
    model.config.image_token_id = None
    with pytest.raises(ostraca.UsageError, match="more than text"):
        ModelPages(client, model, weights="w")


def test_a_name_is_a_digest_of_the_name_before_and_the_tokens() -> None:
    numbers = [number.to_bytes(8, "little") for number in range(5)]
    first = hashlib.sha256(bytes(32) + numbers[1] + numbers[2]).digest()
    second = hashlib.sha256(first + numbers[3] + numbers[4]).digest()
    assert page_hashes([1, 2, 3, 4, 5], 2) == [first, second]


def test_a_name_commits_to_all_tokens_before() -> None:
    names = page_hashes(PROMPT, PAGE_TOKENS)
    assert len(names) == len(set(names)) == 5
    for at in range(40):
        changed = [*PROMPT[:at], PROMPT[at] + 1, *PROMPT[at + 1 :]]
        others = page_hashes(changed, PAGE_TOKENS)
        assert [one == other for one, other in zip(names, others, strict=True)] == [
            page < at // PAGE_TOKENS for page in range(5)
        ]
