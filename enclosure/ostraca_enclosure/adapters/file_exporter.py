"""Exports drives that are files, by ``exports.json`` in their directory.

What hosts would be told by a target they read there (``ostraca_fabric.adapters.file_exports``). A host shows
its secret; the enclosure shows none, for it is a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ostraca_enclosure.plan import (
    CloseToOthers,
    Create,
    Have,
    HostSecrets,
    LetIn,
    Listen,
    Offer,
    Offered,
    OpenToAll,
    Remove,
    ShutOut,
    Step,
    StopListening,
    TakeBack,
)
from ostraca_enclosure.ports import ExportError
from ostraca_fabric.adapters.file_exports import (
    EXPORTS_FILE,
    FileExports,
    FoundExports,
    read_exports,
    withdraw_exports,
    write_exports,
)
from ostraca_fabric.errors import FormatError
from ostraca_fabric.target import Controller, Transport


class FileExporter:
    """One directory's exports. Implements ``ports.Exporter``."""

    def __init__(self, directory: Path, nqn: str) -> None:
        """Export files of *directory*, an absolute path, as *nqn*."""
        self._directory = directory
        self._nqn = nqn
        self._controller = Controller(Transport.FILES, str(directory))

    def observe(self, hosts: Mapping[str, HostSecrets]) -> Have:
        """Return what is exported. Who is let in is known, and listed hosts are all that are."""
        with self._told():
            found = self._read()
            if found is None:
                return Have()
            return Have(
                is_there=True,
                controllers=frozenset({self._controller}),
                offered=tuple(
                    Offered(slot, nguid, str(path))
                    for slot, (nguid, path) in enumerate(sorted(found.namespaces.items()), 1)
                ),
                hosts=found.hosts,
                stale=frozenset(
                    host for host in found.hosts & hosts.keys() if not _shows(found, host, hosts[host].host)
                ),
                is_open=not found.hosts,
            )

    def apply(self, step: Step) -> None:
        """Do one step."""
        with self._told():
            found = self._read()
            if isinstance(step, Create):
                if found is None:
                    write_exports(self._directory, FileExports(self._nqn, {}))
                return
            if isinstance(step, Remove | StopListening):
                # A directory is there or not: it can't be reached and hold nothing.
                withdraw_exports(self._directory)
                return
            if found is None:
                if isinstance(step, TakeBack | ShutOut):
                    return
                raise ExportError(f"{self._directory / EXPORTS_FILE} is gone: it is made again next time")
            self._change(found, step)

    def _change(self, found: FoundExports, step: Step) -> None:
        match step:
            case LetIn(host, secrets):
                if secrets.controller:
                    raise ExportError(
                        f"{host} wants to be shown a secret, and an enclosure on files shows none: leave "
                        "controller_secret out"
                    )
                found.let_in(host, secrets.host)
            case ShutOut(host):
                found.shut_out(host)
            case Offer(export):
                path = Path(export.device)
                if path.parent != self._directory:
                    raise ExportError(f"{path} does not lie in {self._directory}, and only its files do")
                found.offer(export.nguid, path)
            case TakeBack(_, nguid):
                found.take_back(nguid)
            case CloseToOthers() | OpenToAll() | Listen() | Create() | Remove() | StopListening():
                pass  # who is listed says who may connect; and what there is can be reached

    def _read(self) -> FoundExports | None:
        found = read_exports(self._directory)
        if found is not None and found.nqn != self._nqn:
            raise ExportError(
                f"{self._directory / EXPORTS_FILE} is of {found.nqn}, and this enclosure is {self._nqn}: "
                "take another directory, or remove that file"
            )
        return found

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ExportError(f"{self._directory} can't be used: {error}") from error
        except FormatError as error:
            raise ExportError(str(error)) from error


def _shows(found: FoundExports, host: str, secret: str) -> bool:
    """Say whether a host has to show *secret*, or nothing where that is empty."""
    return found.asks(host) == bool(secret) and found.is_secret(host, secret)
