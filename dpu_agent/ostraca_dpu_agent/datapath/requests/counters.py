"""Counters of the data path, for status and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from ostraca_dpu_agent.datapath.staging.memory_waves import IN_CACHE
from ostraca_dpu_agent.datapath.staging.staged import IN_STAGING
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.telemetry.requests import OTHER_STATES, STATES, OperationTally, Tally
from ostraca_fabric.telemetry.status import AgentCounters, EstimateCounters, PrefetchCounters
from ostraca_fabric.wire.codec import Outcomes


class DataPathCounters:
    """Counters since the start, updated by requests, for status and metrics."""

    def __init__(
        self,
        prefetched: PrefetchCounters,
        estimates: EstimateCounters,
        found_earlier: Callable[[], int],
    ) -> None:
        """Begin at zero.

        *prefetched*, *estimates* and *found_earlier* are counted by the DRAM cache, the latency estimator
        and the locator.
        """
        self._found_earlier = found_earlier
        self._prefetched = prefetched
        self._estimates = estimates
        self.tallies = {operation: Tally(operation) for operation in (*STATES, *OTHER_STATES)}
        self.get_hits_direct = 0
        """Blocks left to workers that read them themselves: those on drives once read."""

        self.hits_on: Counter[str] = Counter()
        """Blocks found by gets, per drive, and in memory as ``IN_CACHE`` and ``IN_STAGING``."""

        self.damaged = 0
        """Blocks from flash with a wrong tag."""

    def count(self, operation: str, outcomes: Outcomes, good_bytes: int = 0) -> None:
        """Count final outcomes of blocks, and bytes moved or stored."""
        tally = self.tallies[operation]
        tally.count(outcomes.states, outcomes.reasons)
        tally.bytes += good_bytes

    def decline(self, operation: str, blocks: int, reason: Reason) -> Outcomes:
        """Count and return a decline of all blocks."""
        outcomes = Outcomes.filled(blocks, (STATES | OTHER_STATES)[operation]["DECLINED"], reason)
        self.count(operation, outcomes)
        return outcomes

    def snapshot(self) -> AgentCounters:
        """Return the most used counters."""
        get, put = self.tallies["get"], self.tallies["put"]
        return AgentCounters(
            get_hits=get.of(BlockState.HIT),
            get_hits_from_cache=self.hits_on[IN_CACHE],
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
            get_hits_from_staging=self.hits_on[IN_STAGING],
            get_hits_direct=self.get_hits_direct,
        )

    def operations(self) -> tuple[OperationTally, ...]:
        """Return all counters; those of shadow mode only if not zero."""
        counted = [tally.snapshot() for tally in self.tallies.values()]
        return tuple(each for each in counted if each.operation in STATES or each.blocks)
