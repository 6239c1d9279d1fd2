"""Pages of a model's KV cache: names, and the volume.

A page is ``page_tokens`` consecutive tokens in all layers. Its block holds keys before values, layer by
layer, each of shape (1, KV heads, page tokens, head size).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from ostraca.client import Client
from ostraca.connectors.kv_identity.identity import GroupIdentity, KvIdentity, volume_name
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.chain import Chain

_PLACEHOLDERS = [
    f"{medium}_token_{number}" for medium in ("image", "video", "audio") for number in ("id", "index")
]
"""Fields of configurations with the token in place of a picture, a film or a sound."""

_MOVING_ROPES = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose keys depend on the length of the whole prompt."""

_TOKEN_BYTES = 8

NO_PARENT = bytes(32)
"""Parent of a prompt's first page."""


def page_hashes(tokens: Sequence[int], page_tokens: int) -> list[bytes]:
    """Name every full page by 32 bytes: SHA-256 of the name of the page before, and of the tokens.

    So a name commits to all tokens up to the end of the page. A partial last page has no name.
    """
    hashes: list[bytes] = []
    parent = NO_PARENT
    for end in range(page_tokens, len(tokens) + 1, page_tokens):
        page = tokens[end - page_tokens : end]
        named = b"".join(int(token).to_bytes(_TOKEN_BYTES, "little") for token in page)
        parent = hashlib.sha256(parent + named).digest()
        hashes.append(parent)
    return hashes


class ModelPages:
    """Pages of one model in a volume of their own."""

    def __init__(
        self,
        client: Client,
        model: PreTrainedModel,
        *,
        weights: str,
        page_tokens: int = 64,
        cache_salt: str = "",
    ) -> None:
        """Open the volume of *model*, a decoder of transformers with full attention in each layer.

        *weights* is the revision or digest of the weights, and *cache_salt* separates users who must not
        share. Raises UsageError for another kind of model.
        """
        config = model.config.get_text_config(decoder=True)
        if model.config.is_encoder_decoder:
            raise UsageError("a model with an encoder: the states of a prefix depend on the encoder's input")
        layers = DynamicCache(config=model.config).layers
        kinds = {type(layer).__name__ for layer in layers} - {DynamicLayer.__name__}
        if kinds:
            raise UsageError(
                f"layers of the kinds {', '.join(sorted(kinds))}: prefixes are stored for full attention only"
            )
        rope = json.dumps(getattr(config, "rope_parameters", None), sort_keys=True, default=str)
        if any(kind in rope for kind in _MOVING_ROPES):
            raise UsageError(f"rotary embeddings {rope}: keys of a prefix depend on the prompt's length")
        fields = {getattr(model.config, name, None) for name in _PLACEHOLDERS}
        self._placeholders = fields - {None}
        if config is not model.config and not self._placeholders:
            raise UsageError("a model of more than text, without a token for the rest: no prefix has a name")
        if not weights:
            raise UsageError("no weights are named: give the revision or a digest of the checkpoint")
        self.page_tokens = page_tokens
        self.layers = len(layers)
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.dtype: torch.dtype = model.dtype
        self.block_bytes = 2 * self.layers * self.kv_heads * page_tokens * self.head_dim * self.dtype.itemsize
        layout = KvIdentity(
            model=config.name_or_path or config.model_type,
            dtype=str(self.dtype).removeprefix("torch."),
            weights=weights,
            groups=(GroupIdentity(0, page_tokens, tuple(map(str, range(self.layers)))),),
            block_bytes=self.block_bytes,
            cache_salt=cache_salt,
            packing={"form": "transformers", "heads": f"{self.kv_heads}x{self.head_dim}", "rope": rope},
        ).layout()
        self.volume = client.volume(
            volume_name("transformers", layout), layout, block_bytes=self.block_bytes, create=True
        )

    def chain(self, tokens: Sequence[int]) -> Chain:
        """Name the full pages of a prompt, before the first picture, film or sound.

        Tokens do not tell one picture from another.
        """
        end = next((at for at, token in enumerate(tokens) if int(token) in self._placeholders), len(tokens))
        return self.volume.chain(page_hashes(tokens[:end], self.page_tokens))

    def check(self, states: Sequence[torch.Tensor]) -> None:
        """Check the states of a prompt. Raises UsageError for a batch, and for states of another form."""
        if len(states[0]) != 1:
            raise UsageError(f"a batch of {len(states[0])} prompts: store each prompt alone")
        wanted = (1, self.kv_heads, states[0].shape[2], self.head_dim)
        for each in states:
            if each.shape != wanted or each.dtype is not self.dtype or len(states) != 2 * self.layers:
                raise UsageError(
                    f"{len(states)} states, one of shape {tuple(each.shape)} and {each.dtype}, in place of "
                    f"{2 * self.layers} of {wanted} and {self.dtype}: the cache of a failed pass, or another "
                    "kind of model"
                )
