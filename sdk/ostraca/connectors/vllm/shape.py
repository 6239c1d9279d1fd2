"""What an engine's rows mean, and the volume that follows from it.

The volume's name carries the layout's digest, so engines whose blocks mean different things use different
volumes: a wrong layout can only miss, and never stands in another's way.

vLLM's block hashes commit to what differs from request to request: the tokens, the LoRA adapter's name, the
cache salt, the images. So the layout's own fields for adapter and salt stay empty here.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from ostraca_fabric.errors import UsageError
from ostraca_fabric.layout import KvGroup, Layout
from ostraca_fabric.volume import BLOCK_BYTES_MAX

FORMAT_VERSION = 1
"""Raise it when rows are stored in another way than as they are."""

_NAME_CHARS_MAX = 40


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One KV group."""

    number: int
    """vLLM's index of the group, which ends its keys."""
    tokens_per_chunk: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What vLLM tells of its rows. Each is one chunk of KV of all workers of the engine."""

    model: str
    dtype: str
    groups: tuple[GroupShape, ...]
    row_bytes: int
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    packing: str
    """How bytes lie in a row, in the engine's words: release, device, the name of its KV cache layout."""
    tells_positions: bool
    """Whether requests tell where their keys end; it decides how blocks are placed."""

    def __post_init__(self) -> None:
        """Refuse what can't be stored, saying what can be done."""
        if not self.groups:
            raise UsageError("vLLM offers no KV groups to offload")
        if self.row_bytes > BLOCK_BYTES_MAX:
            raise UsageError(
                f"a chunk of vLLM's offloading has {self.row_bytes} bytes, and a block of Ostraca at most "
                f"{BLOCK_BYTES_MAX}: lower blocks_per_chunk or block_size in kv_connector_extra_config"
            )

    def layout(self, *, revision: str, hash_bytes: int) -> Layout:
        """Return what blocks mean. Everything that vLLM tells takes part in it."""
        return Layout(
            model=f"{self.model}@{revision}" if revision else self.model,
            dtype=self.dtype,
            page_tokens=min(group.tokens_per_chunk for group in self.groups),
            groups=tuple(self._group(group) for group in self.groups),
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            context_parallel=self.context_parallel,
            hash_bytes=hash_bytes,
            format_version=FORMAT_VERSION,
        )

    def _group(self, group: GroupShape) -> KvGroup:
        """Name a group. vLLM tells no heads; the row's size and the layers' names stand for them."""
        names = hashlib.blake2b("\n".join(group.layers).encode(), digest_size=8).hexdigest()
        placed = "units" if self.tells_positions else "hashes"
        kind = f"{group.number}:{group.tokens_per_chunk}:{self.row_bytes}:{names}:{placed}:{self.packing}"
        return KvGroup(layers=len(group.layers), kv_heads=0, head_dim=0, kind=kind)


def volume_name(prefix: str, layout: Layout) -> str:
    """Return a name that people can read and that no other layout has."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", layout.model.rsplit("/", 1)[-1]).strip("-.")
    return f"{prefix}-{model[:_NAME_CHARS_MAX] or 'model'}-{layout.digest()[:8].hex()}"
