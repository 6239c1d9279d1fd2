"""Mistakes made on purpose, for ``make mutants``: around blocks that workers read themselves."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
from tests.simulation.fabric.world import agent_memory
from tests.simulation.mutants.mistakes import _change

from ostraca._direct.direct_reader import DirectReader
from ostraca._protocol.operations import Effect, ExtentsEnded, Finish, GetOperation, Progress
from ostraca_dpu_agent.datapath.drive_io import ReadPlan
from ostraca_dpu_agent.datapath.get import GetRun
from ostraca_dpu_agent.datapath.location.routing import BlockLocations, Pins
from ostraca_dpu_agent.server.dispatcher import WorkerSession
from ostraca_dpu_agent.tenants import Tenants
from ostraca_fabric.model.ids import DriveId, TenantId
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.messages import ExtentsRead, GetProgress


def slots_come_back_under_an_own_read() -> None:
    def at_once(_self: DirectReader, _request: int, act: Callable[[], None]) -> None:
        act()

    _change(DirectReader, "when_read", at_once)


def slots_of_lost_reads_come_back() -> None:
    check, finish = DirectReader._check_drives, DirectReader._finish

    def forgetful(self: DirectReader) -> None:
        before = {batch for drive in self._drives for batch in drive.batches if not batch.is_lost}
        check(self)
        for batch in before:
            if batch.is_lost:
                finish(self, batch.request)

    def once(self: DirectReader, request: int) -> None:
        if request in self._requests:
            finish(self, request)

    _change(DirectReader, "_check_drives", forgetful)
    _change(DirectReader, "_finish", once)


def slots_under_own_reads_never_come_back() -> None:
    when_read = DirectReader.when_read

    def never(self: DirectReader, request: int, act: Callable[[], None]) -> None:
        if request not in self._requests:
            when_read(self, request, act)

    _change(DirectReader, "when_read", never)


def blocks_read_here_count_as_checked() -> None:
    read: Any = DirectReader.read

    def trusting(self: DirectReader, *columns: Any, tags: Any = None, **where: Any) -> None:
        *places, ended = columns

        def trusted(rows: Any, state: Progress) -> None:
            is_read = tags is not None and state is Progress.READING
            ended(rows, Progress.VERIFIED if is_read else state)

        read(self, *places, trusted, **where)

    _change(DirectReader, "read", trusting)


def what_is_lost_is_asked_for_again() -> None:
    on_read = GetOperation._on_read

    def mistaken(self: GetOperation, ended: ExtentsEnded) -> list[Effect]:
        is_lost = ended.state is Progress.LOST
        return on_read(self, replace(ended, state=Progress.FAILED) if is_lost else ended)

    _change(GetOperation, "_on_read", mistaken)


def what_failed_is_left_to_nobody() -> None:
    with_verdicts = GetOperation._with_verdicts

    def curt(self: GetOperation, outcomes: Outcomes, again: bytes = b"") -> Finish:
        return with_verdicts(self, outcomes)

    _change(GetOperation, "_with_verdicts", curt)


def a_get_ends_before_its_own_reads() -> None:
    conclude = GetOperation._conclude

    def hasty(self: GetOperation) -> list[Effect]:
        was_reading, self._is_reading = self._is_reading, False
        effects = conclude(self)
        self._is_reading = was_reading
        return effects

    _change(GetOperation, "_conclude", hasty)


def the_agent_delivers_what_it_has_offered() -> None:
    leave_drives = GetRun._leave_drives

    def greedy(self: GetRun, locations: Any, found: Any, drives: Any) -> Any:
        rest = leave_drives(self, locations, found, drives)
        left = np.setdiff1d(found, rest)
        plan = ReadPlan.of(locations, self._blocks.seeds, left, per_part=len(self._blocks))
        for drive, parts in plan.queues:
            self._context.tasks.spawn(self._lane(parts, partial(self._part, plan, drive)))
        return rest

    _change(GetRun, "_leave_drives", greedy)


def what_is_offered_is_not_pinned() -> None:
    leave_drives = GetRun._leave_drives

    def hasty(self: GetRun, locations: Any, found: Any, drives: Any) -> Any:
        self._context.locator.release(locations.pins)
        return leave_drives(self, locations, found, drives)

    _change(GetRun, "_leave_drives", hasty)


def pins_end_with_the_answer() -> None:
    def none(_self: BlockLocations, _drives: Collection[DriveId]) -> Pins:
        return []

    _change(BlockLocations, "take_pins", none)


def a_get_has_two_offers() -> None:
    def always(self: GetRun) -> Mapping[DriveId, int]:
        worker = self._worker
        return worker.direct_drives if self._context.may_read_directly(worker.tenant) else {}

    _change(GetRun, "_direct_drives", always)


def who_asks_again_is_offered_extents() -> None:
    direct_drives = GetRun._direct_drives

    def stubborn(self: GetRun) -> Mapping[DriveId, int]:
        request = self._request
        self._request = msgspec.structs.replace(request, is_again=False)
        drives = direct_drives(self)
        self._request = request
        return drives

    _change(GetRun, "_direct_drives", stubborn)


def reads_end_by_a_report_alone() -> None:
    end_reads = WorkerSession.end_reads

    def waiting(self: WorkerSession, request: int, report: ExtentsRead | None = None) -> None:
        if report is not None:
            end_reads(self, request, report)

    _change(WorkerSession, "end_reads", waiting)


def own_reads_count_as_requests_for_good() -> None:
    remove = Tenants.remove

    def careless(self: Tenants, counts: Counter[TenantId], tenant: TenantId) -> None:
        if sys._getframe(1).f_code.co_name != "_end_reads":
            remove(self, counts, tenant)

    _change(Tenants, "remove", careless)


# ------------------------------------------------------------------------------------- from an agent's memory


def no_copied_block_is_verified() -> None:
    def trusting(_memory: Any, slots: Any, *_: Any) -> Any:
        return np.ones(len(slots), np.bool_)

    _change(agent_memory, "are_good", trusting)


def who_asks_again_is_offered_memory() -> None:
    find_in_memory = GetRun._find_in_memory

    def stubborn(self: GetRun) -> Any:
        request = self._request
        self._request = msgspec.structs.replace(request, is_again=False)
        found = find_in_memory(self)
        self._request = request
        return found

    _change(GetRun, "_find_in_memory", stubborn)


def blocks_in_memory_are_mixed_up() -> None:
    places = GetRun._places

    def mistaken(self: GetRun, wave: Any) -> GetProgress:
        told = places(self, wave)
        mixed_up = np.frombuffer(told.places, codec.U64)[::-1].tobytes()
        return msgspec.structs.replace(told, places=mixed_up)

    _change(GetRun, "_places", mistaken)


def the_agent_delivers_what_it_leaves_in_memory() -> None:
    places = GetRun._places

    def greedy(self: GetRun, wave: Any) -> GetProgress:
        self._context.tasks.spawn(self._memory_part(wave))
        return places(self, wave)

    _change(GetRun, "_places", greedy)
