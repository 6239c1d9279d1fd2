"""Rebuild of a fabric's map and volumes from superblocks and volume records alone.

Used after the loss of a membership store. If two statements contradict each other, the rebuild names both and
decides for neither: the operator removes a drive and repeats the rebuild. Agents, claims and epochs are not
rebuilt: shard owners find the highest epoch on flash during recovery, and claim a higher epoch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.flash.volume_records import VolumesCopy, VolumesState, newest_copy
from ostraca_fabric.model.fabric_map import DriveRecord, EnclosureRecord, ShardRecord
from ostraca_fabric.model.ids import DriveId, EnclosureId, FabricId, ShardId, TenantId
from ostraca_fabric.model.volume import VolumeRecord


@dataclass(frozen=True, slots=True)
class FoundShard:
    """Records read from one shard."""

    path: str
    """Path of the drive."""

    offset: int
    """Position of the shard on the drive, in bytes."""

    superblock: Superblock
    copies: tuple[VolumesCopy, VolumesCopy]
    """Copies of the volume records."""

    @property
    def volumes(self) -> VolumesCopy | None:
        """Newest good copy of the volume records, or None."""
        number = newest_copy(self.copies)
        return None if number is None else self.copies[number]


@dataclass(frozen=True, slots=True)
class RebuiltFabric:
    """Fabric described by a set of drives."""

    fabric: FabricId | None
    """None without shards, or if the shards belong to several fabrics and none was chosen."""

    enclosures: tuple[EnclosureRecord, ...]
    volumes: tuple[VolumeRecord, ...]
    contradictions: tuple[str, ...]
    """Contradictory statements, with the remedy. Rebuild a fabric only if there are none."""

    losses: tuple[str, ...]
    """Information missing from the copies; a rebuild is possible without this information."""


def shard_record(superblock: Superblock) -> ShardRecord:
    """Return the map's record of a shard."""
    geometry = superblock.geometry
    return ShardRecord(
        superblock.shard,
        superblock.drive,
        superblock.drive_offset,
        geometry.shard_bytes,
        weight=geometry.segments * geometry.data_bytes,
        block_bytes_max=geometry.data_bytes,
    )


def rebuilt(found: Sequence[FoundShard], fabric: FabricId | None = None) -> RebuiltFabric:
    """Assemble *fabric*, or the only fabric found."""
    fabrics = {shard.superblock.fabric for shard in found}
    if fabric is None and len(fabrics) > 1:
        return RebuiltFabric(None, (), (), (_several(found),), ())
    chosen = fabric or next(iter(fabrics), None)
    ours = [shard for shard in found if shard.superblock.fabric == chosen]
    volumes, differing = _volumes(ours)
    contradictions = (*_misplaced(ours), *_doubled(ours), *differing)
    return RebuiltFabric(chosen, _enclosures(ours), volumes, contradictions, tuple(_losses(ours)))


def _enclosures(found: Iterable[FoundShard]) -> tuple[EnclosureRecord, ...]:
    drives: dict[EnclosureId, dict[DriveId, DriveRecord]] = defaultdict(dict)
    shards: dict[EnclosureId, dict[ShardId, ShardRecord]] = defaultdict(dict)
    for shard in found:
        superblock = shard.superblock
        drives[superblock.enclosure][superblock.drive] = DriveRecord(superblock.drive, shard.path)
        shards[superblock.enclosure][superblock.shard] = shard_record(superblock)
    return tuple(
        EnclosureRecord(
            enclosure,
            tuple(drive for _, drive in sorted(drives[enclosure].items())),
            tuple(shard for _, shard in sorted(shards[enclosure].items())),
        )
        for enclosure in sorted(drives)
    )


def _volumes(found: Iterable[FoundShard]) -> tuple[tuple[VolumeRecord, ...], tuple[str, ...]]:
    """Merge the volumes of all shards; the highest incarnation of a volume counts.

    A shard that was absent during the creation of volumes lists fewer volumes. Such a gap is no
    contradiction: volumes are never removed.
    """
    said: dict[tuple[TenantId, str], dict[VolumeRecord, str]] = {}
    for shard in found:
        for volume in shard.volumes.volumes if shard.volumes is not None else ():
            said.setdefault((volume.tenant, volume.name), {}).setdefault(volume, shard.path)
    volumes, differing = [], []
    for (tenant, name), records in said.items():
        newest = max(volume.incarnation for volume in records)
        sayers = {volume: path for volume, path in records.items() if volume.incarnation == newest}
        volumes.append(next(iter(sayers)))
        if len(sayers) > 1:
            differing.append(
                f"{' and '.join(sayers.values())} disagree about volume {name!r} of tenant {tenant!r}: "
                "remove the damaged drive, or the drive of another fabric with the same id, and repeat"
            )
    return tuple(volumes), tuple(differing)


def _several(found: Iterable[FoundShard]) -> str:
    by_fabric: dict[FabricId, list[str]] = defaultdict(list)
    for shard in found:
        by_fabric[shard.superblock.fabric].append(shard.path)
    listed = "; ".join(f"{fabric.hex()} on {', '.join(paths)}" for fabric, paths in sorted(by_fabric.items()))
    return (
        f"these are drives of {len(by_fabric)} fabrics ({listed}): choose a fabric by id, and remove the "
        "drives of the others"
    )


def _misplaced(found: Iterable[FoundShard]) -> Iterable[str]:
    return (
        f"shard {shard.superblock.shard} lies at byte {shard.offset} of {shard.path}, and its superblock "
        f"says {shard.superblock.drive_offset}: the drive is a copy; remove the drive"
        for shard in found
        if shard.offset != shard.superblock.drive_offset
    )


def _doubled(found: Iterable[FoundShard]) -> Iterable[str]:
    paths: dict[ShardId, list[str]] = defaultdict(list)
    for shard in found:
        paths[shard.superblock.shard].append(shard.path)
    return (
        f"{' and '.join(where)} both hold shard {shard}: one is a copy, or was replaced. Remove the drive "
        "not used last"
        for shard, where in sorted(paths.items())
        if len(where) > 1
    )


def _losses(found: Iterable[FoundShard]) -> Iterable[str]:
    for shard in found:
        name, copy = shard.superblock.shard, shard.volumes
        if copy is None and any(each.state is not VolumesState.BLANK for each in shard.copies):
            states = ", ".join(each.state.value for each in shard.copies)
            yield f"neither copy of the volume records of shard {name} is usable: {states}"
        if copy is not None and copy.left_out:
            yield (
                f"{copy.left_out} volumes had no room in the copy of shard {name}: volumes absent from all "
                "other shards are created again by workers with create=True"
            )
        if copy is not None and copy.refused:
            yield (
                f"{copy.refused} volume records of shard {name} were written by a newer release: use that "
                "release, or continue without the records"
            )
