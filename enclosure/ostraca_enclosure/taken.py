"""Which drives an enclosure has exported before, remembered over reboots: a file in its state directory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from ostraca_fabric.adapters.whole_files import write_whole
from ostraca_fabric.errors import FormatError
from ostraca_fabric.target import check_nguid

TAKEN_FILE = "taken.json"
_VERSION = 1


class _Record(msgspec.Struct, frozen=True):
    version: int
    nguids: tuple[str, ...]


class Taken:
    """The NGUIDs of drives that were exported before."""

    def __init__(self, directory: Path) -> None:
        """Read what *directory* remembers. Raises FormatError, and OSError."""
        self._file = directory / TAKEN_FILE
        self.nguids = _read(self._file)

    def keep(self, nguids: Collection[str]) -> None:
        """Remember these, and no others. Raises OSError, and then those before are remembered."""
        wanted = frozenset(nguids)
        if wanted != self.nguids:
            record = _Record(_VERSION, tuple(sorted(wanted)))
            write_whole(self._file, msgspec.json.format(msgspec.json.encode(record)) + b"\n")
            self.nguids = wanted


def _read(file: Path) -> frozenset[str]:
    try:
        record = msgspec.json.decode(file.read_bytes(), type=_Record)
        if record.version != _VERSION:
            raise FormatError(
                f"{file} has version {record.version}, and this release reads {_VERSION}: upgrade it"
            )
        return frozenset(map(check_nguid, record.nguids))
    except FileNotFoundError:
        return frozenset()
    except (msgspec.DecodeError, ValueError) as error:
        raise FormatError(
            f"{file} is damaged ({error}): remove it; drives that are fit are exported anyway, others with "
            "--force"
        ) from error
