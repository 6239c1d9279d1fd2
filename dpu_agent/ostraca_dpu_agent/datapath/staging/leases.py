"""Leases of staging: purposes, refusals, wait queue, and fair parts of tenants.

A tenant counts with connected workers or requests under way. Tenants of other agents' workers
(``RemoteWorkers``) count only while requests for them are under way. ``policies.fair_sharing`` divides a
resource among tenants.

In the wait queue, the tenant that holds least is next. Within a tenant, and among tenants that hold the same,
the order is that of arrival. A tenant with small requests thus waits for the next freed memory, not for all
earlier requests of others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.policies.fair_sharing import is_guaranteed, may_take

_arrivals = count()


class Purpose(Enum):
    """Purpose of a lease."""

    GET = auto()
    PUT = auto()
    CACHED = auto()
    """A get of cached blocks. Takes no slots, only part of its worker's share."""


class LeaseRefusal(Enum):
    """Reason for refusing a lease."""

    DEADLINE = auto()
    """No slots became free in time."""

    TOO_LARGE = auto()
    """Too large even for an empty staging."""

    QUARANTINED = auto()
    """Unfinished transfers hold too much, or block every place for slots of this size."""

    GIVEN_UP = auto()
    """The drive became silent meanwhile."""


REFUSAL_REASONS = {
    LeaseRefusal.DEADLINE: Reason.DEADLINE,
    LeaseRefusal.TOO_LARGE: Reason.OVERLOADED,
    LeaseRefusal.QUARANTINED: Reason.QUARANTINED,
    LeaseRefusal.GIVEN_UP: Reason.DRIVE_SUSPECT,
}


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

    is_quarantined: bool = False


@dataclass(slots=True, eq=False)
class Waiter:
    """A waiting request for a lease."""

    count: int
    slot_bytes: int
    purpose: Purpose
    holder: Hashable
    tenant: Hashable
    drive: Hashable
    result: asyncio.Future[StagingLease | LeaseRefusal]
    arrived: int = field(default_factory=_arrivals.__next__)

    @property
    def wanted_bytes(self) -> int:
        """Total of the slots, in bytes."""
        return self.count * self.slot_bytes


class WaitQueue:
    """Waiters for a purpose."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, dict[Waiter, None]] = {}
        """In order of arrival, by tenant; no tenant without a waiter."""

    def __bool__(self) -> bool:
        """Return whether there are waiters."""
        return bool(self._waiting)

    def add(self, waiter: Waiter) -> None:
        """Add a waiter at the end of its tenant's queue."""
        self._waiting.setdefault(waiter.tenant, {})[waiter] = None

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter."""
        its = self._waiting[waiter.tenant]
        del its[waiter]
        if not its:
            del self._waiting[waiter.tenant]

    def in_turn(self, held: Callable[[Hashable], int], skipped: set[Hashable]) -> Iterator[Waiter]:
        """Yield each waiter once, in turn; *held* returns the bytes of a tenant.

        The caller may add tenants to *skipped*, to skip their waiters. Do not add or remove waiters
        meanwhile.
        """
        turns: list[tuple[int, int, Waiter, Iterator[Waiter]]] = []

        def push(its: Iterator[Waiter]) -> None:
            waiter = next(its, None)
            if waiter is not None:
                heappush(turns, (held(waiter.tenant), waiter.arrived, waiter, its))

        for waiting in self._waiting.values():
            push(iter(waiting))
        while turns:
            _, _, waiter, its = heappop(turns)
            yield waiter
            if waiter.tenant not in skipped:
                push(its)


_User = TypeVar("_User")


class Tenants:
    """Counters of connections and requests. Use on the event loop's thread only."""

    def __init__(self) -> None:
        """Begin without tenants."""
        self.connections: Counter[TenantId] = Counter()
        """Workers' connections; read only."""
        self.requests: Counter[TenantId] = Counter()
        """Requests under way; read only."""
        self._uses: Counter[TenantId] = Counter()
        self.members = self._uses.keys()
        """Tenants that share the agent: a live view."""
        self.on_left: Callable[[], None] = lambda: None
        """Called when the number of members has fallen."""

    def add_connection(self, tenant: TenantId) -> None:
        """Count a connection of a worker."""
        self._add(self.connections, tenant)

    def remove_connection(self, tenant: TenantId) -> None:
        """Stop counting a connection."""
        self._remove(self.connections, tenant)

    def begin_request(self, tenant: TenantId) -> None:
        """Count a request."""
        self._add(self.requests, tenant)

    def end_request(self, tenant: TenantId) -> None:
        """Stop counting a request."""
        self._remove(self.requests, tenant)

    def _add(self, counts: Counter[TenantId], tenant: TenantId) -> None:
        counts[tenant] += 1
        self._uses[tenant] += 1

    def _remove(self, counts: Counter[TenantId], tenant: TenantId) -> None:
        subtract(counts, tenant, 1)
        subtract(self._uses, tenant, 1)
        if tenant not in self._uses:
            self.on_left()


