"""Ostraca as a secondary tier of vLLM's offloading connector.

vLLM loads it by the names in its own configuration::

    "secondary_tiers": [{"type": "OstracaTier", "module_path": "ostraca.connectors.vllm"}]

vLLM keeps KV in pinned host memory (its *primary tier*), in rows of one chunk each, and asks secondary tiers
to keep copies of rows and to fill rows from them. Here a chunk is one block of a volume.

- ``core``: what is decided, pure: where a chunk is placed, what is known of it, which jobs are under way;
- ``settings``, ``shape``: what the configuration means, and which volume it leads to;
- ``link``: finds the fabric without anybody waiting for it;
- ``tier``: the tier as any version of vLLM needs it;
- ``adapter``: the class that vLLM sees. Only this module imports vLLM and knows its versions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostraca.connectors.vllm.adapter import OstracaTier

__all__ = ["OstracaTier"]


def __getattr__(name: str) -> object:
    """Import the adapter, and so vLLM, when vLLM asks for its class."""
    if name != "OstracaTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ostraca.connectors.vllm.adapter import OstracaTier  # noqa: PLC0415

    return OstracaTier
