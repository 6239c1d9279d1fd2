"""Limits of this machine without Ostraca: memory copies, O_DIRECT reads and writes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ostraca_cli.tools.bench.series import gb_per_s
from ostraca_fabric.errors import DriveError
from ostraca_fabric.model.extent import rounded_up
from ostraca_fabric.runtime.memory import HugeMemory

MIB = 1 << 20
THREADS = (1, 2, 4, 8)
PIECES_BYTES = (MIB, 4 * MIB, 8 * MIB)
_TRIALS = 3


class Memcpy:
    """Copy of a batch of blocks between two huge-page memories, in a single thread."""

    def __init__(self, *, blocks: int, block_bytes: int) -> None:
        self._bytes = blocks * block_bytes
        self._memories = [HugeMemory(self._bytes, prefault=True) for _ in range(2)]
        source, target = (
            memory.array[: self._bytes].reshape(blocks, block_bytes) for memory in self._memories
        )
        source[:] = 1
        self._pairs = list(zip(target, source, strict=True))
        self._next = itertools.cycle(self._pairs)
        self._block_bytes = block_bytes

    def turn(self) -> float:
        """Copy the batch; return GB/s."""
        return gb_per_s(self._bytes, self._copy)

    def turn_of_one(self) -> float:
        """Copy the next block of the batch; return GB/s."""
        target, source = next(self._next)
        return gb_per_s(self._block_bytes, lambda: np.copyto(target, source))

    def _copy(self) -> None:
        for target, source in self._pairs:
            np.copyto(target, source)

    def close(self) -> None:
        """Free the memory."""
        self._pairs.clear()
        self._next = itertools.cycle(self._pairs)
        for memory in self._memories:
            memory.close()


class DirectFile:
    """File of written bytes, for O_DIRECT I/O from and to huge-page memory.

    ``read`` and ``write`` move the next batch of the file. ``tune_reads`` and ``tune_writes`` choose the
    number of threads and the size of a piece. The file lies in *directory*, has no name and vanishes with the
    process. Raises DriveError if O_DIRECT is unavailable.
    """

    def __init__(self, directory: Path, *, file_bytes: int, batch_bytes: int) -> None:
        self._batch_bytes = rounded_up(batch_bytes, MIB)
        self._file_bytes = rounded_up(file_bytes, self._batch_bytes)
        self._at = 0
        self._read_shape = self._write_shape = (4, 4 * MIB)
        try:
            self._file = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600)
        except OSError as error:
            raise DriveError(
                f"files in {directory} can't be opened with O_DIRECT ({error.strerror}): "
                "measure in a directory on a disk"
            ) from error
        self._memory = HugeMemory(self._batch_bytes, prefault=True)
        self._memory.array[:] = np.random.default_rng(0).integers(0, 256, self._memory.size_bytes, np.uint8)
        self._threads = ThreadPoolExecutor(max(THREADS))
        try:
            for _ in range(self._file_bytes // self._batch_bytes):
                self.write()
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        """Return a path for opens by other processes of the same user."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file}")

    def read(self) -> float:
        """Read a batch; return GB/s."""
        return self._move(os.preadv, self._read_shape)

    def write(self) -> float:
        """Write a batch; return GB/s."""
        return self._move(os.pwritev, self._write_shape)

    def tune_reads(self) -> tuple[int, int]:
        """Find the fastest reads and use them from now on: (threads, bytes of a piece)."""
        self._read_shape = self._best(os.preadv)
        return self._read_shape

    def tune_writes(self) -> tuple[int, int]:
        """Find the fastest writes and use them from now on: (threads, bytes of a piece)."""
        self._write_shape = self._best(os.pwritev)
        return self._write_shape

    def close(self) -> None:
        """Close the file and free the memory."""
        self._threads.shutdown()
        os.close(self._file)
        self._memory.close()

    def _best(self, move: Callable[[int, list[memoryview], int], int]) -> tuple[int, int]:
        shapes = [
            (threads, piece) for threads in THREADS for piece in PIECES_BYTES if piece <= self._batch_bytes
        ]
        return max(shapes, key=lambda shape: max(self._move(move, shape) for _ in range(_TRIALS)))

    def _move(self, move: Callable[[int, list[memoryview], int], int], shape: tuple[int, int]) -> float:
        threads, piece_bytes = shape
        start, self._at = self._at, (self._at + self._batch_bytes) % self._file_bytes
        offsets = range(0, self._batch_bytes, piece_bytes)

        def run(thread: int) -> None:
            for offset in offsets[thread::threads]:
                view = self._memory.view[offset : min(offset + piece_bytes, self._batch_bytes)]
                if move(self._file, [view], start + offset) != view.nbytes:
                    raise DriveError(
                        "a read or write of the file beside the drives was cut short: is the disk full?"
                    )

        return gb_per_s(self._batch_bytes, lambda: list(self._threads.map(run, range(threads))))
