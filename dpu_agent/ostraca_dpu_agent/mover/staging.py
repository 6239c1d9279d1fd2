"""Staging: the agent's registered memory, and who holds which slot of it.

Every block on its way lies in a leased slot. A lease ends when its last slot is given back or kept in the
DRAM cache; that happens only after every I/O and transfer that touches the slot is known to have ended. A
lease whose request is over before that is in *quarantine* meanwhile: counted, limited, and never cut short.

Leases wait in order of arrival, up to their deadline. Puts hold at most their share, so that gets never wait
for flash writes; each worker holds at most its share, so that one that has stopped can't use staging up, and
each drive, so that one that hangs can't; cached blocks make room when staging needs it and when that helps.
A transfer out of the cache leases the blocks it reads: they stay where they are, and count for its worker's
share and in quarantine as slots do, because nobody else can have their memory meanwhile.

Blocks of all sizes share the memory, and what is in quarantine lies wherever it was leased. A lease whose
slots nothing but quarantine keeps from it does not wait: it is refused, and those behind it go on.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np

from ostraca_dpu_agent.mover.cache import BlockCache
from ostraca_fabric.extent import rounded_up
from ostraca_fabric.memory import HugeMemory
from ostraca_fabric.outcome import Reason
from ostraca_fabric.slots import SlotPool

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from ostraca_dpu_agent.mover.cache import Offer
    from ostraca_dpu_agent.settings import MemorySettings


class Purpose(Enum):
    """What a lease is for."""

    GET = auto()
    PUT = auto()
    CACHED = auto()
    """A get of blocks that the cache holds. It takes no slots, only part of its worker's share."""


class NoRoom(Enum):
    """Why a lease was not given."""

    DEADLINE = auto()
    """None became free in time."""

    TOO_LARGE = auto()
    """It would not fit even an empty staging."""

    QUARANTINED = auto()
    """Too much is held by transfers not known to have ended, or what they hold lies in every place for slots
    of this size."""

    GIVEN_UP = auto()
    """The drive fell silent meanwhile."""


NO_ROOM_REASONS = {
    NoRoom.DEADLINE: Reason.DEADLINE,
    NoRoom.TOO_LARGE: Reason.OVERLOADED,
    NoRoom.QUARANTINED: Reason.QUARANTINED,
    NoRoom.GIVEN_UP: Reason.DRIVE_SUSPECT,
}


NO_ROWS = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class Lease:
    """Some slots of one size, held by one wave of one request."""

    offsets: NDArray[np.int64]
    slot_bytes: int
    purpose: Purpose
    holder: Hashable
    held_bytes: int
    """What it counts for, until its release."""

    rows: NDArray[np.int64]
    """Of the cache, for CACHED."""

    drive: Hashable = None
    """The drive that reads or writes it now."""

    is_quarantined: bool = False


@dataclass(slots=True, eq=False)
class _Waiter:
    count: int
    slot_bytes: int
    purpose: Purpose
    holder: Hashable
    drive: Hashable
    given: asyncio.Future[Lease | NoRoom]


