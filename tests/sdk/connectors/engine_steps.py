"""Tier driven step by step, as by vLLM's scheduler, without vLLM."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from tests.support.stalls import Stopwatch

from ostraca.connectors.kv_identity.identity import GroupIdentity, KvIdentity
from ostraca.connectors.transfers.counters import REQUESTS, ConnectorMetric
from ostraca.connectors.transfers.jobs import RowJob, TransferJob
from ostraca.connectors.vllm.core.hints import RequestHints
from ostraca.connectors.vllm.core.lookup_table import ChunkState
from ostraca.connectors.vllm.settings import TierSettings
from ostraca.connectors.vllm.tier import Tier

_Result = TypeVar("_Result")

MIB = 1 << 20
ROW_BYTES = 64 << 10
TOKENS = 16
PATIENCE_S = 20.0
TURNS_MAX = 10_000
IDENTITY = KvIdentity(
    model="test/model",
    dtype="bf16",
    groups=(GroupIdentity(0, TOKENS, ("layer.0",)),),
    block_bytes=ROW_BYTES,
)


def settings(address: str, **changes: object) -> TierSettings:
    plain = {
        "agents": [address],
        "arena_bytes": 32 * MIB,
        "transports": ["inline"],
        "lookup_deadline_s": 2.0,
        "load_deadline_s": 5.0,
        "store_deadline_s": 5.0,
        "backoff_s": 0.1,
        "backoff_max_s": 0.2,
        "connect_retry_s": 0.05,
    }
    return TierSettings.of(plain | changes)


def prompt(chunks: int, seed: str = "prompt", hash_bytes: int = 32) -> list[bytes]:
    """Return the keys of a prompt's chunks."""
    return [
        hashlib.sha256(f"{seed} {number}".encode()).digest()[:hash_bytes] + bytes(4)
        for number in range(chunks)
    ]


class EngineSteps:
    """Rows and tier of an engine; use as a context manager."""

    def __init__(
        self,
        tier_settings: TierSettings | None,
        *,
        rows: int = 256,
        memory: NDArray[np.uint8] | None = None,
        identity: KvIdentity = IDENTITY,
    ) -> None:
        self.rows = np.zeros((rows, ROW_BYTES), np.uint8) if memory is None else memory
        self.tier = Tier(identity, tier_settings, self.rows)
        self._tells_positions = identity.is_chained
        self._jobs = itertools.count()
        self.slowest_call_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tier.close()

    def wait_for_the_fabric(self) -> Self:
        self.until(lambda: self.tier.is_linked)
        return self

    def has_used_the_arena(self) -> bool:
        """Tell whether any chunk went through the arena; the 16 bytes of a hash seed always do."""
        client = self.tier._link.client
        assert client is not None
        return int(np.count_nonzero(client._runtime.arena.array)) > 1024

    def begin(self, request: str, keys: Sequence[bytes], hints: RequestHints | None = None) -> None:
        """Begin a request with a prompt of these chunks."""
        record = {key: (n + 1) * TOKENS for n, key in enumerate(keys)}
        self.tier.begin_request(request, record if self._tells_positions else None, hints)

    def ask(self, request: str, keys: Sequence[bytes]) -> list[ChunkState]:
        """Look up at every step until all states are known."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            self._step()
            lookups = self._timed(lambda: [self.tier.look_up(key, request) for key in keys])
            self._timed(self.tier.end_step)
            if ChunkState.PENDING not in lookups:
                return lookups
            assert time.monotonic() < until_s, "a request waits for ever"
            threading.Event().wait(0.001)

    def load(self, request: str, keys: Sequence[bytes], first_row: int = 0) -> TransferJob:
        """Load into rows from *first_row* on."""
        return self._move(request, keys, first_row, is_load=True)

    def store(self, request: str, keys: Sequence[bytes], first_row: int = 0) -> TransferJob:
        """Store rows from *first_row* on."""
        return self._move(request, keys, first_row, is_load=False)

    def store_prompt(self, request: str, keys: Sequence[bytes], content: NDArray[np.uint8]) -> TransferJob:
        """Compute a prompt and offload its chunks; return once all stored chunks are found.

        A store ends once the agent has the bytes; look-ups find the chunks a few milliseconds later.
        """
        self.rows[: len(keys)] = content
        self.begin(request, keys)
        finished = self.store(request, keys)
        self.tier.end_request(request)
        for turn in itertools.count():
            self.begin(f"{request} {turn}", keys)
            found = self.ask(f"{request} {turn}", finished.succeeded)
            self.tier.end_request(f"{request} {turn}")
            if ChunkState.MISSING not in found:
                return finished
            assert turn < TURNS_MAX, "what was stored is not found"
        raise AssertionError

    def count(self, metric: ConnectorMetric, label: str = "") -> int:
        return self.tier.counters.total[metric, label]

    def requests_sent(self) -> int:
        return sum(self.count(REQUESTS, operation) for operation in ("lookup", "load", "store"))

    def _move(self, request: str, keys: Sequence[bytes], first_row: int, *, is_load: bool) -> TransferJob:
        number = next(self._jobs)
        job = RowJob(number, request, tuple(keys), tuple(range(first_row, first_row + len(keys))))
        self._timed(lambda: (self.tier.load if is_load else self.tier.store)(job))
        finished = self.finish()
        assert finished.job_id == number
        return finished

    def finish(self) -> TransferJob:
        """Return the next finished job."""
        until_s = time.monotonic() + PATIENCE_S
        while not (found := self._step()):
            assert time.monotonic() < until_s, "a job is never over"
            threading.Event().wait(0.001)
        (finished,) = found
        return finished

    def _step(self) -> list[TransferJob]:
        return self._timed(self.tier.take_finished)

    def until(self, is_so: Callable[[], bool]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < until_s, "it did not come to be"
            threading.Event().wait(0.001)

    def _timed(self, call: Callable[[], _Result]) -> _Result:
        watch = Stopwatch()
        result = call()
        self.slowest_call_s = max(self.slowest_call_s, watch.took_s)
        return result
