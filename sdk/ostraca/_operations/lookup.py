"""Lookups and prefetches: operations without block bytes."""

from __future__ import annotations

import time
from typing import TypeVar

import numpy as np

from ostraca._connection.caller_connections import CallerConnection
from ostraca._operations.job import Job
from ostraca._protocol.operations import BlockOperation, windows
from ostraca._protocol.specs import LookupSpec, PrefetchSpec
from ostraca.results import BlockOutcomes, LookupResult, PrefetchResult
from ostraca_fabric.wire.messages import SPANS_MAX

_Spec_co = TypeVar("_Spec_co", LookupSpec, PrefetchSpec, covariant=True)
_Result_co = TypeVar("_Result_co", covariant=True)


class AgentJob(Job[_Spec_co, _Result_co]):
    """Base of jobs done by the agent alone."""

    def _begin(self, request: int, first: int) -> int:
        if not first:
            self._windows = windows(self.spec.parts, self._blocks_max)
        spans = tuple(chain.span() for chain in next(self._windows))
        message = self.spec.message(request, self._handle, self.until_s - time.monotonic(), spans)
        at = np.arange(first, first + sum(map(len, spans)))
        return self._submit(request, lambda: BlockOperation(message, until_s=self.until_s, at=at))


class PrefetchJob(AgentJob[PrefetchSpec, PrefetchResult]):
    """Prefetch of blocks into an agent's memory."""

    result_type = PrefetchResult


class LookupJob(AgentJob[LookupSpec, LookupResult]):
    """Lookup of the blocks available now."""

    is_brief = True

    def run_at(self, connection: CallerConnection) -> bool:
        """Ask for all blocks at once."""
        spans = tuple(chain.span() for chain in self.spec.parts if len(chain))
        if len(spans) > SPANS_MAX:
            return False

        def start(request: int, handle: int) -> BlockOperation:
            message = self.spec.message(request, handle, self.until_s - time.monotonic(), spans)
            return BlockOperation(message, until_s=self.until_s)

        _, effects = connection.ask(self.spec.volume, start, self.until_s)
        return bool(effects) and not self._take_outcomes(effects)

    def result(self) -> LookupResult:
        """Build the result, with a part for each chain."""
        states, reasons = self.outcomes.encode()
        found, first = [], 0
        for chain in self.spec.parts:
            last = first + len(chain)
            found.append(BlockOutcomes(states[first:last], reasons[first:last], self.outcomes.note))
            first = last
        return LookupResult(tuple(found))
