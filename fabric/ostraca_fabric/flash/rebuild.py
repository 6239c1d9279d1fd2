"""What fabric a set of drives is: its map and its volumes, from superblocks and volume records alone.

For a fabric whose membership store is lost. Two statements that can't both be true are named and never
decided between: whoever rebuilds takes a drive away and asks again. Agents, claims and epochs are not here:
owners find the highest epoch on flash when they recover, and claim above it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_fabric.fabric_map import DriveRecord, EnclosureRecord, ShardRecord
from ostraca_fabric.flash.volume_records import VolumesState, newest_copy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ostraca_fabric.flash.superblock import Superblock
    from ostraca_fabric.flash.volume_records import VolumesCopy
    from ostraca_fabric.ids import DriveId, EnclosureId, FabricId, ShardId, TenantId
    from ostraca_fabric.volume import VolumeRecord


@dataclass(frozen=True, slots=True)
class FoundShard:
    """What was read of one shard."""

    path: str
    """Of the drive."""

    offset: int
    """Where on the drive it was found."""

    superblock: Superblock
    copies: tuple[VolumesCopy, VolumesCopy]
    """Of its volume records."""

    @property
    def volumes(self) -> VolumesCopy | None:
        """The copy that counts."""
        number = newest_copy(self.copies)
        return None if number is None else self.copies[number]


@dataclass(frozen=True, slots=True)
class RebuiltFabric:
    """What drives say that their fabric is."""

    fabric: FabricId | None
    """None when there is no shard, or shards of several fabrics and none was chosen."""

    enclosures: tuple[EnclosureRecord, ...]
    volumes: tuple[VolumeRecord, ...]
    contradictions: tuple[str, ...]
    """Statements that can't both be true, with what to do. Nothing is to be rebuilt while there are any."""

    losses: tuple[str, ...]
    """What the copies don't say any more; the rest can be rebuilt without it."""


def shard_record(superblock: Superblock) -> ShardRecord:
    """Describe a shard as the map does."""
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
    """Put a fabric together: *fabric*, or the only one there is."""
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
    """Join what the shards' copies say: of one volume the highest incarnation counts.

    A shard that was away while volumes were made says less than the others, and nothing else: volumes are
    never taken back.
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
                f"{' and '.join(sayers.values())} say different things of volume {name!r} of tenant "
                f"{tenant!r}: take away the drive that was in another fabric with this one's id, or was "
                "damaged, and ask again"
            )
    return tuple(volumes), tuple(differing)


def _several(found: Iterable[FoundShard]) -> str:
    by_fabric: dict[FabricId, list[str]] = defaultdict(list)
    for shard in found:
        by_fabric[shard.superblock.fabric].append(shard.path)
    listed = "; ".join(f"{fabric.hex()} on {', '.join(paths)}" for fabric, paths in sorted(by_fabric.items()))
    return (
        f"these are drives of {len(by_fabric)} fabrics ({listed}): choose one by its id, and move the "
        "others' away"
    )


def _misplaced(found: Iterable[FoundShard]) -> Iterable[str]:
    return (
        f"shard {shard.superblock.shard} lies at byte {shard.offset} of {shard.path}, and its superblock "
        f"says {shard.superblock.drive_offset}: it was copied from elsewhere; take that drive away"
        for shard in found
        if shard.offset != shard.superblock.drive_offset
    )


def _doubled(found: Iterable[FoundShard]) -> Iterable[str]:
    paths: dict[ShardId, list[str]] = defaultdict(list)
    for shard in found:
        paths[shard.superblock.shard].append(shard.path)
    return (
        f"{' and '.join(where)} both say that they hold shard {shard}: one is a copy, or was replaced. Take "
        "away the one that was not in use last"
        for shard, where in sorted(paths.items())
        if len(where) > 1
    )


def _losses(found: Iterable[FoundShard]) -> Iterable[str]:
    for shard in found:
        name, copy = shard.superblock.shard, shard.volumes
        if copy is None and any(each.state is not VolumesState.BLANK for each in shard.copies):
            states = ", ".join(each.state.value for each in shard.copies)
            yield f"neither copy of the volume records of shard {name} can be used: they are {states}"
        if copy is not None and copy.left_out:
            yield (
                f"{copy.left_out} volumes had found no room in the copy of shard {name}: those that no other "
                "shard has are made again by the workers that open them with create=True"
            )
        if copy is not None and copy.refused:
            yield (
                f"{copy.refused} volume records of shard {name} were written by a release that knows more: "
                "use that one, or go on without them"
            )
