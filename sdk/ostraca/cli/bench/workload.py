"""What is asked of a fabric to measure it: puts and gets of batches of blocks.

Each is checked to have done its work. A put is always of blocks that are new. Nothing of what prepares or
checks a turn is timed.
"""

from __future__ import annotations

import secrets
import select
import time
from typing import TYPE_CHECKING

import numpy as np

from ostraca.cli.bench.series import gb_per_s, seconds_of
from ostraca.client import connect
from ostraca.results import PutResult
from ostraca.settings import ClientSettings
from ostraca_fabric.errors import OstracaError
from ostraca_fabric.layout import Layout
from ostraca_fabric.memory import HugeMemory
from ostraca_fabric.outcome import Ack

if TYPE_CHECKING:
    from ostraca.results import GetResult, LookupResult
    from ostraca_fabric.chain import Chain
    from ostraca_fabric.status import AgentCounters, AgentStatus

MIB = 1 << 20
_HASH_BYTES = 32
_DEADLINE_S = 30.0
_LOOK_AGAIN_S = 0.002


class MeasureError(OstracaError):
    """The fabric did not do what was to be measured, so there is no figure."""


class Workload:
    """One worker with batches of *blocks* blocks. Close it."""

    def __init__(
        self,
        address: str,
        *,
        blocks: int,
        block_bytes: int,
        transport: str | None = None,
        credentials: str | None = None,
        batches: int = 2,
    ) -> None:
        """Connect. The arena holds so many *batches*: a get's and a put's, or more."""
        self.blocks = blocks
        self.batch_bytes = blocks * block_bytes
        chunk_bytes = max(32 * MIB, block_bytes)
        settings = ClientSettings(
            arena_bytes=max(256 * MIB, batches * self.batch_bytes + 2 * chunk_bytes),
            chunk_bytes=chunk_bytes,
            prefault=True,
            transports=(transport,) if transport else ClientSettings().transports,
        )
        self._block_bytes = block_bytes
        self._memory = HugeMemory(self.batch_bytes, prefault=True)
        self._rows = self._memory.array[: self.batch_bytes].reshape(blocks, block_bytes)
        self._rows[:] = np.random.default_rng().integers(0, 256, self._rows.shape, np.uint8)
        self._client = connect(address, settings=settings, credentials=credentials)
        layout = Layout(model="ostraca-bench@1", dtype="bytes", page_tokens=16, hash_bytes=_HASH_BYTES)
        self._volume = self._client.volume(
            f"bench-{block_bytes}", layout, block_bytes=block_bytes, create=True
        )

    @property
    def transport(self) -> str:
        """How blocks cross."""
        return self._client.transport

    def counters(self) -> AgentCounters:
        """Return what the agent has counted."""
        return self.status().counters

    def status(self) -> AgentStatus:
        """Return what the agent believes."""
        return self._client.status()

    def new_chain(self) -> Chain:
        """Name a batch of blocks that nobody has put."""
        return self._volume.chain(secrets.token_bytes(_HASH_BYTES) for _ in range(self.blocks))

    def stored_chain(self) -> Chain:
        """Put a batch, wait until it is committed, and return its name."""
        chain = self.new_chain()
        self._check_put(self._volume.put(chain, source=self._rows, deadline_s=_DEADLINE_S, ack=Ack.COMMITTED))
        return chain

    def half_stored_chain(self) -> Chain:
        """Name twice a batch of blocks, of which the first half is committed."""
        hashes = [secrets.token_bytes(_HASH_BYTES) for _ in range(2 * self.blocks)]
        chain = self._volume.chain(hashes)
        first = chain[: self.blocks]
        self._check_put(self._volume.put(first, source=self._rows, deadline_s=_DEADLINE_S, ack=Ack.COMMITTED))
        return chain

    def lookup_s(self, chain: Chain) -> float:
        """Look a chain up whose first half is there; return seconds."""
        results: list[LookupResult] = []
        spent_s = seconds_of(lambda: results.append(self._volume.lookup(chain, deadline_s=_DEADLINE_S)))
        if results[0].prefix != len(chain) // 2:
            raise MeasureError(f"half of the chain was stored, and the fabric found {results[0]}")
        return spent_s

    def prefetch(self, chain: Chain) -> None:
        """Have the agent bring a batch into its DRAM."""
        found = self._volume.prefetch(chain, deadline_s=_DEADLINE_S)
        if found.hits < len(chain):
            raise MeasureError(
                f"the batch does not fit the agent's DRAM cache ({found}): give it more with --dram"
            )

    def get_views(self, chain: Chain) -> float:
        """Get a batch as verified views of the arena, and give them back; return GB/s."""
        results: list[GetResult] = []

        def work() -> None:
            with self._volume.get_views(chain, lengths=self._block_bytes, deadline_s=_DEADLINE_S) as views:
                results.append(views.result)

        rate = gb_per_s(len(chain) * self._block_bytes, work)
        _check_get(results[0])
        return rate

    def get_into(self, chain: Chain) -> float:
        """Get a batch into the caller's memory; return GB/s."""
        into = self._rows[: len(chain)]
        results: list[GetResult] = []
        rate = gb_per_s(
            into.nbytes, lambda: results.append(self._volume.get(chain, into=into, deadline_s=_DEADLINE_S))
        )
        _check_get(results[0])
        return rate

    def get_one_s(self, chain: Chain) -> float:
        """Get the first block of a batch into the caller's memory; return seconds."""
        first, into = chain[:1], self._rows[:1]
        results: list[GetResult] = []
        spent_s = seconds_of(
            lambda: results.append(self._volume.get(first, into=into, deadline_s=_DEADLINE_S))
        )
        _check_get(results[0])
        return spent_s

    def put(self, ack: Ack) -> float:
        """Put a new batch from the caller's memory; return GB/s until it was acknowledged."""
        chain = self.new_chain()
        results: list[PutResult] = []
        rate = gb_per_s(
            self.batch_bytes,
            lambda: results.append(
                self._volume.put(chain, source=self._rows, deadline_s=_DEADLINE_S, ack=ack)
            ),
        )
        self._check_put(results[0])
        self._wait_until_committed(chain)
        return rate

    def put_slots(self, ack: Ack) -> float:
        """Put a new batch that lies in the arena; return GB/s until it was acknowledged."""
        chain = self.new_chain()
        lease = self._volume.slots(self.blocks, lengths=self._block_bytes)
        for view, row in zip(lease, self._rows, strict=True):
            view[:] = row.data
        results: list[PutResult] = []
        rate = gb_per_s(
            self.batch_bytes,
            lambda: results.append(self._volume.put_slots(chain, lease, deadline_s=_DEADLINE_S, ack=ack)),
        )
        self._check_put(results[0])
        self._wait_until_committed(chain)
        return rate

    def put_slots_ahead(self, ack: Ack, *, batches: int, ahead: int) -> float:
        """Put new batches that lie in the arena, *ahead* of them under way at a time; return GB/s until the
        last was acknowledged. The arena must have room for so many.
        """
        chains = [self.new_chain() for _ in range(batches)]
        results: list[object] = []

        def begin() -> None:
            lease = self._volume.slots(self.blocks, lengths=self._block_bytes)
            self._volume.submit_put_slots(chains.pop(), lease, deadline_s=_DEADLINE_S, ack=ack)

        def work() -> None:
            for _ in range(min(ahead, batches)):
                begin()
            while len(results) < batches:
                select.select([self._client], [], [])
                for done in self._client.take_done():
                    results.append(done.result)
                    if chains:
                        begin()

        rate = gb_per_s(batches * self.batch_bytes, work)
        for result in results:
            self._check_put(result)
        return rate

    def close(self) -> None:
        """Disconnect."""
        self._client.close()
        del self._rows
        self._memory.close()

    def _check_put(self, result: object) -> None:
        if not isinstance(result, PutResult) or result.accepted < self.blocks:
            raise MeasureError(f"the fabric did not take a batch of {self.blocks} blocks: {result}")

    def _wait_until_committed(self, chain: Chain) -> None:
        """Let the flash catch up, so that the next put is not measured against this one's writes."""
        until_s = time.monotonic() + _DEADLINE_S
        found = self._volume.lookup(chain, deadline_s=_DEADLINE_S)
        while found.hits < len(chain):
            if time.monotonic() >= until_s:
                raise MeasureError(
                    f"a batch that was staged is not committed {_DEADLINE_S:.0f} s later: {found}"
                )
            time.sleep(_LOOK_AGAIN_S)
            found = self._volume.lookup(chain, deadline_s=_DEADLINE_S)


def _check_get(result: GetResult) -> None:
    if result.hits < len(result):
        raise MeasureError(f"the fabric did not bring a batch that it has: {result}")
