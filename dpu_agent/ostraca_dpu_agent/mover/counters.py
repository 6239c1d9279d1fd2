"""What the mover has done since its start, for status and metrics."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from ostraca_fabric.outcome import BlockState, PutState
from ostraca_fabric.status import AgentCounters
from ostraca_fabric.tallies import SHADOWS, STATES, OperationTally, Tally

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from ostraca_fabric.ids import DriveId
    from ostraca_fabric.status import EstimateCounters, PrefetchCounters


class Counters:
    """The running counts, which requests add to."""

    def __init__(
        self,
        prefetched: PrefetchCounters,
        estimates: EstimateCounters,
        found_earlier: Callable[[], int],
    ) -> None:
        """Begin with nothing counted but what the DRAM cache, estimates of loads and whoever locates blocks
        count for themselves.
        """
        self._found_earlier = found_earlier
        self._prefetched = prefetched
        self._estimates = estimates
        self.tallies = {operation: Tally(operation) for operation in (*STATES, *SHADOWS)}
        self.get_hits_from_cache = 0
        self.hits_on: Counter[DriveId] = Counter()
        """Blocks that gets found on each drive."""

        self.damaged = 0
        """Blocks read from flash that failed their tag."""

    def count(
        self, operation: str, states: NDArray[np.uint8], reasons: NDArray[np.uint8], good_bytes: int = 0
    ) -> None:
        """Count blocks whose fate is known, and the bytes of those that were moved or stored."""
        tally = self.tallies[operation]
        tally.count(states, reasons)
        tally.bytes += good_bytes

    def snapshot(self) -> AgentCounters:
        """Return the counts most asked for as they are now."""
        get, put = self.tallies["get"], self.tallies["put"]
        return AgentCounters(
            get_hits=get.of(BlockState.HIT),
            get_hits_from_cache=self.get_hits_from_cache,
            get_misses=get.of(BlockState.MISS),
            get_late=get.of(BlockState.LATE),
            get_declined=get.of(BlockState.DECLINED),
            get_bytes=get.bytes,
            put_committed=put.of(PutState.COMMITTED),
            put_exists=put.of(PutState.EXISTS),
            put_declined=put.of(PutState.DECLINED),
            put_bytes=put.bytes,
            damaged=self.damaged,
            found_earlier=self._found_earlier(),
            prefetched=msgspec.structs.replace(self._prefetched),
            estimates=msgspec.structs.replace(self._estimates),
        )

    def operations(self) -> tuple[OperationTally, ...]:
        """Return all counts as they are now; of what was tried out, where anything was."""
        counted = [tally.snapshot() for tally in self.tallies.values()]
        return tuple(each for each in counted if each.operation in STATES or each.blocks)
