"""Mistakes made on purpose, for ``make mutants``: around blocks that workers read from drives themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from tests.simulation.mutants.mistakes import _change

from ostraca._direct.direct_reader import DirectReader
from ostraca._protocol.own_reads import OwnRead, OwnReads
from ostraca_dpu_agent.datapath.flash_io import ReadPlan
from ostraca_dpu_agent.datapath.get import GetRun
from ostraca_dpu_agent.server.dispatcher import WorkerSession
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import ExtentsRead


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


def what_is_lost_is_reported_as_failed() -> None:
    report = OwnReads.report

    def mistaken(self: OwnReads, request: int) -> ExtentsRead | None:
        said = report(self, request)
        if said is None:
            return None
        is_failed = (self._states == OwnRead.FAILED) | (self._states == OwnRead.LOST)
        return ExtentsRead(request, said.verified, np.flatnonzero(is_failed).astype(codec.U32).tobytes())

    _change(OwnReads, "report", mistaken)


def what_failed_is_left_to_nobody() -> None:
    report = OwnReads.report

    def curt(self: OwnReads, request: int) -> ExtentsRead | None:
        said = report(self, request)
        return None if said is None else ExtentsRead(request, said.verified, b"")

    _change(OwnReads, "report", curt)


def the_agent_delivers_what_it_has_offered() -> None:
    take = ReadPlan.take

    def greedy(self: ReadPlan, drives: Any) -> Any:
        queues = list(self.queues)
        offer = take(self, drives)
        self.queues[:] = queues
        return offer

    _change(ReadPlan, "take", greedy)


def what_is_offered_is_not_pinned() -> None:
    offer_extents = GetRun._offer_extents

    async def hasty(self: GetRun, offer: Any, locations: Any, per_part: int) -> None:
        self._context.locator.release(locations)
        await offer_extents(self, offer, locations, per_part)

    _change(GetRun, "_offer_extents", hasty)


def a_get_has_two_offers() -> None:
    def always(self: GetRun) -> bool:
        worker = self._worker
        return bool(worker.direct_drives) and self._context.may_read_directly(worker.tenant)

    _change(GetRun, "_may_offer", always)


def a_report_is_waited_for_beyond_the_end() -> None:
    def extents_read(self: WorkerSession, request: int) -> asyncio.Future[ExtentsRead]:
        report = _Deaf()
        self._extents_read[request] = report
        report.add_done_callback(lambda _: self._extents_read.pop(request))
        return report

    _change(WorkerSession, "extents_read", extents_read)


class _Deaf(asyncio.Future[ExtentsRead]):
    def cancel(self, msg: object = None) -> bool:
        return False
