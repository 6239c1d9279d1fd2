"""Tasks driven as by LMCache's controllers, without LMCache."""

from __future__ import annotations

import hashlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray
from tests.support.stalls import Stopwatch

from ostraca.connectors.lmcache.objects import L2Object, ObjectLayout, ObjectName
from ostraca.connectors.lmcache.settings import LmcacheSettings
from ostraca.connectors.lmcache.tasks import L2Tasks, TaskKind
from ostraca.connectors.transfers.counters import REQUESTS, ConnectorMetric

BLOCK_BYTES = 64 << 10
OBJECT_BYTES = 2 * BLOCK_BYTES + 4096
CHUNK_TOKENS = 16
LAYERS = 4
LAYOUT = ObjectLayout(OBJECT_BYTES, "[([2, 4, 16, 528], 'torch.bfloat16')]")
PATIENCE_S = 20.0


def settings(address: str, **changes: object) -> LmcacheSettings:
    plain = {
        "agents": address,
        "arena_bytes": 32 << 20,
        "transports": ["inline"],
        "block_bytes": BLOCK_BYTES,
        "lookup_deadline_s": 2.0,
        "store_deadline_s": 5.0,
        "backoff_s": 0.1,
        "backoff_max_s": 0.2,
        "connect_retry_s": 0.05,
    }
    return LmcacheSettings.of(plain | changes)


def names(count: int, **changes: object) -> list[ObjectName]:
    """Return the names of a prompt's objects."""
    plain = ObjectName(b"", "test/model", (1 << 24) | (1 << 8), 0, "")
    hashes = [hashlib.sha256(f"{number}".encode()).digest() for number in range(count)]
    return [plain._replace(chunk_hash=each)._replace(**changes) for each in hashes]  # type: ignore[arg-type]


def objects(memory: NDArray[np.uint8], layout: ObjectLayout = LAYOUT) -> list[L2Object]:
    """Return one object per row."""
    return [L2Object(layout, row) for row in memory]


class ServerSteps:
    """Tasks of an LMCache server; use as a context manager."""

    def __init__(self, plugin_settings: LmcacheSettings) -> None:
        self.tasks = L2Tasks(plugin_settings)
        self.slowest_call_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tasks.close()

    def wait_for_the_fabric(self) -> Self:
        self.until(lambda: not self.tasks.read_refusal)
        return self

    def store(self, of: Sequence[ObjectName], memory: Sequence[L2Object | None]) -> list[bool]:
        return self._outcome(TaskKind.STORE, lambda: self.tasks.store(of, memory))

    def load(self, of: Sequence[ObjectName], memory: Sequence[L2Object | None]) -> list[bool]:
        return self._outcome(TaskKind.LOAD, lambda: self.tasks.load(of, memory))

    def look_up(self, of: Sequence[ObjectName], layouts: dict[int, ObjectLayout] | None = None) -> list[bool]:
        described = {0: LAYOUT} if layouts is None else layouts
        return self._outcome(TaskKind.LOOKUP, lambda: self.tasks.look_up(of, described))

    def store_and_find(self, of: Sequence[ObjectName], memory: Sequence[L2Object]) -> None:
        """Store; return once all objects are found."""
        assert self.store(of, memory) == [True] * len(of)
        self.until(lambda: all(self.look_up(of)))

    def count(self, metric: ConnectorMetric, label: str = "") -> int:
        return self.tasks.counters.total[metric, label]

    def requests_sent(self) -> int:
        return sum(self.count(REQUESTS, operation) for operation in ("lookup", "load", "store"))

    def until(self, is_so: Callable[[], bool]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < until_s, "it did not come to be"
            threading.Event().wait(0.001)

    def wait(self, kind: TaskKind, number: int) -> list[bool]:
        """Wait for a task as LMCache does: for the signal of its kind."""
        signal = select.poll()
        signal.register(self.tasks.descriptors[kind], select.POLLIN)
        while (outcome := self.tasks.take(kind, number)) is None:
            assert signal.poll(PATIENCE_S * 1000), "a task is never over"
            os.eventfd_read(self.tasks.descriptors[kind])
        assert self.tasks.take(kind, number) is None, "a result is taken twice"
        return outcome

    def _outcome(self, kind: TaskKind, submit: Callable[[], int]) -> list[bool]:
        watch = Stopwatch()
        number = submit()
        self.slowest_call_s = max(self.slowest_call_s, watch.took_s)
        return self.wait(kind, number)
