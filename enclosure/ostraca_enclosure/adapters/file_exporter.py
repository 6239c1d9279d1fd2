"""Exporter of file drives, by ``exports.json`` in the directory of the drives.

Hosts read there the information normally supplied by a target (``ostraca_fabric.drives.file_exports``). A
host shows its secret; the enclosure, a mere file, shows none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

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
from ostraca_enclosure.ports import ExportError
from ostraca_fabric.drives.file_exports import (
    EXPORTS_FILE,
    FileExports,
    FoundExports,
    read_exports,
    withdraw_exports,
    write_exports,
)
from ostraca_fabric.errors import FormatError
from ostraca_fabric.model.target import Controller, TargetTransport
from ostraca_fabric.runtime.os_errors import explained


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
