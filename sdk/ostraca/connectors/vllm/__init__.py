"""Secondary tier for vLLM's offloading connector.

vLLM's configuration names the tier, registered by a plug-in, or the class::

    "secondary_tiers": [{"type": "ostraca"}]
    "secondary_tiers": [{"type": "OstracaTier", "module_path": "ostraca.connectors.vllm"}]

vLLM keeps KV in pinned host memory, its *primary tier*, in rows of one chunk each. Secondary tiers store
copies of rows and fill rows from the copies. In this tier, a chunk is a block of a volume.

- ``core``: pure decisions: placement and states of chunks
- ``settings``, ``shape``: meaning of the configuration; conditions on chunks and hashes
- ``tier``: the tier without any vLLM version;
- ``adapter``: the class for vLLM. Only this module knows vLLM's versions.
- ``plugin``: registration of the class
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostraca.connectors.vllm.adapter import OstracaTier

__all__ = ["OstracaTier"]


def __getattr__(name: str) -> object:
    """Import the adapter, and vLLM with it, on vLLM's request for the class."""
    if name != "OstracaTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ostraca.connectors.vllm.adapter import OstracaTier  # noqa: PLC0415

    return OstracaTier
