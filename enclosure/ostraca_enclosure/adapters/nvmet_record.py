"""Record of ports and hosts created in nvmet by this enclosure's daemon.

Other ports and hosts may belong to others. The state directory receives each name before creation, so that a
crash leaves no orphan. configfs is empty after a boot and makes old records void, so each record names the
boot.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from ostraca_enclosure.state_files import STATE_VERSION, StateRecord, read_state, write_state

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
