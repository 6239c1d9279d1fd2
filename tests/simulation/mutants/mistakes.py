"""Mistakes made on purpose, each in the running code of a process that is given up to it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from tests.simulation.fabric.world import worker
from tests.simulation.shard import test_oracle as shard_scenes

from ostraca._protocol.ledger import Ledger
from ostraca._protocol.operations import GetOperation, Progress
from ostraca_dpu_agent.adapters.transports.inline_transport import InlinePeer
from ostraca_dpu_agent.controller import epoch_retirement, recovery, served_shard
from ostraca_dpu_agent.controller.claim_validity import ClaimValidity
from ostraca_dpu_agent.controller.placement_epochs import EpochRetirementDue
from ostraca_dpu_agent.controller.served_shard import ServedShard, adopt_late_commits
from ostraca_dpu_agent.controller.served_shards import ServedShards
from ostraca_dpu_agent.datapath import commits
from ostraca_dpu_agent.datapath.location.locator import Locator
from ostraca_dpu_agent.datapath.location.routing import Routes
from ostraca_dpu_agent.datapath.put import MovedGroup, PutRun
from ostraca_dpu_agent.datapath.space import Space
from ostraca_dpu_agent.datapath.staging.arrivals import Arrivals
from ostraca_dpu_agent.datapath.staging.leases import StagingLease
from ostraca_dpu_agent.server.dispatcher import RequestDispatcher
from ostraca_dpu_agent.shards.core import ShardCore, shard_core
from ostraca_dpu_agent.shards.core.allocator import SpaceAllocator
from ostraca_dpu_agent.shards.core.catalog import Promises
from ostraca_dpu_agent.shards.core.commits import CommitQueue
from ostraca_dpu_agent.shards.core.grants import Grants
from ostraca_dpu_agent.shards.core.recovery import Adoption
from ostraca_dpu_agent.shards.core.reservations import ReservationTable
from ostraca_dpu_agent.shards.core.ring.ring import Ring
from ostraca_dpu_agent.shards.group_commit import GroupCommit
from ostraca_dpu_agent.shards.scrub import DamageChecker
from ostraca_dpu_agent.shards.service import OwnerService
from ostraca_dpu_agent.shards.shard import OwnedShard
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.flash.index import BlockIndex
from ostraca_fabric.model.fabric_map import Grant
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.ports.owners import ShardAnswer
from ostraca_fabric.tables.digests import TagCheck, tags_of
from ostraca_fabric.tables.slots import SlotPool
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.codec import distinct
from ostraca_fabric.wire.messages import PastSettled


def _change(of: Any, name: str, to: Any) -> None:
    assert hasattr(of, name), f"{of} has no {name} any more: the mistake is made elsewhere now"
    setattr(of, name, to)


# ------------------------------------------------------------------------------------------- at the two ends


def no_tag_at_the_reader() -> None:
    _change(worker, "are_good", lambda memory, offsets, lengths, seeds, tags: np.ones(len(lengths), np.bool_))


def hits_on_the_agents_word() -> None:
    concluded = GetOperation._conclude

    def trusting(self: GetOperation) -> Any:
        if self._answer is not None:
            self._progress[self._answer.states == 1] = Progress.VERIFIED
        return concluded(self)

    _change(GetOperation, "_conclude", trusting)


def tags_made_by_the_agent() -> None:
    fetch, run = PutRun._fetch_by_transport, Arrivals._run
    puts: dict[int, tuple[PutRun, MovedGroup, TagCheck]] = {}

    def fetching(self: PutRun, group: MovedGroup, lease: StagingLease, check: TagCheck) -> Any:
        puts[id(check.tags)] = self, group, check
        return fetch(self, group, lease, check)

    def making(self: Arrivals, rows: slice) -> None:
        check, (put, group, _) = self.check, puts[id(self.check.tags)]
        offsets, lengths = check.pieces.memory_offsets[rows], check.lengths[rows]
        check.tags[rows] = tags_of(check.pieces.memory, offsets, lengths, check.seeds[rows])
        put._tags = put._tags.copy()
        put._tags[group.positions[rows]] = check.tags[rows]
        run(self, rows)

    _change(PutRun, "_fetch_by_transport", fetching)
    _change(Arrivals, "_run", making)


def slots_used_again_without_quarantine() -> None:
    def give_at_once(pool: SlotPool, _holder: object, offsets: NDArray[np.int64]) -> None:
        pool.give(offsets)

    _change(SlotPool, "quarantine", give_at_once)
    _change(SlotPool, "settle", lambda pool, holder: None)


def a_lost_connection_settles_its_slots() -> None:
    lost = Ledger.lose_connection

    def settling(self: Ledger, *, is_drained: bool) -> None:
        lost(self, is_drained=True)

    _change(Ledger, "lose_connection", settling)


def the_past_is_settled_before_it_is() -> None:
    async def at_once(_self: RequestDispatcher, _session: Any, request: Any) -> PastSettled:
        return PastSettled(request.request)

    _change(RequestDispatcher, "_settle_past", at_once)


# ---------------------------------------------------------------------------------------------- of look-ups


def an_unowned_block_is_found() -> None:
    locate = Locator.locate

    async def hopeful(self: Locator, *rest: Any, **named: Any) -> Any:
        located = await locate(self, *rest, **named)
        if named.get("is_brief"):
            located.is_found[:] |= located.reasons == Reason.NO_OWNER
        return located

    _change(Locator, "locate", hopeful)


def every_block_is_found() -> None:
    locate = Locator.locate

    async def boasting(self: Locator, *rest: Any, **named: Any) -> Any:
        located = await locate(self, *rest, **named)
        if named.get("is_brief"):
            located.is_found[:] = True
        return located

    _change(Locator, "locate", boasting)


def no_block_is_found() -> None:
    _change(BlockIndex, "has_at", lambda *_, **__: 0)


def only_the_first_segment_is_pinned() -> None:
    _change(shard_core, "distinct", lambda segments: distinct(segments)[:1])


def promises_are_broken() -> None:
    _change(Promises, "make", lambda self, segments, end_s: None)


# ----------------------------------------------------------------------------------------- in word of a put


def no_word_of_a_commit_is_good_word() -> None:
    share_out = commits._share_out

    def hopeful(parts: Any, committed: Any) -> None:
        share_out(parts, committed)
        for part in parts if committed is None else ():
            part.answer.result().set(slice(None), PutState.COMMITTED)

    _change(commits, "_share_out", hopeful)


def what_is_being_written_exists() -> None:
    reserve = ShardCore.reserve

    def hasty(self: ShardCore, *rest: Any, **named: Any) -> Any:
        made = reserve(self, *rest, **named)
        is_in_flight = made.reasons == Reason.IN_FLIGHT
        made.states[is_in_flight], made.reasons[is_in_flight] = PutState.EXISTS, Reason.NONE
        return made

    _change(ShardCore, "reserve", hasty)


# ------------------------------------------------------------------------------------------------ in owners


def committed_before_it_is_on_flash() -> None:
    write, end = GroupCommit._write, GroupCommit._end

    async def eager(self: GroupCommit, writes: Any, begun_s: float) -> None:
        for each in writes:
            end(self, each, is_ok=True)
        await write(self, writes, begun_s)

    def silent(_self: GroupCommit, _write: Any, *, is_ok: bool, is_dropped: bool = False) -> None:
        """Return an earlier answer."""

    _change(GroupCommit, "_write", eager)
    _change(GroupCommit, "_end", silent)


def what_exists_is_taken_for_new() -> None:
    reserve, find = ShardCore.reserve, BlockIndex.find

    def forgetful(self: ShardCore, *rest: Any, **named: Any) -> Any:
        _change(BlockIndex, "find", lambda index, keys: np.full(len(keys), -1))
        try:
            return reserve(self, *rest, **named)
        finally:
            _change(BlockIndex, "find", find)

    _change(ShardCore, "reserve", forgetful)


def the_last_commit_wins() -> None:
    """Let the owner confuse listed and committed blocks."""
    what_exists_is_taken_for_new()
    list_blocks = CommitQueue._list

    def instead(self: CommitQueue, slots: NDArray[np.intp], segment: Any) -> None:
        self._reservations.is_adopted[slots] = True
        list_blocks(self, slots, segment)

    _change(CommitQueue, "_list", instead)


def a_commit_under_an_ended_epoch_counts() -> None:
    _change(ShardCore, "commit", shard_scenes.trusting)
    _change(ReservationTable, "number_from", lambda table, count: None)


def pins_are_ignored() -> None:
    end_draining = Ring.end_draining

    def ruthless(self: Ring, now_s: float, pins: NDArray[np.int64]) -> None:
        end_draining(self, now_s, np.zeros_like(pins))

    _change(Ring, "end_draining", ruthless)


def stale_damage_is_trusted() -> None:
    async def trusting(_self: DamageChecker, _report: Any) -> bool:
        return True

    _change(DamageChecker, "_is_damaged", trusting)


def a_failed_write_is_not_waited_for() -> None:
    _change(SpaceAllocator, "expect_late_writes", lambda self, segments, failed_s: None)


def a_late_write_is_not_waited_for_before_space_is_used_again() -> None:
    expire = SpaceAllocator.expire

    def hasty(self: SpaceAllocator, now_s: float) -> None:
        settings = self._settings
        self._settings = replace(settings, late_write_s=0.0)
        try:
            expire(self, now_s)
        finally:
            self._settings = settings

    _change(SpaceAllocator, "expire", hasty)


# ------------------------------------------------------------------------------------------- between owners


def a_successor_opens_inside_an_unretired_grant() -> None:
    begin_core = ShardCore.begin

    def greedy(self: ShardCore, now_s: float, *, epoch: Any, **_withheld: Any) -> None:
        begin_core(self, now_s, epoch=epoch)

    _change(ShardCore, "begin", greedy)


def a_successor_is_granted_what_an_unretired_grant_holds() -> None:
    a_successor_opens_inside_an_unretired_grant()
    _change(Grant, "holds_any", lambda self, segments: False)


def nothing_is_adopted() -> None:
    def blind(_self: ShardCore, _now_s: float, _areas: Any) -> int:
        return 0

    _change(ShardCore, "adopt", blind)


def what_was_adopted_is_let_go_once_it_was_read() -> None:
    """... without a word, when the earlier owner's summaries are read again."""
    adopt, adopted = Adoption.adopt, WeakKeyDictionary[Adoption, NDArray[np.uint8]]()

    def forgetful(self: Adoption, areas: Any) -> int:
        index, known = self._catalog.index, adopted.get(self, np.empty((0, 16), np.uint8))
        rows = index.find(known)
        rows = rows[rows >= 0]
        index.remove(rows[index.is_read(rows)])
        listed = np.concatenate([known, *(each.entries["key"] for each in areas.segments)])
        new = np.unique(listed[index.find(listed) < 0], axis=0)
        count = adopt(self, areas)
        adopted[self] = np.unique(np.concatenate([known, new]), axis=0)
        return count

    _change(Adoption, "adopt", forgetful)


