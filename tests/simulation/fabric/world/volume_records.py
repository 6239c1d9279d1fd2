"""Volume records on flash: what earlier owners may do to them, and what must lie there in the end.

No grant covers them. Until the earlier grants are retired, an earlier owner's write may land over a newer
copy; then the owner reads them again, and makes good what is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.shard.model import ViolationError

from ostraca_fabric.flash.volume_records import COPIES, copy_bytes, copy_offset, examine_volumes, newest_copy
from ostraca_fabric.model.extent import FIRST_SEGMENT_OFFSET, PAGE_BYTES, SUPERBLOCK_COPIES

if TYPE_CHECKING:
    from tests.simulation.fabric.world.process import AgentProcess
    from tests.support.simulated.drives.drive_faults import Mishap
    from tests.support.simulated.drives.simulated_flash import SimulatedFlash

    from ostraca_fabric.flash.superblock import Superblock
    from ostraca_fabric.model.ids import DriveId, ShardId

_SUPERBLOCK_BYTES = SUPERBLOCK_COPIES * PAGE_BYTES


def are_volume_records(mishap: Mishap) -> bool:
    """Say whether what befell lies beside a superblock; each drive has one shard, from its beginning on."""
    return mishap.begin >= _SUPERBLOCK_BYTES and mishap.end <= FIRST_SEGMENT_OFFSET


def check_volume_records(
    process: AgentProcess, flashes: dict[DriveId, SimulatedFlash], superblocks: dict[ShardId, Superblock]
) -> int:
    """Compare what an agent knows of its shards' copies with flash; return how many could be compared.

    Those are the ones that it has read since the earlier grants were retired, and that neither a later owner
    nor a fault of the drive has changed.
    """
    compared = 0
    for shard, owned in process.shards.items():
        copy = process.agent._volume_copies.of(shard)
        if copy is None or not copy._is_read_alone or copy._is_writing or owned.is_failing:
            continue
        flash = flashes[owned.record.drive]
        image = flash.image
        superblock = superblocks[shard]
        begin = copy_offset(superblock.geometry, 0)
        end = begin + COPIES * copy_bytes(superblock.geometry)
        if flash.is_spoilt(0, end):
            continue
        area = image[begin:end].tobytes()
        copies = examine_volumes(superblock, area)
        number = newest_copy(copies)
        found = None if number is None else copies[number]
        if found is not None and found.epoch > owned.epoch:
            continue  # written by a later owner, of whom this one has not heard yet
        if found != copy._copy:
            raise ViolationError(f"{process.name} takes {copy._copy} to be on {shard}, and {found} is")
        compared += 1
    return compared
