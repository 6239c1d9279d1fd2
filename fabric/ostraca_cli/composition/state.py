"""Files of `ostraca up` beside the drives: identity, key and volumes of the fabric.

The directory and its file ``lock`` are locked while the fabric runs, so that no two processes use the
directory. The holder of the lock knows that the previous process is gone. ``fabric.key`` is a secret; no
block is found without the right key. ``worker.token`` is the token of workers over TCP. Only the owner may
read these files.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from ostraca_fabric.drives.flash_files import FlashFileError, open_flash
from ostraca_fabric.errors import FormatError, MembershipError
from ostraca_fabric.model.ids import ID_BYTES, FabricId
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.runtime.atomic_files import PRIVATE, make_private_folder, write_whole
from ostraca_fabric.runtime.os_errors import explained
from ostraca_fabric.runtime.sentences import counted
from ostraca_fabric.sockets.default_paths import TOKEN_FILE
from ostraca_fabric.tables.digests import FABRIC_KEY_BYTES

RECORD_FILE = "fabric.json"
KEY_FILE = "fabric.key"
LOCK_FILE = "lock"

log = logging.getLogger(__name__)

_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO

_DRIVES = "enclosure-*/drive-*.img"

_VERSION = 1
_TOKEN_BYTES = 24


@dataclass(frozen=True, slots=True)
class FabricShape:
    """Shape of a fabric, constant after the first start, because placement depends on the shape."""

    enclosures: int
    drives: int
    """Drives of each enclosure."""

    drive_bytes: int


class _Record(msgspec.Struct, frozen=True):
    version: int
    fabric: bytes
    shape: FabricShape
    volumes: tuple[VolumeRecord, ...] = ()
    is_making_drives: bool = False
    """Whether the first start has yet to create all drives. Only such a start creates missing drives."""


class FabricState:
    """Files of a fabric's directory, locked until ``close``."""

    def __init__(self, directory: Path, shape: FabricShape) -> None:
        """Lock the directory, and read the existing record or begin a fabric.

        A fabric without any drive takes *shape*, so that a start refused for its shape may be repeated.

        Raises MembershipError if another process uses the directory, and FormatError for a fabric of another
        shape or version.
        """
        try:
            make_private_folder(directory)
        except OSError as error:
            raise MembershipError(f"the fabric's folder can't be made: {explained(error)}") from error
        self._path = directory / RECORD_FILE
        self._lock = lock_directory(directory)
        try:
            is_new = not self._path.exists()
            self._record, is_stored = self._read(shape)
            self.key = _key(directory / KEY_FILE, is_new=is_new)
            if not is_stored:  # later starts write nothing, so that a full disk does not stop them
                self._store(self._record)
            restrict_access(directory)
        except BaseException:
            self.close()
            raise

    @property
    def fabric(self) -> FabricId:
        """Return the fabric's id."""
        return FabricId(self._record.fabric)

    @property
    def volumes(self) -> tuple[VolumeRecord, ...]:
        """Return every volume created so far."""
        return self._record.volumes

    @property
    def are_drives_created(self) -> bool:
        """Return whether all drives were created; missing drives are then never recreated."""
        return not self._record.is_making_drives

    def record_drives_created(self) -> None:
        """Record that all drives exist; raises MembershipError if not writable."""
        if self._record.is_making_drives:
            self._record = self._store(msgspec.structs.replace(self._record, is_making_drives=False))

    def worker_token(self) -> str:
        """Return the token of workers on other hosts; creates the token on first use.

        Raises MembershipError if the token cannot be stored, and FormatError if damaged.
        """
        path = self._path.with_name(TOKEN_FILE)
        try:
            if not path.exists():
                write_whole(path, f"{secrets.token_urlsafe(_TOKEN_BYTES)}\n".encode())
            token = path.read_text().strip()
        except OSError as error:
            raise MembershipError(
                f"the workers' token can't be kept in {path}: {explained(error)}"
            ) from error
        except UnicodeDecodeError:  # its message may quote the token
            raise FormatError(f"{path} is no text: remove the file, and a new token is created") from None
        if not token:
            raise FormatError(f"{path} is empty: remove the file, and a new token is created")
        return token

    def store_volumes(self, volumes: tuple[VolumeRecord, ...]) -> None:
        """Store the volumes; raises MembershipError if the directory is not writable."""
        self._record = self._store(msgspec.structs.replace(self._record, volumes=volumes))

    def hold_drive(self, path: Path) -> None:
        """Lock a drive's file against use from another directory by a move or link.

        Raises MembershipError if another process uses the drive. Skips unopenable drives: a later open
        reports the error.
        """
        try:
            drive = open_flash(path, os.O_RDWR)
        except FlashFileError:
            return
        self._lock.callback(os.close, drive)
        try:
            fcntl.flock(drive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MembershipError(
                f"another process uses the drive {path}, perhaps under another name: stop the process, "
                "or take another --dir"
            ) from error
        except OSError:
            return  # the file system has no locks

    def close(self) -> None:
        """Unlock the directory and the drives."""
        self._lock.close()

    def _read(self, shape: FabricShape) -> tuple[_Record, bool]:
        """Return the record, and whether it is stored."""
        if not self._path.exists():
            _refuse_lost(self._path)
            return _Record(_VERSION, secrets.token_bytes(ID_BYTES), shape, is_making_drives=True), False
        try:
            record = _decode(self._path)
        except OSError as error:
            raise FormatError(f"the fabric's record can't be read: {explained(error)}") from error
        if record.shape == shape:
            return record, True
        was = record.shape
        if not record.is_making_drives or _has_drives(self._path.parent):
            raise FormatError(
                f"{self._path.parent} holds a fabric of {counted(was.enclosures, 'enclosure')} with "
                f"{counted(was.drives, 'drive')} of {was.drive_bytes} bytes each, not "
                f"{shape.enclosures} with {shape.drives} of {shape.drive_bytes}: start with the "
                "recorded shape, or create a new fabric in another --dir"
            )
        return msgspec.structs.replace(record, shape=shape), False

    def _store(self, record: _Record) -> _Record:
        _write_whole(self._path, msgspec.json.format(msgspec.json.encode(record)))
        return record


def read_fabric(directory: Path) -> tuple[FabricId, FabricShape]:
    """Return id and shape of the fabric in *directory*; locks nothing.

    Raises FormatError for a record unknown to this release, and OSError for an unreadable record.
    """
    record = _decode(directory / RECORD_FILE)
    return FabricId(record.fabric), record.shape


def read_recorded_volumes(directory: Path, fabric: FabricId) -> tuple[VolumeRecord, ...]:
    """Return the volumes in the record of *fabric*; empty without a readable record."""
    try:
        record = _decode(directory / RECORD_FILE)
    except (FormatError, OSError):
        return ()
    return record.volumes if record.fabric == fabric else ()


def write_fabric(
    directory: Path, fabric: FabricId, shape: FabricShape, volumes: tuple[VolumeRecord, ...]
) -> None:
    """Store the record of a rebuilt fabric; the caller holds the directory's lock.

    Raises MembershipError if the directory is not writable.
    """
    record = _Record(_VERSION, fabric, shape, volumes)
    _write_whole(directory / RECORD_FILE, msgspec.json.format(msgspec.json.encode(record)))


def write_key(path: Path, key: bytes) -> None:
    """Store a fabric's key in a new file.

    Raises FormatError for an invalid key, and MembershipError for an existing key or a failed write.
    """
    _check_key(path, key)
    if path.exists():
        raise MembershipError(f"{path} can't be written: a key exists, and keys are never replaced")
    _write_whole(path, key)


def read_key(path: Path) -> bytes:
    """Return a fabric's key; raises FormatError if unreadable or invalid."""
    try:
        key = path.read_bytes()
    except OSError as error:
        raise FormatError(
            f"the fabric's key can't be read: {explained(error)}. Without the key no block is found"
        ) from error
    _check_key(path, key)
    return key


def is_running(directory: Path) -> bool:
    """Return whether a process runs a fabric in *directory*; False if unknown."""
    # Shared and brief, so that concurrent checks do not block each other.
    try:
        with contextlib.ExitStack() as held:
            _lock_folder(directory, fcntl.LOCK_SH, held)
            fcntl.flock(held.enter_context((directory / LOCK_FILE).open("rb")), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def lock_directory(directory: Path, conflict: str = "") -> contextlib.ExitStack:
    """Lock a directory until the returned stack is closed.

    Raises MembershipError, with the message *conflict*, if another process has the lock. The lock covers the
    directory itself, because the lock file may be removed. The lock covers the file as well, for file systems
    without directory locks, such as NFS, and for releases with file locks alone.
    """
    with contextlib.ExitStack() as held:
        file = held.enter_context(_opened_lock(directory / LOCK_FILE))
        try:
            _lock_folder(directory, fcntl.LOCK_EX, held)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MembershipError(
                conflict
                or (f"another process runs a fabric in {directory}: stop the process, or take another --dir")
            ) from error
        return held.pop_all()


def _lock_folder(directory: Path, mode: int, held: contextlib.ExitStack) -> None:
    """Lock a directory itself if possible; raises BlockingIOError if locked."""
    try:
        itself = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        held.callback(os.close, itself)
        fcntl.flock(itself, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return


def _opened_lock(path: Path) -> IO[bytes]:
    """Open or create a lock file; raises MembershipError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, PRIVATE)
    except OSError as error:
        raise MembershipError(f"{path.parent} can't be locked: {explained(error)}") from error
    with contextlib.suppress(PermissionError):  # the file belongs to another user
        os.fchmod(descriptor, PRIVATE)  # also if the umask removed the user's own bits
    return os.fdopen(descriptor, "ab")


def _decode(path: Path) -> _Record:
    try:
        record = msgspec.json.decode(path.read_bytes(), type=_Record)
    except msgspec.DecodeError as error:
        raise FormatError(
            f"{path} is damaged ({error}): restore the file, or rebuild it from the drives by `ostraca "
            f"fabric rebuild --force --dir {path.parent}`"
        ) from error
    if record.version != _VERSION:
        raise FormatError(
            f"{path} has version {record.version}, and this release reads {_VERSION}: use the release "
            "of the file"
        )
    return record


def _refuse_lost(record: Path) -> None:
    """Refuse a directory with drives but no record, whose key must not be replaced."""
    directory = record.parent
    if _has_drives(directory):
        raise FormatError(
            f"{directory} holds drives, but no {record.name}: rebuild the record from the drives by "
            f"`ostraca fabric rebuild --dir {directory}`, or create a new fabric in another directory"
        )


def _has_drives(directory: Path) -> bool:
    return any(directory.glob(_DRIVES))


def restrict_access(directory: Path) -> None:
    """Close files left open to others by an earlier release: record and drives."""
    drives = directory.glob(_DRIVES)
    for path in (directory / RECORD_FILE, *drives):
        with contextlib.suppress(OSError):  # missing or foreign file: its opening reports the error
            found = path.stat()
            is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            if is_own and found.st_mode & _OF_OTHERS:
                path.chmod(PRIVATE)
                log.info("%s was open to other users of this machine, and is private now", path)


def _write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically; raises MembershipError."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise MembershipError(f"{path} can't be written: {explained(error)}") from error


def _key(path: Path, *, is_new: bool) -> bytes:
    # A key is never replaced, except for the remains of an interrupted first start.
    if is_new and not (path.exists() and path.stat().st_size == FABRIC_KEY_BYTES):
        path.unlink(missing_ok=True)
        write_key(path, secrets.token_bytes(FABRIC_KEY_BYTES))
    return read_key(path)


def _check_key(path: Path, key: bytes) -> None:
    if len(key) != FABRIC_KEY_BYTES:
        raise FormatError(
            f"{path} has {len(key)} bytes, and a fabric key has {FABRIC_KEY_BYTES}: restore the file"
        )
