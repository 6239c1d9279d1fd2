"""An enclosure as a process runs it: its steward's turns, its report, and how it is.

Turns run in a thread, one at a time: they wait for drives and for the kernel. The report is put by a task of
its own, so that a store that is away holds no turn up; what was not put is tried again with the next turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ostraca_enclosure.plan import HostSecrets
from ostraca_enclosure.ports import Reports
from ostraca_enclosure.settings import EnclosureSettings
from ostraca_enclosure.steward import Steward, Turn
from ostraca_fabric.conditions import READY, Conditions, Observation
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.inventory import EnclosureReport
from ostraca_fabric.status import EnclosureStatus
from ostraca_fabric.tasks import Tasks
from ostraca_fabric.version import VERSION

log = logging.getLogger(__name__)


class Enclosure:
    """One enclosure. ``start`` it, then ``stop`` it; it is used once."""

    def __init__(self, steward: Steward, settings: EnclosureSettings, clock: Callable[[], float]) -> None:
        """*clock* is monotonic, in seconds."""
        self._steward = steward
        self._settings = settings
        self._clock = clock
        self._began_s = clock()
        self._conditions = Conditions()
        self._tasks = Tasks("an enclosure")
        self._woken = asyncio.Event()
        self._turned = asyncio.Event()
        self._known = asyncio.Event()
        self._is_stopping = False
        self._turn: Turn | None = None
        self._turns = self._failed = 0
        self._put: EnclosureReport | None = None
        self._put_s = 0.0
        self._trouble = "it was not put yet"
        self._is_stale = False

    async def start(self) -> None:
        """Take the first turn, then go on by itself."""
        await self._take_turn()
        self._tasks.spawn(self._turns_on())

    def report_to(self, reports: Reports) -> None:
        """Put reports there from now on."""
        self._tasks.spawn(self._report(reports))

    def report_lost(self) -> None:
        """Note that the report is gone: it is put again."""
        self._is_stale = True
        self._turned.set()

    def use_hosts(self, hosts: Mapping[str, HostSecrets]) -> None:
        """Let in these hosts, at once; none: every host."""
        self._steward.use_hosts(hosts)
        self._woken.set()

    def look_now(self) -> None:
        """Take the next turn at once."""
        self._woken.set()

    async def known(self) -> None:
        """Wait until a turn has told what is exported: before, nothing may be, as without nvmet."""
        await self._known.wait()

    async def stop(self, *, withdraw: bool) -> None:
        """Take no further turn; *withdraw* what is exported, or leave it to hosts and the next start."""
        self._is_stopping = True
        self._woken.set()
        await self._tasks.stop()
        if withdraw:
            for failed in await asyncio.to_thread(self._steward.withdraw):
                log.error("Not withdrawn: %s", failed)

    @property
    def report(self) -> EnclosureReport:
        """What it says of itself, since the first turn."""
        assert self._turn is not None, "the first turn was taken"
        return self._turn.report

    def status(self) -> EnclosureStatus:
        """Say what it believes."""
        now_s, report = self._clock(), self.report
        return EnclosureStatus(
            enclosure=report.id,
            start_id=report.start.hex(),
            version=VERSION,
            nqn=report.nqn,
            controllers=tuple(map(str, report.controllers)),
            hosts=report.hosts,
            drives=report.drives,
            sentence=report.sentence,
            uptime_s=now_s - self._began_s,
            turns=self._turns,
            steps_failed=self._failed,
            conditions=self._conditions.after(now_s, self._observed()),
        )

    async def _turns_on(self) -> None:
        while not self._is_stopping:
            try:
                async with asyncio.timeout(self._settings.turn_s):
                    await self._woken.wait()
            except TimeoutError:
                pass
            self._woken.clear()
            if not self._is_stopping:
                await self._take_turn()

    async def _take_turn(self) -> None:
        # A step that was begun ends before anything else does: what is done in part, nobody else mends.
        turning = asyncio.ensure_future(asyncio.to_thread(self._steward.turn))
        try:
            turn = await asyncio.shield(turning)
        except asyncio.CancelledError:
            await asyncio.wait([turning])
            raise
        if self._turn is None or turn.report.sentence != self._turn.report.sentence:
            log.log(logging.WARNING if turn.failed else logging.INFO, "%s", turn.report.sentence)
        self._turn = turn
        self._turns += 1
        self._failed += len(turn.failed)
        self._conditions.after(self._clock(), self._observed())  # since when, also while nobody asks
        self._turned.set()
        if turn.is_known:
            self._known.set()

    async def _report(self, reports: Reports) -> None:
        said = ""
        while True:
            await self._turned.wait()
            self._turned.clear()
            report = self.report
            if not self._is_due(report):
                continue
            self._is_stale = False
            try:
                await reports.put(report)
            except MembershipError as error:
                self._trouble = str(error)
                if self._trouble != said:
                    said = self._trouble
                    log.warning("The report can't be put, and is tried again; exports go on: %s", said)
            else:
                if said:
                    log.info("The report is in etcd again")
                self._put, self._put_s, self._trouble, said = report, self._clock(), "", ""

    def _is_due(self, report: EnclosureReport) -> bool:
        if self._put is None or self._trouble or self._is_stale:
            return True
        is_old = self._clock() - self._put_s >= self._settings.report_every_s
        return is_old or replace(report, unix_s=self._put.unix_s) != self._put

    def _observed(self) -> Iterator[Observation]:
        assert self._turn is not None, "the first turn was taken"
        turn, exported = self._turn, [each for each in self.report.drives if each.is_exported]
        is_up = bool(exported) and not self._is_stopping
        yield Observation(
            READY,
            is_up,
            f"{len(exported)} drives are exported"
            if exported
            else "no drive is exported: `drives` say why not, one by one",
        )
        yield Observation(
            "exports_as_wanted",
            turn.is_as_wanted,
            "all is exported that is wanted, to those it is meant for"
            if turn.is_as_wanted
            else "; ".join(turn.failed) or "what is exported is not what is wanted",
        )
        yield Observation(
            "drives_found",
            not turn.not_found,
            f"not found, though named: {', '.join(turn.not_found)}" if turn.not_found else "none is missed",
        )
        doubtful = [each for each in exported if each.doubts]
        yield Observation(
            "drives_fit",
            not doubtful,
            "; ".join(f"{each.name}: {each.doubts[0]}" for each in doubtful)
            or "every drive that is exported is fit",
        )
        yield Observation(
            "report_put", not self._trouble, self._trouble or "the fabric knows how the enclosure is"
        )
