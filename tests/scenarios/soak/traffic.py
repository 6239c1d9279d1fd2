"""Random operations of one worker whose every answer is checked.

A HIT must be what was put, byte for byte, anything else must leave the caller's memory alone, and the end
must come by the deadline.

What a block holds follows from its tenant, volume and number alone, so any worker can check what any other
has put. The same hash names different bytes in each volume.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ostraca
from ostraca import Ack, BlockState, PutState
from ostraca._memory.regions import RegionRows

LAYOUT = ostraca.Layout(model="soak", dtype="bf16", page_tokens=16)
BLOCK_BYTES = 128 * 1024
FREE_S = 10.0
"""Time for late reads of drives into rows to end."""

POISON = 0xEE
DEADLINES_S = (0.02, 0.1, 0.5, 2.0)


def content(volume: Any, number: int) -> NDArray[np.uint8]:
    """Return a block's bytes, not to be written to."""
    return _content(f"{volume.tenant}/{volume.name}/{number}", length_of(number))


@functools.lru_cache(64)
def _content(name: str, length: int) -> NDArray[np.uint8]:
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    return np.frombuffer(np.random.default_rng(seed).bytes(length), np.uint8)


def length_of(number: int) -> int:
    """Lengths differ from block to block."""
    return BLOCK_BYTES - number % 7 * 1000


def hashes(numbers: Sequence[int]) -> list[bytes]:
    return [hashlib.blake2b(str(number).encode(), digest_size=32).digest() for number in numbers]


class PoisonedPool:
    """A region whose rows hold POISON but for the time of an operation: what lands later is found.

    Thread-safe.
    """

    def __init__(self, client: ostraca.Client, rows: int = 96) -> None:
        self._memory = np.frombuffer(mmap.mmap(-1, rows * BLOCK_BYTES), np.uint8).reshape(rows, BLOCK_BYTES)
        self._memory[:] = POISON
        self._region = client.register(self._memory, may_withhold=True)
        self._lock = threading.Lock()
        self._free = deque(range(rows))
        self._owed: list[int] = []
        """Rows that were withheld when given back."""

        self._late_rows = 0

    def take(self, lengths: Sequence[int]) -> tuple[RegionRows, list[NDArray[np.uint8]]]:
        """Return rows for blocks of these lengths, those free for longest, and the memory of each block."""
        with self._lock:
            self._take_back([])
            numbers = [self._free.popleft() for _ in lengths]
            self._late_rows += int((self._memory[numbers] != POISON).any(axis=1).sum())
        views = [self._memory[number, :length] for number, length in zip(numbers, lengths, strict=True)]
        return self._region.rows(numbers, lengths=lengths), views

    def give(self, rows: RegionRows) -> None:
        """Take rows back after the end of their operation, and withheld rows later."""
        with self._lock:
            self._take_back(rows.numbers.tolist())

    def _take_back(self, numbers: list[int]) -> None:
        withheld = {*self._region.withheld}
        owed = self._owed + numbers
        back = [number for number in owed if number not in withheld]
        self._owed = [number for number in owed if number in withheld]
        self._memory[back] = POISON
        self._free.extend(back)

    def take_late_rows(self) -> int:
        """Return the number of rows with bytes that landed after an end, since the last call."""
        with self._lock:
            late, self._late_rows = self._late_rows, 0
            return late + int((self._memory[list(self._free)] != POISON).any(axis=1).sum())


@dataclass(frozen=True, slots=True)
class Overdue:
    """An operation that ended after its deadline; times on the machine's monotonic clock."""

    operation: str
    begun_s: float
    deadline_s: float
    took_s: float
    stalled_s: float
    """How long threads of the process were ready to run meanwhile, and did not: the machine's doing."""


@dataclass(slots=True)
class Tally:
    """What became of the operations of a worker."""

    operations: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    """Blocks by operation, state and reason."""

    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    overdue: list[Overdue] = field(default_factory=list)
    verified: int = 0
    """Blocks handed over and found to be what was put."""

    def add(self, other: Tally) -> None:
        """Count what another counted, too."""
        self.operations.update(other.operations)
        self.outcomes.update(other.outcomes)
        self.errors.update(other.errors)
        self.wrong += other.wrong
        self.overdue += other.overdue
        self.verified += other.verified


