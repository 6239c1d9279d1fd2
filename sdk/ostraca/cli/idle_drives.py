"""Whether drives may be closed: that waits for their I/O, and one that hangs never ends it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ostraca_fabric.ports.drive import Drive

log = logging.getLogger(__name__)

_LAST_IO_S = 2.0
"""What a drive that works needs in the worst case for what it was asked for last."""

_LOOK_S = 0.02


async def are_idle(drives: Iterable[Drive], *, within_s: float = _LAST_IO_S) -> bool:
    """Wait until nothing is under way on any of these drives; say whether that came to be.

    Agents know of the I/O of blocks and of shards they serve. A read of a shard that is not served yet, and a
    drive's trial after a silence, are nobody's: their memory is kept until they end.
    """
    until_s = time.monotonic() + within_s
    waiting = [drive for drive in drives if drive.queued]
    while waiting and time.monotonic() < until_s:
        await asyncio.sleep(_LOOK_S)
        waiting = [drive for drive in waiting if drive.queued]
    for drive in waiting:
        log.warning("drive %s has I/O under way that does not end", drive.id)
    return not waiting
