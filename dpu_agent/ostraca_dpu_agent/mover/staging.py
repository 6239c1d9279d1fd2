"""Staging: the agent's registered memory, and who holds which slot of it.

Every block on its way lies in a leased slot. A lease ends when its last slot is given back or kept in the
DRAM cache; that happens only after every I/O and transfer that touches the slot is known to have ended. A
lease whose request is over before that is in *quarantine* meanwhile: counted, limited, and never cut short.

Leases wait in order of arrival, up to their deadline. Puts hold at most their share, so that gets never wait
for flash writes; cached blocks make room when staging needs it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.mover.cache import BlockCache, CachedBlock
from ostraca_fabric.extent import rounded_up
from ostraca_fabric.memory import HugeMemory
from ostraca_fabric.outcome import Reason
from ostraca_fabric.slots import SlotPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ostraca_dpu_agent.settings import MemorySettings


class Purpose(Enum):
    """What a lease is for."""

    GET = auto()
    PUT = auto()


class NoRoom(Enum):
    """Why a lease was not given."""

    DEADLINE = auto()
    """None became free in time."""

    TOO_LARGE = auto()
    """It would not fit even an empty staging."""

    QUARANTINED = auto()
    """Too much is held by transfers not known to have ended."""


NO_ROOM_REASONS = {
    NoRoom.DEADLINE: Reason.DEADLINE,
    NoRoom.TOO_LARGE: Reason.OVERLOADED,
    NoRoom.QUARANTINED: Reason.QUARANTINED,
}


@dataclass(slots=True, eq=False)
class Lease:
    """Some slots of one size, held by one wave of one request."""

    offsets: NDArray[np.int64]
    slot_bytes: int
    purpose: Purpose
    is_quarantined: bool = False


@dataclass(slots=True, eq=False)
class _Waiter:
    count: int
    slot_bytes: int
    purpose: Purpose
    given: asyncio.Future[Lease]


class Staging:
    """The memory of one agent. Lives on the event loop's thread."""

    def __init__(self, settings: MemorySettings) -> None:
        """Map and fault in the memory: staging and cache together, in one piece."""
        self._settings = settings
        total = rounded_up(settings.staging_bytes + settings.cache_bytes, settings.chunk_bytes)
        self.memory = HugeMemory(total, prefault=True)
        self.cache = BlockCache(settings.cache_bytes)
        self._pool = SlotPool(total, settings.chunk_bytes)
        self._held = dict.fromkeys(Purpose, 0)
        self._waiting: dict[Purpose, deque[_Waiter]] = {purpose: deque() for purpose in Purpose}

    @property
    def held_bytes(self) -> int:
        """Bytes of slots on lease, those in quarantine included."""
        return sum(self._held.values())

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of slots whose request is over and whose transfer isn't known to be."""
        return self._pool.quarantined_bytes

    def view(self, offset: int, length: int) -> memoryview:
        """Return writable memory of a slot."""
        return self.memory.view[offset : offset + length]

    async def lease(
        self, count: int, slot_bytes: int, purpose: Purpose, *, within_s: float
    ) -> Lease | NoRoom:
        """Lease *count* slots, waiting up to *within_s* for them."""
        settings = self._settings
        if count * slot_bytes > self._limit(purpose) or slot_bytes > settings.chunk_bytes:
            return NoRoom.TOO_LARGE
        if self.quarantined_bytes > settings.quarantine_share * settings.staging_bytes:
            return NoRoom.QUARANTINED
        if not self._waiting[purpose]:
            lease = self._take(count, slot_bytes, purpose)
            if lease is not None:
                return lease
        if within_s <= 0:
            return NoRoom.DEADLINE
        waiter = _Waiter(count, slot_bytes, purpose, asyncio.get_running_loop().create_future())
        self._waiting[purpose].append(waiter)
        await asyncio.wait([waiter.given], timeout=within_s)
        if waiter.given.done():
            return waiter.given.result()
        waiter.given.cancel()
        self._waiting[purpose].remove(waiter)
        self._serve_waiters()
        return NoRoom.DEADLINE

    def quarantine(self, lease: Lease) -> None:
        """Count a lease whose request is over; ``release`` ends it as any other."""
        if not lease.is_quarantined and len(lease.offsets):
            lease.is_quarantined = True
            self._pool.quarantine(lease, lease.offsets)

    def release(self, lease: Lease, *, keep: Callable[[int], CachedBlock | None] | None = None) -> None:
        """End a lease: no I/O and no transfer touches its slots any more.

        *keep* is asked for each slot, by its position in the lease, whether it stays as a cached block.
        """
        offsets, lease.offsets = lease.offsets, lease.offsets[:0]
        self._held[lease.purpose] -= len(offsets) * lease.slot_bytes
        if lease.is_quarantined:
            self._pool.settle(lease)
        elif keep is None or self.cache.limit_bytes == 0:
            self._pool.give(offsets)
        else:
            freed = [self._kept(offset, keep(position)) for position, offset in enumerate(offsets.tolist())]
            self._give_back([offset for several in freed for offset in several])
        self._serve_waiters()

    def _kept(self, offset: int, block: CachedBlock | None) -> list[int]:
        if block is None:
            return [offset]
        return [freed for freed, _ in self.cache.put(block)]

    def _give_back(self, offsets: list[int]) -> None:
        if offsets:
            self._pool.give(np.asarray(offsets, np.int64))

    def _limit(self, purpose: Purpose) -> int:
        whole = self._settings.staging_bytes
        return int(whole * self._settings.put_share) if purpose is Purpose.PUT else whole

    def _take(self, count: int, slot_bytes: int, purpose: Purpose) -> Lease | None:
        wanted = count * slot_bytes
        if self._held[purpose] + wanted > self._limit(purpose):
            return None
        if self.held_bytes + wanted > self._settings.staging_bytes:
            return None
        offsets = self._pool.take(count, slot_bytes)
        while offsets is None and self.cache.used_bytes:
            before = self.cache.used_bytes
            freed = self.cache.shrink(max(0, before - max(wanted, self._settings.chunk_bytes)))
            if not freed:
                break
            self._give_back([offset for offset, _ in freed])
            offsets = self._pool.take(count, slot_bytes)
        if offsets is None:
            return None
        self._held[purpose] += wanted
        return Lease(offsets, slot_bytes, purpose)

    def _serve_waiters(self) -> None:
        for purpose in (Purpose.GET, Purpose.PUT):
            waiting = self._waiting[purpose]
            while waiting:
                first = waiting[0]
                lease = self._take(first.count, first.slot_bytes, purpose)
                if lease is None:
                    break
                waiting.popleft()
                first.given.set_result(lease)
