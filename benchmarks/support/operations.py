"""Operations of a workload for figures of the repository, beside those of ``ostraca bench``."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Self

import numpy as np

from ostraca import BlockViews
from ostraca_cli.tools.bench.series import GB, gb_per_s, timed
from ostraca_cli.tools.bench.workload import DEADLINE_S, MeasureError
from ostraca_fabric.model.outcome import Ack
from ostraca_fabric.runtime.memory import HugeMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from ostraca import Chain
    from ostraca_cli.tools.bench.workload import Workload


class RegionWork:
    """Gets and puts of a workload in rows of a region; close it before the workload."""

    def __init__(self, work: Workload, *, may_withhold: bool = False) -> None:
        """Register a batch of rows, with content."""
        self._work = work
        self._memory = HugeMemory(work.batch_bytes, prefault=True)
        pool = self._memory.array[: work.batch_bytes].reshape(work.blocks, work.block_bytes)
        pool[:] = np.random.default_rng().integers(0, 256, pool.shape, np.uint8)
        self._region = work.client.register(pool, may_withhold=may_withhold)
        self._rows = self._region.rows(range(work.blocks))

    def get(self, chain: Chain) -> float:
        """Get a batch into the rows; return GB/s."""
        spent_s, result = timed(lambda: self._work.volume.get(chain, into=self._rows, deadline_s=DEADLINE_S))
        if result.hits < self._work.blocks:
            raise MeasureError(f"the fabric did not return a stored batch: {result}")
        return self._work.batch_bytes / GB / spent_s

    def put(self, ack: Ack) -> float:
        """Put a new batch from the rows; return GB/s until acknowledged."""
        chain = self._work.new_chain()
        spent_s, result = timed(
            lambda: self._work.volume.put(chain, source=self._rows, deadline_s=DEADLINE_S, ack=ack)
        )
        self._work.check_put(result)
        if ack is Ack.STAGED:
            self._work.wait_until_committed(chain)
        return self._work.batch_bytes / GB / spent_s

    def __enter__(self) -> Self:
        """Return the work to the ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unregister the region, and free its memory."""
        self._region.unregister()
        del self._rows
        self._memory.close()


def half_stored_chain(work: Workload) -> Chain:
    """Return a chain of two batches with the first half committed."""
    chain = work.new_chain(batches=2)
    work.store(chain[: work.blocks])
    return chain


def lookup_s(work: Workload, chain: Chain) -> float:
    """Look up a chain with a committed first half; return seconds."""
    spent_s, result = timed(lambda: work.volume.lookup(chain, deadline_s=DEADLINE_S))
    if result.prefix != len(chain) // 2:
        raise MeasureError(f"half of the chain was stored, and the fabric found {result}")
    return spent_s


def put_slots_ahead(work: Workload, ack: Ack, *, batches: int, ahead: int) -> float:
    """Put new batches from the arena, with *ahead* batches in flight.

    Returns GB/s until the last acknowledgement. The arena must have space for *ahead* batches.
    """
    chains = iter([work.new_chain() for _ in range(batches)])

    def begin() -> None:
        lease = work.volume.slots(work.blocks, lengths=work.block_bytes)
        work.volume.submit_put_slots(next(chains), lease, deadline_s=DEADLINE_S, ack=ack)

    return _gb_per_s_ahead(work, begin, work.check_put, batches=batches, ahead=ahead)


def get_views_ahead(work: Workload, chains: Iterator[Chain], *, batches: int, ahead: int) -> float:
    """Get stored batches as views of the arena, with *ahead* batches in flight, and release the views.

    Returns GB/s until the last result. The arena must have space for one batch more.
    """

    def begin() -> None:
        work.volume.submit_get_views(next(chains), lengths=work.block_bytes, deadline_s=DEADLINE_S)

    def check(views: object) -> None:
        if not isinstance(views, BlockViews):
            raise MeasureError(f"the fabric did not return a stored batch: {views}")
        with views:
            if views.result.hits < work.blocks:
                raise MeasureError(f"the fabric did not return a stored batch: {views.result}")

    return _gb_per_s_ahead(work, begin, check, batches=batches, ahead=ahead)


def _gb_per_s_ahead(
    work: Workload, begin: Callable[[], None], check: Callable[[object], None], *, batches: int, ahead: int
) -> float:
    """Begin batches, *ahead* of them in flight, and check each result; return GB/s."""

    def run() -> None:
        begun = ended = 0
        while ended < batches:
            while begun < min(batches, ended + ahead):
                begin()
                begun += 1
            select.select([work.client], [], [])
            for done in work.client.take_completions():
                check(done.result)
                ended += 1

    return gb_per_s(batches * work.batch_bytes, run)
