"""Staging: the agent's registered memory and the leases of its slots.

Every block in transit lies in a leased slot. A lease ends when its last slot is given back or kept in the
DRAM cache. This happens only after the known end of every I/O and transfer on the slot. A lease whose
request ends earlier is in *quarantine* meanwhile: counted, limited, and never cut short.

Leases wait up to their deadline. The tenant that holds least is served first, in order of arrival within
the tenant. Half of staging is guaranteed to connected tenants in equal parts; a single tenant may have all.
Puts hold at most their share, so that gets never wait for flash writes. Each worker
and each drive holds at most its share, so that a stopped worker or a hanging drive can't use up staging.
Cached blocks are evicted when staging needs memory and eviction helps. Blocks of a tenant with little
memory are not evicted for a tenant with much. A transfer out of the cache leases the blocks without moving
them. They count for the worker's share and in quarantine like slots, since their memory is blocked too. The
same holds for a transfer of staged blocks, out of a put's slots.

Blocks of all sizes share the memory, and quarantined slots stay where they were leased. A lease blocked
only by quarantine does not wait: it is refused, and later leases proceed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.staging.cache import BlockCache, CacheOffer
from ostraca_dpu_agent.datapath.staging.leases import (
    Purpose,
    StagingLease,
    Waiter,
    WaitQueue,
    in_turn,
)
from ostraca_dpu_agent.settings import MemorySettings
from ostraca_dpu_agent.tenants import Tenants, subtract
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.policies.fair_sharing import is_guaranteed, may_take
from ostraca_fabric.runtime.memory import HugeMemory
from ostraca_fabric.tables.slots import SlotPool

NO_ROWS = np.empty(0, np.int64)


class Staging:
    """Memory of an agent. Use on the event loop's thread only."""

    def __init__(self, settings: MemorySettings, tenants: Tenants | None = None) -> None:
        """Map and prefault the memory, in one piece.

        *tenants* share the memory; None: tenants are not distinguished.
        """
        self._settings = settings
        total = settings.mapped_bytes
        self.memory = HugeMemory(total, prefault=True, is_reserved=settings.huge_pages)
        self.array = self.memory.array
        """The whole memory, flat; slots are given as offsets into it."""

        self.tenants = tenants or Tenants()
        self.tenants.on_left = self._serve_waiters
        self.cache = BlockCache(
            settings.cache_bytes, protected_share=settings.cache_protected_share, members=self.tenants.members
        )
        self._held: dict[Purpose, Counter[Hashable]] = {purpose: Counter() for purpose in Purpose}
        """Bytes held per tenant, and per drive after abandonment."""
        self._pool = SlotPool(total, settings.chunk_bytes)
        self._held_by: Counter[Hashable] = Counter()
        self._held_on: Counter[Hashable] = Counter()
        """Bytes of slots under I/O per drive, including abandoned I/O."""
        self._quarantined: set[StagingLease] = set()
        """Leases under transfers, or abandoned I/O of drives, not known to have ended."""
        self._queues: dict[Purpose, WaitQueue] = {purpose: {} for purpose in Purpose}
        self.on_wait: Callable[[], None] = lambda: None
        """Called when a lease begins to wait for memory."""

    @property
    def held_bytes(self) -> int:
        """Bytes of leased slots, including quarantine, without cached blocks."""
        return self._held[Purpose.GET].total() + self._held[Purpose.PUT].total()

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of slots in quarantine, without cached blocks."""
        return self._pool.quarantined_bytes

    @property
    def quarantined_cached_blocks(self) -> int:
        """Cached blocks in quarantine, counted per transfer."""
        return sum(len(lease.rows) for lease in self._quarantined)

    @property
    def quarantined_cached_bytes(self) -> int:
        """Bytes of these blocks."""
        return sum(lease.held_bytes for lease in self._quarantined if len(lease.rows))

    @property
    def slots_of(self) -> Counter[Hashable]:
        """Bytes of slots leased per tenant, and per drive after abandonment."""
        return self._held[Purpose.GET] + self._held[Purpose.PUT]

    def holds(self, holder: Hashable) -> bool:
        """Return whether a holder has leases."""
        return holder in self._held_by

    @property
    def limit_bytes(self) -> int:
        """Largest total of leased slots, in bytes."""
        return self._settings.staging_bytes

    @property
    def put_bytes_max(self) -> int:
        """Largest total of slots leased to puts, in bytes."""
        return int(self._settings.staging_bytes * self._settings.put_share)

    def is_half_free_for_puts(self, more_bytes: int) -> bool:
        """Return whether puts hold at most half of their slots, with so many bytes more."""
        return 2 * (self._held[Purpose.PUT].total() + more_bytes) <= self.put_bytes_max

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
        tenant: Hashable = None,
    ) -> StagingLease | Reason:
        """Lease *count* slots to *holder*, a worker of *tenant*, within *within_s*.

        For CACHED: lease the right to ``hold`` as many cached blocks, or to ``share`` as many slots of a put.
        *drive*: the drive to read or write; the wait ends at *given_up*. A lease for GET is read into at
        once: call ``end_drive_io`` after the read. For other leases call ``charge_to_drive`` before writing.

        Refused with OVERLOADED if too large even for an empty staging, DEADLINE without room in time, and
        DRIVE_SUSPECT if the drive becomes silent. QUARANTINED: unfinished transfers hold too much, or block
        every place for slots of this size.
        """
        settings, queue = self._settings, self._queues[purpose]
        if count * slot_bytes > self._limit(purpose) or slot_bytes > settings.chunk_bytes:
            return Reason.OVERLOADED
        result: asyncio.Future[StagingLease | Reason] = asyncio.get_running_loop().create_future()
        waiter = Waiter(count, slot_bytes, count * slot_bytes, purpose, holder, tenant, drive, result)
        if self._is_too_much_quarantined(waiter):
            return Reason.QUARANTINED
        if not (queue or self._is_at_its_share(waiter) or self._is_drive_at_its_share(waiter)):
            lease = self._grant(waiter, self._may_take)
            if lease is not None:
                return lease
        queue.setdefault(tenant, {})[waiter] = None
        self._serve(queue, purpose)
        if result.done():
            return result.result()
        if self._is_blocked_by_quarantine(waiter):
            self._remove(waiter)
            return Reason.QUARANTINED
        return await self._wait(waiter, max(0.0, within_s), given_up)

    async def _wait(
        self, waiter: Waiter, within_s: float, given_up: asyncio.Future[None] | None
    ) -> StagingLease | Reason:
        self.on_wait()
        until: set[asyncio.Future[Any]] = {waiter.result} if given_up is None else {waiter.result, given_up}
        await asyncio.wait(until, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if waiter.result.done():
            return waiter.result.result()
        waiter.result.cancel()
        self._remove(waiter)
        self._serve_waiters()
        return Reason.DEADLINE if given_up is None or not given_up.done() else Reason.DRIVE_SUSPECT

    def _remove(self, waiter: Waiter) -> None:
        queue = self._queues[waiter.purpose]
        del queue[waiter.tenant][waiter]
        if not queue[waiter.tenant]:
            del queue[waiter.tenant]

    def hold(self, lease: StagingLease, rows: NDArray[np.int64]) -> None:
        """Hold cached blocks under a CACHED lease, at most as many as leased."""
        self.cache.hold(rows)
        lease.rows, lease.offsets = rows, self.cache.offsets[rows]
        self._count(lease, len(rows) * lease.slot_bytes - lease.held_bytes)

    def share(self, lease: StagingLease, source: StagingLease, rows: NDArray[np.intp]) -> None:
        """Read slots of a put under a CACHED lease, at most as many as leased."""
        lease.source, lease.offsets = source, source.offsets[rows]
        source.readers += 1
        self._count(lease, len(rows) * lease.slot_bytes - lease.held_bytes)

    def quarantine(self, lease: StagingLease) -> None:
        """Quarantine a lease whose request is over; ``release`` ends the lease."""
        if lease in self._quarantined or not lease.held_bytes:
            return
        if lease.source is not None:
            self.quarantine(lease.source)
        elif lease.purpose is Purpose.CACHED:
            self._pool.use(self.cache.offsets[self._rows_held_alone(lease)])
        else:
            self._pool.quarantine(lease, lease.offsets)
        self._quarantined.add(lease)
        self._serve_waiters()

    def charge_to_drive(self, lease: StagingLease, drive: Hashable) -> None:
        """Charge a lease to the drive that reads or writes its slots from now on."""
        lease.drive = drive
        self._held_on[drive] += lease.held_bytes

    def end_drive_io(self, lease: StagingLease) -> None:
        """Note that the drive no longer uses the lease's slots."""
        if lease.drive is not None:
            subtract(self._held_on, lease.drive, lease.held_bytes)
            lease.drive = None
            self._serve_waiters()

    def abandon_to_drive(self, lease: StagingLease) -> None:
        """Quarantine a lease of an abandoned drive.

        The lease no longer counts for its worker, which continues.
        """
        self.quarantine(lease)
        subtract(self._held_by, lease.holder, lease.held_bytes)
        self._held_by[lease.drive] += lease.held_bytes
        subtract(self._held[lease.purpose], lease.tenant, lease.held_bytes)
        self._held[lease.purpose][lease.drive] += lease.held_bytes
        lease.holder = lease.tenant = lease.drive
        self._serve_waiters()

    def release(self, lease: StagingLease, *, keep: CacheOffer | None = None) -> None:
        """End a lease: no I/O and no transfer uses the slots any more. Readers delay the end.

        *keep* offers the slots' contents to the DRAM cache, one by one.
        """
        if lease.readers:
            lease.late_release = partial(self.release, lease, keep=keep)
            return
        is_quarantined, source = lease in self._quarantined, lease.source
        self._quarantined.discard(lease)
        if source is not None:
            source.readers -= 1
        elif lease.purpose is Purpose.CACHED:
            if is_quarantined:
                self._pool.keep(self.cache.offsets[self._rows_held_alone(lease)])
            self.cache.release(lease.rows)
        elif is_quarantined:
            self._pool.settle(lease)
        elif keep is None or self.cache.limit_bytes == 0:
            self._pool.give(lease.offsets)
        else:
            self._pool.keep(lease.offsets)
            self._pool.drop(self.cache.put(keep, lease.offsets, lease.slot_bytes))
        self.end_drive_io(lease)
        self._count(lease, -lease.held_bytes)
        lease.offsets = lease.rows = NO_ROWS
        if source is not None and source.late_release is not None and not source.readers:
            source.late_release()
        self._serve_waiters()

    def _rows_held_alone(self, lease: StagingLease) -> NDArray[np.int64]:
        """Return the lease's cached blocks that no other quarantined lease holds."""
        others = [other.rows for other in self._quarantined]
        return np.setdiff1d(lease.rows, np.concatenate((NO_ROWS, *others)))

    def _count(self, lease: StagingLease, more_bytes: int) -> None:
        if more_bytes:
            lease.held_bytes += more_bytes
            subtract(self._held_by, lease.holder, -more_bytes)
            subtract(self._held[lease.purpose], lease.tenant, -more_bytes)

    def _limit(self, purpose: Purpose) -> int:
        return self.put_bytes_max if purpose is Purpose.PUT else self._settings.staging_bytes

    def _is_too_much_quarantined(self, waiter: Waiter) -> bool:
        """Return whether unfinished transfers hold too much of staging.

        True if the holder's quarantined and wanted memory exceeds the holder's share. Also true if all
        quarantined memory exceeds the limit, and the wanted memory is not guaranteed to the tenant.
        """
        own = sum(lease.held_bytes for lease in self._quarantined if lease.holder == waiter.holder)
        if own > 0 and self._is_above_share(own + waiter.wanted_bytes):
            return True
        total = self.quarantined_bytes + self.quarantined_cached_bytes
        if total <= self._settings.quarantine_share * self._settings.staging_bytes:
            return False
        return not self._is_guaranteed(waiter)

    def _is_above_share(self, held_bytes: int) -> bool:
        return held_bytes > self._settings.worker_share * self._settings.staging_bytes

    def _is_at_its_share(self, waiter: Waiter) -> bool:
        """Return whether the holder must first give memory back.

        A holder without memory never must.
        """
        held = self._held_by[waiter.holder]
        return held > 0 and self._is_above_share(held + waiter.wanted_bytes)

    def _is_drive_at_its_share(self, waiter: Waiter) -> bool:
        settings = self._settings
        held = 0 if waiter.drive is None else self._held_on.get(waiter.drive, 0)
        return held > 0 and held + waiter.wanted_bytes > settings.drive_share * settings.staging_bytes

    def _may_take(self, waiter: Waiter) -> bool:
        """Return whether a waiter's tenant may take the memory without touching others' guaranteed parts."""
        members = self.tenants.members
        if len(members) <= 1 and waiter.tenant in members:
            return True
        return all(
            may_take(total, held, members, waiter.tenant, waiter.wanted_bytes)
            for total, held in self._divided(waiter.purpose)
        )

    def _is_guaranteed(self, waiter: Waiter) -> bool:
        """Return whether the memory is within the guaranteed part of a waiter's tenant."""
        return all(
            is_guaranteed(total, held, self.tenants.members, waiter.tenant, waiter.wanted_bytes)
            for total, held in self._divided(waiter.purpose)
        )

    def _divided(self, purpose: Purpose) -> Iterator[tuple[int, Counter[Hashable]]]:
        """Yield the bytes divided among tenants for a purpose, and the bytes held of them."""
        if purpose is Purpose.CACHED:
            readable_bytes = self._settings.cache_bytes + self.put_bytes_max
            yield min(self._settings.staging_bytes, readable_bytes), self._held[purpose]
            return
        yield self._settings.staging_bytes, self.slots_of
        if purpose is Purpose.PUT:
            yield self.put_bytes_max, self._held[purpose]

    def _grant(self, waiter: Waiter, may_take: Callable[[Waiter], bool]) -> StagingLease | None:
        if not may_take(waiter):
            return None
        offsets = NO_ROWS if waiter.purpose is Purpose.CACHED else self._take_slots(waiter)
        if offsets is None:
            return None
        lease = StagingLease(
            offsets,
            waiter.slot_bytes,
            waiter.purpose,
            waiter.holder,
            waiter.tenant,
            held_bytes=0,
            rows=NO_ROWS,
        )
        self._count(lease, waiter.wanted_bytes)
        if waiter.purpose is Purpose.GET and waiter.drive is not None:
            self.charge_to_drive(lease, waiter.drive)
        return lease

    def _take_slots(self, waiter: Waiter) -> NDArray[np.int64] | None:
        """Take slots, if necessary from the cache; None if impossible now."""
        count, slot_bytes, wanted = waiter.count, waiter.slot_bytes, waiter.wanted_bytes
        if (
            self._held[waiter.purpose].total() + wanted > self._limit(waiter.purpose)
            or self.held_bytes + wanted > self._settings.staging_bytes
        ):
            return None
        offsets = self._pool.take(count, slot_bytes)
        # Quarantined cached blocks stay; other blocks in use become free soon.
        while offsets is None and self.cache.used_bytes > 0 and self._pool.has_room(count, slot_bytes):
            freed = self._evict_for(waiter)
            if not len(freed):
                break
            self._pool.drop(freed)
            offsets = self._pool.take(count, slot_bytes)
        return offsets

    def _evict_for(self, waiter: Waiter) -> NDArray[np.int64]:
        """Make the cache evict blocks for a lease.

        Blocks of disconnected tenants go first, then those of tenants with most memory, cache and slots
        counted together.
        """
        beside = self.slots_of
        beside[waiter.tenant] += waiter.wanted_bytes
        equal_bytes = self._pool.memory_bytes / max(1, len(self.tenants.members))
        return self.cache.make_room(
            waiter.wanted_bytes, waiter.tenant, beside=beside, equal_bytes=equal_bytes
        )

    def _is_blocked_by_quarantine(self, waiter: Waiter) -> bool:
        """Return whether quarantine alone leaves too few places for the slots."""
        if waiter.purpose is Purpose.CACHED or not self._pool.quarantined_bytes:
            return False
        return not self._pool.has_room(waiter.count, waiter.slot_bytes, if_taken_were_given=True)

    def _serve_waiters(self) -> None:
        for purpose, queue in self._queues.items():
            if queue:
                self._serve(queue, purpose)

    def _serve(self, queue: WaitQueue, purpose: Purpose) -> None:
        """Serve waiters in turn, skipping those at their holder's or drive's share.

        A waiter that needs more memory holds back the rest of its tenant. It also holds back tenants with
        more memory, except for their guaranteed part. A waiter for a drive holds back other tenants from
        this drive. Freed memory thus accumulates for the first waiter.
        """
        is_held_back = False
        skipped: set[Hashable] = set()
        crowded: dict[Hashable, Hashable] = {}
        """Waiting tenant per drive at its share."""
        ended = []
        for waiter in in_turn(queue, self._held[purpose].__getitem__, skipped):
            tenant, drive = waiter.tenant, waiter.drive
            if self._is_at_its_share(waiter) or crowded.get(drive, tenant) != tenant:
                continue
            if self._is_drive_at_its_share(waiter):
                crowded[drive] = tenant
                continue
            lease = self._grant(waiter, self._is_guaranteed if is_held_back else self._may_take)
            if lease is None and not self._is_blocked_by_quarantine(waiter):
                is_held_back = True
                skipped.add(tenant)
                continue
            waiter.result.set_result(Reason.QUARANTINED if lease is None else lease)
            ended.append(waiter)
        for waiter in ended:
            self._remove(waiter)
