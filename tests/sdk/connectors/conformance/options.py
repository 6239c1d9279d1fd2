"""Options common to the connectors under the kit."""

from __future__ import annotations

from ostraca.connectors.conformance import EngineOptions


def deadlines(options: EngineOptions) -> dict[str, object]:
    """Return the deadlines among a connector's settings."""
    return {f"{each}_deadline_s": options.deadline_s for each in ("lookup", "load", "store")}
