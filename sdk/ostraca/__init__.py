"""SDK of Ostraca: library of an inference worker for blocks of KV cache.

    client = ostraca.connect("unix:///run/ostraca/agent.sock")
    volume = client.volume("llama-70b", layout, block_bytes=2 << 20, create=True)
    chain = volume.chain(engine_hashes, rank=0)
    result = volume.get(chain, into=blocks, deadline_s=0.5, recompute_s=3.0)

The import loads next to nothing: each name imports its modules at first use. torch is used only for tensors,
and NIXL only for an arena offered over NIXL.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostraca import aio
    from ostraca._memory.regions import Region
    from ostraca._memory.views import BlockViews, SlotLease
    from ostraca._operations.completions import Completion, Ticket
    from ostraca.client import Client, connect
    from ostraca.client_metrics import ClientMetrics
    from ostraca.results import (
        BlockOutcomes,
        GetResult,
        LookupResult,
        PrefetchResult,
        PutResult,
        WithheldRows,
    )
    from ostraca.settings import ClientSettings
    from ostraca.volume import Volume
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
    from ostraca_fabric.model.chain import Chain
    from ostraca_fabric.model.outcome import Ack, BlockState, PutState, Reason
    from ostraca_fabric.model.volume import KvGroup, Layout

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
    "Completion",
    "ConnectError",
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
    "Region",
    "SlotLease",
    "Ticket",
    "TransportError",
    "UnknownVolumeError",
    "UsageError",
    "VersionError",
    "Volume",
    "WithheldRows",
    "aio",
    "connect",
]

_HOMES = {
    "ostraca.client": ("Client", "connect"),
    "ostraca.client_metrics": ("ClientMetrics",),
    "ostraca.results": (
        "BlockOutcomes",
        "GetResult",
        "LookupResult",
        "PrefetchResult",
        "PutResult",
        "WithheldRows",
    ),
    "ostraca.settings": ("ClientSettings",),
    "ostraca._operations.completions": ("Completion", "Ticket"),
    "ostraca._memory.regions": ("Region",),
    "ostraca._memory.views": ("BlockViews", "SlotLease"),
    "ostraca.volume": ("Volume",),
    "ostraca_fabric.model.chain": ("Chain",),
    "ostraca_fabric.model.volume": ("KvGroup", "Layout"),
    "ostraca_fabric.model.outcome": ("Ack", "BlockState", "PutState", "Reason"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import the modules of a public name at first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "aio":
        return importlib.import_module("ostraca.aio")
    found: object = getattr(importlib.import_module(_HOME_OF.get(name, "ostraca_fabric.errors")), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
