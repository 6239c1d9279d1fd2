"""Options common to the connectors under the kit."""

from __future__ import annotations

from ostraca.connectors.conformance import EngineOptions


def deadlines(options: EngineOptions) -> dict[str, object]:
    """Return the deadlines among a connector's settings."""
    return {f"{each}_deadline_s": options.deadline_s for each in ("lookup", "load", "store")}


class RowCursor:
    """Rows of an engine's memory, used in turn."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._next = 0

    def take(self, count: int) -> slice:
        first = self._next if self._next + count <= self._rows else 0
        self._next = first + count
        return slice(first, self._next)
