"""What `ostraca up` keeps in its directory besides the drives: the fabric's identity, its key and its
volumes.

``lock`` is held while the fabric runs, so that two processes never use one directory; a new process that
holds it knows that the one before is gone. ``fabric.key`` is a secret: without it, or with another, no block
is found. ``worker.token`` is what workers show that come over TCP.
"""

from __future__ import annotations

import fcntl
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ostraca.places import TOKEN_FILE
from ostraca_fabric.adapters.whole_files import write_whole
from ostraca_fabric.errors import FormatError, MembershipError
from ostraca_fabric.ids import ID_BYTES, FabricId
from ostraca_fabric.keys import FABRIC_KEY_BYTES
from ostraca_fabric.sentences import counted
from ostraca_fabric.volume import VolumeRecord

if TYPE_CHECKING:
    from pathlib import Path
    from typing import IO

RECORD_FILE = "fabric.json"
KEY_FILE = "fabric.key"
LOCK_FILE = "lock"

_VERSION = 1
_TOKEN_BYTES = 24


@dataclass(frozen=True, slots=True)
class FabricShape:
    """What can't change after the first start: it decides where blocks lie."""

    enclosures: int
    drives: int
    """Of each enclosure."""

    drive_bytes: int


class _Stored(msgspec.Struct, frozen=True):
    version: int
    fabric: bytes
    shape: FabricShape
    volumes: tuple[VolumeRecord, ...] = ()


class FabricState:
    """The files of one fabric's directory, locked until ``close``."""

    def __init__(self, directory: Path, shape: FabricShape) -> None:
        """Lock the directory, and read what is there or begin anew.

        Raises MembershipError when another process uses it, and FormatError when it holds a fabric of
        another shape or version.
        """
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = directory / RECORD_FILE
        self._lock = locked(directory)
        try:
            stored = self._read(shape)
            self.key = _key(directory / KEY_FILE, is_new=not self._path.exists())
            self._stored = self._written(stored)
        except BaseException:
            self.close()
            raise

    @property
    def fabric(self) -> FabricId:
        """The fabric's id."""
        return FabricId(self._stored.fabric)

    @property
    def volumes(self) -> tuple[VolumeRecord, ...]:
        """Every volume created so far."""
        return self._stored.volumes

    def worker_token(self) -> str:
        """Return the token that workers of other hosts show, making one the first time.

        Raises MembershipError when it can't be kept.
        """
        path = self._path.with_name(TOKEN_FILE)
        try:
            if not path.exists():
                write_whole(path, f"{secrets.token_urlsafe(_TOKEN_BYTES)}\n".encode(), mode=0o600)
            token = path.read_text().strip()
        except OSError as error:
            message = f"the workers' token can't be kept: {error}"
            raise MembershipError(message) from error
        if not token:
            message = f"{path} is empty: remove it, and a new token is made"
            raise FormatError(message)
        return token

    def keep_volumes(self, volumes: tuple[VolumeRecord, ...]) -> None:
        """Store the volumes; raises MembershipError when the directory can't be written."""
        self._stored = self._written(msgspec.structs.replace(self._stored, volumes=volumes))

    def close(self) -> None:
        """Unlock the directory."""
        self._lock.close()

    def _read(self, shape: FabricShape) -> _Stored:
        if not self._path.exists():
            _refuse_lost(self._path)
            return _Stored(_VERSION, secrets.token_bytes(ID_BYTES), shape)
        stored = _decoded(self._path)
        if stored.shape != shape:
            was = stored.shape
            raise FormatError(
                f"{self._path.parent} holds a fabric of {counted(was.enclosures, 'enclosure')} with "
                f"{counted(was.drives, 'drive')} of {was.drive_bytes} bytes each, not {shape.enclosures} "
                f"with {shape.drives} of {shape.drive_bytes}: start it with those, or begin "
                "anew in another --dir"
            )
        return stored

    def _written(self, stored: _Stored) -> _Stored:
        _write_whole(self._path, msgspec.json.format(msgspec.json.encode(stored)))
        return stored


