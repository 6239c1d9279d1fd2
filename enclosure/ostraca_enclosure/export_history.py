"""Export history: drives exported before, in a file of the state directory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ostraca_enclosure.state_files import STATE_VERSION, StateRecord, read_state, write_state
from ostraca_fabric.model.target import check_nguid

HISTORY_FILE = "export_history.json"


class _HistoryRecord(StateRecord, frozen=True):
    nguids: tuple[str, ...]


class ExportHistory:
    """NGUIDs of drives exported before, kept over reboots."""

    def __init__(self, directory: Path) -> None:
        """Read the history in *directory*. Raises FormatError and OSError."""
        self._file = directory / HISTORY_FILE
        record = read_state(
            self._file,
            _HistoryRecord,
            remedy="remove the file; fit drives are exported anyway, other drives with --force",
            check=lambda record: [check_nguid(nguid) for nguid in record.nguids],
        )
        self.nguids = frozenset(record.nguids if record else ())

    def keep(self, nguids: Collection[str]) -> None:
        """Replace the history by *nguids*. After OSError, the old history is kept."""
        wanted = frozenset(nguids)
        if wanted != self.nguids:
            write_state(self._file, _HistoryRecord(STATE_VERSION, tuple(sorted(wanted))))
            self.nguids = wanted
