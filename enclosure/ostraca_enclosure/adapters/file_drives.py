"""Drives as raw files in a directory, ``drive-0.img`` and on, and their exports.

A drive's NGUID is random, made at creation and kept beside the files in ``drives.json``. A recorded drive is
never created again. If the file is missing, or has other contents, the drive is reported and not exported;
the other drives are. After removal of the name from the record, the next start creates another drive: the old
contents are lost, only the name is shared.

Hosts read in ``exports.json`` the information normally supplied by a target
(``ostraca_fabric.drives.file_exports``). A host shows its secret; the enclosure, a mere file, shows none.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ostraca_enclosure.drives import FoundDrive, Obstacle
from ostraca_enclosure.files import check_room
from ostraca_enclosure.plan import (
    AddListener,
    AddNamespace,
    AllowAnyHost,
    AllowHost,
    CreateSubsystem,
    DenyHost,
    ExportedNamespace,
    HostSecrets,
    PresentExports,
    RemoveListener,
    RemoveNamespace,
    RemoveSubsystem,
    RequireAllowList,
    Step,
)
from ostraca_enclosure.ports import ExportError, InventoryError
from ostraca_enclosure.state_files import STATE_VERSION, StateRecord, read_state, write_state
from ostraca_fabric.drives.file_exports import (
    EXPORTS_FILE,
    FileExports,
    FoundExports,
    read_exports,
    withdraw_exports,
    write_exports,
)
from ostraca_fabric.drives.flash_files import flash_file_bytes
from ostraca_fabric.errors import DriveError, FormatError
from ostraca_fabric.model.extent import MIB, PAGE_BYTES, SHARD_BYTES_MIN
from ostraca_fabric.model.ids import ID_BYTES
from ostraca_fabric.model.target import Controller, TargetTransport, check_nguid
from ostraca_fabric.runtime.atomic_files import make_private_folder, write_whole
from ostraca_fabric.runtime.os_errors import explained

DRIVES_FILE = "drives.json"
_NAME = re.compile(r"drive-(0|[1-9][0-9]{0,4})\Z")


class _DriveNames(StateRecord, frozen=True):
    nguids: dict[str, str]
    """By name of the drive."""


class FileDrives:
    """Files of a directory. Implements ``ports.Inventory``."""

    def __init__(self, directory: Path) -> None:
        """Store *directory*, an absolute path; ``prepare`` creates directory and drives."""
        self._directory = directory
        self._file = directory / DRIVES_FILE

    def prepare(self, drives: int, drive_bytes: int) -> None:
        """Ensure *drives* drives, with new drives of *drive_bytes*.

        Existing drives stay as they are; a drive without an NGUID receives a new NGUID. Raises DriveError for
        a size without a shard or if there is no room, and FormatError.
        """
        if drive_bytes <= 0 or drive_bytes % PAGE_BYTES:
            raise DriveError(f"a drive can't have {drive_bytes} bytes: choose a multiple of {PAGE_BYTES}")
        if drive_bytes < SHARD_BYTES_MIN:
            raise DriveError(
                f"a drive of {drive_bytes} bytes is too small for a shard: choose a --drive-size of at least "
                f"{SHARD_BYTES_MIN} bytes ({SHARD_BYTES_MIN // MIB}MiB)"
            )
        try:
            make_private_folder(self._directory)
            known = self._nguids_by_name()
            wanted = [f"drive-{number}" for number in range(drives)]
            missing = [name for name in wanted if name not in known and not os.path.lexists(self._path(name))]
            if missing:
                check_room(self._directory, len(missing), drive_bytes, "a smaller --drive-size")
            for name in missing:
                write_whole(self._path(name), b"", size_bytes=drive_bytes)
            self._assign_nguids()
        except OSError as error:
            raise DriveError(f"drives can't be created in {self._directory}: {explained(error)}") from error

    def look(self) -> tuple[FoundDrive, ...]:
        """Return all drives."""
        try:
            known = self._nguids_by_name()
            paths = {*self._paths(), *map(self._path, known)}
            return tuple(
                self._describe(path, known.get(path.stem, "")) for path in sorted(paths, key=_number)
            )
        except OSError as error:
            raise InventoryError(explained(error)) from error
        except FormatError as error:
            raise InventoryError(str(error)) from error

    def _describe(self, path: Path, nguid: str) -> FoundDrive:
        size_bytes = 0
        obstacles: tuple[Obstacle, ...] = ()
        try:  # a present but failing drive stays exported: agents notice failures themselves
            size_bytes = flash_file_bytes(path)
        except DriveError as error:
            how = f"to replace the drive, move {path} away and remove {path.stem} from {self._file}"
            obstacles = (Obstacle(f"{error}; {how}", is_final=True),)
        return FoundDrive(
            path.stem, str(path), nguid, size_bytes, PAGE_BYTES, is_file=True, obstacles=obstacles
        )

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.img"

    def _paths(self) -> list[Path]:
        found = [path for path in self._directory.glob("drive-*.img") if _NAME.match(path.stem)]
        return sorted(found, key=_number)

    def _assign_nguids(self) -> None:
        """Give an NGUID to each drive without."""
        known = self._nguids_by_name()
        names = dict.fromkeys([*known, *(path.stem for path in self._paths())])
        named = {name: known.get(name) or secrets.token_hex(ID_BYTES) for name in names}
        if named != known:
            write_state(self._file, _DriveNames(STATE_VERSION, named))

    def _nguids_by_name(self) -> dict[str, str]:
        record = read_state(
            self._file,
            _DriveNames,
            remedy="restore the file from a backup, since it names the drives",
            check=_check_names,
        )
        return record.nguids if record else {}


def _check_names(record: _DriveNames) -> None:
    for name, nguid in record.nguids.items():
        check_nguid(nguid)
        if not _NAME.match(name):
            raise ValueError(f"{name!r} is no name of a drive")


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("drive-"))


class FileExporter:
    """Exports of a directory. Implements ``ports.Exporter``."""

    def __init__(self, directory: Path, nqn: str) -> None:
        """Export files of *directory*, an absolute path, as *nqn*."""
        self._directory = directory
        self._nqn = nqn
        self._controller = Controller(TargetTransport.FILES, str(directory))

    def observe(self, hosts: Mapping[str, HostSecrets]) -> PresentExports:
        """Return the present exports. Only listed hosts are admitted, if any are listed."""
        with _export_errors(self._directory):
            found = self._read()
            if found is None:
                return PresentExports()
            return PresentExports(
                exists=True,
                controllers=frozenset({self._controller}),
                namespaces=tuple(
                    ExportedNamespace(slot, nguid, str(path))
                    for slot, (nguid, path) in enumerate(sorted(found.namespaces.items()), 1)
                ),
                hosts=found.hosts,
                stale_hosts=frozenset(
                    host
                    for host in found.hosts & hosts.keys()
                    if not _has_secret(found, host, hosts[host].host)
                ),
                allows_any_host=not found.hosts,
            )

    def apply(self, step: Step) -> None:
        """Apply a step."""
        with _export_errors(self._directory):
            found = self._read()
            if isinstance(step, CreateSubsystem):
                if found is None:
                    write_exports(self._directory, FileExports(self._nqn, {}))
                return
            if isinstance(step, RemoveSubsystem | RemoveListener):
                # Files have no listening state: to stop listening is to withdraw all exports.
                withdraw_exports(self._directory)
                return
            if found is None:
                if isinstance(step, RemoveNamespace | DenyHost):
                    return
                raise ExportError(
                    f"{self._directory / EXPORTS_FILE} is gone: the next turn creates the file again"
                )
            self._change(found, step)

    def _change(self, found: FoundExports, step: Step) -> None:
        match step:
            case AllowHost(host, secrets):
                if secrets.controller:
                    raise ExportError(
                        f"host {host} has a controller_secret, and file-backed enclosures have none: remove "
                        "controller_secret"
                    )
                found.let_in(host, secrets.host)
            case DenyHost(host):
                found.shut_out(host)
            case AddNamespace(export):
                path = Path(export.device)
                if path.parent != self._directory:
                    raise ExportError(
                        f"{path} is outside {self._directory}: export files of this directory only"
                    )
                found.offer(export.nguid, path)
            case RemoveNamespace(_, nguid):
                found.take_back(nguid)
            case (
                RequireAllowList()
                | AllowAnyHost()
                | AddListener()
                | CreateSubsystem()
                | RemoveSubsystem()
                | RemoveListener()
            ):
                pass  # implied: the list of hosts decides on access, and files are always reachable

    def _read(self) -> FoundExports | None:
        found = read_exports(self._directory)
        if found is not None and found.nqn != self._nqn:
            raise ExportError(
                f"{self._directory / EXPORTS_FILE} belongs to {found.nqn}, not to {self._nqn}: choose "
                "another directory, or remove the file"
            )
        return found


@contextmanager
def _export_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExportError(f"directory {directory} is not usable: {explained(error)}") from error
    except FormatError as error:
        raise ExportError(str(error)) from error


def _has_secret(found: FoundExports, host: str, secret: str) -> bool:
    """Return whether a host must show *secret*, or no secret if empty."""
    return found.asks(host) == bool(secret) and found.is_secret(host, secret)
