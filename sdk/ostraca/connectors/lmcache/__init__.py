"""Plug-ins of LMCache: the fabric behind LMCache's memory of objects.

LMCache keeps KV of a chunk of tokens as *objects* in host memory. A plug-in stores copies of objects and
fills objects from the copies. In the plug-ins, an object is one block of a volume, or several if large.

``OstracaL2Adapter`` is for LMCache's multi-process server, ``OstracaStorageBackend`` for an engine with
LMCache in its process. LMCache's configuration names module and class.

- ``objects``: names of objects and layouts, and blocks derived from both. Pure.
- ``settings``: keys of LMCache's configuration
- ``memory_objects``: memory and layout of LMCache's objects
- ``tasks``: lookups, loads and stores without any LMCache version
- ``adapter``, ``storage_plugin``: the classes for LMCache. Only these modules know LMCache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostraca.connectors.lmcache.adapter import OstracaL2Adapter
    from ostraca.connectors.lmcache.storage_plugin import OstracaStorageBackend

__all__ = ["OstracaL2Adapter", "OstracaStorageBackend"]


def __getattr__(name: str) -> object:
    """Import a class, and its part of LMCache, on LMCache's request for the class."""
    if name == "OstracaL2Adapter":
        from ostraca.connectors.lmcache.adapter import OstracaL2Adapter  # noqa: PLC0415

        return OstracaL2Adapter
    if name == "OstracaStorageBackend":
        from ostraca.connectors.lmcache.storage_plugin import OstracaStorageBackend  # noqa: PLC0415

        return OstracaStorageBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
