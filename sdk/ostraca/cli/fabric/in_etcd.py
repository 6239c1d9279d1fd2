"""Rebuilding what etcd has lost of a fabric, from drives that are files: which fabric it is, its enclosures
and its volumes.

Claims and epochs are not made again: agents find the highest epoch on flash, and claim above it. Grants are
gone as well, and with them the knowledge of which segments somebody may still be writing. So each shard is
kept as one that may be written all over (``adapters.etcd.lost``), before there is a fabric that an agent
could join: who claims it serves its blocks at once, and hands out space when no earlier write can land any
more. Agents may run, or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca.cli.etcd_place import etcd_keys, etcd_settings
from ostraca.cli.fabric.rebuild import look
from ostraca.cli.state import KEY_FILE, locked, read_key, write_key
from ostraca_fabric.adapters.etcd.found import fabric_at
from ostraca_fabric.adapters.etcd.lost import keep_lost
from ostraca_fabric.adapters.etcd.membership import EtcdMembership
from ostraca_fabric.errors import FormatError, UsageError
from ostraca_fabric.keys import fabric_key_check

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ostraca.cli.etcd_place import EtcdPlace
    from ostraca.cli.fabric.rebuild import FoundFabric, Keys
    from ostraca_fabric.fabric_map import FabricMap
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


@dataclass(frozen=True, slots=True)
class InEtcd:
    """What etcd has of the fabric that drives say they are of."""

    map: FabricMap | None
    """None while there is no fabric."""

    volumes: int = 0


def look_in_etcd(place: EtcdPlace, fabric: FabricId) -> InEtcd:
    """Say what etcd has of a fabric. Writes nothing.

    Raises UsageError when it has another fabric there, and MembershipError when it can't be reached.
    """
    return asyncio.run(_look(place, fabric))


def in_etcd_lines(there: InEtcd, found: FoundFabric, place: EtcdPlace, *, is_forced: bool) -> Iterator[str]:
    """Say what is in etcd, and what a rebuild would write there."""
    if there.map is None:
        yield f"etcd: there is no fabric under {place.text}"
        yield (
            f"would be written: {_count(len(found.enclosures), 'enclosure')} with "
            f"{_count(len(found.shards), 'shard')}, and {_count(len(found.volumes), 'volume')}"
        )
        return
    known = there.map.enclosures
    yield (
        f"etcd: the fabric is under {place.text}, with {_count(len(known), 'enclosure')}, "
        f"{_count(there.volumes, 'volume')} and {_count(len(there.map.agents), 'agent')}"
    )
    other = [each.id for each in found.enclosures if known.get(each.id) != each]
    changed = ", ".join(other) if other else "no enclosure"
    if is_forced:
        yield f"would be written: {changed}, and volumes that are missing"
    else:
        yield f"would be written: nothing without --force; with it {changed}, and volumes that are missing"


def rebuilt_line(place: EtcdPlace) -> str:
    """Say what comes next."""
    return (
        f"Rebuilt under {place.text}. Agents that run join by themselves; start the others. Blocks are got "
        "once their shard is claimed, and taken owner.grant_s + owner.hold_s + owner.late_write_s (155 s) "
        "later."
    )


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'s' * (number != 1)}"


async def _look(place: EtcdPlace, fabric: FabricId) -> InEtcd:
    settings, keys, dice = etcd_settings(place), etcd_keys(place), random.Random()  # noqa: S311
    if not _is_there(await fabric_at(keys, settings, dice=dice), fabric, place):
        return InEtcd(None)
    membership = await EtcdMembership.open(fabric, settings, dice=dice, keys=keys)
    try:
        return InEtcd(membership.map, len(await anext(membership.volume_changes())))
    finally:
        await membership.close()


def _is_there(there: FabricId | None, fabric: FabricId, place: EtcdPlace) -> bool:
    """Say whether the fabric lies there. Raises UsageError when another one does."""
    if there is not None and there != fabric:
        raise UsageError(
            f"another fabric, {there.hex()}, lies under {place.text}, and these are drives of "
            f"{fabric.hex()}: take another prefix"
        )
    return there is not None


async def _put(
    place: EtcdPlace, found: FoundFabric, fabric: FabricId, key: bytes, *, is_forced: bool
) -> None:
    settings, keys, dice = etcd_settings(place), etcd_keys(place), random.Random()  # noqa: S311
    is_there = _is_there(await fabric_at(keys, settings, dice=dice), fabric, place)
    if is_there and not is_forced:
        raise UsageError(
            f"the fabric is under {place.text}: nothing has to be rebuilt. With --force its enclosures and "
            "volumes are made as the drives say"
        )
    shards = [shard.id for enclosure in found.enclosures for shard in enclosure.shards]
    await keep_lost(shards, keys, settings, dice=dice)
    membership = await EtcdMembership.open(
        fabric, settings, dice=dice, keys=keys, begin=True, key_check=fabric_key_check(key, fabric)
    )
    try:
        await membership.put_enclosures(found.enclosures)
        for volume in found.volumes:
            await membership.create_volume(volume)
    finally:
        await membership.close()
