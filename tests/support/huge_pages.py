"""Huge pages of this machine, reserved for a test where that is allowed."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

_COUNT = Path("/proc/sys/vm/nr_hugepages")
_FREE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


class HugePages:
    """Pool of this machine's kernel. Skips a test whose pages it can't reserve."""

    def reserve(self, count: int) -> None:
        """Have so many pages, all of them free."""
        try:
            _COUNT.write_text(f"{count}\n")
        except OSError as error:
            pytest.skip(f"huge pages can't be reserved here: {error}")
        if (self.count, self.free) != (count, count):
            pytest.skip(f"the kernel has {self.free} of {count} huge pages")

    @property
    def count(self) -> int:
        return int(_COUNT.read_text())

    @property
    def free(self) -> int:
        return int(_FREE.read_text())


@pytest.fixture
def huge_pages() -> Iterator[HugePages]:
    """Give the pool back as it was."""
    if not _FREE.exists():
        pytest.skip("this kernel has no huge pages of 2 MiB")
    pool = HugePages()
    with _COUNT.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # a test of another process has the pool meanwhile
        before = pool.count
        if before:
            pytest.skip(f"{before} huge pages are reserved already, perhaps for others")
        yield pool
        if pool.count != before:
            _COUNT.write_text(f"{before}\n")
