"""Reads of drives into memory of devices, by files that this test opens."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.sdk.conftest import no_thread_to_be_had

from ostraca._direct.device_reads import DRIVE_THREADS, DeviceReads
from ostraca_fabric.drives.io_engine import IoEnd
from ostraca_fabric.model.extent import PAGE_BYTES, Pieces
from ostraca_fabric.tables.digests import GOOD

PAGES = 64
NOWHERE = np.empty(0, np.uint8)
BAD_PAGE = 40


@dataclass
class Memory:
    array: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(PAGES * PAGE_BYTES, np.uint8))

    def readable(self) -> NDArray[np.uint8]:
        return self.array

    @property
    def pages(self) -> list[int]:
        """The number of the page that each page was read from."""
        found: list[int] = self.array.reshape(PAGES, PAGE_BYTES)[:, 0].tolist()
        return found


@dataclass
class Drive:
    """Pages filled with their number. A page is bad."""

    reads: list[tuple[int, int]] = field(default_factory=list)
    is_closed: bool = False

    def read(self, memory: NDArray[np.uint8], at: int, length: int, offset: int) -> None:
        first, pages = offset // PAGE_BYTES, length // PAGE_BYTES
        self.reads.append((first, pages))
        if first <= BAD_PAGE < first + pages:
            raise RuntimeError("KvikIO failure at: posix_io.hpp:\nInput/output error")
        content = np.repeat(np.arange(first, first + pages, dtype=np.uint8), PAGE_BYTES)
        memory[at : at + length] = content

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Reads:
    """Reads of one drive, and their ends."""

    drive: Drive
    reads: DeviceReads
    news: threading.Semaphore
    memory: Memory = field(default_factory=Memory)

    ended: list[tuple[IoEnd, str]] = field(default_factory=list)

    def submit(self, to: Sequence[int], pages: Sequence[int], states: NDArray[np.uint8]) -> bool:
        """Read single *pages* of the drive to pages of memory; False if the read is refused."""
        return self.reads.submit(
            7,
            Pieces(NOWHERE, places(to), places(pages), np.full(len(pages), PAGE_BYTES, np.uint32)),
            self.memory,
            states,
            lambda end, cause: self.ended.append((end, cause)),
        )

    def read(self, to: Sequence[int], pages: Sequence[int]) -> tuple[list[bool], IoEnd, str]:
        """Read pages as ``submit``; return which of them were read, and the end."""
        states = np.zeros(len(pages), np.uint8)
        assert self.submit(to, pages, states)
        assert self.news.acquire(timeout=30)
        assert not self.ended, "ends are taken"
        self.reads.take()
        end, cause = self.ended.pop()
        return (states == GOOD).tolist(), end, cause

    def is_refused(self) -> bool:
        return not self.submit([0], [3], np.zeros(1, np.uint8))


def places(pages: Sequence[int]) -> NDArray[np.int64]:
    return np.array(pages, np.int64) * PAGE_BYTES


@contextmanager
def reads_of(drive: Drive) -> Iterator[Reads]:
    news = threading.Semaphore(0)
    made = DeviceReads(lambda descriptor: drive, news.release)
    yield Reads(drive, made, news)
    made.close()


def test_pieces_are_read_together_that_are_adjacent_on_the_drive_and_in_memory() -> None:
    drive = Drive()
    with reads_of(drive) as reads:
        assert reads.read([2, 3, 5, 4, 6], [10, 11, 12, 13, 15]) == ([True] * 5, IoEnd(0, 15 * 4096, 0), "")
        assert reads.memory.pages[:8] == [0, 0, 10, 11, 13, 12, 15, 0]
        assert drive.reads == [(10, 2), (12, 1), (13, 1), (15, 1)]
    assert drive.is_closed
    assert "ostraca-gpu" not in {each.name for each in threading.enumerate()}


def test_a_failure_after_a_success_is_one_of_the_drive_and_tells_where() -> None:
    with reads_of(Drive()) as reads:
        assert reads.read([0, 1, 2], [3, BAD_PAGE, 50]) == (
            [True, False, False],
            IoEnd(1, BAD_PAGE * PAGE_BYTES, 0),
            "RuntimeError: KvikIO failure at: posix_io.hpp: Input/output error",
        )
        assert reads.reads.is_usable
        assert reads.read([1], [9])[0] == [True]


def test_a_first_failure_ends_all_reads_and_blames_no_drive(caplog: pytest.LogCaptureFixture) -> None:
    with reads_of(Drive()) as reads:
        assert reads.read([0, 1], [BAD_PAGE, 3]) == ([False] * 2, IoEnd(0, BAD_PAGE * PAGE_BYTES, 0), "")
        assert not reads.reads.is_usable
        assert reads.is_refused()
        assert reads.drive.reads == [(BAD_PAGE, 1)]
    [line] = caplog.messages
    assert line.endswith("failed: RuntimeError: KvikIO failure at: posix_io.hpp: Input/output error")


def test_without_a_thread_reads_are_refused_until_there_is_one() -> None:
    with reads_of(Drive()) as reads:
        with no_thread_to_be_had("ostraca-gpu"):
            assert reads.is_refused()
        assert reads.read([0], [3])[0] == [True]
        names = [each.name for each in threading.enumerate()]
        assert names.count("ostraca-gpu") == DRIVE_THREADS