def a_late_write_is_not_waited_for_before_its_grant_is_retired() -> None:
    wait_s = ServedShard._late_write_wait_s
    _change(
        ServedShard,
        "_late_write_wait_s",
        lambda self, grant: wait_s(self, grant) - self._settings.late_write_s,
    )


def an_own_entry_does_not_win() -> None:
    _change(Adoption, "_are_outranked", lambda self, found, entries: np.zeros(len(entries), np.bool_))


def a_commit_after_its_reservation_counts() -> None:
    _change(ReservationTable, "take_expired", lambda self, now_s: np.zeros(0, np.intp))


def the_fence_is_ignored() -> None:
    _change(Grants, "may_write", lambda self, now_s: True)


def lookups_end_with_the_grant() -> None:
    resolve = OwnerService.resolve

    def bound(self: OwnerService, shard: Any, *rest: Any) -> Any:
        owned = self.shards.get(shard)
        if owned is not None and not owned.core.is_recovering and not owned.is_exclusive:
            return ShardAnswer(is_owner=False)
        return resolve(self, shard, *rest)

    _change(OwnerService, "resolve", bound)


def an_owner_writes_without_asking() -> None:
    confirm = OwnedShard.confirm
    _change(OwnedShard, "confirm", lambda self, _until_s, **asked: confirm(self, math.inf, **asked))


