"""Tasks: the plug-ins without any LMCache version.

LMCache's threads submit tasks, and a thread of the plug-in receives the results from the fabric. The thread
signals one of three event descriptors, and the controllers of LMCache's server then take the results; or the
thread calls a function. A failure of the fabric is a miss, or a dropped store. Every task ends by its
deadline.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from ostraca.client import Client
from ostraca.connectors.lmcache.objects import (
    L2Object,
    LayoutTable,
    ObjectLayout,
    ObjectName,
    block_hashes,
    blocks_of,
    run_of,
)
from ostraca.connectors.lmcache.settings import LmcacheSettings
from ostraca.connectors.transfers.counters import LOAD_BYTES, LOOKUP_CHUNKS, ConnectorCounters
from ostraca.connectors.transfers.fabric_link import FabricLink
from ostraca.connectors.transfers.jobs import RowJob
from ostraca.connectors.transfers.operations import Ended, FabricOperations
from ostraca_fabric.runtime.threads import show_name

log = logging.getLogger(LmcacheSettings.LOGGER)

_START_POLL_S = 0.01


class TaskKind(Enum):
    """Kind of a task; each has its own event descriptor."""

    STORE = auto()
    LOOKUP = auto()
    LOAD = auto()


@dataclass(slots=True)
class L2Task:
    """Task under way: the blocks of each object, and the blocks known to be good."""

    number: int
    kind: TaskKind
    hashes: list[Sequence[bytes]]
    """Hashes of each object's blocks; empty for an object without an attempt."""

    sizes_bytes: list[int]
    pending: set[bytes] = field(default_factory=set)
    """Blocks of a lookup without an answer."""

    good: set[bytes] = field(default_factory=set)

    def outcome(self) -> list[bool]:
        """Return the success of each object: all of its blocks are good."""
        return [bool(hashes) and self.good.issuperset(hashes) for hashes in self.hashes]


class MemoryRows:
    """Memory of the blocks of jobs under way, by row. Rows differ in size."""

    row_bytes = 0

    def __init__(self) -> None:
        self._memory: dict[int, NDArray[np.uint8]] = {}
        self._rows_of_job: dict[int, range] = {}
        self._next = 0

    def add(self, job_id: int, memory: Sequence[NDArray[np.uint8]]) -> tuple[int, ...]:
        """Return rows for the blocks of a job."""
        rows = range(self._next, self._next + len(memory))
        self._next = rows.stop
        self._rows_of_job[job_id] = rows
        self._memory.update(zip(rows, memory, strict=True))
        return tuple(rows)

    def blocks(self, rows: Sequence[int]) -> Sequence[NDArray[np.uint8]]:
        """Return the memory of rows."""
        return [self._memory[row] for row in rows]

    def remove(self, job_id: int) -> None:
        """Forget the memory of an ended job."""
        for row in self._rows_of_job.pop(job_id):
            del self._memory[row]


