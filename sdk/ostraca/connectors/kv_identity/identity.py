"""Facts that decide the bytes of a block, and the volume derived from the facts.

The volume's name and the tag of each block carry the layout's digest. So engines with different facts use
different volumes: a wrong fact can only miss, and never affects other engines.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import msgspec

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.volume import KvGroup, Layout

_NAME_CHARS_MAX = 40
_DETAIL_BYTES = 16


@dataclass(frozen=True, slots=True)
class GroupIdentity:
    """Group of layers with common blocks."""

    number: int
    """The engine's number of the group, as in the engine's keys."""

    block_tokens: int
    layers: tuple[str, ...]
    """Names of the layers, in the order of their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvIdentity:
    """Facts of an engine; each fact changes the digest, and the order of ``packing`` does not."""

    model: str
    dtype: str
    """Type of KV elements, such as ``bfloat16``, ``fp8_e4m3`` or ``nvfp4``."""

    scales: str = ""
    """Origin and granularity of scales of FP8 or NVFP4 elements; empty without scales."""

    weights: str = ""
    """Fingerprint of the weights: revision or digest. Empty if the model's name tells the weights."""

    groups: tuple[GroupIdentity, ...]
    block_bytes: int
    """Bytes of a block of one rank."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    adapter: str = ""
    """LoRA adapter, unless the engine's hashes commit to the adapter."""

    cache_salt: str = ""
    """Salt of the engine's hashes, unless the hashes commit to the salt."""

    packing: Mapping[str, str] = field(default_factory=dict)
    """Further facts about the placement of bytes in a block, by name: release, device, KV cache layout."""

    hash_bytes: int = 32
    """Length of the engine's hashes."""

    is_chained: bool = True
    """Whether blocks are placed by their prefix, or each by its own hash."""

    format_version: int = 1
    """Version of the connector's form of blocks; raised with each change."""

    def __post_init__(self) -> None:
        """Refuse an engine without KV to store. Raises UsageError."""
        if not self.groups:
            raise UsageError("the engine offers no KV groups to offload")

    def layout(self) -> Layout:
        """Return the layout of the blocks, derived from all facts.

        Engines do not report heads: the digest of all facts in each group's kind replaces heads.
        """
        facts = msgspec.msgpack.encode(asdict(self), order="deterministic")
        detail = hashlib.blake2b(facts, digest_size=_DETAIL_BYTES, person=b"ostraca-kv").hexdigest()
        return Layout(
            model=f"{self.model}@{self.weights}" if self.weights else self.model,
            dtype=self.dtype,
            page_tokens=min(group.block_tokens for group in self.groups),
            groups=tuple(
                KvGroup(
                    layers=len(group.layers),
                    kv_heads=0,
                    head_dim=0,
                    kind=f"{group.number}:{group.block_tokens}:{self.block_bytes}:{detail}",
                )
                for group in self.groups
            ),
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            context_parallel=self.context_parallel,
            adapter=self.adapter,
            cache_salt=self.cache_salt,
            hash_bytes=self.hash_bytes,
            format_version=self.format_version,
        )


def volume_name(prefix: str, layout: Layout) -> str:
    """Return a readable volume name, unique to the layout."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", layout.model.rsplit("/", 1)[-1]).strip("-.")
    return f"{prefix}-{model[:_NAME_CHARS_MAX] or 'model'}-{layout.digest()[:8].hex()}"
