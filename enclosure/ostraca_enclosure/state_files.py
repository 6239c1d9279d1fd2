"""Small records in JSON files of the daemon's directories, replaced as a whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from ostraca_fabric.errors import FormatError
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
