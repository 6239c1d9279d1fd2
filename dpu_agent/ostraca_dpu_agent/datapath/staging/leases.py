"""Leases of staging: purposes and wait queue.

In the wait queue, the tenant that holds least is next. Within a tenant, and among tenants that hold the same,
the order is that of arrival. A tenant with small requests thus waits for the next freed memory, not for all
earlier requests of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum, auto
from heapq import heappop, heappush
from itertools import count

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.outcome import BlockState, Reason

_arrivals = count()


class Purpose(IntEnum):
    """Purpose of a lease."""

    GET = auto()
    PUT = auto()
    CACHED = auto()
    """A get of cached or staged blocks. Takes no slots, only part of its worker's share."""


STATES_WITHOUT_LEASE = {Reason.DEADLINE: BlockState.LATE, Reason.DRIVE_SUSPECT: BlockState.MISS}
"""State of blocks to load without a lease, by the reason; others are DECLINED."""


@dataclass(slots=True, eq=False)
class StagingLease:
    """Slots of one size, held by a wave of a request."""

    offsets: NDArray[np.int64]
    slot_bytes: int
    purpose: Purpose
    holder: Hashable
    tenant: Hashable
    """Charged tenant: the holder's, or the drive after abandonment."""

    held_bytes: int
    """Charged bytes, until the release."""

    rows: NDArray[np.int64]
    """Rows of the cache, for CACHED."""

    drive: Hashable = None
    """The drive that reads or writes the slots now."""

    source: StagingLease | None = None
    """Lease of the put whose slots are read, for CACHED."""

    readers: int = 0
    """Number of leases that read the slots; a release waits for them."""

    late_release: Callable[[], None] | None = None
    """Release that waits for the last reader."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A waiting request for a lease."""

    count: int
    slot_bytes: int
    wanted_bytes: int
    """Total of the slots."""
    purpose: Purpose
    holder: Hashable
    tenant: Hashable
    drive: Hashable
    result: asyncio.Future[StagingLease | Reason]
    arrived: int = field(default_factory=_arrivals.__next__)


WaitQueue = dict[Hashable, dict[Waiter, None]]
"""Waiters for a purpose, in order of arrival, by tenant; no tenant without a waiter."""


def in_turn(queue: WaitQueue, held: Callable[[Hashable], int], skipped: set[Hashable]) -> Iterator[Waiter]:
    """Yield each waiter once, in turn; *held* returns the bytes of a tenant.

    The caller may add tenants to *skipped*, to skip their waiters. Do not add or remove waiters
    meanwhile.
    """
    turns: list[tuple[int, int, Waiter, Iterator[Waiter]]] = []

    def push(its: Iterator[Waiter]) -> None:
        waiter = next(its, None)
        if waiter is not None:
            heappush(turns, (held(waiter.tenant), waiter.arrived, waiter, its))

    for waiting in queue.values():
        push(iter(waiting))
    while turns:
        _, _, waiter, its = heappop(turns)
        yield waiter
        if waiter.tenant not in skipped:
            push(its)
