"""Files with a superblock and noise, as drives of this host."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ostraca_fabric.flash.superblock import Superblock, encode_superblock
from ostraca_fabric.model.extent import PAGE_BYTES, Geometry
from ostraca_fabric.model.ids import DriveId, EnclosureId, FabricId, ShardId

MIB = 1 << 20
FABRIC = FabricId(b"f" * 16)
DRIVE_BYTES = 16 * MIB
SUPERBLOCK_BYTES = 2 * PAGE_BYTES
NOBODY = 65534


def superblock_of(name: str, *, drive_offset: int = 0) -> bytes:
    """Return the first pages of drive ``shelf/<name>``."""
    geometry = Geometry.planned(DRIVE_BYTES, segment_bytes=MIB)
    drive, shard = DriveId(f"shelf/{name}"), ShardId(f"shelf/{name}/0")
    return encode_superblock(
        Superblock(FABRIC, b"i" * 16, EnclosureId("shelf"), drive, shard, drive_offset, geometry)
    )


def create_drive(path: Path, name: str = "") -> bytes:
    """Create a drive, named like its file unless *name* is given; return its content."""
    first = superblock_of(name or path.stem)
    content = first + random.Random(str(path.name)).randbytes(DRIVE_BYTES - len(first))
    path.write_bytes(content)
    return content


@contextmanager
def as_another_user() -> Iterator[None]:
    """Open files as another user, in this thread and in those it starts, where the tests run as root."""
    libc, own = ctypes.CDLL(None), os.geteuid()
    if not own:
        libc.setfsuid(NOBODY)
    try:
        yield
    finally:
        libc.setfsuid(own)
