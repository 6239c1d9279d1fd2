"""Backend of SGLang's HiCache: the fabric as dynamic storage.

SGLang's ``--hicache-storage-backend-extra-config`` names the class::

    {"backend_name": "ostraca", "module_path": "ostraca.connectors.sglang", "class_name": "OstracaHiCache",
     "interface_v1": 1, "ostraca": {"agents": "unix:///run/ostraca/agent.sock"}}

HiCache keeps pages of KV in pools of host memory. A backend stores copies of pages and fills pages from the
copies. In this backend, a page is one block of a volume, or several if large.

- ``settings``: settings of the backend, and the identity of a rank
- ``pages``: names of pages, and the blocks of a page. Pure.
- ``host_pools``: memory and identity of SGLang's pools
- ``page_store``: lookups, loads and stores without any SGLang version
- ``adapter``: the class for SGLang. Only this module knows SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostraca.connectors.sglang.adapter import OstracaHiCache

__all__ = ["OstracaHiCache"]


def __getattr__(name: str) -> object:
    """Import the adapter, and SGLang with it, on SGLang's request for the class."""
    if name != "OstracaHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ostraca.connectors.sglang.adapter import OstracaHiCache  # noqa: PLC0415

    return OstracaHiCache