class L2Tasks:
    """Tasks of one LMCache server or engine. Thread-safe. ``close`` must be called."""

    def __init__(
        self, settings: LmcacheSettings, *, hash_seed: str = "", clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Connect in the background, after ``start_wait_s`` at most.

        A *hash_seed* is compared with the other engines' seed, and a difference is logged. Raises UsageError
        for a ``weights_file`` that can't be read.
        """
        layout = settings.layout()
        self._block_bytes = settings.block_bytes
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._is_closed = False
        self._next_number = 0
        self._rows = MemoryRows()
        self._layouts = LayoutTable(entries_max=settings.layouts_max)
        self._transfers: dict[int, L2Task] = {}
        self._lookups: dict[bytes, list[L2Task]] = {}
        """Lookups under way, by block."""
        self._receivers: dict[int, Callable[[list[bool]], None]] = {}
        self._results: dict[TaskKind, dict[int, list[bool]]] = {kind: {} for kind in TaskKind}
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self.descriptors = {kind: os.eventfd(0, flags) for kind in TaskKind}
        """Event descriptors, signalled when results can be taken."""
        self._wake = os.eventfd(0, flags)
        self._watched: Client | None = None
        self._link = FabricLink(settings, block_bytes=settings.block_bytes, layout=None)
        self._link.switch_layout(layout, hash_seed=hash_seed)
        self._operations = FabricOperations(
            self._link, settings, self._rows, tokens_per_chunk={}, clock_s=clock_s
        )
        self._thread = threading.Thread(target=self._receive, name="ostraca-l2", daemon=True)
        self._thread.start()
        until_s = clock_s() + settings.start_wait_s
        while self.read_refusal and clock_s() < until_s:
            threading.Event().wait(_START_POLL_S)

    @property
    def counters(self) -> ConnectorCounters:
        """Counts so far."""
        return self._operations.counters

    @property
    def read_refusal(self) -> str:
        """Reason against lookups and loads now, such as ``no_fabric``; empty if allowed."""
        return self._operations.health.read_refusal

    def store(self, names: Sequence[ObjectName], objects: Sequence[L2Object | None]) -> int:
        """Start to store objects; return the task's number. None stands for an object without memory."""
        return self._transfer(TaskKind.STORE, names, objects)

    def load(self, names: Sequence[ObjectName], objects: Sequence[L2Object | None]) -> int:
        """Start to fill objects; return the task's number. Failed objects may be filled in part."""
        return self._transfer(TaskKind.LOAD, names, objects)

    def look_up(self, names: Sequence[ObjectName], layouts: Mapping[int, ObjectLayout]) -> int:
        """Start to look objects up; return the task's number.

        *layouts* is LMCache's description by group, used for objects of unknown families.
        """
        with self._lock:
            task = self._begin(TaskKind.LOOKUP)
            now_s = self._clock_s()
            for name in names:
                layout = self._layouts.layout_of(name) or layouts.get(name.object_group_id)
                hashes = block_hashes(name, layout, self._block_bytes) if layout else []
                if any(self._operations.failed_loads.holds(each, now_s) for each in hashes):
                    self.counters.add(LOOKUP_CHUNKS, "failed_load", len(hashes))
                    hashes = []
                elif not hashes:
                    self.counters.add(LOOKUP_CHUNKS, "unknown_layout")
                task.hashes.append(hashes)
            self._send_lookup(task)
            return task.number

    def call_at_end(self, kind: TaskKind, number: int, receiver: Callable[[list[bool]], None]) -> None:
        """Call *receiver* with the success of each object, once. *receiver* must not wait, nor call this."""
        with self._lock:
            if number in self._results[kind]:
                receiver(self._results[kind].pop(number))
            else:
                self._receivers[number] = receiver

    def take(self, kind: TaskKind, number: int) -> list[bool] | None:
        """Take the success of each object of an ended task, once; None if not ended."""
        with self._lock:
            return self._results[kind].pop(number, None)

    def take_all(self, kind: TaskKind) -> dict[int, list[bool]]:
        """Take the results of all ended tasks of a kind."""
        with self._lock:
            taken, self._results[kind] = self._results[kind], {}
            return taken

    def delete(self, names: Iterable[ObjectName]) -> list[int]:
        """Tell the fabric that these objects are not worth keeping; return the size of each, 0 if unknown.

        Blocks leave with their segment. Until then, lookups find the objects.
        """
        hashes: dict[bytes, None] = {}
        sizes_bytes = []
        with self._lock:
            for name in names:
                layout = self._layouts.layout_of(name)
                sizes_bytes.append(layout.size_bytes if layout else 0)
                if layout:
                    hashes.update(dict.fromkeys(block_hashes(name, layout, self._block_bytes)))
            if not self._is_closed:
                self._operations.end_session(run_of(list(hashes)))
        return sizes_bytes

    def close(self) -> None:
        """End stores under way within ``close_deadline_s``, then the connection; other tasks fail.

        Releases LMCache's memory.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        with self._lock:
            self._operations.close()
            self._deliver(self._operations.poll())
        for descriptor in (*self.descriptors.values(), self._wake):
            os.close(descriptor)

    def _begin(self, kind: TaskKind) -> L2Task:
        self._next_number += 1
        return L2Task(self._next_number, kind, [], [])

    def _transfer(
        self, kind: TaskKind, names: Sequence[ObjectName], objects: Sequence[L2Object | None]
    ) -> int:
        with self._lock:
            task = self._begin(kind)
            memory: dict[bytes, NDArray[np.uint8]] = {}
            for name, each in zip(names, objects, strict=True):
                hashes = block_hashes(name, each.layout, self._block_bytes) if each else []
                if each and hashes and hashes[0] not in memory:
                    self._layouts.learn(name, each.layout)
                    memory.update(zip(hashes, blocks_of(each.memory, self._block_bytes), strict=True))
                else:  # an object named twice in one task is moved once
                    hashes = []
                task.hashes.append(hashes)
                task.sizes_bytes.append(each.layout.size_bytes if each else 0)
            if self._is_closed or not memory:
                self._end(task)
                return task.number
            self._transfers[task.number] = task
            rows = self._rows.add(task.number, list(memory.values()))
            job = RowJob(task.number, "", tuple(memory), rows)
            move = self._operations.store if kind is TaskKind.STORE else self._operations.load
            move(job, run_of(list(memory)), [])
            self._settle()
            return task.number

    def _send_lookup(self, task: L2Task) -> None:
        hashes = list(dict.fromkeys(each for hashes in task.hashes for each in hashes))
        refusal = self._lookup_refusal()
        if not refusal and hashes and not self._operations.submit_lookup(run_of(hashes)):
            refusal = "not_submitted"
        if refusal or not hashes:
            self.counters.add(LOOKUP_CHUNKS, refusal, len(hashes))
            self._end(task)
            return
        task.pending.update(hashes)
        for each in hashes:
            self._lookups.setdefault(each, []).append(task)
        self._settle()

    def _lookup_refusal(self) -> str:
        if self._is_closed:
            return "closed"
        return self._operations.health.read_refusal or (
            "" if self._operations.can_submit_lookup else "too_many"
        )

    def _settle(self) -> None:
        """Deliver the results of refused pieces at once, and let the thread watch a new client."""
        self._deliver(self._operations.poll())
        if self._watched is not self._link.client:
            os.eventfd_write(self._wake, 1)

    def _deliver(self, ended: Ended) -> None:
        for each, is_there in ended.answers:
            for task in self._lookups.pop(each, ()):
                task.pending.discard(each)
                if is_there:
                    task.good.add(each)
                if not task.pending:
                    self._end(task)
        for job in ended.jobs:
            self._rows.remove(job.job_id)
            task = self._transfers.pop(job.job_id)
            task.good.update(job.succeeded)
            self._end(task)

    def _end(self, task: L2Task) -> None:
        outcome = task.outcome()
        if task.kind is TaskKind.LOAD:
            loaded_bytes = sum(
                size for size, is_good in zip(task.sizes_bytes, outcome, strict=True) if is_good
            )
            self.counters.add(LOAD_BYTES, count=loaded_bytes)
        if receiver := self._receivers.pop(task.number, None):
            try:
                receiver(outcome)
            except Exception:
                log.exception("Ostraca: LMCache failed at the end of a %s", task.kind.name.lower())
            return
        self._results[task.kind][task.number] = outcome
        if not self._is_closed:
            os.eventfd_write(self.descriptors[task.kind], 1)

    def _receive(self) -> None:
        """Deliver results as they come, until ``close``."""
        show_name("l2")
        while True:
            client = self._watched = self._link.client
            waiting = select.poll()
            waiting.register(self._wake, select.POLLIN)
            if client is not None:
                waiting.register(client.fileno(), select.POLLIN)
            if self._wake in dict(waiting.poll()):
                os.eventfd_read(self._wake)
            with self._lock:
                if self._is_closed:
                    return
                self._deliver(self._operations.poll())
