"""Plug-in of LMCache's multi-process server: the fabric as an L2 adapter.

LMCache's configuration names the class::

    {"type": "plugin", "module_path": "ostraca.connectors.lmcache", "class_name": "OstracaL2Adapter",
     "adapter_params": {"agents": "unix:///run/ostraca/agent.sock"}}

LMCache keeps KV of a chunk of tokens as *objects* in host memory, L1. L2 adapters store copies of objects and
fill objects from the copies. In this plug-in, an object is one block of a volume, or several if large.

- ``objects``: names of objects and layouts, and blocks derived from both. Pure.
- ``settings``: meaning of ``adapter_params``
- ``tasks``: the plug-in without any LMCache version
- ``adapter``: the class for LMCache. Only this module knows LMCache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostraca.connectors.lmcache.adapter import OstracaL2Adapter

__all__ = ["OstracaL2Adapter"]


def __getattr__(name: str) -> object:
    """Import the adapter, and LMCache with it, on LMCache's request for the class."""
    if name != "OstracaL2Adapter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ostraca.connectors.lmcache.adapter import OstracaL2Adapter  # noqa: PLC0415

    return OstracaL2Adapter
