"""The steps of long work: each looks at what there is, does what is left to do, and says what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ostraca_fabric import record_keys
from ostraca_fabric.admin.asking import BusyError
from ostraca_fabric.admin.bringing import Bringing
from ostraca_fabric.admin.draining import drained
from ostraca_fabric.admin.judging import Again, Done, Failed, authenticated, reached
from ostraca_fabric.admin.model import DriveUse, EnclosureSpec, EnclosureStatus, Kind, Phase, decode
from ostraca_fabric.admin.taking import Subject, Taken, put_in_map
from ostraca_fabric.errors import (
    BlocksTooLargeError,
    ChangedError,
    PlacementBusyError,
)
from ostraca_fabric.fabric_map import EnclosureState, weights_of
from ostraca_fabric.ids import EnclosureId
from ostraca_fabric.ports.records import Written

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ostraca_fabric.admin.asking import Asking
    from ostraca_fabric.admin.erasing import Erasing
    from ostraca_fabric.admin.model import Operation, Step
    from ostraca_fabric.inventory import EnclosureReport
    from ostraca_fabric.ports.membership import Membership
    from ostraca_fabric.ports.records import Records
    from ostraca_fabric.volume import VolumeRecord


@dataclass(frozen=True, slots=True)
class AgainSettings:
    """When a step that waits for something looks again."""

    busy_s: float = 5.0
    """For another change of the map, or for room for one more placement epoch."""

    passed_s: float = 2.0
    """For earlier placements to end."""


class Steps:
    """Takes steps by the hands of agents."""

    def __init__(
        self,
        records: Records,
        membership: Membership,
        asking: Asking,
        *,
        report_of: Callable[[EnclosureId], Awaitable[EnclosureReport | None]],
        volumes: Callable[[], Awaitable[Sequence[VolumeRecord]]],
        new_format_id: Callable[[], str],
        erasing: Erasing,
        again: AgainSettings | None = None,
    ) -> None:
        """*report_of* returns what an enclosure's own daemon says, None where none does; *erasing* takes the
        steps that are about no enclosure.
        """
        self._records = records
        self._membership = membership
        self._asking = asking
        self._again = again or AgainSettings()
        self._erasing = erasing
        bringing = Bringing(
            records,
            membership,
            asking,
            report_of=report_of,
            volumes=volumes,
            new_format_id=new_format_id,
        )
        self._by_name: dict[tuple[Kind, str], Callable[[Subject], Awaitable[Taken]]] = {
            (Kind.ONBOARD, "reachable"): self._reachable,
            (Kind.ONBOARD, "authenticated"): self._authenticated,
            (Kind.ONBOARD, "identified"): bringing.identified,
            (Kind.ONBOARD, "preflight"): bringing.preflight,
            (Kind.ONBOARD, "formatted"): bringing.formatted,
            (Kind.ONBOARD, "probed"): bringing.probed,
            (Kind.ONBOARD, "in the map"): bringing.in_the_map,
            (Kind.DRAIN, "takes nothing new"): self._takes_nothing_new,
            (Kind.DRAIN, "passed over"): self._passed_over,
            (Kind.UNDRAIN, "takes blocks again"): self._takes_blocks_again,
            (Kind.REPLACE, "identified"): bringing.replacement_identified,
            (Kind.REPLACE, "preflight"): bringing.preflight,
            (Kind.REPLACE, "formatted"): bringing.formatted,
            (Kind.REPLACE, "probed"): bringing.probed,
            (Kind.REPLACE, "in the map"): bringing.replaced_in_the_map,
            (Kind.EXPAND, "identified"): bringing.added_identified,
            (Kind.EXPAND, "preflight"): bringing.preflight,
            (Kind.EXPAND, "formatted"): bringing.formatted,
            (Kind.EXPAND, "probed"): bringing.probed,
            (Kind.EXPAND, "in the map"): bringing.added_in_the_map,
            (Kind.RETIRE, "out of the map"): self._out_of_the_map,
            (Kind.RETIRE, "forgotten"): self._forgotten,
        }

    def failed(self, message: str) -> Taken:
        """Return what a step came to that raised."""
        return Taken(Failed(message))

    async def take(self, operation: Operation, step: Step) -> Taken:
        """Do a step as far as it goes. Raises OstracaError where it has failed, MembershipError where the
        store is away.
        """
        if operation.kind is Kind.ERASE:
            return await self._erasing.take(operation, step)
        subject = await self._subject(operation)
        if subject is None:
            if operation.kind is Kind.RETIRE:
                return Taken(Done("nothing of it is left"))
            return Taken(Failed("the enclosure is not registered any more"))
        try:
            return await self._by_name[operation.kind, step.name](subject)
        except (PlacementBusyError, ChangedError, BusyError) as error:
            return Taken(Again(str(error), self._again.busy_s))
        except BlocksTooLargeError as error:
            return Taken(Failed(str(error)))

    async def _subject(self, operation: Operation) -> Subject | None:
        enclosure = EnclosureId(operation.enclosure)
        keys = [record_keys.spec(enclosure), record_keys.status(enclosure)]
        found = await self._records.get_many(keys)
        if len(found) < len(keys):
            return None
        spec, status = (found[key] for key in keys)
        return Subject(
            operation,
            decode(spec.value, EnclosureSpec),
            decode(status.value, EnclosureStatus),
            {key: found[key].revision for key in keys},
        )

    # ------------------------------------------------------------------------------------------- onboarding

    async def _reachable(self, subject: Subject) -> Taken:
        answers = await self._asking.looked(subject.spec)
        return Taken(reached(answers, len(answers)))

    async def _authenticated(self, subject: Subject) -> Taken:
        answers = await self._asking.looked(subject.spec)
        return Taken(authenticated(answers, len(answers)))

    # --------------------------------------------------------------------------------- draining, retiring

    async def _takes_nothing_new(self, subject: Subject) -> Taken:
        there = self._membership.map.enclosures.get(subject.id)
        if there is not None and there.state is not EnclosureState.DRAINING:
            others = (each for each in self._membership.map.enclosures.values() if each.id != subject.id)
            if not subject.operation.force and not weights_of(others):
                message = "no other enclosure takes blocks, and puts would be declined: add one, or force it"
                return Taken(Failed(message))
            await put_in_map(self._membership, there.drained(), there, force=subject.operation.force)
        status = msgspec.structs.replace(subject.status, phase=Phase.DRAINING)
        return Taken(Done("new blocks go elsewhere"), subject.writes(status), subject.revisions)

    async def _passed_over(self, subject: Subject) -> Taken:
        statuses = await self._asking.statuses()
        before = next(each.detail for each in subject.operation.steps if each.name == "passed over")
        verdict = drained(self._membership.map, subject.id, statuses, before, again_s=self._again.passed_s)
        if not isinstance(verdict, Done):
            return Taken(verdict)
        status = msgspec.structs.replace(subject.status, phase=Phase.DRAINED)
        return Taken(verdict, subject.writes(status), subject.revisions)

    async def _takes_blocks_again(self, subject: Subject) -> Taken:
        there = self._membership.map.enclosures.get(subject.id)
        if there is None:
            return Taken(Failed("it is not in the map"))
        if there.state is EnclosureState.DRAINING:
            await put_in_map(self._membership, there.undrained(), there, force=subject.operation.force)
        status = msgspec.structs.replace(subject.status, phase=Phase.READY)
        return Taken(Done("it takes blocks again"), subject.writes(status), subject.revisions)

    async def _out_of_the_map(self, subject: Subject) -> Taken:
        there = self._membership.map.enclosures.get(subject.id)
        if there is not None:
            await self._membership.put_enclosures(
                [], removed=[subject.id], seen={subject.id: there}, force=subject.operation.force
            )
        return Taken(Done("no agent places or owns anything there any more"))

    async def _forgotten(self, subject: Subject) -> Taken:
        uses = await self._records.get_many([record_keys.nguid(each.nguid) for each in subject.status.drives])
        named = await self._records.get_many([record_keys.nguid(nguid) for nguid in subject.spec.drives])
        uses = {**uses, **named}
        ours = {
            key: record
            for key, record in uses.items()
            if decode(record.value, DriveUse).enclosure == subject.id
        }
        gone = [record_keys.spec(subject.id), record_keys.status(subject.id), *ours]
        unchanged = {**subject.revisions, **{key: record.revision for key, record in ours.items()}}
        return Taken(
            Done("its registration has ended; what lies on its drives stays there"),
            tuple(Written(key, None) for key in gone),
            unchanged,
        )
