"""KV cache of a transformer as blocks: the location of each page.

A block is a page: `page_tokens` consecutive tokens, all layers. Its parts are, layer by layer, the keys and
then the values of these tokens, as views of the cache itself. Views work in both directions: a put reads the
model's memory, and a get fills the same memory, without a copy.

A plain `DynamicCache` grows by concatenation: every token copies all bytes, and earlier views keep memory
unused by the model. `KvCache` allocates all memory at the start and never moves a byte. `KvCache` is a
transformers `Cache` for the model.

This module neither computes with the model nor talks to Ostraca.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicLayer


@dataclass(frozen=True, slots=True)
class KvShape:
    """Parameters of a page's bytes, in the words of a layout."""

    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype = torch.float32

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the whole cache, keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.page_tokens * self.token_bytes


class KvLayer(DynamicLayer):  # type: ignore[misc, no-untyped-call, unused-ignore]  # see the imports
    """Layer of a `KvCache`: `keys` and `values` are the filled part of fixed memory."""

    def __init__(self, shape: KvShape, tokens_max: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        whole = (1, shape.kv_heads, tokens_max, shape.head_dim)
        # NaN, so that a page which nobody filled poisons every answer instead of passing for zeros. Writing
        # it also makes the kernel map the memory now, and not while somebody measures a load.
        self._all_keys = torch.full(whole, torch.nan, dtype=shape.dtype)
        self._all_values = torch.full(whole, torch.nan, dtype=shape.dtype)
        self.dtype, self.device = self._all_keys.dtype, self._all_keys.device
        self.resize(0)
        self.is_initialized = True

    def resize(self, tokens: int) -> None:
        """Declare the first `tokens` tokens as filled. No byte moves."""
        if not 0 <= tokens <= self._all_keys.shape[2]:
            msg = f"{tokens} tokens do not fit a cache of {self._all_keys.shape[2]}"
            raise ValueError(msg)
        self.keys = self._all_keys[:, :, :tokens, :]
        self.values = self._all_values[:, :, :tokens, :]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of new tokens; return all of them. The model calls this method."""
        start = self.get_seq_length()
        self.resize(start + key_states.shape[2])
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, start:, :] = key_states
        self.values[:, :, start:, :] = value_states
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens: transformers passes a negative number."""
        self.resize(self.get_seq_length() - abs(tokens_to_remove))

    def reset(self) -> None:
        """Drop all tokens."""
        self.resize(0)


class KvCache(Cache):
    """Cache of a sequence for transformers, in memory allocated once."""

    def __init__(self, shape: KvShape, *, tokens_max: int) -> None:
        self.shape = shape
        self.kv_layers = [KvLayer(shape, tokens_max) for _ in range(shape.layers)]
        super().__init__(layers=list(self.kv_layers))

    @property
    def tokens(self) -> int:
        """Number of filled tokens."""
        return self.kv_layers[0].get_seq_length()

    def resize(self, tokens: int) -> None:
        """Declare the first `tokens` tokens as filled.

        Before a load, the call makes room: load or compute every page up to there before the model attends to
        the pages. After an answer, the call drops the answer.
        """
        for layer in self.kv_layers:
            layer.resize(tokens)

    def block(self, page: int) -> list[torch.Tensor]:
        """Return the parts of a page, in the order of all puts and gets.

        Keys come before values, layer by layer. The parts are strided views of shape (1, kv heads, page
        tokens, head size), valid for the life of this cache. The page must lie within the filled tokens.
        """
        start, end = page * self.shape.page_tokens, (page + 1) * self.shape.page_tokens
        if page < 0 or end > self.tokens:
            msg = f"page {page} ends at token {end}, but only {self.tokens} are filled: call resize first"
            raise ValueError(msg)
        parts: list[torch.Tensor] = []
        for layer in self.kv_layers:
            assert layer.keys is not None
            assert layer.values is not None
            parts += (layer.keys[:, :, start:end, :], layer.values[:, :, start:end, :])
        return parts

    def blocks(self, pages: Iterable[int]) -> list[list[torch.Tensor]]:
        """Return `block` for each of these pages."""
        return [self.block(page) for page in pages]


def block_digest(block: Sequence[torch.Tensor]) -> bytes:
    """Return the SHA-256 of a block's bytes; equal digests mean equal bits, even for NaN."""
    digest = hashlib.sha256()
    for part in block:
        digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