def read_fabric(directory: Path) -> tuple[FabricId, FabricShape]:
    """Return whose drives lie in *directory*, and how many there are. Locks nothing.

    Raises FormatError when the record can't be read by this release, and OSError when it can't be read.
    """
    stored = _decoded(directory / RECORD_FILE)
    return FabricId(stored.fabric), stored.shape


def recorded_volumes(directory: Path, fabric: FabricId) -> tuple[VolumeRecord, ...]:
    """Return the volumes that the record says a fabric has; none where there is no record of that fabric that
    can be read.
    """
    try:
        stored = _decoded(directory / RECORD_FILE)
    except (FormatError, OSError):
        return ()
    return stored.volumes if stored.fabric == fabric else ()


def write_fabric(
    directory: Path, fabric: FabricId, shape: FabricShape, volumes: tuple[VolumeRecord, ...]
) -> None:
    """Store the record of a fabric that was rebuilt, under the directory's lock.

    Raises MembershipError when it can't be written.
    """
    stored = _Stored(_VERSION, fabric, shape, volumes)
    _write_whole(directory / RECORD_FILE, msgspec.json.format(msgspec.json.encode(stored)))


def write_key(path: Path, key: bytes) -> None:
    """Store a fabric's key where there is none.

    Raises FormatError when it is none, and MembershipError when one is there or it can't be written.
    """
    _check_key(path, key)
    if path.exists():
        message = f"{path} can't be written: a key is there, and none is ever replaced"
        raise MembershipError(message)
    _write_whole(path, key, mode=0o600)


def read_key(path: Path) -> bytes:
    """Return a fabric's key; raises FormatError when it can't be read, or is none."""
    try:
        key = path.read_bytes()
    except OSError as error:
        message = f"the fabric's key can't be read: {error}. Without it no block is found; restore it"
        raise FormatError(message) from error
    _check_key(path, key)
    return key


def is_running(directory: Path) -> bool:
    """Say whether a process runs a fabric in *directory*; False, too, where nobody lets us find out."""
    try:
        with (directory / LOCK_FILE).open("rb") as lock:
            # Held for an instant only, and shared: one who looks does not stand in another's way.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def locked(directory: Path, taken: str = "") -> IO[bytes]:
    """Take the lock of a directory, until what is returned is closed.

    Raises MembershipError, with *taken*, when another process has it.
    """
    lock = (directory / LOCK_FILE).open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise MembershipError(
            taken or f"another process runs a fabric in {directory}: stop it, or take another --dir"
        ) from error
    return lock


def _decoded(path: Path) -> _Stored:
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
    except msgspec.DecodeError as error:
        message = (
            f"{path} is damaged ({error}): restore it, or make it again from the drives by `ostraca fabric "
            f"rebuild --force --dir {path.parent}`"
        )
        raise FormatError(message) from error
    if stored.version != _VERSION:
        raise FormatError(
            f"{path} has version {stored.version}, and this release reads {_VERSION}: use the "
            "release that wrote it"
        )
    return stored


def _refuse_lost(record: Path) -> None:
    """Take a directory for a new one only when it holds no drives: its key must not be made anew."""
    directory = record.parent
    if any(directory.glob("enclosure-*/drive-*.img")):
        raise FormatError(
            f"{directory} holds drives, and {record.name}, which says whose they are, is lost: `ostraca "
            f"fabric rebuild --dir {directory}` makes it again from the drives; or begin anew elsewhere"
        )


def _write_whole(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace a file by another, whole or not at all. Raises MembershipError."""
    try:
        write_whole(path, content, mode=mode)
    except OSError as error:
        message = f"{path} can't be written: {error}"
        raise MembershipError(message) from error


def _key(path: Path, *, is_new: bool) -> bytes:
    # A key is never replaced, but for what a first start that was interrupted left of one.
    if is_new and not (path.exists() and path.stat().st_size == FABRIC_KEY_BYTES):
        path.unlink(missing_ok=True)
        write_key(path, secrets.token_bytes(FABRIC_KEY_BYTES))
    return read_key(path)


def _check_key(path: Path, key: bytes) -> None:
    if len(key) != FABRIC_KEY_BYTES:
        message = f"{path} has {len(key)} bytes where a fabric key has {FABRIC_KEY_BYTES}: restore it"
        raise FormatError(message)