class TenantShares:
    """Leased bytes per tenant: slots, slots of puts, and cached blocks in transfer.

    Bytes left to an abandoned drive count for the drive, which is no member.
    """

    def __init__(
        self, members: Collection[Hashable], *, slot_bytes: int, put_bytes: int, cached_bytes: int
    ) -> None:
        """Share these among *members*, a live view of the connected tenants."""
        self._members = members
        self._slot_bytes = slot_bytes
        self._put_bytes = put_bytes
        self._cached_bytes = cached_bytes
        self._held: dict[Purpose, Counter[Hashable]] = {purpose: Counter() for purpose in Purpose}

    def count(self, purpose: Purpose, tenant: Hashable, more_bytes: int) -> None:
        """Count bytes taken by a tenant, or given back if negative."""
        subtract(self._held[purpose], tenant, -more_bytes)

    def held(self, purpose: Purpose, tenant: Hashable) -> int:
        """Return the bytes held by a tenant for a purpose."""
        return self._held[purpose][tenant]

    @property
    def slots(self) -> Counter[Hashable]:
        """Bytes of slots per holder."""
        return self._held[Purpose.GET] + self._held[Purpose.PUT]

    def may_take(self, purpose: Purpose, tenant: Hashable, wanted_bytes: int) -> bool:
        """Return whether other tenants permit this amount."""
        if len(self._members) <= 1 and tenant in self._members:
            return True
        return all(
            may_take(total, held, self._members, tenant, wanted_bytes) for total, held in self._of(purpose)
        )

    def is_guaranteed(self, purpose: Purpose, tenant: Hashable, wanted_bytes: int) -> bool:
        """Return whether this amount is guaranteed to a tenant beside others."""
        return all(
            is_guaranteed(total, held, self._members, tenant, wanted_bytes)
            for total, held in self._of(purpose)
        )

    def _of(self, purpose: Purpose) -> Iterator[tuple[int, Counter[Hashable]]]:
        """Yield totals that include this purpose, with the holdings of each."""
        if purpose is Purpose.CACHED:
            yield self._cached_bytes, self._held[purpose]
            return
        yield self._slot_bytes, self.slots
        if purpose is Purpose.PUT:
            yield self._put_bytes, self._held[purpose]


class WaitingPuts:
    """Counter of waiting puts, up to a limit. Use on the event loop's thread only."""

    def __init__(self, most: int, members: Collection[TenantId]) -> None:
        """Allow *most* waiting puts; *members* are the tenants of the agent."""
        self._most = most
        self._members = members
        self._by_tenant: Counter[TenantId] = Counter()

    def __len__(self) -> int:
        """Return the number of waiting puts."""
        return self._by_tenant.total()

    @contextmanager
    def waiting(self, tenant: TenantId) -> Iterator[bool]:
        """Count a put while waiting; yield False, uncounted, at the limit."""
        if len(self) >= self._most or not may_take(self._most, self._by_tenant, self._members, tenant, 1):
            yield False
            return
        self._by_tenant[tenant] += 1
        try:
            yield True
        finally:
            subtract(self._by_tenant, tenant, 1)


def subtract(counts: Counter[_User], user: _User, amount: int) -> None:
    """Subtract from a user's count, and drop the user at zero."""
    left = counts[user] - amount
    if left:
        counts[user] = left
    else:
        counts.pop(user, None)
