"""Volumes: namespaces of blocks with one tenant, one layout and one largest block size.

Workers share blocks only under equal layouts. The layout's digest is part of every block's tag, so a read
with another layout always misses.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

import msgspec

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.extent import rounded_up
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.limits import text, whole

BLOCK_BYTES_MAX = 16 << 20

_set = object.__setattr__  # converts numpy numbers to ints in a frozen dataclass


@dataclass(frozen=True, slots=True)
class VolumeRecord:
    """Volume as recorded in the membership store, without a secret."""

    tenant: TenantId
    name: str
    layout: Layout
    block_bytes: int
    """Largest block, in bytes."""

    incarnation: int = 1
    """Raised by every erasure, which gives the volume a new secret."""

    is_erasable: bool = False
    """Whether the volume can be erased: agents without news of the store serve an erasable volume only for a
    while. Fixed at creation, so that every agent knows."""

    def __post_init__(self) -> None:
        """Refuse block sizes too large for flash."""
        size_bytes = whole("block_bytes", self.block_bytes, least=1, most=BLOCK_BYTES_MAX)
        _set(self, "block_bytes", size_bytes)

    @property
    def slot_bytes(self) -> int:
        """Room of one block in an arena, in staging and at most on flash: whole pages."""
        return rounded_up(self.block_bytes)

    def erased(self) -> VolumeRecord:
        """Return the record after an erasure, with the next incarnation."""
        return replace(self, incarnation=self.incarnation + 1)

    def raised_to(self, incarnation: int) -> VolumeRecord:
        """Return the record with *incarnation*, or unchanged if already as high.

        A higher incarnation proves an earlier erasure, so the volume is erasable.
        """
        if incarnation <= self.incarnation:
            return self
        return replace(self, incarnation=incarnation, is_erasable=True)


def check_erasable(volume: VolumeRecord) -> None:
    """Raise UsageError for a volume that some agent may serve for ever."""
    if not volume.is_erasable:
        raise UsageError(
            f"volume {volume.name!r} of tenant {volume.tenant!r} can't be erased, as fixed at creation: make "
            "tenants erasable before their first volume"
        )


@dataclass(frozen=True, slots=True)
class VolumeIdentity:
    """Identity under a tag, besides the block's own. All fields are public."""

    tenant: TenantId
    name: str
    layout_digest: bytes
    encoded: bytes = field(init=False, repr=False, compare=False)
    """The fields, each preceded by its length (u32, little-endian)."""

    def __post_init__(self) -> None:
        """Encode the fields once: every request needs them."""
        fields = [self.tenant.encode(), self.name.encode(), self.layout_digest]
        _set(self, "encoded", b"".join(len(each).to_bytes(4, "little") + each for each in fields))


DIGEST_BYTES = 16
HASH_BYTES_MIN = 8
HASH_BYTES_MAX = 64
GROUPS_MAX = 256
"""KV groups of one layout. Models have a handful; without a limit, the digest of one message's layout could
occupy an agent for seconds."""

WORD_CHARACTERS_MAX = 1024
"""Longest text in a layout."""


COUNT_MAX = (1 << 32) - 1
"""Largest number in a layout."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Group of layers with jointly managed pages (hybrid and MLA models have several)."""

    layers: int
    kv_heads: int
    head_dim: int
    kind: str = "attention"
    """``attention``, ``sliding``, ``mla``, ``state``: the engine's word; only equality matters here."""

    def __post_init__(self) -> None:
        """Refuse values impossible for any engine."""
        for name in ("layers", "kv_heads", "head_dim"):
            _set(self, name, whole(f"{name} of a KV group", getattr(self, name), least=0, most=COUNT_MAX))
        _set(self, "kind", text("kind of a KV group", self.kind, characters_max=WORD_CHARACTERS_MAX))


@dataclass(frozen=True, slots=True)
class Layout:
    """An engine's layout of KV in a block. Every field counts for equality and the digest."""

    model: str
    """Model and revision of the weights, for example ``meta-llama/Llama-3-70B@a1b2c3``."""

    dtype: str
    """``bf16``, ``fp8_e4m3``, ``nvfp4`` ...: including scales, if any."""

    page_tokens: int
    """Tokens in one page, and so in one block."""

    groups: Annotated[tuple[KvGroup, ...], msgspec.Meta(max_length=GROUPS_MAX)] = ()
    """KV groups in the engine's order; a request names a group by index."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1

    adapter: str = ""
    """LoRA adapter and revision, or empty."""

    cache_salt: str = ""
    """The engine's hash salt to separate users, or empty."""

    hash_bytes: int = 32
    """Length of the engine's block hashes: 32 for SHA-256."""

    format_version: int = 1
    """Version of the connector's block format; raise the version with every change of the packing."""

    def __post_init__(self) -> None:
        """Refuse a layout impossible for any engine."""
        for name in ("model", "dtype", "adapter", "cache_salt"):
            word = text(f"{name} of a layout", getattr(self, name), characters_max=WORD_CHARACTERS_MAX)
            _set(self, name, word)
        if not self.model or not self.dtype:
            raise UsageError("a layout needs a model and a dtype, to keep different bytes apart")
        for name in ("page_tokens", "tensor_parallel", "pipeline_parallel", "context_parallel"):
            _set(self, name, whole(f"{name} of a layout", getattr(self, name), least=1, most=COUNT_MAX))
        hash_bytes = whole("hash_bytes", self.hash_bytes, least=HASH_BYTES_MIN, most=HASH_BYTES_MAX)
        _set(self, "hash_bytes", hash_bytes)
        _set(self, "format_version", whole("format_version", self.format_version, least=0, most=COUNT_MAX))
        self._check_groups()

    def _check_groups(self) -> None:
        groups: object = self.groups
        if not isinstance(groups, (list, tuple)):
            raise UsageError(
                f"groups of a layout is a {type(groups).__name__}: pass a tuple of ostraca.KvGroup"
            )
        if len(groups) > GROUPS_MAX:
            raise UsageError(f"a layout of {len(groups)} KV groups: use at most {GROUPS_MAX}")
        if not all(isinstance(group, KvGroup) for group in groups):
            raise UsageError("groups of a layout are ostraca.KvGroup: pass a tuple of KvGroup")
        _set(self, "groups", tuple(groups))

    @property
    def ranks(self) -> int:
        """Number of ranks; each rank holds its own part of a page."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    def check_part(self, *, rank: int, group: int) -> None:
        """Refuse a rank or KV group outside this layout: its blocks would always be misses.

        A layout without named groups has one group. Raises UsageError.
        """
        if not 0 <= rank < self.ranks:
            raise UsageError(
                f"rank {rank} of a layout with {self.ranks} (tensor_parallel {self.tensor_parallel}, "
                f"pipeline_parallel {self.pipeline_parallel}, context_parallel {self.context_parallel}): "
                f"take 0 to {self.ranks - 1}, or open the volume with the engine's parallel sizes"
            )
        groups = max(1, len(self.groups))
        if not 0 <= group < groups:
            raise UsageError(
                f"KV group {group} of a layout with {len(self.groups)} groups: take 0 to {groups - 1}, or "
                "open the volume with the engine's groups in the layout"
            )

    def digest(self) -> bytes:
        """Return a digest of all fields: 16 bytes.

        BLAKE2b-128 over the fields as canonical (sorted) msgpack, under a personalisation of our own.
        """
        canonical = msgspec.msgpack.encode(asdict(self), order="deterministic")
        return hashlib.blake2b(canonical, digest_size=DIGEST_BYTES, person=b"ostraca-layout").digest()
