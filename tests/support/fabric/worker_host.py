"""A worker as a process of its own, which can be stopped, killed, cut off, and asked what it saw."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from tests.scenarios.soak.traffic import (
    BLOCK_BYTES,
    FREE_S,
    LAYOUT,
    POISON,
    PoisonedPool,
    content,
    hashes,
    put_all,
)
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import Ack, BlockState
from ostraca.results import GetResult, PutResult
from ostraca.settings import ClientSettings

MIB = 1 << 20
STORED = 48
"""Blocks that every worker finds or puts when it starts."""

BATCH = 24
DEADLINE_S = 1.0


@dataclass
class Seen:
    """What became of a worker's operations."""

    operations: int = 0
    wrong: int = 0
    """Blocks handed over that are not what was put, or written to without being HITs."""

    hits: int = 0
    outcomes: set[str] = field(default_factory=set)
    worst_late_s: float = 0.0
    direct: int = 0
    """Blocks that the worker read from drives itself meanwhile."""

    def add(self, other: Seen) -> None:
        self.operations += other.operations
        self.wrong += other.wrong
        self.hits += other.hits
        self.outcomes |= other.outcomes
        self.worst_late_s = max(self.worst_late_s, other.worst_late_s)


DIRECT = "direct"
"""Instead of a transport: the worker reads drives itself, and what the agent delivers crosses inline."""

MEMORY = "memory"
"""Instead of a transport: worker and agent copy blocks out of each other's memory, the rest crosses inline.

No put of such a worker uses its arena.
"""

REGIONS = "regions"
"""Instead of a transport: blocks cross inline, from and to rows of a region of the worker."""

ROWS = "rows"
"""Instead of a transport: the worker reads drives itself into rows of its region, with withheld rows."""

PUSHED = "pushed"
"""Instead of a transport: the agent moves blocks over NIXL from and to rows of a region of the worker."""

INLINE = (DIRECT, MEMORY, REGIONS, ROWS)
_PUSHED_ROWS = 640
"""Rows enough for the operations of a test while an agent has stopped, and withholds theirs."""


