"""Reading again what earlier owners list in segments under their unretired grants."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from ostraca_dpu_agent.steward.recover import in_slices, read_summaries

if TYPE_CHECKING:
    from ostraca_dpu_agent.owner.shard import OwnedShard
    from ostraca_fabric.flash.superblock import Superblock
    from ostraca_fabric.ports.drive import Drive


async def adopt_again(owned: OwnedShard, drive: Drive, superblock: Superblock) -> int:
    """Read the summaries of all withheld segments of a shard, and adopt them; return how many blocks are new.

    Before segments are retired this must have been called, and have returned, once more: when no write to
    them could land any more. Raises DriveError where the summaries can't be read or made durable.
    """
    new, withheld = 0, owned.withheld
    if not withheld:
        return 0
    async with aclosing(read_summaries(drive, owned.record, superblock, withheld)) as parts:
        async for part in parts:
            for some in in_slices(part):
                if owned.is_closed:
                    return new
                new += owned.adopt(some)
                await asyncio.sleep(0)
    return new
