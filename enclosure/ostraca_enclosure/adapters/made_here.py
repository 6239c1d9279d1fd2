"""What of nvmet's tree this enclosure's daemon has made: ports and hosts, which may as well be others'.

Written down before it is made, in the state directory, so that a crash leaves nothing that nobody removes.
configfs is empty after a boot, and what was written down then means nothing: so each record names the boot.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ostraca_fabric.adapters.whole_files import write_whole
from ostraca_fabric.errors import FormatError

MADE_FILE = "nvmet.json"
_VERSION = 1


class _Record(msgspec.Struct, frozen=True):
    version: int
    boot: str
    ports: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


class MadeHere:
    """Names of ports and hosts. Methods that note or forget raise OSError."""

    def __init__(self, directory: Path, boot: str) -> None:
        """Read what *directory* says of this *boot*. Raises FormatError, and OSError."""
        self._file = directory / MADE_FILE
        found = _read(self._file)
        self._record = found if found is not None and found.boot == boot else _Record(_VERSION, boot)

    @property
    def ports(self) -> tuple[str, ...]:
        """Ports that were made here."""
        return self._record.ports

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts that were made here."""
        return self._record.hosts

    def note_port(self, port: str) -> None:
        """Write down that *port* is about to be made."""
        self._keep(ports=(*(each for each in self.ports if each != port), port))

    def forget_port(self, port: str) -> None:
        """Write down that it is gone, or somebody else's now."""
        self._keep(ports=tuple(each for each in self.ports if each != port))

    def note_host(self, host: str) -> None:
        """Write down that *host* is about to be made."""
        self._keep(hosts=(*(each for each in self.hosts if each != host), host))

    def forget_host(self, host: str) -> None:
        """Write down that it is gone, or somebody else's now."""
        self._keep(hosts=tuple(each for each in self.hosts if each != host))

    def _keep(self, **changed: tuple[str, ...]) -> None:
        record = msgspec.structs.replace(self._record, **changed)
        if record != self._record:
            write_whole(self._file, msgspec.json.format(msgspec.json.encode(record)) + b"\n")
            self._record = record


def boot_id(proc: Path) -> str:
    """Return what tells this boot from others. Raises OSError."""
    return (proc / "sys/kernel/random/boot_id").read_text().strip()


def _read(file: Path) -> _Record | None:
    try:
        record = msgspec.json.decode(file.read_bytes(), type=_Record)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise FormatError(
            f"{file} is damaged ({error}): remove it, and after the enclosure's end remove by hand the ports "
            "and hosts of nvmet that nobody uses"
        ) from error
    if record.version != _VERSION:
        raise FormatError(
            f"{file} has version {record.version}, and this release reads {_VERSION}: upgrade it"
        )
    return record