class WorkerHost:
    """The process, as a test sees it. Use it as a context manager."""

    def __init__(
        self, address: str | list[str], transport: str, quarantine_bytes_max: int = 128 * MIB
    ) -> None:
        self._is_direct = transport in (DIRECT, MEMORY, ROWS)
        self._gets = False
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._begun = spawn.Value("Q", 0)
        self.process = spawn.Process(
            target=_work, args=(address, transport, quarantine_bytes_max, self._begun, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self.transport: str = self._pipe.recv()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def once(self, operation: str, deadline_s: float = DEADLINE_S) -> Seen:
        """Do one operation."""
        return self._ask("once", operation, deadline_s)

    def go(self, operation: str, deadline_s: float = DEADLINE_S) -> None:
        """Do one after the other from now on; returns when some have ended and another is under way."""
        self._gets = operation == "get"
        self._pipe.send(("go", operation, deadline_s))
        self.goes_on(3)

    def goes_on(self, operations: int) -> None:
        """Wait until that many more have begun."""
        wanted = self._begun.value + operations
        until_s = time.monotonic() + 20
        while self._begun.value < wanted:
            assert time.monotonic() < until_s, "the worker does nothing more"
            time.sleep(0.001)

    def halt(self) -> Seen:
        """End what ``go`` began, after the operation under way."""
        seen = self._ask("halt")
        assert bool(seen.direct) == (self._is_direct and self._gets), seen
        return seen

    @property
    def quarantined_bytes(self) -> int:
        seen: int = self._ask("quarantined")  # type: ignore[assignment]
        return seen

    def recovers(self) -> Seen:
        """Wait until gets hit again and nothing is in quarantine; return what the last get saw.

        A worker with drives has read all blocks of that get itself.
        """
        until_s = time.monotonic() + 20
        while True:
            seen = self.once("get")
            assert seen.wrong == 0
            is_read = seen.direct == BATCH * self._is_direct
            if seen.hits == BATCH and is_read and not self.quarantined_bytes:
                return seen
            assert time.monotonic() < until_s, (seen, self.quarantined_bytes)

    def stop(self) -> int:
        """End the process in good order and return its exit code."""
        self._pipe.send(("stop",))
        self.process.join(10)
        code = self.process.exitcode
        return -1 if code is None else code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.join()
        self._pipe.close()

    def _ask(self, *request: object) -> Seen:
        self._pipe.send(request)
        assert self._pipe.poll(30), "the worker does not answer"
        answer: Seen = self._pipe.recv()
        return answer


class _Worker:
    """Does operations in any thread; in place with *rows* of a region."""

    def __init__(self, client: ostraca.Client, begun: Any, *, rows: int) -> None:
        self.volume = client.volume("v", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        self._pool = PoisonedPool(client, rows) if rows else None
        self._withholds = rows == _PUSHED_ROWS
        self._begun = begun
        self._next = itertools.count(1000 * os.getpid(), BATCH)
        self._committed = [0, BATCH]
        """First numbers of batches that can be got."""

    def do(self, operation: str, deadline_s: float) -> Seen:
        first = next(self._next) if operation == "put" else random.choice(self._committed)
        numbers = range(first, first + BATCH)
        chain = self.volume.chain(hashes(numbers), is_chained=False)
        wanted = [content(self.volume, number) for number in numbers]
        memory, given = self._memory_for(operation, wanted)
        with self._begun.get_lock():
            self._begun.value += 1
        watch = Stopwatch()
        result: GetResult | PutResult
        if operation == "put":
            result = self.volume.put(chain, source=given, deadline_s=deadline_s, ack=Ack.COMMITTED)
        else:
            result = self.volume.get(chain, into=given, deadline_s=deadline_s)
        late_s = watch.took_s - deadline_s
        if isinstance(result, GetResult) and not self._withholds:
            assert result.withheld.wait(FREE_S)
        outcomes = {f"{s.name} {r.name}" for s, r in zip(result.states, result.reasons, strict=True)}
        if outcomes == {"COMMITTED NONE"}:
            self._committed.append(first)
        is_hit = [state == BlockState.HIT and operation == "get" for state in result.states]
        if self._pool is not None:
            wrong = [
                hit and not np.array_equal(row, right)
                for row, right, hit in zip(memory, wanted, is_hit, strict=True)
            ]
            self._pool.give(given)
            return Seen(1, sum(wrong) + self._pool.take_late_rows(), sum(is_hit), outcomes, late_s)
        wrong = [
            block is not right and not np.array_equal(block, right if hit else np.full_like(right, POISON))
            for block, right, hit in zip(memory, wanted, is_hit, strict=True)
        ]
        return Seen(1, sum(wrong), sum(is_hit), outcomes, late_s)

    def _memory_for(self, operation: str, wanted: list[NDArray[np.uint8]]) -> tuple[list[Any], Any]:
        """Return memory for each block, with the block for a put, and what to pass to the operation."""
        if self._pool is None:
            memory = [block if operation == "put" else np.full_like(block, POISON) for block in wanted]
            return memory, memory
        rows, views = self._pool.take([len(block) for block in wanted])
        if operation == "put":
            for view, block in zip(views, wanted, strict=True):
                view[:] = block
        return views, rows


def drives_beside(address: str | Sequence[str]) -> str:
    """Return the pattern of the drives of ``ostraca up``, by the address of an agent."""
    first = address if isinstance(address, str) else address[0]
    return str(Path(first.removeprefix("unix://")).parent / "enclosure-*" / "drive-*.img")


def blocks_read(client: ostraca.Client) -> int:
    """Return how many blocks a client has read from drives itself."""
    direct = client.metrics().direct
    return 0 if direct is None else direct.blocks_read


def _work(address: str, transport: str, quarantine_bytes_max: int, begun: Any, pipe: Connection) -> None:
    carrier = "nixl" if transport == PUSHED else transport
    settings = ClientSettings(
        arena_bytes=32 * MIB,
        chunk_bytes=4 * MIB,
        transports=("inline",) if transport in INLINE else tuple(carrier.split(",")),
        quarantine_bytes_max=quarantine_bytes_max,
        direct_drives=(drives_beside(address),) if transport in (DIRECT, ROWS) else (),
        direct_memory=transport == MEMORY,
    )
    client = ostraca.connect(address, settings=settings)
    worker = _Worker(client, begun, rows={REGIONS: 96, ROWS: 96, PUSHED: _PUSHED_ROWS}.get(transport, 0))
    put_all(worker.volume, STORED)
    assert transport != MEMORY or not client._runtime.arena.array.any(), "the agent read them where they were"
    pipe.send(client.transport)
    begun_at = 0
    going: list[threading.Thread] = []
    seen, is_halted = Seen(), threading.Event()

    def go_on(operation: str, deadline_s: float) -> None:
        while not is_halted.is_set():
            seen.add(worker.do(operation, deadline_s))

    while (request := pipe.recv())[0] != "stop":
        match request:
            case "go", operation, deadline_s:
                seen, begun_at = Seen(), blocks_read(client)
                is_halted.clear()
                # Two, so that one is in mid transfer while the other looks at what it got.
                going = [threading.Thread(target=go_on, args=(operation, deadline_s)) for _ in range(2)]
                for thread in going:
                    thread.start()
            case "once", operation, deadline_s:
                before = blocks_read(client)
                pipe.send(replace(worker.do(operation, deadline_s), direct=blocks_read(client) - before))
            case ("halt",):
                is_halted.set()
                for thread in going:
                    thread.join()
                pipe.send(replace(seen, direct=blocks_read(client) - begun_at))
            case ("quarantined",):
                pipe.send(client.quarantined_bytes)
    client.close()
