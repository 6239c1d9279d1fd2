"""Registration of enclosures by their own reports, for pods, whose addresses change.

The follower registers each enclosure that reports, and replaces the controllers of a registration when the
report names others. A retired enclosure stays out until an operator registers it again. Operators register
enclosures themselves elsewhere: a report has no secret and no choice of drives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from ostraca_admin.audit import Audit, Requester
from ostraca_admin.enclosure_service import EnclosureService
from ostraca_admin.errors import ConflictError, PreconditionError
from ostraca_admin.model import VERSION, EnclosureSpec, OperationState
from ostraca_admin.rules import may_try_again
from ostraca_fabric.errors import MembershipError, StoreAwayError, UsageError
from ostraca_fabric.model.inventory import EnclosureReport
from ostraca_fabric.ports.records import ABSENT

log = logging.getLogger(__name__)

_TURN_S = 2.0
_RETRY_S = 20.0
"""Pause before a failed onboarding begins anew."""

_REQUESTER = Requester("report-follower", "admin", "follow reports")


class ReportFollower:
    """Follower of an admin; several admins may follow the same reports."""

    def __init__(
        self,
        reports: Callable[[], Awaitable[Sequence[EnclosureReport]]],
        service: EnclosureService,
        audit: Audit,
        *,
        notify: Callable[[], None],
    ) -> None:
        """Call *notify* after each registration, to begin the onboarding."""
        self._reports = reports
        self._service = service
        self._unix_s = audit.unix_s
        self._notify = notify
        self._refused: dict[str, str] = {}
        """Last logged refusal, by enclosure."""

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                await self.turn()
            except MembershipError as error:
                log.warning("Reports of enclosures are not followed, retrying: %s", error)
            await asyncio.sleep(_TURN_S)

    async def turn(self) -> None:
        """Bring all registrations up to date. Raises MembershipError."""
        for report in await self._reports():
            try:
                await self._follow(report)
            except StoreAwayError:
                raise
            except (ConflictError, UsageError, MembershipError) as error:
                if self._refused.get(report.id) != str(error):
                    self._refused[report.id] = str(error)
                    log.warning("The report of enclosure %s is not followed: %s", report.id, error)
            except PreconditionError:
                continue  # an operator or another follower was faster: the next turn reads anew
            else:
                self._refused.pop(report.id, None)

    async def _follow(self, report: EnclosureReport) -> None:
        """Register an enclosure or its new controllers.

        Raises ConflictError, UsageError, and PreconditionError after a concurrent change.
        """
        if not any(drive.is_exported for drive in report.drives):
            return
        controllers = tuple(map(str, report.controllers))
        known = await self._service.find(report.id)
        if known is None:
            spec = EnclosureSpec(VERSION, report.id, report.nqn, controllers)
        elif known.spec.nqn != report.nqn:
            raise ConflictError(
                f"the report names subsystem {report.nqn}, and the registration {known.spec.nqn}"
            )
        else:
            spec = msgspec.structs.replace(known.spec, controllers=controllers)
            operation = known.operation
            if operation.state is OperationState.RUNNING:
                return
            has_paused = self._unix_s() - operation.ended_unix_s >= _RETRY_S
            if spec == known.spec and not (may_try_again(operation) and has_paused):
                return
        read = ABSENT if known is None else known.spec_revision
        await self._service.register(spec, _REQUESTER, if_match=read, may_return=False)
        self._notify()
