"""Workload of measurements: puts and gets of batches of blocks.

The workload checks the success of each operation. Each put has new blocks. Figures exclude the time for
preparation and checks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

import numpy as np

from ostraca.client import connect
from ostraca.results import GetResult, PutResult
from ostraca.settings import ClientSettings
from ostraca_cli.tools.bench.series import GB, timed
from ostraca_fabric.errors import OstracaError
from ostraca_fabric.model.chain import Chain
from ostraca_fabric.model.outcome import Ack
from ostraca_fabric.model.volume import Layout
from ostraca_fabric.runtime.memory import HugeMemory

MIB = 1 << 20
_HASH_BYTES = 32
DEADLINE_S = 30.0
_LOOK_AGAIN_S = 0.002


class MeasureError(OstracaError):
    """Failure of the fabric to do the measured work; there is no figure."""


class Workload:
    """Worker with batches of *blocks* blocks; call ``close`` at the end."""

    def __init__(
        self,
        address: str,
        *,
        blocks: int,
        block_bytes: int,
        transport: str | None = None,
        credentials: str | None = None,
        batches: int = 2,
        direct_drives: Sequence[str] = (),
        direct_memory: bool = False,
    ) -> None:
        """Connect, with an arena for *batches* batches: a get's and a put's at least.

        The worker reads *direct_drives* itself, where the fabric allows it. With *direct_memory*, the worker
        reads the agent's memory, too.
        """
        self.address = address
        self.agent_pid = 0
        """Process of the agent, if known."""

        self.blocks = blocks
        self.batch_bytes = blocks * block_bytes
        chunk_bytes = max(32 * MIB, block_bytes)
        settings = ClientSettings(
            arena_bytes=max(256 * MIB, batches * self.batch_bytes + 2 * chunk_bytes),
            chunk_bytes=chunk_bytes,
            prefault=True,
            transports=(transport,) if transport else ClientSettings().transports,
            direct_drives=tuple(direct_drives),
            direct_memory=direct_memory,
        )
        self.block_bytes = block_bytes
        self._memory = HugeMemory(self.batch_bytes, prefault=True)
        self._rows = self._memory.array[: self.batch_bytes].reshape(blocks, block_bytes)
        self._rows[:] = np.random.default_rng().integers(0, 256, self._rows.shape, np.uint8)
        self.client = connect(address, settings=settings, credentials=credentials)
        layout = Layout(model="ostraca-bench@1", dtype="bytes", page_tokens=16, hash_bytes=_HASH_BYTES)
        self.volume = self.client.volume(f"bench-{block_bytes}", layout, block_bytes=block_bytes, create=True)

    def new_chain(self, batches: int = 1) -> Chain:
        """Name batches of new blocks."""
        return self._new_chain(batches * self.blocks)

    def _new_chain(self, blocks: int) -> Chain:
        return self.volume.chain(secrets.token_bytes(_HASH_BYTES) for _ in range(blocks))

    def stored_chain(self) -> Chain:
        """Put a batch, wait for the commit, and return its chain."""
        chain = self.new_chain()
        self.store(chain)
        return chain

    def prefetch(self, chain: Chain) -> None:
        """Prefetch a batch into the agent's DRAM cache."""
        found = self.volume.prefetch(chain, deadline_s=DEADLINE_S)
        if found.hits < len(chain):
            raise MeasureError(
                f"the batch does not fit the agent's DRAM cache ({found}): enlarge the cache with --dram"
            )

    def get_views(self, chain: Chain) -> float:
        """Get a batch as verified views of the arena, release the views; return GB/s."""

        def get() -> GetResult:
            with self.volume.get_views(chain, lengths=self.block_bytes, deadline_s=DEADLINE_S) as views:
                return views.result

        return len(chain) * self.block_bytes / GB / _checked_get_s(get)

    def get_into(self, chain: Chain) -> float:
        """Get a batch into the caller's memory; return GB/s."""
        return len(chain) * self.block_bytes / GB / self.get_s(chain)

    def put(self, ack: Ack) -> float:
        """Put a new batch from the caller's memory; return GB/s until acknowledged."""
        chain = self.new_chain()
        return self._put_rate(chain, ack, lambda: self._put(chain, ack))

    def put_one_s(self, number: int) -> float:
        """Put a row of the caller's memory as a new block, and wait for no commit; return seconds."""
        chain, source = self._new_chain(1), self._rows[number : number + 1]
        spent_s, result = timed(
            lambda: self.volume.put(chain, source=source, deadline_s=DEADLINE_S, ack=Ack.STAGED)
        )
        _check_put(result, 1)
        return spent_s

    def put_slots(self, ack: Ack) -> float:
        """Put a new batch from the arena; return GB/s until acknowledged."""
        chain = self.new_chain()
        lease = self.volume.slots(self.blocks, lengths=self.block_bytes)
        for view, row in zip(lease, self._rows, strict=True):
            view[:] = row.data
        return self._put_rate(
            chain, ack, lambda: self.volume.put_slots(chain, lease, deadline_s=DEADLINE_S, ack=ack)
        )

    def close(self) -> None:
        """Disconnect."""
        self.client.close()
        del self._rows
        self._memory.close()

    def get_s(self, chain: Chain) -> float:
        """Get blocks into the caller's memory; return seconds."""
        into = self._rows[: len(chain)]
        return _checked_get_s(lambda: self.volume.get(chain, into=into, deadline_s=DEADLINE_S))

    def get_one_s(self, chain: Chain, number: int) -> float:
        """Get a single block of a batch into its row of the caller's memory; return seconds."""
        block, into = chain[number : number + 1], self._rows[number : number + 1]
        return _checked_get_s(lambda: self.volume.get(block, into=into, deadline_s=DEADLINE_S))

    def _put(self, chain: Chain, ack: Ack) -> PutResult:
        return self.volume.put(chain, source=self._rows, deadline_s=DEADLINE_S, ack=ack)

    def _put_rate(self, chain: Chain, ack: Ack, put: Callable[[], PutResult]) -> float:
        spent_s, result = timed(put)
        self.check_put(result)
        if ack is Ack.STAGED:
            self.wait_until_committed(chain)
        return self.batch_bytes / GB / spent_s

    def store(self, chain: Chain) -> None:
        """Put a batch and wait for the commit; raises MeasureError on failure."""
        self.check_put(self._put(chain, Ack.COMMITTED))

    def check_put(self, result: object) -> None:
        """Raise MeasureError unless all blocks of a batch were accepted."""
        _check_put(result, self.blocks)

    def wait_until_committed(self, chain: Chain) -> None:
        """Wait for flash, so that the next put does not compete with earlier writes.

        A look-up would not tell: staged blocks are hits. The shard owner lists committed blocks only.
        """
        until_s = time.monotonic() + DEADLINE_S
        for block in range(len(chain)):
            while not self._is_committed(chain[block : block + 1]):
                if time.monotonic() >= until_s:
                    raise MeasureError(f"a staged batch is not committed {DEADLINE_S:.0f} s later")
                time.sleep(_LOOK_AGAIN_S)

    def _is_committed(self, block: Chain) -> bool:
        view = self.volume.explain(block, timeout_s=DEADLINE_S).owner_view
        return view is not None and view.is_listed


def _check_put(result: object, blocks: int) -> None:
    if not isinstance(result, PutResult) or result.accepted < blocks:
        raise MeasureError(f"the fabric did not take {blocks} blocks: {result}")


def _checked_get_s(get: Callable[[], GetResult]) -> float:
    """Return the seconds of a get; raises MeasureError without full hits."""
    spent_s, result = timed(get)
    if result.hits < len(result):
        raise MeasureError(f"the fabric did not return a stored batch: {result}")
    return spent_s
