"""Rebuilding what etcd has lost of a fabric, from drives that are files: which fabric it is, its enclosures
and its volumes.

Claims and epochs are not made again: agents find the highest epoch on flash, and claim above it. Grants are
gone as well, and with them the knowledge of which segments somebody may still be writing. So each shard is
kept as one that may be written all over: who claims it serves its blocks at once, and hands out space when
no earlier write can land any more. Agents may run, or not: all of it is written before there is a fabric
that they could join (``adapters.etcd.rebuilding``), and a rebuild that died in the midst is repeated.

A fabric that is there is told what it lacks only when its operator insists (``adapters.etcd.lost``).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca.cli.etcd_place import etcd_keys, etcd_settings
from ostraca.cli.fabric.rebuild import look
from ostraca.cli.state import KEY_FILE, locked, read_key, write_key
from ostraca_fabric.adapters.etcd.found import fabric_at
from ostraca_fabric.adapters.etcd.lost import Lost
from ostraca_fabric.adapters.etcd.membership import EtcdMembership
from ostraca_fabric.adapters.etcd.rebuilding import Rebuilding
from ostraca_fabric.errors import FormatError, UsageError
from ostraca_fabric.ids import ID_BYTES, StartId
from ostraca_fabric.keys import fabric_key_check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from ostraca.cli.etcd_place import EtcdPlace
    from ostraca.cli.fabric.rebuild import FoundFabric, Keys
    from ostraca_fabric.fabric_map import FabricMap
    from ostraca_fabric.ids import FabricId
    from ostraca_fabric.volume import VolumeRecord


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What was made again."""

    found: FoundFabric
    raised: tuple[VolumeRecord, ...] = ()
    """Volumes that were there in a lower incarnation than drives say, as they were."""


def rebuild_in_etcd(
    place: EtcdPlace, directory: Path, keys: Keys, fabric: FabricId | None = None, *, is_forced: bool = False
) -> Rebuilt:
    """Put into etcd what the drives in *directory* say that their fabric is.

    While etcd has the fabric nothing is done, unless *is_forced*: then what is there stays, what is missing
    is added, and no volume is left in a lower incarnation than drives say. May be repeated wherever it ended.

    Raises UsageError for a fabric that is there, and when etcd has another one there; FormatError when drives
    contradict each other or the key is lost; MembershipError when etcd can't be reached, or what is there was
    begun with another key, or is no fabric.
    """
    if not directory.is_dir():
        raise UsageError(f"there is no directory {directory}: pass the --files of `ostraca fabric create`")
    with contextlib.closing(locked(directory, f"another process works on {directory}: wait for it")):
        found = look(directory.resolve(), fabric, is_of_up=False)
        if found.contradictions or found.fabric is None:
            raise FormatError(f"nothing was rebuilt: {'; '.join(found.contradictions)}")
        missing = keys.missing(directory)
        key = missing or read_key(directory / KEY_FILE)

        def keep_key() -> None:
            if missing is not None:
                write_key(directory / KEY_FILE, missing)

        raised = asyncio.run(_put(place, found, found.fabric, key, keep_key=keep_key, is_forced=is_forced))
    return Rebuilt(found, tuple(raised))


@dataclass(frozen=True, slots=True)
class InEtcd:
    """What etcd has of the fabric that drives say they are of."""

    map: FabricMap | None
    """None while there is no fabric."""

    volumes: tuple[VolumeRecord, ...] = ()
    is_begun: bool = False
    """Whether a rebuild of it has not ended."""


def look_in_etcd(place: EtcdPlace, fabric: FabricId) -> InEtcd:
    """Say what etcd has of a fabric. Writes nothing.

    Raises UsageError when it has another fabric there, and MembershipError when it can't be reached, or has
    there what is none.
    """
    return asyncio.run(_look(place, fabric))


