"""Lookups and prefetches: operations without block bytes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ostraca._operations.batch import Batch, OperationJob
from ostraca._protocol.operations import BlockOperation, windows
from ostraca._protocol.specs import LookupSpec, OperationSpec, PrefetchSpec
from ostraca.results import BlockOutcomes, LookupResult, PrefetchResult

if TYPE_CHECKING:
    from ostraca._operations.batch import BatchContext
    from ostraca_fabric.wire.codec import Outcomes


def lookup_job(spec: LookupSpec) -> OperationJob[LookupResult]:
    """Build a lookup of the blocks available now."""

    def result(outcomes: Outcomes, _: Batch[OperationSpec] | None) -> LookupResult:
        states, reasons = outcomes.encode()
        found, first = [], 0
        for chain in spec.parts:
            last = first + len(chain)
            found.append(BlockOutcomes(states[first:last], reasons[first:last], outcomes.note))
            first = last
        return LookupResult(tuple(found))

    return OperationJob(
        spec,
        time.monotonic(),
        lambda context: LookupBatch(context, spec),
        result,
    )


def prefetch_job(spec: PrefetchSpec) -> OperationJob[PrefetchResult]:
    """Build a prefetch of blocks into an agent's memory."""
    return OperationJob(
        spec,
        time.monotonic(),
        lambda context: LookupBatch(context, spec),
        lambda outcomes, _: PrefetchResult(*outcomes.encode(), outcomes.note),
    )


class LookupBatch(Batch["LookupSpec | PrefetchSpec"]):
    """Lookup or prefetch: no bytes cross."""

    def __init__(self, context: BatchContext, spec: LookupSpec | PrefetchSpec) -> None:
        super().__init__(context, spec)
        self._windows = {window.first: window for window in windows(spec.parts, self._blocks_max)}

    def _begin(self, request: int, first: int) -> int:
        window = self._windows[first]
        spans = tuple(chain.span() for chain in window.chains)
        left_s = self._until_s - time.monotonic()
        message = self._spec.message(request, self._context.handle, left_s, spans)
        self._submit(BlockOperation(message, until_s=self._until_s), first)
        return window.blocks
