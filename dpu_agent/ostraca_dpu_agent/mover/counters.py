"""What the mover has done since its start, for status and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.outcome import BlockState, PutState
from ostraca_fabric.status import AgentCounters

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(slots=True)
class Counters:
    """Running counts; blocks unless a name says bytes."""

    get_hits: int = 0
    get_hits_from_cache: int = 0
    get_misses: int = 0
    get_late: int = 0
    get_declined: int = 0
    get_bytes: int = 0
    put_committed: int = 0
    put_exists: int = 0
    put_declined: int = 0
    put_bytes: int = 0
    damaged: int = 0

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
        """Return the counts as status shows them."""
        return AgentCounters(**{name: getattr(self, name) for name in AgentCounters.__struct_fields__})
