"""Shape of an engine's rows, and the volume derived from it.

The volume's name carries the layout's digest, so engines with different meanings of blocks use different
volumes. A wrong layout can only miss, and never affects other engines.

vLLM's block hashes commit to all per-request differences: tokens, name of the LoRA adapter, cache salt,
images. The layout's own fields for adapter and salt therefore stay empty.

Hashes with a random seed differ in each process: no other engine finds the stored blocks, without any error.
Unless PYTHONHASHSEED is set, vLLM draws a random seed: before 0.29 always, and since then for its xxhash
algorithms, with hashes shorter than SHA-256.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.volume import BLOCK_BYTES_MAX, KvGroup, Layout

FORMAT_VERSION = 1
"""Raise this number with any change in the stored form of rows."""

_NAME_CHARS_MAX = 40


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Shape of a KV group."""

    number: int
    """vLLM's index of the group, at the end of the group's keys."""
    tokens_per_chunk: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineShape:
    """vLLM's description of rows. A row is one chunk of KV of all the engine's workers."""

    model: str
    dtype: str
    groups: tuple[GroupShape, ...]
    row_bytes: int
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    packing: str
    """Placement of bytes in a row, in the engine's words: release, device, name of the KV cache layout."""
    has_positions: bool
    """Whether requests tell the positions of their keys; decides the placement of blocks."""

    def __post_init__(self) -> None:
        """Refuse shapes that can't be stored, with a remedy."""
        if not self.groups:
            raise UsageError("vLLM offers no KV groups to offload")
        if self.row_bytes > BLOCK_BYTES_MAX:
            raise UsageError(
                f"a chunk of vLLM's offloading has {self.row_bytes} bytes, and a block of Ostraca at most "
                f"{BLOCK_BYTES_MAX}: lower blocks_per_chunk or block_size in kv_connector_extra_config"
            )

    def layout(self, *, revision: str, hash_bytes: int) -> Layout:
        """Return the layout of blocks, derived from all of vLLM's description."""
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
        """Build the layout of a group.

        vLLM does not report heads; the row's size and the layers' names replace them.
        """
        names = hashlib.blake2b("\n".join(group.layers).encode(), digest_size=8).hexdigest()
        placed = "units" if self.has_positions else "hashes"
        kind = f"{group.number}:{group.tokens_per_chunk}:{self.row_bytes}:{names}:{placed}:{self.packing}"
        return KvGroup(layers=len(group.layers), kv_heads=0, head_dim=0, kind=kind)


def volume_name(prefix: str, layout: Layout) -> str:
    """Return a readable volume name, unique to the layout."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", layout.model.rsplit("/", 1)[-1]).strip("-.")
    return f"{prefix}-{model[:_NAME_CHARS_MAX] or 'model'}-{layout.digest()[:8].hex()}"


VARIABLE = "PYTHONHASHSEED"
_ALIKE_SINCE = (0, 29)
_XXHASH_BYTES = 16
_RANDOM = ("", "random")


def hash_seed_problem(version: str, hash_bytes: int, environment: Mapping[str, str]) -> str:
    """Return why other processes can't find this engine's blocks, and a remedy.

    Empty if they can. *version* is vLLM's, or empty if irrelevant.
    """
    seed = environment.get(VARIABLE, "")
    is_old, is_short = _release(version) < _ALIKE_SINCE, hash_bytes == _XXHASH_BYTES
    if seed not in _RANDOM or not (is_old or is_short):
        return ""
    whose = "the xxhash algorithms" if is_short else f"vLLM {version}"
    given = f"is {seed!r}" if seed else "is not set"
    return (
        f"block hashes of {whose} differ in each process, as {VARIABLE} {given}: other engines, and "
        f"this engine after a restart, find no stored blocks. Set {VARIABLE} to the same number "
        "everywhere"
    )


def _release(version: str) -> tuple[int, ...]:
    """Read the first two numbers of a version; without numbers, count as new."""
    numbers = version.split(".")[:2]
    return tuple(map(int, numbers)) if all(number.isdecimal() for number in numbers) else _ALIKE_SINCE
