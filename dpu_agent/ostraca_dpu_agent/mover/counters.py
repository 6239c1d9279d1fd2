"""What the mover has done since its start, for status and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ostraca_fabric.outcome import BlockState, PutState
from ostraca_fabric.status import AgentCounters

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Counters(AgentCounters):
    """The running counts, which gets and puts add to."""

    def count_get(self, states: NDArray[np.uint8], lengths: NDArray[np.uint32]) -> None:
        """Count an answered get."""
        tally = np.bincount(states, minlength=len(BlockState)).tolist()
        self.get_hits += tally[BlockState.HIT]
        self.get_misses += tally[BlockState.MISS]
        self.get_late += tally[BlockState.LATE]
        self.get_declined += tally[BlockState.DECLINED]
        self.get_bytes += int(lengths[states == BlockState.HIT].sum())

    def count_put(self, states: NDArray[np.uint8], lengths: NDArray[np.uint32]) -> None:
        """Count blocks of a put whose fate is known."""
        tally = np.bincount(states, minlength=len(PutState)).tolist()
        self.put_committed += tally[PutState.COMMITTED]
        self.put_exists += tally[PutState.EXISTS]
        self.put_declined += tally[PutState.DECLINED]
        self.put_bytes += int(lengths[states == PutState.COMMITTED].sum())

    def snapshot(self) -> AgentCounters:
        """Return the counts as they are now."""
        return msgspec.convert(self, AgentCounters, from_attributes=True)
