"""Identities in a fabric.

Names are chosen by people and readable in logs and in etcd; start ids and fabric ids are random. A shard's id
contains its enclosure and drive, so that log lines show the location of a block.
"""

from __future__ import annotations

import re
from typing import NewType

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.limits import described

FabricId = NewType("FabricId", bytes)
"""16 random bytes, created with the fabric."""

StartId = NewType("StartId", bytes)
"""16 random bytes, new at each start of a process: distinguishes a restarted process from the previous
one."""

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
"""Rises only with changes of shards or their weights."""

ID_BYTES = 16

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")


def checked_name(noun: str, name: str) -> str:
    """Return *name* if usable in keys and paths.

    Raises UsageError with the rules of good names; *noun* names the object in the message.
    """
    if not isinstance(name, str) or not _NAME.match(name):  # type: ignore[redundant-expr]  # untyped callers
        raise UsageError(
            f"{noun} {described(name)} is not a usable name: take 1 to 63 of a-z, 0-9, '.', '_' and '-', "
            "beginning with a letter or digit"
        )
    return str.__str__(name)


def drive_id(enclosure: EnclosureId, name: str) -> DriveId:
    """Build the id of an enclosure's drive."""
    return DriveId(f"{enclosure}/{checked_name('drive', name)}")


def shard_id(drive: DriveId, number: int) -> ShardId:
    """Build the id of a drive's shard."""
    return ShardId(f"{drive}/{number}")


def drive_of(shard: ShardId) -> DriveId:
    """Return the id of a shard's drive."""
    return DriveId(shard.rpartition("/")[0])


def enclosure_of(shard: ShardId) -> EnclosureId:
    """Return the id of a shard's enclosure."""
    return EnclosureId(shard.partition("/")[0])
