"""Agent's reads out of the memory of a worker on its host, for puts.

The kernel copies the bytes, and names the process: a worker can't have this agent read another one. Threads
of this module copy and check blocks, a few for each worker, so that a worker with slow memory delays no
other. Their work is in C, without the interpreter lock. Blocks of a failed copy stay unchecked, and are not
stored.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.extent import cut_by_bytes
from ostraca_fabric.runtime.process_memory import ProcessBlocks, copy_verified, shows_proof
from ostraca_fabric.runtime.threads import show_name
from ostraca_fabric.tables.digests import TagCheck
from ostraca_fabric.wire.messages import WorkerMemory

log = logging.getLogger(__name__)

_THREADS = 2
"""Threads of a worker."""

_PARTS = 2 * _THREADS
"""Parts of large fetches: a delayed thread leaves some to the other."""

_PART_BYTES_MIN = 2 << 20
"""A part worth another thread."""


class WorkerMemoryReader:
    """Reader of one worker's memory. Use on the event loop's thread only, and close it."""

    def __init__(self, process: int) -> None:
        """Read from *process*. Raises RuntimeError if no thread can start."""
        self._process = process
        self._is_closed = False
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        try:
            for _ in range(_THREADS):
                threading.Thread(
                    target=_serve, args=(self._waiting,), name="ostraca-read", daemon=True
                ).start()
        except RuntimeError:
            self.close()
            raise

    @classmethod
    async def of(cls, process: int, offer: WorkerMemory) -> WorkerMemoryReader | None:
        """Return a reader of the worker that made an offer, or None if this agent may not read it.

        *process* is the worker according to the kernel, 0 if unknown. Slow memory delays no other connection.
        """
        why = "another process namespace hides it"
        try:
            if process:
                reader = cls(process)
                why = await reader._why_not(offer)
                if not why:
                    return reader
                reader.close()
        except RuntimeError as error:
            why = str(error)
        log.info("The memory of worker process %d is not read: %s", process, why)
        return None

    async def _why_not(self, offer: WorkerMemory) -> str:
        """Read the proof in a thread; return why this agent can't, or the empty string."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[str] = loop.create_future()

        def tell(why: str) -> None:
            if not found.done():
                found.set_result(why)

        def look() -> None:
            try:
                is_shown = shows_proof(self._process, offer.proof_address, offer.proof)
                why = "" if is_shown else "its proof is not there"
            except OSError as error:
                why = str(error)
            with suppress(RuntimeError):  # the loop is closed: no caller waits
                loop.call_soon_threadsafe(tell, why)

        self._waiting.put(look)
        return await found

    def fetch(self, check: TagCheck, addresses: NDArray[np.uint64]) -> MemoryFetch:
        """Start copying the blocks of *check* from *addresses*, and checking each: shape (n,).

        After ``close``, nothing is copied.
        """
        fetch = MemoryFetch(check, ProcessBlocks(self._process, addresses))
        for _ in range(fetch.start(0 if self._is_closed else _THREADS)):
            self._waiting.put(fetch.copy_parts)
        return fetch

    def close(self) -> None:
        """Begin no other fetch. Those under way end by themselves."""
        if not self._is_closed:
            self._is_closed = True
            for _ in range(_THREADS):
                self._waiting.put(None)


def _serve(waiting: SimpleQueue[Callable[[], None] | None]) -> None:
    show_name("read")
    while (act := waiting.get()) is not None:
        act()


class MemoryFetch:
    """Blocks on their way out of a worker's memory: implements ``ports.transport.BlockStream``."""

    def __init__(self, check: TagCheck, source: ProcessBlocks) -> None:
        """Prepare, on the running loop. The columns must not change until the end."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._check = check
        self._source = source
        self._changed = threading.Lock()
        part_bytes = max(_PART_BYTES_MIN, int(check.lengths.sum(dtype=np.int64)) // _PARTS)
        self._left = deque(cut_by_bytes(check.lengths, part_bytes))
        self._copied: list[slice] = []
        """Parts under way."""

        self._threads = 0

    def start(self, threads_max: int) -> int:
        """Return the number of threads to call ``copy_parts`` in, once each."""
        self._threads = min(threads_max, len(self._left))
        if not self._threads:
            self._end()
        return self._threads

    def stop(self) -> NDArray[np.intp]:
        """Begin no further block; return the rows of the parts under way."""
        self._source.stop[0] = 1
        with self._changed:
            self._left.clear()
            return np.concatenate(
                (np.empty(0, np.intp), *(np.arange(each.start, each.stop) for each in self._copied))
            )

    def copy_parts(self) -> None:
        """Copy and check until no part is left."""
        try:
            while (rows := self._take()) is not None:
                self._copy(rows)
                with self._changed:
                    self._copied.remove(rows)
        except OSError as error:
            log.warning("Blocks can't be read from a worker's memory: %s", error.strerror)
            self.stop()
        except Exception:
            log.exception("a copy out of a worker's memory crashed; this is a bug in Ostraca")
            self.stop()
        with self._changed:
            self._threads -= 1
            is_last = not self._threads
        if is_last:
            with suppress(RuntimeError):  # the loop is closed: no caller waits
                self._loop.call_soon_threadsafe(self._end)

    def _copy(self, rows: slice) -> None:
        """Copy and check blocks, so that a block noted as GOOD has no foreign bytes behind the end."""
        check, pieces = self._check, self._check.pieces
        columns = (pieces.memory_offsets, check.lengths, check.seeds, check.tags, check.states)
        copy_verified(self._source, rows, pieces.memory, *columns)

    def _take(self) -> slice | None:
        with self._changed:
            if not self._left:
                return None
            self._copied.append(rows := self._left.popleft())
            return rows

    def _end(self) -> None:
        self.ended.set_result(None)
