"""Settings of the backend, and the identity of the KV of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ostraca.connectors.kv_identity.identity import GroupIdentity, KvIdentity
from ostraca.connectors.sglang.pages import HASH_BYTES
from ostraca.connectors.transfers.settings import ConnectorSettings
from ostraca.settings import MIB
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.volume import BLOCK_BYTES_MAX, Layout

_WITHOUT_EFFECT = ("lookups_inflight_max", "loads_inflight_chunks_max", "stores_inflight_chunks_max")


@dataclass(frozen=True, slots=True)
class SglangSettings(ConnectorSettings):
    """Settings of one backend, with every limit of the backend."""

    LOGGER: ClassVar[str] = "sglang.ostraca"
    WHERE: ClassVar[str] = "the Ostraca backend of SGLang"

    volume: str = "sglang"
    """First part of the volume's name; the rest is derived from the layout."""

    block_bytes: int = 4 * MIB
    """Largest block; larger pages are cut into blocks. Engines share pages only with an equal value."""

    prefix_keys: bool = False
    """Whether SGLang passes the keys before each page. Set true together with SGLang's
    ``hicache_storage_pass_prefix_keys``: neighbours are then placed together, and the loss of an enclosure
    costs fewer prefixes. Engines share pages only with an equal value.
    """

    kv_cache_dtype: str = ""
    """SGLang's ``--kv-cache-dtype``. Needed if SGLang does not report the type of a cache of 8 bits."""

    lookup_deadline_s: float = 0.5
    """Longest call for a lookup; pages without an answer by then are misses."""

    load_deadline_s: float = 2.0
    """Longest call for a load of at most 128 pages; SGLang computes pages missing by then."""

    store_deadline_s: float = 5.0
    """Longest call for a store of at most 128 pages; the pages stay in SGLang's host memory meanwhile."""

    def __post_init__(self) -> None:
        """Refuse invalid values. Raises UsageError."""
        if not 0 < self.block_bytes <= BLOCK_BYTES_MAX:
            raise UsageError(f"block_bytes is {self.block_bytes}: give a value from 1 to {BLOCK_BYTES_MAX}")
        for name in _WITHOUT_EFFECT:
            if getattr(self, name) != getattr(ConnectorSettings(), name):
                raise UsageError(f"{name} has no effect: SGLang waits for each call, so leave it out")
        ConnectorSettings.__post_init__(self)  # super() fails in dataclasses with slots


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """Facts about one rank of SGLang, and about the rank's main pool."""

    model: str
    dtype: str
    page_tokens: int
    layers: int
    tensor: tuple[int, int] = (0, 1)
    """Rank and size of tensor parallelism."""

    pipeline: tuple[int, int] = (0, 1)
    context: tuple[int, int] = (0, 1)
    is_replicated: bool = False
    """Whether all tensor-parallel ranks hold equal KV, as with MLA. A single copy serves all."""

    packing: Mapping[str, str] = field(default_factory=dict)
    """Further facts about the placement of bytes in a page."""

    @property
    def rank(self) -> int:
        """Rank in the layout."""
        (tensor, tensors), (stage, _), (part, parts) = self.tensor, self.pipeline, self.context
        place = stage * parts + part
        return place if self.is_replicated else place * tensors + tensor

    def layout(self, settings: SglangSettings, *, block_bytes: int) -> Layout:
        """Return the layout of the volume. Raises UsageError if ``weights_file`` can't be read."""
        return KvIdentity(
            model=self.model,
            dtype=self.dtype,
            weights=settings.weights(),
            groups=(GroupIdentity(0, self.page_tokens, tuple(map(str, range(self.layers)))),),
            block_bytes=block_bytes,
            tensor_parallel=1 if self.is_replicated else self.tensor[1],
            pipeline_parallel=self.pipeline[1],
            context_parallel=self.context[1],
            # Pipeline stages differ in layers, so each stage has a volume of its own.
            packing={"engine": "sglang", "stage": str(self.pipeline[0]), **self.packing},
            hash_bytes=HASH_BYTES,
            is_chained=settings.prefix_keys,
        ).layout()
