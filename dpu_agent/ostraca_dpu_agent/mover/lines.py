"""Who waits for staging, and whose turn it is: the first in line of the tenant that holds least.

Within a tenant, and among tenants that hold the same, in order of arrival. So a tenant that asks for little
waits for what is given back next, and not for all that others have asked for before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable, Iterator

    from ostraca_dpu_agent.mover.leases import Lease, NoRoom, Purpose

_arrivals = count()


@dataclass(slots=True, eq=False)
class Waiter:
    """Somebody who wants a lease."""

    count: int
    slot_bytes: int
    purpose: Purpose
    holder: Hashable
    tenant: Hashable
    drive: Hashable
    given: asyncio.Future[Lease | NoRoom]
    arrived: int = field(default_factory=_arrivals.__next__)

    @property
    def wanted_bytes(self) -> int:
        """What the slots come to."""
        return self.count * self.slot_bytes


class Line:
    """Those who wait for one purpose."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, dict[Waiter, None]] = {}
        """In order of arrival, by tenant; no tenant without a waiter."""

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiting)

    def add(self, waiter: Waiter) -> None:
        """Put a waiter at its tenant's end."""
        self._waiting.setdefault(waiter.tenant, {})[waiter] = None

    def remove(self, waiter: Waiter) -> None:
        """Let a waiter go."""
        its = self._waiting[waiter.tenant]
        del its[waiter]
        if not its:
            del self._waiting[waiter.tenant]

    def in_turn(self, held: Callable[[Hashable], int], left_out: set[Hashable]) -> Iterator[Waiter]:
        """Yield each waiter once, as their turns come; *held* says what a tenant holds now.

        The caller may add tenants to *left_out*, whose waiters have no turn any more. Don't add or remove
        waiters meanwhile.
        """
        turns: list[tuple[int, int, Waiter, Iterator[Waiter]]] = []

        def queue_up(its: Iterator[Waiter]) -> None:
            waiter = next(its, None)
            if waiter is not None:
                heappush(turns, (held(waiter.tenant), waiter.arrived, waiter, its))

        for waiting in self._waiting.values():
            queue_up(iter(waiting))
        while turns:
            _, _, waiter, its = heappop(turns)
            yield waiter
            if waiter.tenant not in left_out:
                queue_up(its)
