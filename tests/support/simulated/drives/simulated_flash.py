"""Flash that fails as flash does, from dice: what a ``SimulatedDrive`` is a path to.

It knows what it has done to its bytes: ``owed`` says of every page that holds, by a fault of the drive alone,
something else than what was written there, what that would be. What a power cut may do to writes that were
not flushed, or not answered, is no fault, and neither is what a failed write leaves behind.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tests.support.simulated.drives.drive_faults import Befell, DriveFaults, Mishap

from ostraca_fabric.model.extent import PAGE_BYTES

SECTOR_BYTES = 512

_LANDED_REMEMBERED = 256


@dataclass(slots=True, eq=False)
class WriteUnderWay:
    """A write that was submitted, and has not ended."""

    begin: int
    parts: list[NDArray[np.uint8]]
    """Memory of the submitter, as it is when the write lands."""

    decided: int
    """Its number: that of its submission, or sooner if its submitter stood still before submitting it."""

    stop: Callable[[], None]
    """Keeps it from landing and from ending by itself."""

    fail: Callable[[], None]
    """Tells the submitter, if it lives, that the write has failed."""

    @property
    def data(self) -> NDArray[np.uint8]:
        """What is to land."""
        return np.concatenate(self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class _Cached:
    """A write in the volatile cache."""

    order: int
    begin: int
    data: NDArray[np.uint8]
    is_submitter_alive: Callable[[], bool]


class SimulatedFlash:
    """*size_bytes* of flash, and everything under way to it. All chance comes from *dice*."""

    def __init__(
        self,
        size_bytes: int,
        dice: random.Random,
        faults: DriveFaults | None = None,
        *,
        has_volatile_cache: bool = False,
    ) -> None:
        assert size_bytes % PAGE_BYTES == 0, "flash has whole pages"
        self.size_bytes = size_bytes
        self.dice = dice
        self.faults = faults or DriveFaults()
        self.has_volatile_cache = has_volatile_cache
        self.image = np.zeros(size_bytes, np.uint8)
        """What would be read now, were there no fault."""

        self.owed: dict[int, bytes] = {}
        """Pages, by number, that a fault of the drive has changed: what they should hold."""

        self.covered: dict[int, list[bytes]] = {}
        """What a page that is owed something has held since then, until another fault."""

        self.unreadable: set[int] = set()
        self.mishaps: list[Mishap] = []
        """Everything that befell, in order."""

        self.under_way: list[WriteUnderWay] = []
        self.cuts = 0
        """Power cuts so far."""

        self._durable = np.zeros(size_bytes, np.uint8) if has_volatile_cache else self.image
        self._cached: deque[_Cached] = deque()
        self._cached_count = 0
        self._submitted = 0
        self._fenced = np.full(size_bytes // PAGE_BYTES, -1, np.int64)
        self._newest = np.zeros(size_bytes // PAGE_BYTES, np.int64)
        self._landed: deque[tuple[int, int]] = deque(maxlen=_LANDED_REMEMBERED)

    def next_number(self) -> int:
        """Count a write that is submitted."""
        self._submitted += 1
        return self._submitted

    @property
    def upcoming(self) -> int:
        """The number that the next write will have."""
        return self._submitted + 1

    def fence(self, begin: int = 0, end: int | None = None) -> None:
        """Take every write that is under way now, or decided on, for late if it lands here.

        Somebody else writes here from now on.
        """
        self._fenced[begin // PAGE_BYTES : None if end is None else end // PAGE_BYTES] = self._submitted

    def is_spoilt(self, begin: int, end: int) -> bool:
        """Say whether a fault of the drive has changed any page of these bytes, or made it unreadable."""
        pages = range(begin // PAGE_BYTES, -(-end // PAGE_BYTES))
        return any(page in self.owed or page in self.unreadable for page in pages)

    def befell_since(self, mishaps: int, begin: int, end: int, *kinds: Befell) -> bool:
        """Say whether one of these kinds befell these bytes since there were so many mishaps."""
        return any(each.kind in kinds and each.touches(begin, end) for each in self.mishaps[mishaps:])

    def chance(self, of: float) -> bool:
        """Roll the dice, where there is any chance."""
        return of > 0 and self.dice.random() < of

    def read(self, begin: int, end: int, parts: list[NDArray[np.uint8]]) -> bool:
        """Read into memory; say whether that went well."""
        self._age()
        if self.chance(self.faults.read_errors) or any(
            page in self.unreadable for page in range(begin // PAGE_BYTES, end // PAGE_BYTES)
        ):
            self._note(Befell.READ_ERROR, begin, end)
            return False
        at = begin
        for part in parts:
            part[:] = self.image[at : at + len(part)]
            at += len(part)
        if self.chance(self.faults.rot_on_read):
            part = self.dice.choice(parts)
            part[self.dice.randrange(len(part))] ^= np.uint8(1 << self.dice.randrange(8))
            self._note(Befell.ROT_ON_READ, begin, end)
        return True

    def write(
        self, number: int, begin: int, data: NDArray[np.uint8], is_submitter_alive: Callable[[], bool]
    ) -> bool:
        """Land a write, or what its fate is instead; say what its submitter is told.

        *number*: which one it is, in the order in which submitters decided on them.
        """
        self._age()
        faults, end = self.faults, begin + len(data)
        if self.chance(faults.no_space):
            self._note(Befell.NO_SPACE, begin, end)
            return False
        if self.chance(faults.write_errors):
            self._note(Befell.WRITE_ERROR, begin, end)
            self.land(number, begin, data, is_submitter_alive, whole_in=SECTOR_BYTES)
            return False
        if self.chance(faults.misdirected):
            self._misdirect(begin, data, is_submitter_alive)
            return True
        self.land(number, begin, data, is_submitter_alive)
        return True

    def land(
        self,
        number: int,
        begin: int,
        data: NDArray[np.uint8],
        is_submitter_alive: Callable[[], bool],
        *,
        whole_in: int = 0,
    ) -> None:
        """Put a write where it belongs; with *whole_in*, any part of it in units of so many bytes."""
        end = begin + len(data)
        rows = slice(begin // PAGE_BYTES, end // PAGE_BYTES)
        is_late = self._is_late(number, rows)
        before = self.image[begin:end].copy() if is_late.any() or whole_in else None
        if whole_in:
            self.image[begin:end] = self._in_part(self.image[begin:end], data, whole_in)
        else:
            self.image[begin:end] = data
        if before is not None and is_late.any():
            self._owe(begin, before, Befell.LATE, where=is_late)
        if self.owed or self.unreadable:
            for page in (np.flatnonzero(~is_late) + rows.start).tolist():
                self._pay(page)
                self.unreadable.discard(page)
        self._newest[rows] = np.maximum(self._newest[rows], number)
        self._landed.append((begin, end))
        self._cache(begin, self.image[begin:end].copy() if whole_in else data, is_submitter_alive)

    def flush_mark(self) -> tuple[int, int]:
        """Return what a flush that is submitted now must make durable."""
        return self._cached_count, self.cuts

    def flush(self, mark: tuple[int, int]) -> bool:
        """Make durable what had been answered when the flush was submitted; say what is answered to it."""
        order, cuts = mark
        if self.faults.lies_about_flush:
            return True
        if cuts != self.cuts or self.chance(self.faults.write_errors):
            self._note(Befell.WRITE_ERROR, 0, 0)
            return False
        while self._cached and self._cached[0].order <= order:
            cached = self._cached.popleft()
            self._durable[cached.begin : cached.begin + len(cached.data)] = cached.data
        return True

    def power_cut(self) -> None:
        """Lose what a drive loses without power; then it goes on at once.

        What was answered and not flushed, where the cache is volatile, and what was under way, lands whole,
        in part by sectors, or not at all, in any order. Whoever waits for an I/O is told that it failed.
        """
        self.cuts += 1
        under_way, self.under_way = self.under_way, []
        open_writes = [(each.begin, each.data) for each in under_way]
        late = []
        for write, (begin, data) in zip(under_way, open_writes, strict=True):
            write.stop()
            is_late = self._is_late(
                write.decided, slice(begin // PAGE_BYTES, (begin + len(data)) // PAGE_BYTES)
            )
            if is_late.any():
                late.append((begin, self.image[begin : begin + len(data)].copy(), is_late))
        cached, answered = list(self._cached), []
        self._cached.clear()
        for each in cached:
            here = slice(each.begin, each.begin + len(each.data))
            open_writes.append((each.begin, each.data))
            if each.is_submitter_alive():
                answered.append((each.begin, self.image[here].copy()))
        self.dice.shuffle(open_writes)
        for begin, data in open_writes:
            here = slice(begin, begin + len(data))
            self._durable[here] = self._in_part(self._durable[here], data, SECTOR_BYTES)
            self._note(Befell.POWER_CUT, here.start, here.stop)
        for begin, data in open_writes:
            self.image[begin : begin + len(data)] = self._durable[begin : begin + len(data)]
        for begin, before in answered:
            self._owe(begin, before, Befell.CACHE_LOST)
        for begin, before, is_late in late:
            self._owe(begin, before, Befell.LATE, where=is_late)
        for write in under_way:
            write.fail()

    def _is_late(self, number: int, pages: slice) -> NDArray[np.bool_]:
        return (self._newest[pages] > number) | (self._fenced[pages] >= number)

    def _note(self, kind: Befell, begin: int, end: int) -> None:
        self.mishaps.append(Mishap(kind, begin, end))

    def _owe(
        self, begin: int, should_be: NDArray[np.uint8], kind: Befell, where: NDArray[np.bool_] | None = None
    ) -> None:
        """Remember what pages should hold that hold something else now."""
        wanted = should_be.reshape(-1, PAGE_BYTES)
        differs = (self.image[begin : begin + len(should_be)].reshape(-1, PAGE_BYTES) != wanted).any(axis=1)
        if where is not None:
            differs &= where
        for row in np.flatnonzero(differs).tolist():
            page, content = begin // PAGE_BYTES + row, wanted[row].tobytes()
            if self.owed.setdefault(page, content) is not content:
                self.covered.setdefault(page, []).append(content)
        if differs.any():
            self._note(kind, begin, begin + len(should_be))

    def _pay(self, page: int) -> None:
        """Restore a page's content."""
        self.owed.pop(page, None)
        self.covered.pop(page, None)

    def _in_part(self, old: NDArray[np.uint8], new: NDArray[np.uint8], unit: int) -> NDArray[np.uint8]:
        """Return old bytes of which none, all, the first, or any units are new."""
        units, kind = len(new) // unit, self.dice.randrange(4)
        if kind == 0:
            return old.copy()
        if kind == 1:
            return new
        if kind == 2:
            is_new = np.arange(units) < self.dice.randrange(units + 1)
        else:
            is_new = np.frombuffer(self.dice.randbytes(units), np.uint8) % 2 == 1
        mixed: NDArray[np.uint8] = np.where(
            is_new[:, None], new.reshape(units, unit), old.reshape(units, unit)
        )
        return mixed.reshape(-1)

    def _cache(self, begin: int, data: NDArray[np.uint8], is_submitter_alive: Callable[[], bool]) -> None:
        if self.has_volatile_cache:
            self._cached_count += 1
            self._cached.append(_Cached(self._cached_count, begin, data, is_submitter_alive))

    def _misdirect(self, begin: int, data: NDArray[np.uint8], is_submitter_alive: Callable[[], bool]) -> None:
        pages = (self.size_bytes - len(data)) // PAGE_BYTES
        elsewhere = self.dice.randrange(pages + 1) * PAGE_BYTES
        here = slice(elsewhere, elsewhere + len(data))
        before = self.image[here].copy()
        self.image[here] = data
        self._cache(elsewhere, data, is_submitter_alive)
        self._owe(elsewhere, before, Befell.MISDIRECTED)
        for row, page in enumerate(range(begin // PAGE_BYTES, (begin + len(data)) // PAGE_BYTES)):
            self._pay(page)  # what is owed there is newer now
            self._owe(page * PAGE_BYTES, data[row * PAGE_BYTES : (row + 1) * PAGE_BYTES], Befell.MISDIRECTED)

    def _age(self) -> None:
        """Let time gnaw at what lies on flash."""
        faults = self.faults
        if self.chance(faults.rot):
            self.rot(self._somewhere())
        if self.chance(faults.unreadable):
            page = self._somewhere() // PAGE_BYTES
            self.unreadable.add(page)
            self._note(Befell.UNREADABLE, page * PAGE_BYTES, (page + 1) * PAGE_BYTES)

    def rot(self, offset: int) -> None:
        """Change one bit of the byte at *offset*."""
        begin = offset // PAGE_BYTES * PAGE_BYTES
        before = self.image[begin : begin + PAGE_BYTES].copy()
        bit = np.uint8(1 << self.dice.randrange(8))
        self.image[offset] ^= bit
        if self.has_volatile_cache:
            self._durable[offset] ^= bit
        self._owe(begin, before, Befell.ROT)

    def decay(self, bits: int) -> None:
        """Change so many bits, each of something that was written before."""
        for _ in range(bits):
            self.rot(self._somewhere())

    def _somewhere(self) -> int:
        """Choose a byte that was written before, if any was."""
        begin, end = self.dice.choice(self._landed) if self._landed else (0, self.size_bytes)
        return self.dice.randrange(begin, end)
