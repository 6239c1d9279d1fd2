"""Identities: who and what there is in a fabric.

Names are chosen by people and readable in logs and in etcd; start ids and fabric ids are random. A shard's id
names its enclosure and drive, so that a log line says where a block lay.
"""

from __future__ import annotations

import re
from typing import NewType

from ostraca_fabric.errors import UsageError, shown

FabricId = NewType("FabricId", bytes)
"""16 random bytes, made once when a fabric is."""

StartId = NewType("StartId", bytes)
"""16 random bytes, made at each start of a process: tells a restarted process from the one before."""

TenantId = NewType("TenantId", str)
AgentId = NewType("AgentId", str)
EnclosureId = NewType("EnclosureId", str)
DriveId = NewType("DriveId", str)
"""``<enclosure>/<drive name>``."""

ShardId = NewType("ShardId", str)
"""``<enclosure>/<drive name>/<number>``."""

OwnerEpoch = NewType("OwnerEpoch", int)
"""Rises with each new owner of a shard."""

PlacementEpoch = NewType("PlacementEpoch", int)
"""Rises when shards or their weights change, and at no other time."""

ID_BYTES = 16

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")


def checked_name(what: str, name: str) -> str:
    """Return *name* when it can stand in keys and paths.

    Raises UsageError that says what a good name is; *what* names the thing in its message.
    """
    if not isinstance(name, str) or not _NAME.match(name):  # type: ignore[redundant-expr]  # untyped callers
        message = (
            f"{what} {shown(str(name))} is not a usable name: take 1 to 63 of a-z, 0-9, '.', '_' and '-', "
            "beginning with a letter or digit"
        )
        raise UsageError(message)
    return name


def drive_id(enclosure: EnclosureId, name: str) -> DriveId:
    """Name a drive of an enclosure."""
    return DriveId(f"{enclosure}/{checked_name('drive', name)}")


def shard_id(drive: DriveId, number: int) -> ShardId:
    """Name a drive's shard."""
    return ShardId(f"{drive}/{number}")


def drive_of(shard: ShardId) -> DriveId:
    """Name the drive a shard lies on."""
    return DriveId(shard.rpartition("/")[0])


def enclosure_of(shard: ShardId) -> EnclosureId:
    """Name the enclosure a shard lies in."""
    return EnclosureId(shard.partition("/")[0])
