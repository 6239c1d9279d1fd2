"""Restore a fabric in etcd from drives that are files: id, enclosures, volumes.

A rebuild does not restore claims and epochs: agents find the highest epoch on flash, and claim above that
epoch. Grants are lost too, so segments with writes in progress are unknown. The rebuild therefore records
every segment of each shard as granted. A new shard owner serves the blocks at once, and allocates space once
no earlier write can land.

Agents may run meanwhile: the rebuild writes all records before the fabric becomes visible to agents
(``membership.etcd.rebuild``). A crashed rebuild can be repeated.

With an existing fabric, the rebuild adds missing records only on request (``membership.etcd.repair``).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ostraca_cli.commands.fabric.rebuild import FoundFabric, KeyOptions, look
from ostraca_cli.composition.etcd_options import EtcdPlace, etcd_keys, etcd_settings
from ostraca_cli.composition.state import KEY_FILE, lock_directory, read_key, write_key
from ostraca_fabric.errors import FormatError, UsageError
from ostraca_fabric.membership.etcd.membership import EtcdMembership
from ostraca_fabric.membership.etcd.rebuild import FabricRepair, Rebuilding
from ostraca_fabric.membership.etcd.store import fabric_at
from ostraca_fabric.model.fabric_map import FabricMap
from ostraca_fabric.model.ids import ID_BYTES, FabricId, StartId
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.tables.digests import fabric_key_check


@dataclass(frozen=True, slots=True)
class RebuildResult:
    """Result of a rebuild."""

    found: FoundFabric
    raised: tuple[VolumeRecord, ...] = ()
    """Volumes with a lower incarnation in etcd than on the drives, as found in etcd."""


def rebuild_in_etcd(
    place: EtcdPlace,
    directory: Path,
    keys: KeyOptions,
    fabric: FabricId | None = None,
    *,
    is_forced: bool = False,
) -> RebuildResult:
    """Write the fabric found on the drives in *directory* to etcd.

    Refuses an existing fabric unless *is_forced*: then existing records stay, missing records are added, and
    each volume rises at least to its incarnation on the drives. The caller may repeat an interrupted rebuild.

    Raises UsageError for an existing fabric, or another fabric in etcd; FormatError if drives contradict each
    other or the key is lost; MembershipError if etcd is unreachable, or holds data begun with another key, or
    no fabric.
    """
    if not directory.is_dir():
        raise UsageError(f"directory {directory} does not exist: give the --files of `ostraca fabric create`")
    with contextlib.closing(lock_directory(directory, f"another process uses {directory}: wait for its end")):
        found = look(directory.resolve(), fabric, is_of_up=False)
        if found.contradictions or found.fabric is None:
            raise FormatError(f"nothing was rebuilt: {'; '.join(found.contradictions)}")
        missing = keys.missing(directory)
        key = missing or read_key(directory / KEY_FILE)

        def keep_key() -> None:
            if missing is not None:
                write_key(directory / KEY_FILE, missing)

        raised = asyncio.run(_put(place, found, found.fabric, key, keep_key=keep_key, is_forced=is_forced))
    return RebuildResult(found, tuple(raised))


@dataclass(frozen=True, slots=True)
class EtcdContents:
    """State in etcd of the fabric found on the drives."""

    map: FabricMap | None
    """None while there is no fabric."""

    volumes: tuple[VolumeRecord, ...] = ()
    is_begun: bool = False
    """Whether an earlier rebuild is unfinished."""


def in_etcd_lines(
    contents: EtcdContents, found: FoundFabric, place: EtcdPlace, *, is_forced: bool
) -> Iterator[str]:
    """Describe the state in etcd, and the writes of a rebuild."""
    if contents.map is None:
        unfinished = ", but an unfinished rebuild, to be continued" if contents.is_begun else ""
        yield f"etcd: no fabric under {place.text}{unfinished}"
        yield (
            f"would be written: {_count(len(found.enclosures), 'enclosure')} with "
            f"{_count(len(found.shards), 'shard')}, and {_count(len(found.volumes), 'volume')}"
        )
        return
    known = contents.map.enclosures
    yield (
        f"etcd: fabric under {place.text}, with {_count(len(known), 'enclosure')}, "
        f"{_count(len(contents.volumes), 'volume')} and {_count(len(contents.map.agents), 'agent')}"
    )
    other = [each.id for each in found.enclosures if known.get(each.id) != each]
    changed = ", ".join(other) if other else "no enclosure"
    would = f"{changed}, and missing volumes"
    yield f"would be written: {would if is_forced else f'nothing without --force; with it {would}'}"
    verb = "would be raised" if is_forced else "with --force would be raised"
    yield from raised_lines(_lower(contents.volumes, found), found, verb=verb)


def raised_lines(lower: Iterable[VolumeRecord], found: FoundFabric, *, verb: str = "RAISED") -> Iterator[str]:
    """Name the volumes with an erasure that etcd had lost."""
    on_drives = {(each.tenant, each.name): each.incarnation for each in found.volumes}
    for volume in lower:
        yield (
            f"{verb}: volume {volume.tenant}/{volume.name} from incarnation {volume.incarnation} to "
            f"{on_drives[volume.tenant, volume.name]}, by the drives: erased before; blocks put since etcd "
            "lost the erasure become misses"
        )


def rebuilt_line(place: EtcdPlace) -> str:
    """Describe the next step."""
    return (
        f"Rebuilt under {place.text}. Running agents join by themselves; start the others. Gets work once a "
        "shard is claimed, puts owner.grant_s + owner.hold_s + owner.late_write_s (155 s) later."
    )


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'s' * (number != 1)}"


async def look_in_etcd(place: EtcdPlace, fabric: FabricId) -> EtcdContents:
    """Return the state of a fabric in etcd; writes nothing.

    Raises UsageError if etcd has another fabric at *place*, and MembershipError if etcd is unreachable or
    holds other data there.
    """
    settings, keys, dice = etcd_settings(place), etcd_keys(place), random.Random()  # noqa: S311
    if not _is_there(await fabric_at(keys, settings, dice=dice), fabric, place):
        async with _rebuilding(place, fabric) as rebuilding:
            return EtcdContents(None, is_begun=await rebuilding.is_begun())
    membership = await EtcdMembership.open(fabric, settings, dice=dice, keys=keys)
    try:
        return EtcdContents(membership.map, await anext(membership.volume_changes()))
    finally:
        await membership.close()


def _is_there(contents: FabricId | None, fabric: FabricId, place: EtcdPlace) -> bool:
    """Return whether the fabric exists; raises UsageError for another fabric."""
    if contents is not None and contents != fabric:
        raise UsageError(
            f"another fabric, {contents.hex()}, lies under {place.text}, and these are drives of "
            f"{fabric.hex()}: take another prefix"
        )
    return contents is not None


async def _put(
    place: EtcdPlace,
    found: FoundFabric,
    fabric: FabricId,
    key: bytes,
    *,
    keep_key: Callable[[], None],
    is_forced: bool,
) -> list[VolumeRecord]:
    """Write the fabric; return the raised volumes as found before.

    Calls *keep_key* once all checks have passed, and before the fabric that needs the key exists.
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
            f"the fabric exists under {place.text}, so nothing needs a rebuild: give --force to restore "
            "enclosures and volumes from the drives"
        )
    membership = await EtcdMembership.open(fabric, settings, dice=dice, keys=keys, key_check=key_check)
    repair = FabricRepair(fabric, settings, keys=keys, dice=dice)
    try:
        keep_key()
        stored = [(volume, await membership.create_volume(volume)) for volume in found.volumes]
        raised = await repair.raise_volumes(
            [volume for volume, contents in stored if contents.incarnation < volume.incarnation]
        )
        await repair.keep_grants(shard.id for enclosure in found.enclosures for shard in enclosure.shards)
        await membership.put_enclosures(found.enclosures)
        return raised
    finally:
        await repair.close()
        await membership.close()


def _rebuilding(place: EtcdPlace, fabric: FabricId) -> Rebuilding:
    """Return a new rebuild of the fabric."""
    return Rebuilding(
        fabric,
        etcd_settings(place),
        keys=etcd_keys(place),
        dice=random.Random(),  # noqa: S311 (for waits)
        start=StartId(secrets.token_bytes(ID_BYTES)),
        unix_s=time.time(),
    )


def _lower(contents: Iterable[VolumeRecord], found: FoundFabric) -> list[VolumeRecord]:
    """Return the volumes with a lower incarnation in etcd than on the drives."""
    on_drives = {(each.tenant, each.name): each.incarnation for each in found.volumes}
    return [each for each in contents if each.incarnation < on_drives.get((each.tenant, each.name), 1)]