def an_own_claim_is_a_fence_for_good() -> None:
    def fencing(self: ServedShards, fabric_map: Any) -> None:
        for each in self.served.values():
            self._fence_if_superseded(each, fabric_map)

    async def left_as_it_is(self: ServedShards, shard: Any) -> None:
        pass

    _change(ServedShards, "fence_superseded", fencing)
    _change(ServedShards, "restart", left_as_it_is)  # else the fence alone does no harm


def a_grant_counts_before_it_is_recorded() -> None:
    granted = ServedShard._record_grant

    async def eager(self: ServedShard, segments: Any, retired: Any) -> bool:
        self.owned.apply_grant(segments)
        return await granted(self, segments, retired)

    _change(ServedShard, "_record_grant", eager)


def nothing_is_adopted_in_the_end() -> None:
    adopt = ServedShard._adopt
    serving_of: dict[OwnedShard, ServedShard] = {}

    async def noted(self: ServedShard) -> None:
        serving_of[self.owned] = self
        await adopt(self)

    async def unless_due(owned: OwnedShard, *rest: Any) -> None:
        its = serving_of[owned]
        if min(its._retire_at_s.values()) > its._clock():
            await adopt_late_commits(owned, *rest)

    _change(ServedShard, "_adopt", noted)
    _change(served_shard, "adopt_late_commits", unless_due)


