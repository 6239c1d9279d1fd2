"""A look-up: which blocks could be got now. It touches no flash.

Blocks in the DRAM cache need no owner, except when the caller asks for a pin: the cache promises nothing, an
owner does. With a pin, what no owner promises is a miss, wherever else it may be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.keys import derive_keys
from ostraca_fabric.outcome import BlockState, Reason
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import LookupDone

if TYPE_CHECKING:
    import asyncio

    from ostraca_dpu_agent.mover.mover import Mover
    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.wire.messages import Lookup

_HIT, _NONE = int(BlockState.HIT), int(Reason.NONE)  # of an enum's member, numpy takes thrice as long


class LookupRun:
    """One look-up."""

    def __init__(
        self,
        mover: Mover,
        volume: ServedVolume,
        request: Lookup,
        stopped: asyncio.Future[None],
        *,
        counted_as: str = "lookup",
    ) -> None:
        """Take the request apart."""
        self._mover = mover
        self._counted_as = counted_as
        self._volume = volume
        self._request = request
        self._keys = derive_keys(volume.secret, request.spans)
        self._clocked = mover.clocked(request.deadline_s, stopped)

    async def run(self) -> LookupDone:
        """Ask the DRAM cache and the owners."""
        count, within_s = len(self._keys), self._clocked.left_s
        if within_s <= 0:
            states = columns.filled(count, BlockState.LATE)
            reasons = columns.filled(count, Reason.DEADLINE)
        else:
            is_pinned = self._request.pin_s > 0
            cache = self._mover.staging.cache
            is_cached = np.zeros(count, np.bool_) if is_pinned else cache.contains(self._keys)
            located = await self._mover.locator.look_up(
                self._mover.routes(),
                self._volume,
                self._request.spans,
                self._keys,
                wanted=~is_cached,
                within_s=within_s,
                pin_s=self._request.pin_s,
            )
            is_hit, reasons = is_cached | located.is_found, located.reasons
            states = columns.filled(count, BlockState.MISS)
            states[is_hit], reasons[is_hit] = _HIT, _NONE
        self._mover.ended(self._counted_as, self._keys, states, reasons)
        return LookupDone(self._request.request, states.tobytes(), reasons.tobytes())