class Traffic:
    """Operations on volumes of one client, in one thread."""

    def __init__(
        self,
        volumes: Sequence[Any],
        *,
        seed: int | Sequence[int],
        blocks: int = 64,
        batch_max: int = 12,
        stalls: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Work on *volumes* (of any shell), with *blocks* different blocks each.

        *stalls* says of each thread how long it has been ready to run, and did not.
        """
        self.tally = Tally()
        self._stalls = stalls
        self._volumes = volumes
        self._dice = np.random.default_rng(seed)
        self._blocks = blocks
        self._batch_max = batch_max
        self._steps: list[Callable[[Any, list[int], float], Any]] = [
            self._put,
            self._put,
            self._get,
            self._get,
            self._get,
            self._views,
            self._lookup,
            self._prefetch,
        ]

    def step(self) -> None:
        """Do one operation, and check it."""
        volume = self._volumes[int(self._dice.integers(len(self._volumes)))]
        count = int(self._dice.integers(1, self._batch_max + 1))
        first = int(self._dice.integers(0, self._blocks))
        numbers = [(first + n) % self._blocks for n in range(count)]
        deadline_s = float(self._dice.choice(DEADLINES_S))
        step = self._steps[int(self._dice.integers(len(self._steps)))]
        operation = step.__name__.strip("_")
        prepared = step(volume, numbers, deadline_s)
        stalls, begun_s = self._stalls(), time.monotonic()
        try:
            result = prepared()
        except ostraca.OstracaError as error:
            self.tally.errors[f"{operation} {type(error).__name__}: {str(error)[:120]}"] += 1
            return
        finally:
            took_s = time.monotonic() - begun_s
            self.tally.operations[operation] += 1
            if took_s > deadline_s:
                stalled_s = sum(at_s - stalls.get(thread, 0.0) for thread, at_s in self._stalls().items())
                self.tally.overdue.append(Overdue(operation, begun_s, deadline_s, took_s, stalled_s))
        outcome = result.result if operation == "views" else result
        for state, reason in zip(outcome.states, outcome.reasons, strict=True):
            self.tally.outcomes[f"{operation} {state.name} {reason.name}"] += 1
        if operation == "get":
            self._check(volume, numbers, result.states, prepared.into)
        elif operation == "views":
            with result:
                self._check_views(volume, numbers, result)

    def _put(self, volume: Any, numbers: list[int], deadline_s: float) -> Callable[[], Any]:
        source = [content(volume, number).copy() for number in numbers]
        ack = Ack.COMMITTED if self._dice.random() < 0.5 else Ack.STAGED
        chain = volume.chain(hashes(numbers), is_chained=False)

        def put() -> Any:
            result = volume.put(chain, source=source, deadline_s=deadline_s, ack=ack)
            for block in source:
                block[:] = POISON  # the caller's memory is its own again, whatever became of the put
            return result

        return put

    def _get(self, volume: Any, numbers: list[int], deadline_s: float) -> Callable[[], Any]:
        into = [np.full(length_of(number), POISON, np.uint8) for number in numbers]
        return _Get(volume, volume.chain(hashes(numbers), is_chained=False), into, deadline_s)

    def _views(self, volume: Any, numbers: list[int], deadline_s: float) -> Callable[[], Any]:
        lengths = [length_of(number) for number in numbers]
        chain = volume.chain(hashes(numbers), is_chained=False)
        return lambda: volume.get_views(chain, lengths=lengths, deadline_s=deadline_s)

    def _lookup(self, volume: Any, numbers: list[int], deadline_s: float) -> Callable[[], Any]:
        chain = volume.chain(hashes(numbers), is_chained=False)
        return lambda: volume.lookup(chain, deadline_s=deadline_s)

    def _prefetch(self, volume: Any, numbers: list[int], deadline_s: float) -> Callable[[], Any]:
        chain = volume.chain(hashes(numbers), is_chained=False)
        return lambda: volume.prefetch(chain, deadline_s=deadline_s)

    def _check(self, volume: Any, numbers: list[int], states: Any, into: list[NDArray[np.uint8]]) -> None:
        for number, state, block in zip(numbers, states, into, strict=True):
            if state != BlockState.HIT:
                self._note(volume, number, "written though no HIT", is_right=bool((block == POISON).all()))
            else:
                is_right = np.array_equal(block, content(volume, number))
                self._note(volume, number, "a HIT with wrong bytes", is_right=is_right)
                self.tally.verified += 1

    def _check_views(self, volume: Any, numbers: list[int], views: Any) -> None:
        for number, state, view in zip(numbers, views.result.states, views, strict=True):
            if state == BlockState.HIT:
                is_right = view is not None and view == content(volume, number).data
                self._note(volume, number, "a view of wrong bytes", is_right=is_right)
                self.tally.verified += 1

    def _note(self, volume: Any, number: int, what: str, *, is_right: bool) -> None:
        if not is_right:
            self.tally.wrong.append(f"{volume.name}/{number}: {what}")


class RegionTraffic(Traffic):
    """Traffic whose gets and puts are in place, in a pool of rows used again and again."""

    def __init__(
        self,
        client: ostraca.Client,
        volumes: Sequence[Any],
        *,
        seed: int | Sequence[int],
        blocks: int,
        stalls: Callable[[], Mapping[str, float]] = dict,
        withheld_max: int = 0,
    ) -> None:
        """Work as ``Traffic``; so many rows may be withheld at one time."""
        super().__init__(volumes, seed=seed, blocks=blocks, stalls=stalls)
        self._pool = PoisonedPool(client, rows=2 * self._batch_max + withheld_max)
        self._lent: RegionRows | None = None

    def _put(self, volume: Any, numbers: list[int], deadline_s: float) -> Callable[[], Any]:
        ack = Ack.COMMITTED if self._dice.random() < 0.5 else Ack.STAGED
        chain = volume.chain(hashes(numbers), is_chained=False)

        def put() -> Any:
            rows, memory = self._pool.take([length_of(number) for number in numbers])
            for row, number in zip(memory, numbers, strict=True):
                row[:] = content(volume, number)
            self._lent = rows
            return volume.put(chain, source=rows, deadline_s=deadline_s, ack=ack)

        return put

    def _get(self, volume: Any, numbers: list[int], deadline_s: float) -> Callable[[], Any]:
        self._lent, memory = self._pool.take([length_of(number) for number in numbers])
        chain = volume.chain(hashes(numbers), is_chained=False)
        return _Get(volume, chain, memory, deadline_s, self._lent)

    def _check(self, volume: Any, numbers: list[int], states: Any, into: list[NDArray[np.uint8]]) -> None:
        """Check the hits: other rows may hold anything until they are given back."""
        is_hit = [state == BlockState.HIT for state in states]
        hits = [number for number, hit in zip(numbers, is_hit, strict=True) if hit]
        super()._check(
            volume, hits, [BlockState.HIT] * len(hits), [into[at] for at in np.flatnonzero(is_hit)]
        )

    def step(self) -> None:
        """Do one operation, and check it and the rows that are in no use."""
        super().step()
        if self._lent is not None:
            self._pool.give(self._lent)
            self._lent = None
        late = self._pool.take_late_rows()
        if late:
            self.tally.wrong.append(f"{late} rows have bytes that landed after an end")


class _Get:
    """A get that keeps the memory it was given."""

    def __init__(
        self,
        volume: Any,
        chain: ostraca.Chain,
        into: list[NDArray[np.uint8]],
        deadline_s: float,
        rows: RegionRows | None = None,
    ) -> None:
        self.into = into
        self._given = into if rows is None else rows
        self._volume = volume
        self._chain = chain
        self._deadline_s = deadline_s

    def __call__(self) -> Any:
        return self._volume.get(self._chain, into=self._given, deadline_s=self._deadline_s)


def put_all(volume: ostraca.Volume, blocks: int) -> None:
    """Put every block, committed."""
    numbers = range(blocks)
    chain = volume.chain(hashes(numbers), is_chained=False)
    source = [content(volume, number) for number in numbers]
    result = volume.put(chain, source=source, deadline_s=30, ack=Ack.COMMITTED)
    assert set(result.states) <= {PutState.COMMITTED, PutState.EXISTS}, result
