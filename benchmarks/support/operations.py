"""Operations of a workload for figures of the repository, beside those of ``ostraca bench``."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

from ostraca_cli.tools.bench.series import gb_per_s, timed
from ostraca_cli.tools.bench.workload import DEADLINE_S, MeasureError

if TYPE_CHECKING:
    from ostraca import Chain
    from ostraca_cli.tools.bench.workload import Workload
    from ostraca_fabric.model.outcome import Ack


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
    chains = [work.new_chain() for _ in range(batches)]
    results: list[object] = []

    def begin() -> None:
        lease = work.volume.slots(work.blocks, lengths=work.block_bytes)
        work.volume.submit_put_slots(chains.pop(), lease, deadline_s=DEADLINE_S, ack=ack)

    def put_all() -> None:
        for _ in range(min(ahead, batches)):
            begin()
        while len(results) < batches:
            select.select([work.client], [], [])
            for done in work.client.take_completions():
                results.append(done.result)
                if chains:
                    begin()

    rate = gb_per_s(batches * work.batch_bytes, put_all)
    for result in results:
        work.check_put(result)
    return rate
