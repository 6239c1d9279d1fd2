"""A put: blocks from a worker's arena, regions or other memory to flash.

Owners reserve space first, so that an existing block costs no transfer. A small put for one drive is fetched
meanwhile. The blocks for a drive are processed in independent *groups*: lease staging, fetch, check against
the SDK's tag, write, commit. Threads check waves as they arrive, and a group is written once all of it is
checked. So the event loop has a few turns per group, and no flash write of a group competes with its own
fetch. A put with acknowledgement STAGED is answered when all blocks have passed the check; its groups
continue to the commit. The data path never creates a tag: bytes without a matching SDK tag are not stored.
Checked blocks are readable at this agent until they are committed.

A put refused by a busy shard retries until its deadline, every ``space_retry_s``. Waiting blocks hold
neither staging nor space, and blocks with space proceed alone. Puts that wait for each other's shards thus
cannot deadlock. The number of waiting puts is limited (``waiting_puts_max``), since each holds a request
slot that gets need too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.drive_io import DriveIO, interleave_drives
from ostraca_dpu_agent.datapath.location.routing import NO_POSITIONS, GroupedBlocks, Routes
from ostraca_dpu_agent.datapath.requests.blocks import TransferRun
from ostraca_dpu_agent.datapath.requests.context import Deadline, RequestContext
from ostraca_dpu_agent.datapath.requests.worker import WorkerConnection
from ostraca_dpu_agent.datapath.space import Space
from ostraca_dpu_agent.datapath.staging.arrivals import Arrivals
from ostraca_dpu_agent.datapath.staging.leases import Purpose, StagingLease
from ostraca_dpu_agent.datapath.staging.staged import StagedGroup
from ostraca_dpu_agent.volumes import ServedVolume
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.extent import Pieces, whole_pages
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.model.outcome import Ack, PutState, Reason
from ostraca_fabric.ports.transport import BlockStream
from ostraca_fabric.runtime.tasks import until_done, wait_for_all
from ostraca_fabric.tables.digests import GOOD, TagCheck
from ostraca_fabric.tables.slots import cut_into_waves
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import Put, PutDone

_EXISTS_SHARE = 0.25
"""Largest share of a put's remaining time to wait for a search for existing blocks."""

_EARLY_BYTES = 4 << 20
"""Most bytes to fetch before the owners' answer, which may be that blocks exist. The answer takes as long as
the copy of a block, or longer.
"""

_OWNER_CANT_SAY = (Reason.RECOVERING, Reason.NO_OWNER)
"""Reasons of an owner that can't tell whether the block exists; the previous owner may know."""


_AT_CHECK = (
    np.array([PutState.DECLINED, PutState.STAGED, PutState.DECLINED], np.uint8),
    np.array([Reason.TRANSFER_FAILED, Reason.NONE, Reason.DAMAGED], np.uint8),
)
"""Outcome of a block by the ``CheckState`` after the check."""

_AT_END = (
    np.array([PutState.LATE, PutState.STAGED, PutState.DECLINED], np.uint8),
    np.array([Reason.DEADLINE, Reason.NONE, Reason.DAMAGED], np.uint8),
)
"""The same at the end of the request, for groups not checked completely."""


@dataclass(slots=True, eq=False)
class GroupFetch:
    """Blocks on their way from the worker to staging."""

    lease: StagingLease
    check: TagCheck
    stream: BlockStream
    checked: asyncio.Future[None]
    """Done after the last check."""

    async def outlive(self) -> None:
        """Stop, and wait for the end."""
        self.stream.stop()
        await until_done(self.stream.ended)
        await until_done(self.checked)


@dataclass(slots=True, eq=False)
class MovedGroup:
    """Blocks of a put on their way from the arena to a drive."""

    positions: NDArray[np.intp]
    """Positions in the request."""

    fetch: GroupFetch | None = None
    """None before the lease."""

    states: NDArray[np.uint8] = field(init=False)
    """A ``CheckState`` per block, which checks change until all are checked or the request is over."""

    has_space: bool = True
    """False while owners have not answered."""

    good: NDArray[np.intp] = field(init=False)
    """Rows of blocks with a matching tag, in the order of their places on the drive; set by the check."""

    write: DriveIO | None = None
    """Write of the good blocks."""


