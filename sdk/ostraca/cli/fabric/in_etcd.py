"""Rebuilding what etcd has lost of a fabric, from drives that are files: which fabric it is, its enclosures
and its volumes.

Claims and epochs are not made again: agents find the highest epoch on flash, and claim above it. Grants are
gone as well, and with them the knowledge of which segments somebody may still be writing: so no agent may
have run for ``late_write_s`` when the first one starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

from ostraca.cli.etcd_place import etcd_keys, etcd_settings
from ostraca.cli.fabric.rebuild import look
from ostraca.cli.state import KEY_FILE, locked, read_key, write_key
from ostraca_fabric.adapters.etcd.found import fabric_at
from ostraca_fabric.adapters.etcd.membership import EtcdMembership
from ostraca_fabric.errors import FormatError, UsageError
from ostraca_fabric.keys import fabric_key_check

if TYPE_CHECKING:
    from pathlib import Path

    from ostraca.cli.etcd_place import EtcdPlace
    from ostraca.cli.fabric.rebuild import FoundFabric, Keys
    from ostraca_fabric.ids import FabricId


def rebuild_in_etcd(
    place: EtcdPlace, directory: Path, keys: Keys, fabric: FabricId | None = None, *, is_forced: bool = False
) -> FoundFabric:
    """Put into etcd what the drives in *directory* say that their fabric is.

    While etcd has the fabric nothing is done, unless *is_forced*: then what is there stays, and what is
    missing is added. Raises UsageError for that, and when etcd has another fabric there; FormatError when
    drives contradict each other or the key is lost; MembershipError when etcd can't be reached, or what is
    there was begun with another key.
    """
    if not directory.is_dir():
        raise UsageError(f"there is no directory {directory}: pass the --files of `ostraca fabric create`")
    with contextlib.closing(locked(directory, f"another process works on {directory}: wait for it")):
        found = look(directory.resolve(), fabric, is_of_up=False)
        if found.contradictions or found.fabric is None:
            raise FormatError(f"nothing was rebuilt: {'; '.join(found.contradictions)}")
        key = keys.missing(directory)
        asyncio.run(
            _put(place, found, found.fabric, key or read_key(directory / KEY_FILE), is_forced=is_forced)
        )
        if key is not None:
            write_key(directory / KEY_FILE, key)
    return found


async def _put(
    place: EtcdPlace, found: FoundFabric, fabric: FabricId, key: bytes, *, is_forced: bool
) -> None:
    settings, keys, dice = etcd_settings(place), etcd_keys(place), random.Random()  # noqa: S311
    there = await fabric_at(keys, settings, dice=dice)
    if there is not None and there != fabric:
        raise UsageError(
            f"another fabric, {there.hex()}, lies under {place.text}, and these are drives of "
            f"{fabric.hex()}: take another prefix"
        )
    if there is not None and not is_forced:
        raise UsageError(
            f"the fabric is under {place.text}: nothing has to be rebuilt. With --force its enclosures and "
            "volumes are made as the drives say"
        )
    membership = await EtcdMembership.open(
        fabric, settings, dice=dice, keys=keys, begin=True, key_check=fabric_key_check(key, fabric)
    )
    try:
        await membership.put_enclosures(found.enclosures)
        for volume in found.volumes:
            await membership.create_volume(volume)
    finally:
        await membership.close()
