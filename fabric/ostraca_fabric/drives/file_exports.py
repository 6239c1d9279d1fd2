"""Exports of an enclosure on files: ``exports.json`` in the enclosure's directory.

The file replaces the answers of an NVMe-oF target to a connecting host: permitted hosts, their secrets, and
the namespaces. Readers of the directory can also read the drives, so refusals only prevent mistakes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ostraca_fabric.errors import FormatError
from ostraca_fabric.model.target import check_nguid
from ostraca_fabric.runtime.atomic_files import sync_directory, write_whole

EXPORTS_FILE = "exports.json"
_VERSION = 1
_SALT_BYTES = 16


class _Namespace(msgspec.Struct, frozen=True):
    nguid: str
    path: str


class _Exports(msgspec.Struct, frozen=True):
    version: int
    nqn: str
    salt: str
    hosts: dict[str, str]
    """By NQN: salted digest of the host's secret, empty without a secret. No entry: every host may
    connect."""

    namespaces: tuple[_Namespace, ...]


@dataclass(frozen=True, slots=True)
class FileExports:
    """Exports of an enclosure on files, to be written."""

    nqn: str
    namespaces: Mapping[str, Path]
    """By NGUID: the drive's file."""

    hosts: Mapping[str, str] = field(default_factory=dict)
    """By NQN: secret of the host, empty for none. No entry: every host may connect."""


def write_exports(directory: Path, exports: FileExports) -> None:
    """Replace the exports of *directory*, which contains the files. Raises OSError."""
    salt = secrets.token_bytes(_SALT_BYTES)
    record = _Exports(
        _VERSION,
        exports.nqn,
        salt.hex(),
        {host: _digest(salt, secret) for host, secret in sorted(exports.hosts.items())},
        tuple(_Namespace(nguid, path.name) for nguid, path in sorted(exports.namespaces.items())),
    )
    _write(directory, record)


def withdraw_exports(directory: Path) -> None:
    """Remove all exports; no error if there are none. Raises OSError."""
    (directory / EXPORTS_FILE).unlink(missing_ok=True)
    sync_directory(directory)


class FoundExports:
    """Exports found in a directory."""

    def __init__(self, directory: Path, record: _Exports) -> None:
        """Store the exports. Call ``read_exports`` instead."""
        self.nqn = record.nqn
        self.namespaces = {each.nguid: directory / each.path for each in record.namespaces}
        """By NGUID: the drive's file."""

        self._directory = directory
        self._record = record
        self._salt = bytes.fromhex(record.salt)
        self._hosts = record.hosts

    @property
    def hosts(self) -> frozenset[str]:
        """NQNs of the permitted hosts; empty: every host may connect."""
        return frozenset(self._hosts)

    def knows(self, host: str) -> bool:
        """Tell whether a host may connect, given the right secret."""
        return not self._hosts or host in self._hosts

    def is_secret(self, host: str, secret: str) -> bool:
        """Tell whether *secret* is the host's secret."""
        wanted = self._hosts.get(host, "")
        return hmac.compare_digest(wanted, _digest(self._salt, secret) if wanted else "")

    def asks(self, host: str) -> bool:
        """Tell whether a host needs a secret."""
        return bool(self._hosts.get(host))

    # Each change rewrites the whole file from the record found, because secrets can't be read back.

    def let_in(self, host: str, secret: str) -> None:
        """Let a host connect, with only this secret. Raises OSError."""
        self._write(hosts={**self._hosts, host: _digest(self._salt, secret)})

    def shut_out(self, host: str) -> None:
        """Exclude a host; after the last exclusion every host may connect. Raises OSError."""
        self._write(hosts={name: told for name, told in self._hosts.items() if name != host})

    def offer(self, nguid: str, path: Path) -> None:
        """Export a file of this directory. Raises OSError."""
        self._write(namespaces=(*self._without(nguid), _Namespace(nguid, path.name)))

    def take_back(self, nguid: str) -> None:
        """End the export of a drive. Raises OSError."""
        self._write(namespaces=self._without(nguid))

    def _without(self, nguid: str) -> tuple[_Namespace, ...]:
        return tuple(each for each in self._record.namespaces if each.nguid != nguid)

    def _write(self, **changed: object) -> None:
        _write(self._directory, msgspec.structs.replace(self._record, **changed))


def read_exports(directory: Path) -> FoundExports | None:
    """Return the exports of *directory*, or None. Raises FormatError and OSError."""
    file = directory / EXPORTS_FILE
    try:
        record = msgspec.json.decode(file.read_bytes(), type=_Exports)
        if record.version != _VERSION:
            raise FormatError(
                f"{file} has version {record.version}, and this release reads {_VERSION}: upgrade it"
            )
        for each in record.namespaces:
            check_nguid(each.nguid)
            if "/" in each.path or each.path in ("", ".", ".."):
                raise FormatError(f"{file} names {each.path!r}, which is not a file of that directory")
        return FoundExports(directory, record)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, ValueError) as error:
        raise FormatError(f"{file} is damaged ({error}): start the enclosure's daemon again") from error


def _write(directory: Path, record: _Exports) -> None:
    write_whole(directory / EXPORTS_FILE, msgspec.json.format(msgspec.json.encode(record)) + b"\n")


def _digest(salt: bytes, secret: str) -> str:
    return hashlib.blake2b(secret.encode(), key=salt, digest_size=32).hexdigest() if secret else ""
