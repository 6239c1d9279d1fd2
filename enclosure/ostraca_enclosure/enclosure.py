"""Enclosure as a running process: settings, turns of the controller, report and conditions.

Turns run in a thread, one at a time, since drives and kernel may block. A separate task stores the report, so
that an unavailable store delays no turn. A failed report is tried again with the next turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ostraca_enclosure.controller import ExportController, Turn
from ostraca_enclosure.drives import FitSettings
from ostraca_enclosure.plan import HostSecrets
from ostraca_enclosure.ports import Reports
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.model.inventory import EnclosureReport
from ostraca_fabric.model.limits import check_above_zero
from ostraca_fabric.runtime.tasks import Tasks, set_within
from ostraca_fabric.runtime.version import VERSION
from ostraca_fabric.telemetry.conditions import READY, Conditions, Observation
from ostraca_fabric.telemetry.http.app import HttpSettings
from ostraca_fabric.telemetry.log_lines import lost_lines
from ostraca_fabric.telemetry.status import EnclosureDaemonStatus


@dataclass(frozen=True, slots=True)
class EnclosureSettings:
    """Settings of an enclosure's daemon."""

    drives: tuple[str, ...] = ()
    """Drives to export, by name, device, NGUID or serial number; empty: every fit and unused drive. A drive
    in this list is exported even if it may hold data; a mounted drive never is."""

    force: bool = False
    """Export unfit drives too, for laboratories."""

    reservations: bool = False
    """Whether hosts may reserve drives exported from now on; a kernel before Linux 6.13 exports without. Set
    only where agents set ``nvme.reservations``: any admitted host could lock out others."""

    turn_s: float = 5.0
    """Interval between checks of all exports. New drives are found, and failed steps retried, after this
    time."""

    health_every_s: float = 60.0
    """Interval between reads of drives' SMART logs, which cost a drive a command or two."""

    report_every_s: float = 60.0
    """Longest age of the report in etcd while nothing changes."""

    secrets_check_s: float = 5.0
    """Interval between looks at the file of hosts."""

    fit: FitSettings = field(default_factory=FitSettings)
    http: HttpSettings = field(default_factory=HttpSettings)

    def __post_init__(self) -> None:
        """Refuse what can't work."""
        check_above_zero(self, "turn_s", "health_every_s", "report_every_s", "secrets_check_s")


log = logging.getLogger(__name__)


class Enclosure:
    """Running enclosure. Call ``start``, then ``stop``; usable once."""

    def __init__(
        self,
        controller: ExportController,
        settings: EnclosureSettings,
        clock: Callable[[], float],
        *,
        target: str = "",
    ) -> None:
        """Store the dependencies; *clock* is monotonic, in seconds, *target* a name for the status."""
        self._target = target
        self._controller = controller
        self._settings = settings
        self._clock = clock
        self._began_s = clock()
        self._conditions = Conditions()
        self._tasks = Tasks("an enclosure")
        self._wake = asyncio.Event()
        self._turn_done = asyncio.Event()
        self._exports_known = asyncio.Event()
        self._is_stopping = False
        self._turn: Turn | None = None
        self._turns = self._failed = 0
        self._stored: EnclosureReport | None = None
        self._stored_at_s = 0.0
        self._trouble = "the report was not stored yet"
        self._is_stale = False

    async def start(self) -> None:
        """Run the first turn, and start the task for further turns."""
        await self._take_turn()
        self._tasks.spawn(self._run_turns())

    def report_to(self, reports: Reports) -> None:
        """Store reports in *reports* from now on."""
        self._tasks.spawn(self._report(reports))

    def report_lost(self) -> None:
        """Store the report again, after a loss in the store."""
        self._is_stale = True
        self._turn_done.set()

    def use_hosts(self, hosts: Mapping[str, HostSecrets]) -> None:
        """Admit these hosts at once; empty means every host."""
        self._controller.use_hosts(hosts)
        self._wake.set()

    def look_now(self) -> None:
        """Start the next turn at once."""
        self._wake.set()

    async def wait_until_known(self) -> None:
        """Wait until a turn has determined the exports.

        For example, exports stay unknown without nvmet.
        """
        await self._exports_known.wait()

    async def stop(self, *, withdraw: bool) -> None:
        """End the turns; *withdraw* exports, or leave exports to hosts and the next start."""
        self._is_stopping = True
        self._wake.set()
        await self._tasks.stop()
        if withdraw:
            for failed in await asyncio.to_thread(self._controller.withdraw):
                log.error("Not withdrawn: %s", failed)

    @property
    def report(self) -> EnclosureReport:
        """The last report, available after the first turn."""
        assert self._turn is not None, "the first turn was taken"
        return self._turn.report

    def status(self) -> EnclosureDaemonStatus:
        """Return the status of the enclosure."""
        now_s, report = self._clock(), self.report
        return EnclosureDaemonStatus(
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
            conditions=self._conditions.after(now_s, self._observations()),
            lost_log_lines=lost_lines(),
            target=self._target,
        )

    async def _run_turns(self) -> None:
        while not self._is_stopping:
            await set_within(self._wake, self._settings.turn_s)
            self._wake.clear()
            if not self._is_stopping:
                await self._take_turn()

    async def _take_turn(self) -> None:
        # A started turn must end first: no other task would repair a partial step.
        turning = asyncio.ensure_future(asyncio.to_thread(self._controller.turn))
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
        self._conditions.after(
            self._clock(), self._observations()
        )  # keeps the age of conditions right between queries
        self._turn_done.set()
        if turn.is_known:
            self._exports_known.set()

    async def _report(self, reports: Reports) -> None:
        logged = ""
        while True:
            await self._turn_done.wait()
            self._turn_done.clear()
            report = self.report
            if not self._is_due(report):
                continue
            self._is_stale = False
            try:
                await reports.put(report)
            except MembershipError as error:
                self._trouble = str(error)
                if self._trouble != logged:
                    logged = self._trouble
                    log.warning("The report can't be stored, trying again; exports continue: %s", logged)
            else:
                if logged:
                    log.info("The report is stored in etcd again")
                self._stored, self._stored_at_s, self._trouble, logged = report, self._clock(), "", ""

    def _is_due(self, report: EnclosureReport) -> bool:
        if self._stored is None or self._trouble or self._is_stale:
            return True
        is_old = self._clock() - self._stored_at_s >= self._settings.report_every_s
        return is_old or replace(report, unix_s=self._stored.unix_s) != self._stored

    def _observations(self) -> Iterator[Observation]:
        assert self._turn is not None, "the first turn was taken"
        turn, exported = self._turn, [each for each in self.report.drives if each.is_exported]
        is_up = bool(exported) and not self._is_stopping
        yield Observation(
            READY,
            is_up,
            f"{len(exported)} drives are exported"
            if exported
            else "no drive is exported: see the reasons under `drives`",
        )
        yield Observation(
            "exports_as_wanted",
            turn.is_as_wanted,
            "all wanted drives are exported to the wanted hosts"
            if turn.is_as_wanted
            else "; ".join(turn.failed) or "exports differ from the wanted exports",
        )
        yield Observation(
            "drives_found",
            not turn.not_found,
            f"named, not found: {', '.join(turn.not_found)}"
            if turn.not_found
            else "all named drives are present",
        )
        doubtful = [each for each in exported if each.doubts]
        yield Observation(
            "drives_fit",
            not doubtful,
            "; ".join(f"{each.name}: {each.doubts[0]}" for each in doubtful) or "all exported drives are fit",
        )
        yield Observation("report_put", not self._trouble, self._trouble or "the report is stored in etcd")
