"""Reads of drives into memory of a device, such as a GPU, and the port to files that can be read there.

``ostraca._direct.kvikio_file`` is the adapter. Each drive has threads of its own, so a hung drive holds no
other drive up. A read keeps its memory alive until its end, however late. Ends are taken by ``take``, in the
thread of ``DirectReader``.

If the first read of all fails, no drive is read into devices any more: the library can't do it here. A later
failure is one of the drive.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.drives.io_engine import IoEnd
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.runtime.threads import show_name
from ostraca_fabric.tables.digests import GOOD

log = logging.getLogger("ostraca")

DRIVE_THREADS = 4
"""Reads under way on a drive."""


class DeviceMemory(Protocol):
    """Memory of a device, as ``ostraca._memory.device_blocks.DeviceStaging`` has it."""

    def readable(self) -> Any:  # noqa: ANN401 (the library's own view of memory)
        """Return the memory for this thread's reads, once all earlier uses of the memory have ended.

        Raises an error of the device.
        """


class DeviceFile(Protocol):
    """Drive that can be read into device memory. Thread-safe."""

    def read(self, memory: Any, at: int, length: int, offset: int) -> None:  # noqa: ANN401 (of DeviceMemory)
        """Read whole pages from *offset* on to position *at* of *memory*, and wait for the end.

        All arguments are in bytes. Raises an error unless all bytes were read. Nothing lands later.
        """

    def close(self) -> None:
        """Close the file. No read may be under way."""


OpenFile = Callable[[int], DeviceFile]
"""Opens the drive of an open descriptor, which stays open. Raises an error."""

Ended = Callable[[IoEnd, str], None]
"""Takes the end of a batch, and the cause of a failure."""


@dataclass(slots=True, eq=False)
class _Lane:
    """Threads of one drive."""

    descriptor: int
    batches: SimpleQueue[Callable[[], None] | None] = field(default_factory=SimpleQueue)
    threads: list[threading.Thread] = field(default_factory=list)
    opening: threading.Lock = field(default_factory=threading.Lock)
    file: DeviceFile | None = None


class DeviceReads:
    """Reads of all drives. ``submit``, ``take`` and ``close`` must not run at the same time as themselves."""

    def __init__(self, open_file: OpenFile, wake: Callable[[], None]) -> None:
        """Begin without a thread. *wake* has ``take`` called soon; from any thread."""
        self._open_file = open_file
        self._wake = wake
        self._lanes: dict[int, _Lane] = {}
        self._ended: SimpleQueue[tuple[Ended, IoEnd, str]] = SimpleQueue()
        self._has_read = False
        self.is_usable = True
        """False after a failed first read."""

    def submit(
        self,
        descriptor: int,
        pieces: Pieces,
        memory: DeviceMemory,
        states: NDArray[np.uint8],
        end: Ended,
    ) -> bool:
        """Submit pieces in drive order, whose own memory is not used; False for a refused batch.

        States of read pieces become ``GOOD``. Then *end* is called, by ``take``.
        """
        lane = self._lanes.setdefault(descriptor, _Lane(descriptor))
        if not self.is_usable or not self._has_threads(lane):
            return False
        lane.batches.put(partial(self._read, lane, pieces, memory, states, end))
        return True

    def take(self) -> None:
        """Report batches that have ended."""
        while True:
            try:
                end, result, cause = self._ended.get_nowait()
            except Empty:
                return
            end(result, cause)

    def close(self) -> None:
        """End the threads, and close the files. No read may be under way."""
        for lane in self._lanes.values():
            for _ in lane.threads:
                lane.batches.put(None)
            for thread in lane.threads:
                thread.join()
            if lane.file is not None:
                lane.file.close()

    def _has_threads(self, lane: _Lane) -> bool:
        """Start the threads of a drive; False where the process may have none."""
        while len(lane.threads) < DRIVE_THREADS:
            thread = threading.Thread(target=self._run, args=(lane,), name="ostraca-gpu", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            lane.threads.append(thread)
        return bool(lane.threads)

    # In a thread of a drive.

    def _run(self, lane: _Lane) -> None:
        show_name("gpu")
        while self._goes_on(lane):
            pass

    def _goes_on(self, lane: _Lane) -> bool:
        """Read one batch, and keep nothing of it; False at the end."""
        read = lane.batches.get()
        if read is None:
            return False
        read()
        del read
        self._wake()
        return True

    def _read(
        self, lane: _Lane, pieces: Pieces, memory: DeviceMemory, states: NDArray[np.uint8], end: Ended
    ) -> None:
        failed, cause, offset = 0, "", int(pieces.drive_offsets[0])
        try:
            readable, file = memory.readable(), self._file(lane)
            for some in _runs(pieces):
                offset = int(pieces.drive_offsets[some.start])
                at, length = int(pieces.memory_offsets[some.start]), int(pieces.lengths[some].sum())
                file.read(readable, at, length, offset)
                self._has_read = True
                states[some] = GOOD
        except Exception as error:  # noqa: BLE001 (of a library: it may be anything)
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            failed = int(self._has_read)
            if not failed and self.is_usable:
                self.is_usable = False
                log.warning("No drive is read into GPU memory, as the first read failed: %s", cause)
        self._ended.put((end, IoEnd(failed, offset, 0), cause if failed else ""))

    def _file(self, lane: _Lane) -> DeviceFile:
        with lane.opening:
            if lane.file is None:
                lane.file = self._open_file(lane.descriptor)
            return lane.file


def _runs(pieces: Pieces) -> Iterator[slice]:
    """Yield pieces that are adjacent on the drive and in memory."""
    lengths = pieces.lengths[:-1]
    is_apart = (np.diff(pieces.drive_offsets) != lengths) | (np.diff(pieces.memory_offsets) != lengths)
    for first, last in pairwise([0, *(np.flatnonzero(is_apart) + 1).tolist(), len(pieces)]):
        yield slice(first, last)
