"""Steps of long operations: check the present state, do the missing work, report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from ostraca_admin.agent_queries import AgentQueries, BusyError
from ostraca_admin.model import (
    VERSION,
    DriveUse,
    EnclosurePhase,
    EnclosureSpec,
    Operation,
    OperationKind,
    RegistrationStatus,
    RetiredEnclosure,
    Step,
    decode,
    encode,
)
from ostraca_admin.workflows.drain import drain_verdict
from ostraca_admin.workflows.erase import ErasureSteps
from ostraca_admin.workflows.onboarding import OnboardingSteps
from ostraca_admin.workflows.preflight import (
    StepDone,
    StepFailed,
    StepPending,
    Verdict,
    authentication_verdict,
    reach_verdict,
)
from ostraca_admin.workflows.step_context import StepResult, Subject, put_in_map
from ostraca_fabric.errors import (
    BlocksTooLargeError,
    ChangedError,
    OstracaError,
    PlacementBusyError,
)
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.fabric_map import EnclosureState, weights_of
from ostraca_fabric.model.ids import AgentId, EnclosureId
from ostraca_fabric.model.inventory import EnclosureReport
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.ports.records import RecordChange, RecordLock, Records
from ostraca_fabric.wire.flash_work import DiscoveredDrives


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """Delays before a waiting step is repeated."""

    busy_s: float = 5.0
    """Wait for another change of the map, or for a free placement epoch."""

    drain_s: float = 2.0
    """Wait for earlier placements to end."""


class Steps:
    """Steps of all operations, executed by agents."""

    def __init__(
        self,
        records: Records,
        membership: Membership,
        queries: AgentQueries,
        *,
        report_of: Callable[[EnclosureId], Awaitable[EnclosureReport | None]],
        volumes: Callable[[], Awaitable[Sequence[VolumeRecord]]],
        new_format_id: Callable[[], str],
        erasure: ErasureSteps,
        retry: RetrySettings | None = None,
    ) -> None:
        """Store the dependencies.

        *report_of* returns the report of an enclosure's own daemon, or None without a daemon. *erasure* runs
        the steps without an enclosure.
        """
        self._records = records
        self._membership = membership
        self._queries = queries
        self._retry = retry or RetrySettings()
        self._erasure = erasure
        onboarding = OnboardingSteps(
            records,
            membership,
            queries,
            report_of=report_of,
            volumes=volumes,
            new_format_id=new_format_id,
        )
        self._by_name: dict[tuple[OperationKind, str], Callable[[Subject], Awaitable[StepResult]]] = {
            (OperationKind.ONBOARD, "reachable"): partial(self._judge, reach_verdict),
            (OperationKind.ONBOARD, "authenticated"): partial(self._judge, authentication_verdict),
            (OperationKind.ONBOARD, "identified"): onboarding.identify,
            (OperationKind.ONBOARD, "preflight"): onboarding.check,
            (OperationKind.ONBOARD, "formatted"): onboarding.format,
            (OperationKind.ONBOARD, "probed"): onboarding.probe,
            (OperationKind.ONBOARD, "in the map"): onboarding.add_to_map,
            (OperationKind.DRAIN, "closed to writes"): self._close,
            (OperationKind.DRAIN, "no longer searched"): self._await_lookups,
            (OperationKind.UNDRAIN, "open to writes"): self._reopen,
            (OperationKind.REPLACE, "identified"): onboarding.identify_replacement,
            (OperationKind.REPLACE, "preflight"): onboarding.check,
            (OperationKind.REPLACE, "formatted"): onboarding.format,
            (OperationKind.REPLACE, "probed"): onboarding.probe,
            (OperationKind.REPLACE, "in the map"): onboarding.replace_in_map,
            (OperationKind.EXPAND, "identified"): onboarding.identify_additions,
            (OperationKind.EXPAND, "preflight"): onboarding.check,
            (OperationKind.EXPAND, "formatted"): onboarding.format,
            (OperationKind.EXPAND, "probed"): onboarding.probe,
            (OperationKind.EXPAND, "in the map"): onboarding.expand_in_map,
            (OperationKind.RETIRE, "out of the map"): self._remove_from_map,
            (OperationKind.RETIRE, "unregistered"): self._unregister,
        }

    async def run(self, operation: Operation, step: Step, hold: RecordLock) -> StepResult:
        """Run a step as far as possible, for an operation held by *hold*.

        Raises OstracaError if the step failed, MembershipError if the store is unavailable.
        """
        if operation.kind is OperationKind.ERASE:
            return await self._erasure.run(operation, step)
        await self._membership.refresh()  # with a late map, a step could take its work for done
        subject = await self._subject(operation, hold)
        if subject is None:
            if operation.kind is OperationKind.RETIRE:
                return StepResult(StepDone("the enclosure is already removed"))
            return StepResult(StepFailed("the enclosure is no longer registered: register it again"))
        try:
            return await self._by_name[operation.kind, step.name](subject)
        except (PlacementBusyError, ChangedError, BusyError) as error:
            return StepResult(StepPending(str(error), self._retry.busy_s))
        except BlocksTooLargeError as error:
            return StepResult(StepFailed(str(error)))

    async def _subject(self, operation: Operation, hold: RecordLock) -> Subject | None:
        enclosure = EnclosureId(operation.enclosure)
        keys = [record_keys.spec(enclosure), record_keys.status(enclosure)]
        found = await self._records.get_many(keys)
        if len(found) < len(keys):
            return None
        spec, status = (found[key] for key in keys)
        return Subject(
            operation,
            decode(spec, EnclosureSpec),
            decode(status, RegistrationStatus),
            {key: found[key].revision for key in keys},
            hold,
        )

    # ------------------------------------------------------------------------------------------- onboarding

    async def _judge(
        self,
        verdict: Callable[[Mapping[AgentId, DiscoveredDrives | OstracaError]], Verdict],
        subject: Subject,
    ) -> StepResult:
        return StepResult(verdict(await self._queries.look(subject.spec)))

    # --------------------------------------------------------------------------------- draining, retiring

    async def _close(self, subject: Subject) -> StepResult:
        current = self._membership.map.enclosures.get(subject.id)
        if current is not None and current.state is not EnclosureState.DRAINING:
            others = self._membership.map.enclosures.values()
            is_open = [each for each in others if each.id != subject.id and weights_of([each])]
            if not subject.operation.force and not is_open:
                message = (
                    "no other enclosure is open for new blocks, so all puts would be declined: add an "
                    "enclosure, or force the drain"
                )
                return StepResult(StepFailed(message))
            await put_in_map(self._membership, subject, current.drained(), current, is_open[:1])
        status = msgspec.structs.replace(subject.status, phase=EnclosurePhase.DRAINING)
        return StepResult(
            StepDone("new blocks go to other enclosures"), subject.writes(status), subject.revisions
        )

    async def _await_lookups(self, subject: Subject) -> StepResult:
        statuses = await self._queries.statuses()
        before = next(each.detail for each in subject.operation.steps if each.name == "no longer searched")
        verdict = drain_verdict(
            self._membership.map, subject.id, statuses, before, retry_s=self._retry.drain_s
        )
        if not isinstance(verdict, StepDone):
            return StepResult(verdict)
        status = msgspec.structs.replace(subject.status, phase=EnclosurePhase.DRAINED)
        return StepResult(verdict, subject.writes(status), subject.revisions)

    async def _reopen(self, subject: Subject) -> StepResult:
        current = self._membership.map.enclosures.get(subject.id)
        if current is None:
            return StepResult(StepFailed("the enclosure is not in the map: register it again"))
        if current.state is EnclosureState.DRAINING:
            await put_in_map(self._membership, subject, current.undrained(), current)
        status = msgspec.structs.replace(subject.status, phase=EnclosurePhase.READY)
        return StepResult(
            StepDone("the enclosure is open for new blocks"), subject.writes(status), subject.revisions
        )

    async def _remove_from_map(self, subject: Subject) -> StepResult:
        current = self._membership.map.enclosures.get(subject.id)
        if current is not None:
            await self._membership.put_enclosures(
                [],
                removed=[subject.id],
                seen={subject.id: current},
                under=subject.hold,
                force=subject.operation.force,
            )
        return StepResult(StepDone("no agent uses the enclosure any more"))

    async def _unregister(self, subject: Subject) -> StepResult:
        uses = await self._records.get_many([record_keys.nguid(each.nguid) for each in subject.status.drives])
        named = await self._records.get_many([record_keys.nguid(nguid) for nguid in subject.spec.drives])
        uses = {**uses, **named}
        ours = {
            key: record for key, record in uses.items() if decode(record, DriveUse).enclosure == subject.id
        }
        gone = [record_keys.spec(subject.id), record_keys.status(subject.id), *ours]
        retired = encode(RetiredEnclosure(VERSION, subject.id, subject.operation.id))
        unchanged = {**subject.revisions, **{key: record.revision for key, record in ours.items()}}
        return StepResult(
            StepDone("registration removed; contents of the drives stay"),
            (
                *(RecordChange(key, None) for key in gone),
                RecordChange(record_keys.retired(subject.id), retired),
            ),
            unchanged,
        )
