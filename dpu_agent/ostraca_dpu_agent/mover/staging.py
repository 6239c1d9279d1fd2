"""Staging: the agent's registered memory, and who holds which slot of it.

Every block on its way lies in a leased slot. A lease ends when its last slot is given back or kept in the
DRAM cache; that happens only after every I/O and transfer that touches the slot is known to have ended. A
lease whose request is over before that is in *quarantine* meanwhile: counted, limited, and never cut short.

Leases wait for their turn, up to their deadline: first in line is the tenant that holds least, and within a
tenant who came first. Half of staging is guaranteed to the tenants that are connected, in equal parts; one
alone may have it all (``shares``). Puts hold at most their share, so that gets never wait for flash writes;
each worker holds at most its share, so that one that has stopped can't use staging up, and each drive, so
that one that hangs can't; cached blocks make room when staging needs it and when that helps, and those of a
tenant that has little of the memory not for one that has much. A transfer out of the cache leases the blocks
it reads: they stay where they are, and count for its worker's share and in quarantine as slots do, because
nobody else can have their memory meanwhile.

Blocks of all sizes share the memory, and what is in quarantine lies wherever it was leased. A lease whose
slots nothing but quarantine keeps from it does not wait: it is refused, and those behind it go on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ostraca_dpu_agent.counted import subtract
from ostraca_dpu_agent.mover.cache import BlockCache
from ostraca_dpu_agent.mover.leases import NO_ROOM_REASONS, Lease, NoRoom, Purpose
from ostraca_dpu_agent.mover.lines import Line, Waiter
from ostraca_dpu_agent.mover.shares import TenantShares
from ostraca_dpu_agent.mover.tenants import Tenants
from ostraca_fabric.extent import rounded_up
from ostraca_fabric.memory import HugeMemory
from ostraca_fabric.slots import SlotPool

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from ostraca_dpu_agent.mover.cache import Offer
    from ostraca_dpu_agent.settings import MemorySettings

__all__ = ["NO_ROOM_REASONS", "Lease", "NoRoom", "Purpose", "Staging"]

NO_ROWS = np.empty(0, np.int64)


class Staging:
    """The memory of one agent. Lives on the event loop's thread."""

    def __init__(self, settings: MemorySettings, tenants: Tenants | None = None) -> None:
        """Map and fault in the memory, in one piece. *tenants* share it; None: nobody is told apart."""
        self._settings = settings
        wanted = max(settings.staging_bytes, settings.cache_bytes + settings.reserve_bytes)
        total = rounded_up(wanted, settings.chunk_bytes)
        self.memory = HugeMemory(total, prefault=True)
        self.array = self.memory.array
        """All of the memory, flat: blocks lie in it at the offsets of their slots."""

        self.tenants = tenants or Tenants()
        self.tenants.on_left = self._serve_waiters
        members = self.tenants.members
        self.cache = BlockCache(
            settings.cache_bytes, protected_share=settings.cache_protected_share, members=members
        )
        self._shares = TenantShares(
            members,
            slot_bytes=settings.staging_bytes,
            put_bytes=self.put_bytes_max,
            cached_bytes=min(settings.staging_bytes, settings.cache_bytes),
        )
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
        self._lines = {purpose: Line() for purpose in Purpose}

    @property
    def held_bytes(self) -> int:
        """Bytes of slots on lease, those in quarantine included, cached blocks not."""
        return self._held[Purpose.GET] + self._held[Purpose.PUT]

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of slots whose request is over and whose transfer isn't known to be, cached blocks not."""
        return self._pool.quarantined_bytes

    @property
    def slots_of(self) -> Counter[Hashable]:
        """Bytes of slots that each tenant has on lease, and each drive that was given up with some."""
        return self._shares.slots

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
        tenant: Hashable = None,
    ) -> Lease | NoRoom:
        """Lease *count* slots to *holder*, a worker of *tenant*, waiting up to *within_s* for them.

        For CACHED: lease the right to ``hold`` as many blocks of the cache. *drive*: what is to be read from
        or written to; nobody waits for that after *given_up*. A lease for GET is read into at once; call
        ``off_drive`` then, and ``onto_drive`` before others are written.
        """
        settings, line = self._settings, self._lines[purpose]
        if count * slot_bytes > self._limit(purpose) or slot_bytes > settings.chunk_bytes:
            return NoRoom.TOO_LARGE
        given: asyncio.Future[Lease | NoRoom] = asyncio.get_running_loop().create_future()
        waiter = Waiter(count, slot_bytes, purpose, holder, tenant, drive, given)
        if self._is_too_much_quarantined(waiter):
            return NoRoom.QUARANTINED
        line.add(waiter)
        self._serve(line, purpose)
        if given.done():
            return given.result()
        if self._is_kept_out(waiter):
            line.remove(waiter)
            return NoRoom.QUARANTINED
        if within_s > 0:
            return await self._wait(waiter, within_s, given_up)
        line.remove(waiter)
        return NoRoom.DEADLINE

    async def _wait(
        self, waiter: Waiter, within_s: float, given_up: asyncio.Future[None] | None
    ) -> Lease | NoRoom:
        until: set[asyncio.Future[Any]] = {waiter.given} if given_up is None else {waiter.given, given_up}
        await asyncio.wait(until, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if waiter.given.done():
            return waiter.given.result()
        waiter.given.cancel()
        self._lines[waiter.purpose].remove(waiter)
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
            subtract(self._held_on, lease.drive, lease.held_bytes)
            lease.drive = None
            self._serve_waiters()

    def leave_to_drive(self, lease: Lease) -> None:
        """Quarantine a lease whose drive was given up: it no longer counts for its worker, who goes on."""
        self.quarantine(lease)
        for counted in (self._held_by, self._quarantined_by):
            subtract(counted, lease.holder, lease.held_bytes)
            counted[lease.drive] += lease.held_bytes
        self._shares.count(lease.purpose, lease.tenant, -lease.held_bytes)
        self._shares.count(lease.purpose, lease.drive, lease.held_bytes)
        lease.holder = lease.tenant = lease.drive
        self._serve_waiters()

    def release(self, lease: Lease, *, keep: Offer | None = None) -> None:
        """End a lease: no I/O and no transfer touches its slots any more.

        *keep* offers what lies in them, slot by slot, to the DRAM cache.
        """
        if lease.is_quarantined:
            subtract(self._quarantined_by, lease.holder, lease.held_bytes)
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
            subtract(self._held_by, lease.holder, -more_bytes)
            self._shares.count(lease.purpose, lease.tenant, more_bytes)

    def _limit(self, purpose: Purpose) -> int:
        return self.put_bytes_max if purpose is Purpose.PUT else self._settings.staging_bytes

    def _is_too_much_quarantined(self, waiter: Waiter) -> bool:
        """Whether transfers not known to have ended hold too much of staging, beyond what is guaranteed to
        the waiter's tenant, or of its holder's share.
        """
        own = self._quarantined_by[waiter.holder]
        if own > 0 and self._is_above_share(own + waiter.wanted_bytes):
            return True
        total = self.quarantined_bytes + self.quarantined_cached_bytes
        if total <= self._settings.quarantine_share * self._settings.staging_bytes:
            return False
        return not self._shares.is_guaranteed(waiter.purpose, waiter.tenant, waiter.wanted_bytes)

    def _is_above_share(self, held_bytes: int) -> bool:
        return held_bytes > self._settings.worker_share * self._settings.staging_bytes

    def _is_at_its_share(self, waiter: Waiter) -> bool:
        """Whether its holder has to give something back first; one that holds nothing never has."""
        held = self._held_by[waiter.holder]
        return held > 0 and self._is_above_share(held + waiter.wanted_bytes)

    def _is_drive_at_its_share(self, waiter: Waiter) -> bool:
        settings = self._settings
        held = 0 if waiter.drive is None else self._held_on.get(waiter.drive, 0)
        return held > 0 and held + waiter.wanted_bytes > settings.drive_share * settings.staging_bytes

    def _take(self, waiter: Waiter) -> Lease | None:
        offsets = NO_ROWS if waiter.purpose is Purpose.CACHED else self._slots(waiter)
        if offsets is None:
            return None
        lease = Lease(
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
            self.onto_drive(lease, waiter.drive)
        return lease

    def _slots(self, waiter: Waiter) -> NDArray[np.int64] | None:
        """Take slots, from the cache where staging has too few; None when they can't be had now."""
        count, slot_bytes, wanted = waiter.count, waiter.slot_bytes, waiter.wanted_bytes
        if self._held[waiter.purpose] + wanted > self._limit(waiter.purpose):
            return None
        if self.held_bytes + wanted > self._settings.staging_bytes:
            return None
        offsets = self._pool.take(count, slot_bytes)
        while offsets is None and self._may_the_cache_help(count, slot_bytes):
            freed = self._lent(waiter)
            if not len(freed):
                break
            self._pool.drop(freed)
            offsets = self._pool.take(count, slot_bytes)
        return offsets

    def _lent(self, waiter: Waiter) -> NDArray[np.int64]:
        """Have the cache drop blocks for a lease: of tenants that are gone, and of those that have most of
        the memory, the cache and slots counted together.
        """
        beside = self._shares.slots
        beside[waiter.tenant] += waiter.wanted_bytes
        equal_bytes = self._pool.memory_bytes / max(1, len(self.tenants.members))
        return self.cache.lend(waiter.wanted_bytes, waiter.tenant, beside=beside, equal_bytes=equal_bytes)

    def _may_the_cache_help(self, count: int, slot_bytes: int) -> bool:
        """Whether there would be room without the cache. Of blocks in use, those in quarantine are known to
        stay; others are let go of soon.
        """
        return self.cache.used_bytes > 0 and self._pool.has_room(count, slot_bytes)

    def _is_kept_out(self, waiter: Waiter) -> bool:
        """Whether what is in quarantine leaves too few places for its slots, whatever else is given back."""
        if waiter.purpose is Purpose.CACHED or not self._pool.quarantined_bytes:
            return False
        return not self._pool.has_room(waiter.count, waiter.slot_bytes, if_taken_were_given=True)

    def _serve_waiters(self) -> None:
        for purpose, line in self._lines.items():
            if line:
                self._serve(line, purpose)

    def _serve(self, line: Line, purpose: Purpose) -> None:
        """Serve waiters in turn; those whose holder or drive is at its share let others go before them.

        One that has to wait beyond that keeps the rest of its tenant waiting, and those of tenants that hold
        more from all but what is guaranteed to them; one that waits for a drive keeps other tenants from it.
        So what comes free adds up to what the first one needs.
        """
        is_kept_back = False
        left_out: set[Hashable] = set()
        crowded: dict[Hashable, Hashable] = {}
        """Who waits for each drive that is at its share."""
        ended = []
        for waiter in line.in_turn(lambda tenant: self._shares.held(purpose, tenant), left_out):
            tenant, drive = waiter.tenant, waiter.drive
            if self._is_at_its_share(waiter) or crowded.get(drive, tenant) != tenant:
                continue
            if self._is_drive_at_its_share(waiter):
                crowded[drive] = tenant
                continue
            may_take = self._shares.is_guaranteed if is_kept_back else self._shares.may_take
            lease = self._take(waiter) if may_take(purpose, tenant, waiter.wanted_bytes) else None
            if lease is None and not self._is_kept_out(waiter):
                is_kept_back = True
                left_out.add(tenant)
                continue
            waiter.given.set_result(NoRoom.QUARANTINED if lease is None else lease)
            ended.append(waiter)
        for waiter in ended:
            line.remove(waiter)
