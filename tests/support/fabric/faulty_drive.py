"""A real drive that does one kind of wrong while it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.tables.digests import TagCheck

Ends = NDArray[np.bool_]
Result = TypeVar("Result")

BLOCK_BYTES = 64 * 1024
"""Blocks have this size here, so that writes of data are told from writes of summaries."""

ASIDE_BYTES = 16 << 20
"""How far from its place a misdirected write lands; nothing else lies there."""


class Fault(Enum):
    """What the drive does wrong."""

    NONE = auto()
    READ_FAILS = auto()
    READ_IS_SHORT = auto()
    READ_HANGS = auto()
    WRITE_FAILS = auto()
    """As with EIO and ENOSPC: nothing is written."""
    WRITE_HANGS = auto()
    WRITE_IS_TORN = auto()
    """Half of each block arrives, and the drive says that all of it did."""
    WRITE_GOES_ASTRAY = auto()
    FLUSH_FAILS = auto()


class FaultyDrive:
    """Implements ``ports.drive.Drive`` around another one."""

    refuses_reads = False
    refuses_writes = False
    reads_given_up = writes_given_up = None

    def __init__(self, drive: Drive, *, is_file: bool = False) -> None:
        """*is_file*: whether the fabric is to know that it is one; else it stands for flash."""
        self.id = drive.id
        self.size_bytes = drive.size_bytes
        self.has_volatile_cache = True
        self.is_file = is_file
        self.fault = Fault.NONE
        self._drive = drive
        self._held: list[Callable[[], None]] = []

    @property
    def queued(self) -> int:
        return self._drive.queued + len(self._held)

    def submit_read(self, pieces: Pieces, check: TagCheck | None = None) -> asyncio.Future[Ends]:
        if self.fault is Fault.READ_FAILS:
            return soon(np.zeros(len(pieces), np.bool_))
        if self.fault is Fault.READ_HANGS:
            return self._hold(lambda: self._drive.submit_read(pieces, check))
        if self.fault is Fault.READ_IS_SHORT:
            half = slice(0, len(pieces) // 2)
            some, ends = pieces.some(half), np.zeros(len(pieces), np.bool_)
            if check is None:
                return extended(self._drive.submit_read(some), ends)
            part = TagCheck(some, check.lengths[half], check.seeds[half], check.tags[half])
            read = self._drive.submit_read(some, part)
            read.add_done_callback(lambda _: check.states.__setitem__(half, part.states))
            return extended(read, ends)
        return self._drive.submit_read(pieces, check)

    def submit_write(self, pieces: Pieces) -> asyncio.Future[Ends]:
        if self.fault is Fault.WRITE_FAILS:
            return soon(np.zeros(len(pieces), np.bool_))
        if self.fault is Fault.WRITE_HANGS:
            return self._hold(lambda: self._drive.submit_write(pieces))
        if len(pieces) and int(pieces.lengths.min()) >= BLOCK_BYTES:
            offsets, lengths = pieces.drive_offsets, pieces.lengths
            if self.fault is Fault.WRITE_IS_TORN:
                lengths = lengths // np.uint32(2)
            elif self.fault is Fault.WRITE_GOES_ASTRAY:
                offsets = offsets + ASIDE_BYTES
            pieces = Pieces(pieces.memory, pieces.memory_offsets, offsets, lengths)
        return self._drive.submit_write(pieces)

    def submit_flush(self) -> asyncio.Future[bool]:
        return soon(False) if self.fault is Fault.FLUSH_FAILS else self._drive.submit_flush()

    def submit_look(self) -> asyncio.Future[str | None]:
        return self._drive.submit_look()

    def mend(self) -> None:
        """Do well from now on, and end what hangs. On the fabric's loop."""
        self.fault = Fault.NONE
        held, self._held = self._held, []
        for act in held:
            act()

    def close(self) -> None:
        self._drive.close()

    def _hold(self, submit: Callable[[], asyncio.Future[Ends]]) -> asyncio.Future[Ends]:
        outer: asyncio.Future[Ends] = asyncio.get_running_loop().create_future()
        self._held.append(lambda: submit().add_done_callback(lambda inner: outer.set_result(inner.result())))
        return outer


def soon(result: Result) -> asyncio.Future[Result]:
    """Return a future that gives this in a later turn of the loop, as an I/O does."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    loop.call_soon(future.set_result, result)
    return future


def extended(some: asyncio.Future[Ends], ends: Ends) -> asyncio.Future[Ends]:
    """Return a future that gives *ends*, with *some* for the first of them."""
    future: asyncio.Future[Ends] = asyncio.get_running_loop().create_future()

    def end(inner: asyncio.Future[Ends]) -> None:
        ends[: len(inner.result())] = inner.result()
        future.set_result(ends)

    some.add_done_callback(end)
    return future