def in_etcd_lines(there: InEtcd, found: FoundFabric, place: EtcdPlace, *, is_forced: bool) -> Iterator[str]:
    """Say what is in etcd, and what a rebuild would write there."""
    if there.map is None:
        begun = ", but a rebuild that has not ended: this one goes on with it" if there.is_begun else ""
        yield f"etcd: there is no fabric under {place.text}{begun}"
        yield (
            f"would be written: {_count(len(found.enclosures), 'enclosure')} with "
            f"{_count(len(found.shards), 'shard')}, and {_count(len(found.volumes), 'volume')}"
        )
        return
    known = there.map.enclosures
    yield (
        f"etcd: the fabric is under {place.text}, with {_count(len(known), 'enclosure')}, "
        f"{_count(len(there.volumes), 'volume')} and {_count(len(there.map.agents), 'agent')}"
    )
    other = [each.id for each in found.enclosures if known.get(each.id) != each]
    changed = ", ".join(other) if other else "no enclosure"
    would = f"{changed}, and volumes that are missing"
    yield f"would be written: {would if is_forced else f'nothing without --force; with it {would}'}"
    verb = "would be raised" if is_forced else "with --force would be raised"
    yield from raised_lines(_lower(there.volumes, found), found, verb=verb)


def raised_lines(lower: Iterable[VolumeRecord], found: FoundFabric, *, verb: str = "RAISED") -> Iterator[str]:
    """Say of which volumes etcd had forgotten an erasure."""
    said = {(each.tenant, each.name): each.incarnation for each in found.volumes}
    for volume in lower:
        yield (
            f"{verb}: volume {volume.tenant}/{volume.name} from incarnation {volume.incarnation} to "
            f"{said[volume.tenant, volume.name]}, as drives say: it was erased, and what was put since etcd "
            "forgot that is a miss"
        )


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
        async with _rebuilding(place, fabric) as rebuilding:
            return InEtcd(None, is_begun=await rebuilding.is_begun())
    membership = await EtcdMembership.open(fabric, settings, dice=dice, keys=keys)
    try:
        return InEtcd(membership.map, await anext(membership.volume_changes()))
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
    place: EtcdPlace,
    found: FoundFabric,
    fabric: FabricId,
    key: bytes,
    *,
    keep_key: Callable[[], None],
    is_forced: bool,
) -> list[VolumeRecord]:
    """Write it, and return what volumes were that are raised. *keep_key* is called once nothing speaks
    against it, and before there is a fabric that needs the key.
    """
    settings, keys, dice = etcd_settings(place), etcd_keys(place), random.Random()  # noqa: S311
    key_check = fabric_key_check(key, fabric)
    if not _is_there(await fabric_at(keys, settings, dice=dice), fabric, place):
        async with _rebuilding(place, fabric) as rebuilding:
            await rebuilding.take()
            keep_key()
            await rebuilding.write(found.enclosures, found.volumes)
            await rebuilding.begin(key_check)
        return []
    if not is_forced:
        raise UsageError(
            f"the fabric is under {place.text}: nothing has to be rebuilt. With --force its enclosures and "
            "volumes are made as the drives say"
        )
    membership = await EtcdMembership.open(fabric, settings, dice=dice, keys=keys, key_check=key_check)
    lost = Lost(fabric, settings, keys=keys, dice=dice)
    try:
        keep_key()
        stored = [(volume, await membership.create_volume(volume)) for volume in found.volumes]
        raised = await lost.raise_volumes(
            [volume for volume, there in stored if there.incarnation < volume.incarnation]
        )
        await lost.keep_grants(shard.id for enclosure in found.enclosures for shard in enclosure.shards)
        await membership.put_enclosures(found.enclosures)
        return raised
    finally:
        await lost.close()
        await membership.close()


def _rebuilding(place: EtcdPlace, fabric: FabricId) -> Rebuilding:
    """Return a new try."""
    return Rebuilding(
        fabric,
        etcd_settings(place),
        keys=etcd_keys(place),
        dice=random.Random(),  # noqa: S311 (for waits)
        start=StartId(secrets.token_bytes(ID_BYTES)),
        unix_s=time.time(),
    )


def _lower(there: Iterable[VolumeRecord], found: FoundFabric) -> list[VolumeRecord]:
    """Return the volumes of etcd that are of a lower incarnation than drives say."""
    said = {(each.tenant, each.name): each.incarnation for each in found.volumes}
    return [each for each in there if each.incarnation < said.get((each.tenant, each.name), 1)]
