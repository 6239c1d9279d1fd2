"""Tiny models with made-up weights, every token of which depends on the whole prompt.

vLLM's own dummy weights are so small that the last token alone decides the next: an engine could mix its KV
up and nobody would see it. Here attention is sharp, and weighs as much as the token itself. In 32 bits, so
that rounding decides nothing.

``python -m tests.sdk.connectors.vllm.tiny_model FOLDER`` writes one for ``vllm serve`` and Dynamo.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
}
HYBRID_MODEL = MODEL | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64,
    "sliding_window": 256,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": True,
}
"""A model of two KV groups, one of which keeps a window only."""

_SHARP = 2.0
"""By how much larger queries and keys are than they would usually be."""
_ADAPTER_RANK = 8

_Weights = dict[str, NDArray[np.float32]]


def write_model(folder: Path, config: dict[str, Any] = MODEL) -> Path:
    """Write a model as Hugging Face lays it out, without a tokenizer; the same one each time."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of one word per token: token 17 is the word ``t17``."""
    words = {f"t{token}": token for token in range(MODEL["vocab_size"])}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MODEL["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message.content }} {% endfor %}",
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of the model, which changes its keys and values."""
    from safetensors.numpy import save_file

    dice = np.random.default_rng(seed)
    weights: _Weights = {}
    for layer in range(MODEL["num_hidden_layers"]):
        for part in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            out = MODEL["num_key_value_heads"] * MODEL["head_dim"]
            weights[f"{name}.lora_A.weight"] = _drawn(dice, _ADAPTER_RANK, MODEL["hidden_size"])
            weights[f"{name}.lora_B.weight"] = _drawn(dice, out, _ADAPTER_RANK)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    told = {"peft_type": "LORA", "r": _ADAPTER_RANK, "lora_alpha": _ADAPTER_RANK}
    (folder / "adapter_config.json").write_text(json.dumps(told | {"target_modules": ["k_proj", "v_proj"]}))
    return folder


def _weights(config: dict[str, Any]) -> _Weights:
    dice = np.random.default_rng(0)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    is_gemma = config["tie_word_embeddings"]  # it multiplies embeddings, and adds 1 to the weights of norms
    one = np.full(hidden, 0.0 if is_gemma else 1.0, np.float32)
    embedding = _drawn(dice, config["vocab_size"], hidden)
    # Embeddings that are also the last matrix would say the last token again, but for these signs.
    weights: _Weights = {
        "model.norm.weight": one - np.float32(2 * is_gemma) * dice.integers(0, 2, hidden).astype(np.float32)
    }
    weights["model.embed_tokens.weight"] = embedding if is_gemma else 4 * embedding
    if not is_gemma:
        weights["lm_head.weight"] = _drawn(dice, config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": _SHARP * _drawn(dice, queries, hidden),
            "self_attn.k_proj": _SHARP * _drawn(dice, keys, hidden),
            "self_attn.v_proj": _drawn(dice, keys, hidden),
            "self_attn.o_proj": _drawn(dice, hidden, queries),
            "mlp.gate_proj": _drawn(dice, inner, hidden),
            "mlp.up_proj": _drawn(dice, inner, hidden),
            "mlp.down_proj": _drawn(dice, hidden, inner),
            "input_layernorm": one,
            "post_attention_layernorm": one,
        }
        if is_gemma:
            shapes |= {"pre_feedforward_layernorm": one, "post_feedforward_layernorm": one}
            norm = np.full(head, _SHARP - 1, np.float32)
            shapes |= {"self_attn.q_norm": norm, "self_attn.k_norm": norm}
        weights |= {f"model.layers.{layer}.{name}.weight": values for name, values in shapes.items()}
    return weights


def _drawn(dice: np.random.Generator, out: int, into: int) -> NDArray[np.float32]:
    """Draw a matrix, shape (out, into), that neither enlarges nor shrinks what it multiplies."""
    drawn: NDArray[np.float32] = dice.standard_normal((out, into), np.float32) / np.float32(into**0.5)
    return drawn


if __name__ == "__main__":
    print(f"wrote {write_tokenizer(write_model(Path(sys.argv[1])))}")
