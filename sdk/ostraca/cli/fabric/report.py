"""What `ostraca fabric rebuild` found, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca.cli.sizes import size_text
from ostraca_fabric.errors import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ostraca.cli.fabric.rebuild import FoundFabric, KeyFate
    from ostraca_fabric.flash.rebuild import FoundShard

_MIB = 1 << 20


def found_lines(found: FoundFabric, key: KeyFate) -> Iterator[str]:
    """Say what the drives are, what volumes they know of, and what is missing."""
    if found.fabric is not None:
        yield f"fabric {found.fabric.hex()}"
    width = max((len(shard.superblock.shard) for shard in found.shards), default=0)
    for shard in found.shards:
        size = size_text(shard.superblock.geometry.shard_bytes)
        yield f"  {shard.superblock.shard:<{width}}  {size:>10}  {_recorded(shard)}"
    yield f"volumes: {len(found.volumes) or 'none'}"
    width = max((len(f"{volume.tenant}/{volume.name}") for volume in found.volumes), default=0)
    for volume in found.volumes:
        name = f"{volume.tenant}/{volume.name}"
        yield (
            f"  {name:<{width}}  blocks of up to {size_text(volume.block_bytes)}, of model "
            f"{shown(volume.layout.model)}"
        )
    yield f"key: {key.value}"
    yield from (f"LOST: {loss}" for loss in found.losses)
    yield from (f"CONTRADICTION: {contradiction}" for contradiction in found.contradictions)


def start_line(found: FoundFabric) -> str:
    """Say how the fabric is started that was rebuilt."""
    shape = found.shape
    assert shape is not None, "it was rebuilt"
    capacity = shape.enclosures * shape.drives * shape.drive_bytes
    size = f"{capacity // _MIB}MiB" if capacity % _MIB == 0 else str(capacity)
    return (
        f"Rebuilt. Start it by: ostraca up --dir {found.directory} --enclosures {shape.enclosures} "
        f"--drives {shape.drives} --capacity {size}"
    )


def _recorded(shard: FoundShard) -> str:
    if shard.volumes is None:
        return "no volumes recorded"
    count = len(shard.volumes.volumes)
    return f"{count} volume{'s' * (count != 1)} recorded"