class Staging:
    """The memory of one agent. Lives on the event loop's thread."""

    def __init__(self, settings: MemorySettings) -> None:
        """Map and fault in the memory, in one piece."""
        self._settings = settings
        wanted = max(settings.staging_bytes, settings.cache_bytes + settings.reserve_bytes)
        total = rounded_up(wanted, settings.chunk_bytes)
        self.memory = HugeMemory(total, prefault=True)
        self.array = self.memory.array
        """All of the memory, flat: blocks lie in it at the offsets of their slots."""

        self.cache = BlockCache(settings.cache_bytes, protected_share=settings.cache_protected_share)
        self._pool = SlotPool(total, settings.chunk_bytes)
        self._held = dict.fromkeys(Purpose, 0)
        self._held_by: Counter[Hashable] = Counter()
        self._held_on: Counter[Hashable] = Counter()
        """Bytes of slots that each drive reads or writes, those it was given up with included."""
        self._quarantined_by: Counter[Hashable] = Counter()
        self.quarantined_cached_blocks = 0
        """Blocks of the cache under transfers not known to have ended, counted for each transfer."""
        self.quarantined_cached_bytes = 0
        self._stuck: set[Lease] = set()
        """Leases of cached blocks in quarantine."""
        self._waiting: dict[Purpose, deque[_Waiter]] = {purpose: deque() for purpose in Purpose}

    @property
    def held_bytes(self) -> int:
        """Bytes of slots on lease, those in quarantine included, cached blocks not."""
        return self._held[Purpose.GET] + self._held[Purpose.PUT]

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of slots whose request is over and whose transfer isn't known to be, cached blocks not."""
        return self._pool.quarantined_bytes

    @property
    def put_bytes_max(self) -> int:
        """The most bytes of slots that puts may have on lease."""
        return int(self._settings.staging_bytes * self._settings.put_share)

    async def lease(
        self,
        count: int,
        slot_bytes: int,
        purpose: Purpose,
        *,
        holder: Hashable,
        within_s: float,
        drive: Hashable = None,
        given_up: asyncio.Future[None] | None = None,
    ) -> Lease | NoRoom:
        """Lease *count* slots to *holder*, a worker, waiting up to *within_s* for them.

        For CACHED: lease the right to ``hold`` as many blocks of the cache. *drive*: what is to be read from
        or written to; nobody waits for that after *given_up*. A lease for GET is read into at once; call
        ``off_drive`` then, and ``onto_drive`` before others are written.
        """
        settings = self._settings
        if count * slot_bytes > self._limit(purpose) or slot_bytes > settings.chunk_bytes:
            return NoRoom.TOO_LARGE
        if self._is_too_much_quarantined(holder, count * slot_bytes):
            return NoRoom.QUARANTINED
        given: asyncio.Future[Lease | NoRoom] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(count, slot_bytes, purpose, holder, drive, given)
        if all(self._is_at_its_share(earlier) for earlier in self._waiting[purpose]):
            lease = self._take(waiter)
            if lease is not None:
                return lease
        if self._is_kept_out(waiter):
            return NoRoom.QUARANTINED
        return await self._wait(waiter, within_s, given_up)

    async def _wait(
        self, waiter: _Waiter, within_s: float, given_up: asyncio.Future[None] | None
    ) -> Lease | NoRoom:
        if within_s <= 0:
            return NoRoom.DEADLINE
        self._waiting[waiter.purpose].append(waiter)
        until: set[asyncio.Future[Any]] = {waiter.given} if given_up is None else {waiter.given, given_up}
        await asyncio.wait(until, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if waiter.given.done():
            return waiter.given.result()
        waiter.given.cancel()
        self._waiting[waiter.purpose].remove(waiter)
        self._serve_waiters()
        return NoRoom.DEADLINE if given_up is None or not given_up.done() else NoRoom.GIVEN_UP

    def hold(self, lease: Lease, rows: NDArray[np.int64]) -> None:
        """Hold blocks of the cache under a lease for CACHED: as many as it is of, or fewer, now known."""
        self.cache.take(rows)
        lease.rows, lease.offsets = rows, self.cache.offsets[rows]
        self._count(lease, len(rows) * lease.slot_bytes - lease.held_bytes)

    def quarantine(self, lease: Lease) -> None:
        """Count a lease whose request is over; ``release`` ends it as any other."""
        if lease.is_quarantined or not lease.held_bytes:
            return
        lease.is_quarantined = True
        self._quarantined_by[lease.holder] += lease.held_bytes
        if lease.purpose is Purpose.CACHED:
            self.quarantined_cached_blocks += len(lease.rows)
            self.quarantined_cached_bytes += lease.held_bytes
            self._pool.use(self.cache.offsets[self._rows_it_alone_holds_up(lease)])
            self._stuck.add(lease)
        else:
            self._pool.quarantine(lease, lease.offsets)
        self._serve_waiters()

    def onto_drive(self, lease: Lease, drive: Hashable) -> None:
        """Count a lease for the drive that reads or writes its slots from now on."""
        lease.drive = drive
        self._held_on[drive] += lease.held_bytes

    def off_drive(self, lease: Lease) -> None:
        """Say that its drive touches the lease's slots no more."""
        if lease.drive is not None:
            _subtract(self._held_on, lease.drive, lease.held_bytes)
            lease.drive = None
            self._serve_waiters()

    def leave_to_drive(self, lease: Lease) -> None:
        """Quarantine a lease whose drive was given up: it no longer counts for its worker, who goes on."""
        self.quarantine(lease)
        for counted in (self._held_by, self._quarantined_by):
            _subtract(counted, lease.holder, lease.held_bytes)
            counted[lease.drive] += lease.held_bytes
        lease.holder = lease.drive
        self._serve_waiters()

    def release(self, lease: Lease, *, keep: Offer | None = None) -> None:
        """End a lease: no I/O and no transfer touches its slots any more.

        *keep* offers what lies in them, slot by slot, to the DRAM cache.
        """
        if lease.is_quarantined:
            _subtract(self._quarantined_by, lease.holder, lease.held_bytes)
        if lease.purpose is Purpose.CACHED:
            self._give_back(lease)
        elif lease.is_quarantined:
            self._pool.settle(lease)
        elif keep is None or self.cache.limit_bytes == 0:
            self._pool.give(lease.offsets)
        else:
            self._pool.keep(lease.offsets)
            self._pool.drop(self.cache.put(keep, lease.offsets, lease.slot_bytes))
        self.off_drive(lease)
        self._count(lease, -lease.held_bytes)
        lease.offsets = lease.rows = NO_ROWS
        self._serve_waiters()

    def _give_back(self, lease: Lease) -> None:
        if lease.is_quarantined:
            self.quarantined_cached_blocks -= len(lease.rows)
            self.quarantined_cached_bytes -= lease.held_bytes
            self._stuck.remove(lease)
            self._pool.keep(self.cache.offsets[self._rows_it_alone_holds_up(lease)])
        self.cache.give_back(lease.rows)

    def _rows_it_alone_holds_up(self, lease: Lease) -> NDArray[np.int64]:
        """Which of a lease's cached blocks no other one in quarantine holds."""
        others = [other.rows for other in self._stuck]
        return np.setdiff1d(lease.rows, np.concatenate((NO_ROWS, *others)))

    def _count(self, lease: Lease, more_bytes: int) -> None:
        if more_bytes:
            lease.held_bytes += more_bytes
            self._held[lease.purpose] += more_bytes
            _subtract(self._held_by, lease.holder, -more_bytes)

    def _limit(self, purpose: Purpose) -> int:
        return self.put_bytes_max if purpose is Purpose.PUT else self._settings.staging_bytes

    def _is_too_much_quarantined(self, holder: Hashable, wanted_bytes: int) -> bool:
        """Whether transfers not known to have ended hold too much of staging, or of the holder's share."""
        limit = self._settings.quarantine_share * self._settings.staging_bytes
        own = self._quarantined_by[holder]
        total = self.quarantined_bytes + self.quarantined_cached_bytes
        return total > limit or (own > 0 and self._is_above_share(own + wanted_bytes))

    def _is_above_share(self, held_bytes: int) -> bool:
        return held_bytes > self._settings.worker_share * self._settings.staging_bytes

    def _is_at_its_share(self, waiter: _Waiter) -> bool:
        """Whether its holder, or its drive, has to give something back first; one that holds nothing never
        has.
        """
        settings, wanted = self._settings, waiter.count * waiter.slot_bytes
        held = self._held_by[waiter.holder]
        if held > 0 and self._is_above_share(held + wanted):
            return True
        of_drive = 0 if waiter.drive is None else self._held_on.get(waiter.drive, 0)
        return of_drive > 0 and of_drive + wanted > settings.drive_share * settings.staging_bytes

    def _take(self, waiter: _Waiter) -> Lease | None:
        if self._is_at_its_share(waiter):
            return None
        count, slot_bytes, purpose = waiter.count, waiter.slot_bytes, waiter.purpose
        offsets = NO_ROWS if purpose is Purpose.CACHED else self._slots(count, slot_bytes, purpose)
        if offsets is None:
            return None
        lease = Lease(offsets, slot_bytes, purpose, waiter.holder, held_bytes=0, rows=NO_ROWS)
        self._count(lease, count * slot_bytes)
        if purpose is Purpose.GET and waiter.drive is not None:
            self.onto_drive(lease, waiter.drive)
        return lease

    def _slots(self, count: int, slot_bytes: int, purpose: Purpose) -> NDArray[np.int64] | None:
        """Take slots, from the cache where staging has too few; None when they can't be had now."""
        wanted = count * slot_bytes
        if self._held[purpose] + wanted > self._limit(purpose):
            return None
        if self.held_bytes + wanted > self._settings.staging_bytes:
            return None
        offsets = self._pool.take(count, slot_bytes)
        while offsets is None and self._may_the_cache_help(count, slot_bytes):
            before = self.cache.used_bytes
            freed = self.cache.shrink(max(0, before - wanted))
            if not len(freed):
                break
            self._pool.drop(freed)
            offsets = self._pool.take(count, slot_bytes)
        return offsets

    def _may_the_cache_help(self, count: int, slot_bytes: int) -> bool:
        """Whether there would be room without the cache. Of blocks in use, those in quarantine are known to
        stay; others are let go of soon.
        """
        return self.cache.used_bytes > 0 and self._pool.has_room(count, slot_bytes)

    def _is_kept_out(self, waiter: _Waiter) -> bool:
        """Whether what is in quarantine leaves too few places for its slots, whatever else is given back."""
        if waiter.purpose is Purpose.CACHED or not self._pool.quarantined_bytes:
            return False
        return not self._pool.has_room(waiter.count, waiter.slot_bytes, if_taken_were_given=True)

    def _serve_waiters(self) -> None:
        """Serve waiters in order; those whose holder is at its share let others go before them."""
        for waiting in self._waiting.values():
            for waiter in list(waiting):
                if self._is_at_its_share(waiter):
                    continue
                lease = self._take(waiter)
                if lease is None and not self._is_kept_out(waiter):
                    break
                waiting.remove(waiter)
                waiter.given.set_result(NoRoom.QUARANTINED if lease is None else lease)


def _subtract(counted: Counter[Hashable], holder: Hashable, held_bytes: int) -> None:
    """Forget who holds nothing any more."""
    counted[holder] -= held_bytes
    if not counted[holder]:
        del counted[holder]
