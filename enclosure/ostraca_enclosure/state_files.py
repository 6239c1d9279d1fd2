"""Records of the daemon in JSON files, each replaced as a whole.

``ExportHistory`` has the drives exported before. ``NvmetRecord`` has the ports and hosts created in nvmet by
this enclosure's daemon; others may belong to other programs. A name is recorded before the creation, so that
a crash leaves no orphan. configfs is empty after a boot and makes old records void, so each record names the
boot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from ostraca_fabric.errors import FormatError
from ostraca_fabric.model.target import check_nguid
from ostraca_fabric.runtime.atomic_files import write_whole

STATE_VERSION = 1


class StateRecord(msgspec.Struct, frozen=True):
    """Base of the records."""

    version: int


_Record = TypeVar("_Record", bound=StateRecord)


def read_state(
    file: Path, kind: type[_Record], *, remedy: str, check: Callable[[_Record], object] = lambda _: None
) -> _Record | None:
    """Return the record in *file*, or None without a file.

    *check* raises ValueError for invalid contents. Raises OSError, and FormatError for a damaged file, with
    *remedy* as advice.
    """
    try:
        record = msgspec.json.decode(file.read_bytes(), type=kind)
        if record.version != STATE_VERSION:
            raise FormatError(
                f"{file} has version {record.version}, and this release reads version {STATE_VERSION}: "
                "upgrade this release"
            )
        check(record)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, ValueError) as error:
        raise FormatError(f"{file} is damaged ({error}): {remedy}") from error
    return record


def write_state(file: Path, record: StateRecord) -> None:
    """Replace the record in *file* durably. Raises OSError."""
    write_whole(file, msgspec.json.format(msgspec.json.encode(record)) + b"\n")


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


NVMET_FILE = "nvmet.json"

ObjectKind = Literal["ports", "hosts"]
"""Directory of the objects in nvmet."""


class _NvmetObjects(StateRecord, frozen=True):
    boot: str
    ports: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


class NvmetRecord:
    """Names of ports and hosts. Methods to add or remove raise OSError."""

    def __init__(self, directory: Path, boot: str) -> None:
        """Read the record of this *boot* in *directory*. Raises FormatError and OSError."""
        self._file = directory / NVMET_FILE
        found = read_state(
            self._file,
            _NvmetObjects,
            remedy="remove the file; after the daemon's end, remove unused ports and hosts of nvmet",
        )
        self._record = found if found and found.boot == boot else _NvmetObjects(STATE_VERSION, boot)

    def names(self, kind: ObjectKind) -> tuple[str, ...]:
        """Return the names of ports or hosts created here."""
        return self._record.ports if kind == "ports" else self._record.hosts

    def add(self, kind: ObjectKind, name: str) -> None:
        """Record *name* before creation."""
        self._keep(kind, (*(each for each in self.names(kind) if each != name), name))

    def remove(self, kind: ObjectKind, name: str) -> None:
        """Delete the record of *name*, now removed or in use by others."""
        self._keep(kind, tuple(each for each in self.names(kind) if each != name))

    def _keep(self, kind: ObjectKind, names: tuple[str, ...]) -> None:
        record = msgspec.structs.replace(self._record, **{kind: names})
        if record != self._record:
            write_state(self._file, record)
            self._record = record


def boot_id(proc: Path) -> str:
    """Return the id of this boot. Raises OSError."""
    return (proc / "sys/kernel/random/boot_id").read_text().strip()
