"""Settings of the tier in vLLM's configuration.

The fields of ``TierSettings`` are the keys of the tier's entry in ``secondary_tiers``, besides vLLM's own
``type``, ``module_path`` and ``backpressure``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from ostraca.connectors.transfers.settings import ConnectorSettings
from ostraca_fabric.errors import UsageError

LOGGER = "vllm.ostraca"
"""Logger of the tier, below vLLM's: vLLM shows only records under its own name, at VLLM_LOGGING_LEVEL."""

METRIC_PREFIX = "vllm:kv_offload_ostraca_"
"""Prefix of the tier's metrics among vLLM's. Prometheus adds ``_total`` to a counter's name."""

ROUTER_SETTINGS = frozenset({"router_capabilities", "control_ports", "control_advertise_host"})
"""Keys of the tier's entry that Dynamo reads to attach hints to requests; without meaning for the tier."""

_LOCALITIES = ("", "LOCAL", "REMOTE")


@dataclass(frozen=True, slots=True)
class TierSettings(ConnectorSettings):
    """Settings of one tier, with every limit of the tier."""

    LOGGER: ClassVar[str] = LOGGER
    WHERE: ClassVar[str] = "the Ostraca tier of secondary_tiers"

    volume: str = "vllm"
    """First part of the volume's name; the rest is derived from the layout."""

    locality: str = ""
    """Kind of the tier in vLLM's tier filters and in KV events: LOCAL, REMOTE, or empty for neither. Dynamo's
    router credits storage of kind LOCAL or without a kind, and drops events of kind REMOTE.
    """

    enable_kv_events: bool = False
    """Whether stored chunks are announced among vLLM's KV events, if vLLM publishes events at all. A router
    then prefers the engine that stored a chunk, although every engine of the pod can load the chunk.
    """

    recheck_s: float = 0.5
    """Time between two lookups of an announced chunk, so that routers hear of evictions."""

    recheck_chunks_per_s: int = 20_000
    """Lookups of announced chunks per second, which limit comes first."""

    lookup_chunks_max: int = 8192
    """Chunks in one lookup. Further chunks wait for the next step."""

    table_chunks_max: int = 1 << 20
    """Remembered answers for live requests, about 200 bytes each. Further chunks are misses."""

    @classmethod
    def of(cls, config: Mapping[str, object]) -> Self:
        """Read the tier's entry, as far as meant for the tier. Raises UsageError."""
        own = {name: value for name, value in config.items() if name not in ROUTER_SETTINGS}
        # A plain super() fails in dataclasses with slots.
        return super(TierSettings, cls).of(own)

    def __post_init__(self) -> None:
        """Refuse invalid values. Raises UsageError."""
        if self.locality not in _LOCALITIES:
            raise UsageError(f"locality is {self.locality!r}: take LOCAL, REMOTE, or leave it out")
        ConnectorSettings.__post_init__(self)  # super() fails in dataclasses with slots
