"""Turns of a store's client: operations, timed and verified, at the harness's request.

Requests and answers are lines of JSON on stdin and stdout. The first request is an Order. Every later request
names an operation, and its answer has the seconds of each repetition.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

Rows: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""Memory of blocks, shape (blocks, bytes of a block)."""


class Sliceable(Protocol):
    """Names of blocks, as the store's client wants them."""

    def __getitem__(self, part: slice, /) -> Any:  # noqa: ANN401 (a list, or a chain)
        """Return some of the names."""


Names = TypeVar("Names", bound=Sliceable)


@dataclass(frozen=True, slots=True)
class Order:
    """Parameters of all turns."""

    blocks: int
    block_bytes: int
    singles: int
    """Number of one-block operations in a turn."""

    keys: int
    """Number of keys in a look-up; the store has the first half of them."""

    rounds: int

    directory: str
    """Empty directory on the measured disk."""

    variant: str
    """Way to run the store; each store has its own words."""

    @property
    def held_bytes(self) -> int:
        """Space for all blocks that a store with deletion has at once, twice."""
        return 2 * self.block_bytes * (self.keys // 2 + self.blocks + self.singles)

    @property
    def written_bytes(self) -> int:
        """All bytes of the run."""
        return self.block_bytes * (self.keys // 2 + self.rounds * (self.blocks + self.singles))


class Store(ABC, Generic[Names]):
    """Client of a store. All methods raise on failure, such as a missing block."""

    version: str

    @abstractmethod
    def names(self, labels: Sequence[str]) -> Names:
        """Convert unique labels to the names of blocks; untimed."""

    @abstractmethod
    def put(self, names: Names, rows: Rows) -> None:
        """Store blocks from caller memory."""

    @abstractmethod
    def get(self, names: Names, rows: Rows) -> None:
        """Load blocks into caller memory."""

    @abstractmethod
    def count(self, names: Names) -> int:
        """Return the number of stored blocks."""

    def settle(self, names: Names) -> None:
        """Wait until nothing of a put goes on in the background; untimed."""

    @abstractmethod
    def forget(self, names: Names) -> None:
        """Free the space of blocks; untimed."""


class Turns(Generic[Names]):
    """Operations of the harness on a store; each returns the seconds of its repetitions."""

    def __init__(self, store: Store[Names], order: Order, memory: Rows) -> None:
        """Store half of the keys of look-ups. *memory* has twice the blocks of a batch."""
        self._store, self._order = store, order
        self._source, self._target = memory[: order.blocks], memory[order.blocks :]
        self._random = np.random.default_rng()
        self._keys = self._new_names(order.keys)
        for start in range(0, order.keys // 2, order.blocks):
            part = self._keys[start : min(start + order.blocks, order.keys // 2)]
            self._put(part, self._fresh_source()[: min(order.blocks, order.keys // 2 - start)])
        self._stored = self._new_names(0)

    def put_batch(self) -> list[float]:
        """Put a batch of new blocks; the next ``get_batch`` gets it."""
        self._stored = self._new_names(self._order.blocks)
        return [self._put(self._stored, self._fresh_source())]

    def get_batch(self) -> list[float]:
        """Get the batch."""
        self._target[:] = 0
        spent_s = _seconds(lambda: self._store.get(self._stored, self._target))
        self._verify(self._order.blocks)
        return [spent_s]

    def put_one(self) -> list[float]:
        """Put new blocks, one at a time, without a pause; the next ``get_one`` gets them."""
        count = self._order.singles
        self._stored, rows = self._new_names(count), self._fresh_source()[:count]
        ones = [(self._stored[at : at + 1], rows[at : at + 1]) for at in range(count)]
        spent_s = [_seconds(partial(self._store.put, *one)) for one in ones]
        self._store.settle(self._stored)
        return spent_s

    def get_one(self) -> list[float]:
        """Get the blocks, one at a time."""
        count = self._order.singles
        self._target[:] = 0
        ones = [(self._stored[at : at + 1], self._target[at : at + 1]) for at in range(count)]
        spent_s = [_seconds(partial(self._store.get, *one)) for one in ones]
        self._verify(count)
        return spent_s

    def look_up(self) -> list[float]:
        """Look up keys, half of them stored."""
        counts: list[int] = []
        spent_s = [
            _seconds(lambda: counts.append(self._store.count(self._keys))) for _ in range(self._order.singles)
        ]
        if set(counts) != {self._order.keys // 2}:
            raise ValueError(f"the store has {self._order.keys // 2} of the keys and found {counts}")
        return spent_s

    def _put(self, names: Names, rows: Rows) -> float:
        spent_s = _seconds(lambda: self._store.put(names, rows))
        self._store.settle(names)
        return spent_s

    def _verify(self, count: int) -> None:
        if not np.array_equal(self._source[:count], self._target[:count]):
            raise ValueError("the store returned wrong bytes")
        self._store.forget(self._stored)

    def _new_names(self, count: int) -> Names:
        return self._store.names([secrets.token_hex(16) for _ in range(count)])

    def _fresh_source(self) -> Rows:
        self._source[:] = np.frombuffer(self._random.bytes(self._source.size), np.uint8).reshape(
            self._source.shape
        )
        return self._source


def serve(open_store: Callable[[Order, Rows], AbstractContextManager[Store[Any]]]) -> None:
    """Open the store and answer requests until the end of stdin; a failure is the last answer."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    try:
        order = Order(**json.loads(sys.stdin.readline()))
        memory = block_memory(2 * order.blocks, order.block_bytes)
        with open_store(order, memory) as store:
            turns = Turns(store, order, memory)
            print(json.dumps({"version": store.version}), file=answers)
            for line in sys.stdin:
                spent_s = getattr(turns, json.loads(line)["operation"])()
                print(json.dumps({"seconds": spent_s}), file=answers)
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"failure": f"{type(error).__name__}: {error}"}), file=answers)
        raise


def block_memory(blocks: int, block_bytes: int) -> Rows:
    """Return page-aligned memory in huge pages, with all pages present."""
    mapped = mmap.mmap(-1, blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8).reshape(blocks, block_bytes)
    memory[:] = 0
    return memory


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