class PutRun(TransferRun[Put]):
    """A put. ``run`` answers; groups continue to flash afterwards.

    Groups run in a few sequential *lanes*. At the end of the request, groups not yet started give their
    space back.
    """

    def __init__(
        self,
        context: RequestContext,
        worker: WorkerConnection,
        volume: ServedVolume,
        request: Put,
        deadline: Deadline,
    ) -> None:
        """Parse the request. Raises as ``TransferRun``, and RefusedError for blocks in no reach."""
        super().__init__(context, worker, volume, request, deadline, late=PutState.LATE)
        self._ack = _ack(request.ack)
        self._tags = codec.rows16(request.tags, len(self._blocks))
        self._memory = worker.memory if request.addresses else None
        self._arena = worker.arena if self._memory is None else None
        if self._memory is None:
            self._check_regions()
        self._is_short = volume.are_too_short(self._blocks.spans)
        self._space = Space(
            context,
            self._blocks,
            self._outcomes.set,
            ttl_s=request.ttl_s,
            pool=volume.pool,
        )
        self._moving: dict[BlockStream, MovedGroup] = {}
        """Groups before the end of their check."""
        self._waiting: list[tuple[DriveId, deque[MovedGroup]]] = []
        self._unchecked: set[MovedGroup | None] = {None}
        """Groups before the end of their check, and None while groups may be added."""
        self._is_staged: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> PutDone:
        """Store the blocks; answer at the requested state or at the deadline.

        After any exception, ``Settled`` follows.
        """
        storing = self._context.tasks.begin(self._store())
        answered = self._is_staged if self._ack is Ack.STAGED else storing
        unsettled = await self._end(storing, answered, partial(self._stop_moving, storing))
        return PutDone(
            self._request.request,
            *self._current_outcomes().encode(),
            unsettled.astype(codec.U32).tobytes(),
        )

    def _current_outcomes(self) -> codec.Outcomes:
        """Return the outcomes so far.

        Checked blocks are STAGED if the caller asked for STAGED, else LATE.
        """
        outcomes = self._outcomes.copy()
        if self._ack is Ack.COMMITTED:
            outcomes.set(outcomes.states == PutState.STAGED, PutState.LATE, Reason.DEADLINE)
        if self._deadline.stopped.done():
            outcomes.reasons[outcomes.states == PutState.LATE] = Reason.CANCELLED
        return outcomes

    async def _store(self) -> None:
        """Reserve space and run all groups, until none uses the arena or flash."""
        context = self._context
        try:
            moving = await self._begin()
            if self._space.is_busy.any():
                moving.insert(0, self._retry_busy())
            else:
                self._end_check(None)
            await context.tasks.run_all(moving)
        finally:
            committed_bytes = int(self._blocks.lengths[self._outcomes.states == PutState.COMMITTED].sum())
            context.record("put", self._blocks.keys, self._outcomes, committed_bytes)
            self._unchecked.clear()  # of groups that never began
            self._end_check(None)

    async def _begin(self) -> list[Coroutine[Any, Any, None]]:
        """Reserve space, and fetch a small put meanwhile; return lanes as ``_lanes``."""
        routes = self._context.routes()
        grouped = routes.by_owner(self._volume.placement_secret, self._blocks.spans)
        early = await self._fetch_early(routes, grouped)
        try:
            reserved = await self._reserve(routes, grouped)
        except BaseException:
            if early is not None:
                await self._discard(early)
            raise
        if early is None or np.array_equal(early.positions, reserved):
            return self._lanes(reserved, early)
        return [*self._lanes(reserved), self._discard(early)]

    async def _fetch_early(self, routes: Routes, grouped: GroupedBlocks) -> MovedGroup | None:
        """Begin to fetch the blocks of a small put for one drive, if staging has room now."""
        blocks, per_group = len(self._blocks), self._context.blocks_per_put(self._slot_bytes)
        if not 0 < blocks <= min(per_group, _EARLY_BYTES // self._slot_bytes) or self._is_short.any():
            return None
        parts, unowned = grouped
        drives = {routes.place(part.shard)[0] for its in parts.values() for part in its}
        if len(drives) != 1 or len(unowned):
            return None
        if not self._context.staging.is_half_free_for_puts(blocks * self._slot_bytes):
            return None  # puts to owners that answer need the other half
        (drive,) = drives
        group = MovedGroup(np.arange(blocks), has_space=False)
        lease = await self._lease(Purpose.PUT, drive, blocks, self._slot_bytes, within_s=0.0)
        if isinstance(lease, Reason):
            return None
        self._fetch(group, lease)
        return group

    async def _discard(self, group: MovedGroup) -> None:
        """End a fetch of blocks that are not stored."""
        assert group.fetch is not None
        await group.fetch.outlive()
        self._moving.pop(group.fetch.stream, None)
        self._context.staging.release(group.fetch.lease)

    def _lanes(
        self, reserved: NDArray[np.intp], early: MovedGroup | None = None
    ) -> list[Coroutine[Any, Any, None]]:
        """Return lanes for blocks with space, to be run at once; *early* has all of them."""
        context = self._context
        per_group = context.blocks_per_put(self._slot_bytes)
        waiting = [
            (drive, deque([early] if early else map(MovedGroup, cut_into_waves(its, per_group))))
            for drive, its in self._space.by_drive(reserved)
        ]
        self._waiting += waiting
        for _, groups in waiting:
            self._unchecked.update(groups)
        return [
            self._lane(*queue) for queue in interleave_drives(waiting, lanes=context.settings.waves_ahead)
        ]

    async def _retry_busy(self) -> None:
        """Retry blocks of busy shards while the put lasts, then wait for their groups."""
        tenants, tenant = self._context.staging.tenants, self._worker.tenant
        waiting, most = tenants.waiting_puts, self._context.settings.waiting_puts_max
        lanes: list[asyncio.Task[None]] = []
        try:
            if tenants.may_add(waiting, tenant, most):
                tenants.add(waiting, tenant)
                try:
                    while self._space.is_busy.any():
                        within_s = min(self._context.settings.space_retry_s, self._deadline.left_s)
                        await asyncio.wait([self._deadline.over], timeout=within_s)
                        if self._deadline.is_over() or self._deadline.left_s <= 0:
                            break
                        lanes += map(self._context.tasks.spawn, self._lanes(await self._reserve_again()))
                finally:
                    tenants.remove(waiting, tenant)
        finally:
            self._end_check(None)
            await wait_for_all(lanes)

    async def _reserve_again(self) -> NDArray[np.intp]:
        """Retry reservations; return the positions with new space."""
        context, wanted = self._context, self._space.is_busy.copy()
        routes = context.routes()
        await self._space.reserve(
            routes,
            routes.by_owner(self._volume.placement_secret, self._blocks.spans),
            wanted,
            within_s=self._deadline.left_s,
            is_again=True,
        )
        reserved = (wanted & self._space.is_reserved).nonzero()[0]
        self._outcomes.set(reserved, PutState.LATE, Reason.DEADLINE)
        return reserved

    async def _reserve(self, routes: Routes, grouped: GroupedBlocks) -> NDArray[np.intp]:
        """Reserve space for blocks *grouped* by owner; return the positions with space.

        All other blocks get their final state.
        """
        context, within_s = self._context, self._deadline.left_s
        if within_s <= 0:
            return np.zeros(0, np.intp)
        is_short = self._is_short
        self._outcomes.set(is_short, PutState.DECLINED, Reason.TOO_SHORT)
        reserving = self._space.reserve(routes, grouped, ~is_short, within_s=within_s)
        if not routes.has_earlier:
            await reserving
            return self._space.is_reserved.nonzero()[0]
        finding = context.locator.find_earlier(
            routes,
            self._volume,
            self._blocks.spans,
            self._blocks.keys,
            wanted=~is_short,
            within_s=min(context.settings.exists_within_s, _EXISTS_SHARE * within_s),
        )
        _, (exists, existed) = await asyncio.gather(reserving, finding)
        exists |= existed & np.isin(self._outcomes.reasons, _OWNER_CANT_SAY)
        is_reserved = self._space.is_reserved
        self._space.release((is_reserved & exists).nonzero()[0])
        self._outcomes.set(exists, PutState.EXISTS, Reason.NONE)
        self._space.is_busy[exists] = False
        return (is_reserved & ~exists).nonzero()[0]

    async def _lane(self, drive: DriveId, waiting: deque[MovedGroup]) -> None:
        while waiting:
            group = waiting.popleft()
            try:
                fetch = await self._fetched(drive, group)
                if fetch is not None:
                    await self._store_group(drive, group, fetch, is_last=not waiting)
            finally:
                self._end_check(group)

    def _end_check(self, group: MovedGroup | None) -> None:
        """Note that a group is checked; answer after the last. Repeated calls do nothing."""
        self._unchecked.discard(group)
        if not (self._unchecked or self._is_staged.done()):
            self._is_staged.set_result(None)

    async def _fetched(self, drive: DriveId, group: MovedGroup) -> GroupFetch | None:
        """Return the fetch of a group with space, begun here unless begun early; None without staging."""
        if group.fetch is None:
            lease = await self._lease(Purpose.PUT, drive, len(group.positions), self._slot_bytes)
            if isinstance(lease, Reason):
                if lease is not Reason.DEADLINE:
                    self._outcomes.set(group.positions, PutState.DECLINED, lease)
                self._space.release(group.positions)
                return None
            self._fetch(group, lease)
        elif self._deadline.is_over():
            self._space.release(group.positions)
            await self._discard(group)
            return None
        group.has_space = True
        return group.fetch

    async def _store_group(
        self, drive_id: DriveId, group: MovedGroup, fetch: GroupFetch, *, is_last: bool
    ) -> None:
        """Process a group with space, whose fetch has begun. *is_last*: no other waits for the lane."""
        context, lease, check, positions = self._context, fetch.lease, fetch.check, group.positions
        staged = StagedGroup(
            lease,
            self._blocks.keys[positions],
            check.lengths,
            check.tags,
            lambda rows: self._space.are_standing(positions[rows], context.routes().map),
        )
        kept = np.zeros(len(positions), np.bool_)
        try:
            await self._check_group(group, fetch)
            context.staged.add(staged, group.good)
            self._end_check(group)
            context.staging.charge_to_drive(lease, drive_id)
            if self._ack is Ack.STAGED and is_last:
                turn = context.writes.turn(drive_id, lease.held_bytes)
                if not self._unchecked:
                    await until_done(self._deadline.over)  # the answer goes before the write
                await turn
            reasons = await self._write(drive_id, group, fetch)
            if group.write is None or not group.write.is_abandoned:
                context.staging.end_drive_io(lease)
            has_failed = reasons != Reason.NONE
            if has_failed.any():
                context.staged.remove(staged, group.good[has_failed])
            kept[:] = await self._commit(group, reasons)
        except BaseException:  # on any error, the lease must outlive all started work
            await fetch.outlive()
            if group.write is not None:
                await until_done(group.write.ends)
            raise
        finally:
            context.staged.remove(staged)
            keep = self._blocks.cache_offer(positions, check.tags, kept)
            context.release(lease, group.write, keep=keep)

    def _fetch(self, group: MovedGroup, lease: StagingLease) -> None:
        """Start fetching a group into a lease, from the worker's memory or by its transport."""
        lengths, positions = self._blocks.lengths[group.positions], group.positions
        no_places = np.zeros(len(positions), np.int64)  # on the drive, before the write
        pieces = Pieces(self._context.staging.array, lease.offsets, no_places, whole_pages(lengths))
        check = TagCheck(pieces, lengths, self._blocks.seeds[positions], self._tags[positions])
        if self._memory is None:
            stream, checked = self._fetch_by_transport(group, lease, check)
        else:
            stream = self._memory.fetch(check, self._slots[positions])
            checked = stream.ended
        group.states, group.fetch = check.states, GroupFetch(lease, check, stream, checked)
        self._leases.add(lease)
        self._moving[stream] = group
        stream.ended.add_done_callback(lambda _: self._leases.discard(lease))

    def _fetch_by_transport(
        self, group: MovedGroup, lease: StagingLease, check: TagCheck
    ) -> tuple[BlockStream, asyncio.Future[None]]:
        arrivals = Arrivals(check, self._context.checkers)
        per_wave = self._context.blocks_per_wave(self._slot_bytes)
        assert self._arena is not None, "other workers' memory is read"
        blocks = self._wave(group.positions, lease)
        stream = self._arena.fetch(blocks, per_wave=per_wave, arrived=arrivals.arrive)
        stream.ended.add_done_callback(lambda _: arrivals.end())
        return stream, arrivals.checked

    async def _check_group(self, group: MovedGroup, fetch: GroupFetch) -> None:
        """Wait until a group has arrived and is checked, and note the outcomes.

        After the end of the request, no further block may be stored.
        """
        await fetch.checked
        del self._moving[fetch.stream]
        if not self._deadline.is_over():
            self._note_checked(group, _AT_CHECK)
        is_good = group.states == GOOD
        good = is_good.nonzero()[0]
        group.good = good[self._space.drive_offsets(group.positions[good]).argsort(kind="stable")]
        if len(good) < len(is_good):
            self._space.release(group.positions[~is_good])

    def _note_checked(self, group: MovedGroup, ends: tuple[NDArray[np.uint8], NDArray[np.uint8]]) -> None:
        """Set the outcomes of checked blocks; no other block of the group may be stored from now on."""
        states = group.states = group.states.copy()
        self._outcomes.set(group.positions, ends[0][states], ends[1][states])

    def _stop_moving(self, storing: asyncio.Future[None]) -> NDArray[np.intp]:
        """Begin no further wave or group; return the blocks of unsettled waves. Raises as *storing*."""
        if storing.done():
            storing.result()
        for _, waiting in self._waiting:
            while waiting:
                self._space.release(waiting.popleft().positions)
        moving = [NO_POSITIONS]
        for stream, group in self._moving.items():
            moving.append(group.positions[stream.stop()])
            if group.has_space:
                self._note_checked(group, _AT_END)
        return np.sort(np.concatenate(moving))

    async def _write(self, drive_id: DriveId, group: MovedGroup, fetch: GroupFetch) -> NDArray[np.uint8]:
        """Write the good blocks of a group; return a reason per good block: NONE for blocks on flash."""
        drive, reasons = self._context.drives.get(drive_id), codec.filled(len(group.good), Reason.DRIVE_ERROR)
        if drive is not None and drive.refuses_writes:
            reasons[:] = Reason.DRIVE_SUSPECT
        elif self._space.has_expired(group.positions):
            # Checked last: this agent may have been suspended meanwhile.
            reasons[:] = Reason.EXPIRED
        elif drive is not None and len(group.good):
            lengths = fetch.check.pieces.lengths[group.good]
            places = self._space.drive_offsets(group.positions[group.good])
            pieces = Pieces(self._context.staging.array, fetch.lease.offsets[group.good], places, lengths)
            group.write = self._context.writes.submit(drive, pieces)
            await group.write.wait()
            if group.write.is_abandoned:
                reasons[:] = Reason.DRIVE_SUSPECT
            else:
                reasons[group.write.ends.result()] = Reason.NONE
        return reasons

    async def _commit(self, group: MovedGroup, reasons: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Commit the written good blocks of a group; return which are committed.

        Blocks that an abandoned write may still reach keep their space until the reservation ends.
        """
        positions, has_failed = group.positions[group.good], reasons != Reason.NONE
        if has_failed.any():
            failed = positions[has_failed]
            self._outcomes.set(failed, PutState.DECLINED, reasons[has_failed])
            if group.write is None or not group.write.is_abandoned:
                self._space.release(failed, may_land=group.write is not None)
        chosen = positions[~has_failed]
        if self._space.has_expired(chosen):
            self._outcomes.set(chosen, PutState.DECLINED, Reason.EXPIRED)
        else:
            await self._space.commit(chosen, self._tags)
        is_committed: NDArray[np.bool_] = self._outcomes.states[group.positions] == PutState.COMMITTED
        return is_committed


def _ack(ack: int) -> Ack:
    try:
        return Ack(ack)
    except ValueError as error:
        raise UsageError(
            f"ack {ack} is no state to acknowledge at: ask for {Ack.STAGED} (staged) or {Ack.COMMITTED}"
        ) from error
