"""Ostraca's SDK: what an inference worker imports to read and write blocks of KV cache.

    client = ostraca.connect("unix:///run/ostraca/agent.sock")
    volume = client.volume("llama-70b", layout, block_bytes=2 << 20, create=True)
    chain = volume.chain(engine_hashes, rank=0)
    result = volume.get(chain, into=blocks, deadline_s=0.5, recompute_s=3.0)

Importing it loads next to nothing; what a name needs is imported when the name is first used, and torch and
NIXL only when a tensor is passed or an arena is offered over NIXL.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostraca.client import Client, connect
    from ostraca.meter import ClientMetrics
    from ostraca.results import BlockOutcomes, GetResult, LookupResult, PrefetchResult, PutResult
    from ostraca.settings import ClientSettings
    from ostraca.shells.done import Done, Ticket
    from ostraca.views import BlockViews, SlotLease
    from ostraca.volume import Volume
    from ostraca_fabric.chain import Chain
    from ostraca_fabric.errors import (
        AuthenticationError,
        ClosedError,
        ConnectError,
        LayoutMismatchError,
        OstracaError,
        ProtocolError,
        RefusedError,
        TransportError,
        UnknownVolumeError,
        UsageError,
        VersionError,
    )
    from ostraca_fabric.layout import KvGroup, Layout
    from ostraca_fabric.outcome import Ack, BlockState, PutState, Reason

__all__ = [
    "Ack",
    "AuthenticationError",
    "BlockOutcomes",
    "BlockState",
    "BlockViews",
    "Chain",
    "Client",
    "ClientMetrics",
    "ClientSettings",
    "ClosedError",
    "ConnectError",
    "Done",
    "GetResult",
    "KvGroup",
    "Layout",
    "LayoutMismatchError",
    "LookupResult",
    "OstracaError",
    "PrefetchResult",
    "ProtocolError",
    "PutResult",
    "PutState",
    "Reason",
    "RefusedError",
    "SlotLease",
    "Ticket",
    "TransportError",
    "UnknownVolumeError",
    "UsageError",
    "VersionError",
    "Volume",
    "connect",
]

_HOMES = {
    "ostraca.client": ("Client", "connect"),
    "ostraca.meter": ("ClientMetrics",),
    "ostraca.results": ("BlockOutcomes", "GetResult", "LookupResult", "PrefetchResult", "PutResult"),
    "ostraca.settings": ("ClientSettings",),
    "ostraca.shells.done": ("Done", "Ticket"),
    "ostraca.views": ("BlockViews", "SlotLease"),
    "ostraca.volume": ("Volume",),
    "ostraca_fabric.chain": ("Chain",),
    "ostraca_fabric.layout": ("KvGroup", "Layout"),
    "ostraca_fabric.outcome": ("Ack", "BlockState", "PutState", "Reason"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import what a public name needs, when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(_HOME_OF.get(name, "ostraca_fabric.errors")), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
