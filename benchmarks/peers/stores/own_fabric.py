"""Ostraca: gets copied into caller memory from the agent's DRAM, puts until staged.

The variant is a transport, or *memory*: worker and agent copy blocks out of each other's memory.
A batch counts as settled when it is on flash, and in the agent's DRAM cache. Tags are on, as always.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.peers.stores.turns import Order, Rows, Store, serve
from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.fabric import running_fabric
from ostraca_cli.tools.bench.series import SHORT
from ostraca_cli.tools.bench.workload import DEADLINE_S, MeasureError, Workload
from ostraca_fabric.model.chain import Chain
from ostraca_fabric.model.outcome import Ack
from ostraca_fabric.runtime.version import VERSION
from ostraca_fabric.sockets.default_paths import TOKEN_FILE


class OwnFabric(Store[Chain]):
    """Worker of a fabric."""

    version = VERSION

    def __init__(self, work: Workload) -> None:
        self._work, self._volume = work, work.volume

    def names(self, labels: Sequence[str]) -> Chain:
        """Return a chain."""
        return self._volume.chain(hashlib.sha256(label.encode()).digest() for label in labels)

    def put(self, names: Chain, rows: Rows) -> None:
        """Put until staged."""
        result = self._volume.put(names, source=rows, deadline_s=DEADLINE_S, ack=Ack.STAGED)
        if result.accepted < len(names):
            raise MeasureError(f"the fabric did not take all blocks: {result}")

    def get(self, names: Chain, rows: Rows) -> None:
        """Get, verified and copied."""
        result = self._volume.get(names, into=rows, deadline_s=DEADLINE_S)
        if result.hits < len(names):
            raise MeasureError(f"the fabric did not return all blocks: {result}")

    def count(self, names: Chain) -> int:
        """Look up."""
        return self._volume.lookup(names, deadline_s=DEADLINE_S).hits

    def settle(self, names: Chain) -> None:
        """Wait for the commit, and load the blocks into the DRAM cache."""
        self._work.wait_until_committed(names)
        self._work.prefetch(names)

    def forget(self, names: Chain) -> None:
        """Do nothing: the fabric has no deletion, and the drive has space for the whole run."""


@contextlib.contextmanager
def _open_store(order: Order, _: Rows) -> Iterator[OwnFabric]:
    directory = Path(order.directory)
    plan = suite.BenchPlan(order.blocks, order.block_bytes, SHORT, directory)
    capacity_bytes = max(plan.capacity_bytes, 2 * order.written_bytes)
    options = ("--capacity", str(capacity_bytes), "--dram", str(suite.dram_bytes(plan)))
    reads_memory = order.variant == "memory"
    transport = "nixl" if reads_memory else order.variant
    listening = () if transport == "nixl" else ("--listen", "tcp://127.0.0.1:0")
    with (
        running_fabric(directory, *options, *listening, "--transport", transport) as fabric,
        contextlib.closing(
            Workload(
                fabric.addresses[-1],
                blocks=order.blocks,
                block_bytes=order.block_bytes,
                transport=transport,
                direct_memory=reads_memory,
                credentials=(directory / TOKEN_FILE).read_text().strip() if listening else None,
            )
        ) as work,
    ):
        yield OwnFabric(work)


if __name__ == "__main__":
    serve(_open_store)
