"""What makes a block's bytes meaningful.

Two workers share blocks only when all of this is equal, and the layout's digest is in every block's tag: a
worker that reads with another layout can only miss.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

import msgspec

from ostraca_fabric.errors import UsageError

DIGEST_BYTES = 16
HASH_BYTES_MIN = 8
HASH_BYTES_MAX = 64


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

    groups: tuple[KvGroup, ...] = ()
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

    def digest(self) -> bytes:
        """Return 16 bytes that commit to every field.

        BLAKE2b-128 over the fields as canonical (sorted) msgpack, under a personalisation of our own.
        """
        canonical = msgspec.msgpack.encode(asdict(self), order="deterministic")
        return hashlib.blake2b(canonical, digest_size=DIGEST_BYTES, person=b"ostraca-layout").digest()
