"""Plain files, one for each block: written beside their final name, then renamed; a batch by four threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.peers.stores.turns import Order, Rows, Store, serve

THREADS = 4
DIRECT = "O_DIRECT"


class PlainFiles(Store[list[Path]]):
    """Directory of files; *flags* extend those of each open."""

    version = ""

    def __init__(self, directory: Path, threads: ThreadPoolExecutor, flags: int) -> None:
        self._directory, self._threads, self._flags = directory, threads, flags

    def names(self, labels: Sequence[str]) -> list[Path]:
        """Return paths."""
        return [self._directory / label for label in labels]

    def put(self, names: list[Path], rows: Rows) -> None:
        """Write files."""
        self._each(self._write, names, rows)

    def get(self, names: list[Path], rows: Rows) -> None:
        """Read files."""
        self._each(self._read, names, rows)

    def count(self, names: list[Path]) -> int:
        """Count files."""
        return sum(map(os.path.exists, names))

    def forget(self, names: list[Path]) -> None:
        """Delete files."""
        for path in names:
            path.unlink()

    def _each(self, work: Callable[[Path, Rows], None], names: list[Path], rows: Rows) -> None:
        run = map if len(names) == 1 else self._threads.map
        for _ in run(work, names, rows):
            pass

    def _write(self, path: Path, row: Rows) -> None:
        beside = path.with_suffix(".new")
        with _opened(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags) as file:
            if os.write(file, row.data) != len(row):
                raise OSError(f"the write of {path} was cut short")
        beside.replace(path)

    def _read(self, path: Path, row: Rows) -> None:
        with _opened(path, os.O_RDONLY | self._flags) as file:
            if os.readv(file, [row.data]) != len(row):
                raise OSError(f"the read of {path} was cut short")


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def _open_store(order: Order, _: Rows) -> Iterator[PlainFiles]:
    with ThreadPoolExecutor(THREADS) as threads:
        yield PlainFiles(Path(order.directory), threads, os.O_DIRECT if order.variant == DIRECT else 0)


if __name__ == "__main__":
    serve(_open_store)
