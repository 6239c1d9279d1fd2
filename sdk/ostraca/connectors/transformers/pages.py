"""Pages of a model's KV cache: names, and the volume.

A page is ``page_tokens`` consecutive tokens in all layers. Its block holds keys before values, layer by
layer, each of shape (1, KV heads, page tokens, head size).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ostraca.client import Client
from ostraca.connectors.kv_identity.identity import GroupIdentity, KvIdentity, volume_name
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.chain import Chain

_FULL_ATTENTION = "full_attention"

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
        kinds = set(getattr(config, "layer_types", None) or [_FULL_ATTENTION])
        if kinds != {_FULL_ATTENTION}:
            raise UsageError(
                f"layers of the kinds {', '.join(sorted(kinds))}: prefixes are stored for full attention only"
            )
        if not weights:
            raise UsageError("no weights are named: give the revision or a digest of the checkpoint")
        self.page_tokens = page_tokens
        self.layers: int = config.num_hidden_layers
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
            packing={"form": "transformers", "heads": f"{self.kv_heads}x{self.head_dim}"},
        ).layout()
        self.volume = client.volume(
            volume_name("transformers", layout), layout, block_bytes=self.block_bytes, create=True
        )

    def chain(self, tokens: Sequence[int]) -> Chain:
        """Name the full pages of a prompt."""
        return self.volume.chain(page_hashes(tokens, self.page_tokens))
