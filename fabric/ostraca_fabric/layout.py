"""What makes a block's bytes meaningful.

Two workers share blocks only when all of this is equal, and the layout's digest is in every block's tag: a
worker that reads with another layout can only miss.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Annotated

import msgspec

from ostraca_fabric.errors import UsageError

DIGEST_BYTES = 16
HASH_BYTES_MIN = 8
HASH_BYTES_MAX = 64
GROUPS_MAX = 256
"""KV groups of one layout. Models have a handful; without a limit, one message could keep an agent busy for
seconds with the digest of its layout."""

WORD_CHARACTERS_MAX = 1024
"""The longest text in a layout."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One group of layers whose pages are managed together (hybrid and MLA models have several)."""

    layers: int
    kv_heads: int
    head_dim: int
    kind: str = "attention"
    """``attention``, ``sliding``, ``mla``, ``state``: the engine's word; only equality matters here."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How an engine lays KV out in a block. Every field takes part in equality and in the digest."""

    model: str
    """The model and its weights' revision, for example ``meta-llama/Llama-3-70B@a1b2c3``."""

    dtype: str
    """``bf16``, ``fp8_e4m3``, ``nvfp4`` ...: with its scales, where it has any."""

    page_tokens: int
    """Tokens in one page, and so in one block."""

    groups: Annotated[tuple[KvGroup, ...], msgspec.Meta(max_length=GROUPS_MAX)] = ()
    """The KV groups in the engine's order; a request names one by its index."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1

    adapter: str = ""
    """LoRA adapter and revision, or empty."""

    cache_salt: str = ""
    """What the engine mixes into its hashes to keep users apart, or empty."""

    hash_bytes: int = 32
    """Length of the engine's block hashes: 32 for SHA-256."""

    format_version: int = 1
    """Raise it when the connector that packs blocks changes how it packs them."""

    def __post_init__(self) -> None:
        """Refuse a layout that no engine can mean."""
        if not self.model or not self.dtype:
            message = "a layout needs a model and a dtype: they keep different bytes apart"
            raise UsageError(message)
        if not HASH_BYTES_MIN <= self.hash_bytes <= HASH_BYTES_MAX:
            message = (
                f"hash_bytes is {self.hash_bytes}: engines use {HASH_BYTES_MIN} to {HASH_BYTES_MAX} bytes"
            )
            raise UsageError(message)
        positive = (self.page_tokens, self.tensor_parallel, self.pipeline_parallel, self.context_parallel)
        if min(positive) < 1:
            message = "page_tokens and the parallel sizes of a layout must be at least 1"
            raise UsageError(message)
        self._check_lengths()

    def _check_lengths(self) -> None:
        if len(self.groups) > GROUPS_MAX:
            message = f"a layout of {len(self.groups)} KV groups: it has at most {GROUPS_MAX}"
            raise UsageError(message)
        words = (
            self.model,
            self.dtype,
            self.adapter,
            self.cache_salt,
            *(group.kind for group in self.groups),
        )
        longest = max(map(len, words))
        if longest > WORD_CHARACTERS_MAX:
            message = (
                f"a text of {longest} characters in a layout: take at most {WORD_CHARACTERS_MAX}, a digest"
            )
            raise UsageError(message)

    def digest(self) -> bytes:
        """Return 16 bytes that commit to every field.

        BLAKE2b-128 over the fields as canonical (sorted) msgpack, under a personalisation of our own.
        """
        canonical = msgspec.msgpack.encode(asdict(self), order="deterministic")
        return hashlib.blake2b(canonical, digest_size=DIGEST_BYTES, person=b"ostraca-layout").digest()