def a_reservation_counts_from_its_answer() -> None:
    take: Any = Space._record

    def from_now(self: Space, *rest: Any) -> None:
        take(self, *rest[:-1], self._context.clock() + self._context.hold_s)

    _change(Space, "_record", from_now)


def a_reservation_has_no_end_for_its_writer() -> None:
    _change(Space, "has_expired", lambda *_: False)


def the_fence_counts_from_the_answer() -> None:
    confirm = OwnedShard.confirm

    def from_now(self: OwnedShard, _until_s: float, **asked: float) -> None:
        confirm(self, self._clock() + self._settings.grant_s, **asked)

    _change(OwnedShard, "confirm", from_now)


def a_claim_stands_whatever_the_store_says() -> None:
    begin_standing = ClaimValidity.__init__

    class Yes:
        def __init__(self, membership: Any) -> None:
            self._membership = membership

        def __getattr__(self, name: str) -> Any:
            return getattr(self._membership, name)

        async def confirm(self, *who: Any) -> bool:
            await self._membership.confirm(*who)
            return True

    def trusting(self: ClaimValidity, agent: Any, membership: Any, **named: Any) -> None:
        begin_standing(self, agent, Yes(membership), **named)

    _change(ClaimValidity, "__init__", trusting)


# --------------------------------------------------------------------------------------------- in placement


def an_epoch_is_retired_at_once() -> None:
    _change(epoch_retirement, "epochs_due", lambda fabric_map, *_, **__: _all_earlier(fabric_map))


def _all_earlier(fabric_map: Any) -> tuple[EpochRetirementDue, ...]:
    return tuple(EpochRetirementDue(record.epoch, "it is over") for record in fabric_map.earlier_placements)


def only_the_current_epoch_is_asked() -> None:
    _change(Routes, "by_owner_of_all", Routes.by_owner)


# -------------------------------------------------------------------------------------------- on bad drives


def a_shard_with_a_bad_page_is_not_read() -> None:
    read_areas = recovery._read_areas

    async def faint(*rest: Any) -> Any:
        is_bad = await read_areas(*rest)
        return is_bad | is_bad.any()

    _change(recovery, "_read_areas", faint)


def a_write_that_failed_is_taken_for_good() -> None:
    submit = GuardedDrive.submit_write

    def trusting(self: GuardedDrive, pieces: Any) -> Any:
        said = asyncio.get_running_loop().create_future()

        def ended(ends: Any) -> None:
            if not said.done():
                said.set_result(np.ones(len(ends.result()), np.bool_))

        submit(self, pieces).add_done_callback(ended)
        return said

    _change(GuardedDrive, "submit_write", trusting)


# ------------------------------------------------------------------------------------------------- by frames


def inline_blocks_are_mixed_up_unchecked() -> None:
    no_tag_at_the_reader()
    _change(InlinePeer, "_send", _sent_from_the_wrong_place)


def _sent_from_the_wrong_place(self: InlinePeer, wave: Any) -> Any:
    return self._channel.send_bulk(
        self._transfers,
        self._staging,
        places=wave.arena.astype(codec.U64),
        offsets=wave.staging[::-1].copy(),
        lengths=wave.lengths,
    )


# --------------------------------------------------------------------------------------- where blocks belong


def blocks_are_placed_by_revision() -> None:
    begin_made, chosen = Routes.__init__, Routes.shard_numbers
    revisions: dict[int, int] = {}

    def by_revision(self: Routes, fabric_map: Any, *rest: Any) -> None:
        begin_made(self, fabric_map, *rest)
        revisions[id(self)] = fabric_map.revision

    def salted(self: Routes, age: int, secret: bytes, spans: Any) -> NDArray[np.intp]:
        salt = b"%d" % revisions[id(self)]
        return chosen(self, age, blake2b(secret, key=salt, digest_size=32).digest(), spans)

    _change(Routes, "__init__", by_revision)
    _change(Routes, "shard_numbers", salted)
