"""The steps of long work: each looks at what there is, does what is left to do, and says what came of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ostraca_fabric import record_keys
from ostraca_fabric.admin.asking import BusyError
from ostraca_fabric.admin.draining import drained
from ostraca_fabric.admin.judging import (
    Again,
    Done,
    Failed,
    Taken,
    authenticated,
    chosen,
    identified,
    may_be_formatted,
    reached,
    replacement_of,
    seen_by_all,
)
from ostraca_fabric.admin.map_records import map_record
from ostraca_fabric.admin.model import (
    VERSION,
    DriveUse,
    EnclosureSpec,
    EnclosureStatus,
    Kind,
    Phase,
    decode,
    encode,
)
from ostraca_fabric.errors import (
    BlocksTooLargeError,
    ChangedError,
    PlacementBusyError,
)
from ostraca_fabric.fabric_map import EnclosureState, weights_of
from ostraca_fabric.ids import EnclosureId, drive_id
from ostraca_fabric.ports.records import ABSENT, Written

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ostraca_fabric.admin.asking import Asking
    from ostraca_fabric.admin.erasing import Erasing
    from ostraca_fabric.admin.judging import Verdict
    from ostraca_fabric.admin.model import ChosenDrive, Operation, Step
    from ostraca_fabric.fabric_map import EnclosureRecord
    from ostraca_fabric.inventory import EnclosureReport
    from ostraca_fabric.ports.membership import Membership
    from ostraca_fabric.ports.records import Records
    from ostraca_fabric.volume import VolumeRecord

_AT_ONCE = 4
"""Drives formatted or measured at once."""


@dataclass(frozen=True, slots=True)
class AgainSettings:
    """When a step that waits for something looks again."""

    busy_s: float = 5.0
    """For another change of the map, or for room for one more placement epoch."""

    passed_s: float = 2.0
    """For earlier placements to end."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """The enclosure that an operation is about, as it was read."""

    operation: Operation
    spec: EnclosureSpec
    status: EnclosureStatus
    revisions: dict[str, int]

    @property
    def id(self) -> EnclosureId:
        return EnclosureId(self.spec.name)

    def writes(self, status: EnclosureStatus, *more: Written) -> tuple[Written, ...]:
        """Return what writes another status."""
        return (Written(record_keys.status(self.id), encode(status)), *more)


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
        self._report_of = report_of
        self._volumes = volumes
        self._new_format_id = new_format_id
        self._erasing = erasing
        self._by_name: dict[tuple[Kind, str], Callable[[_Subject], Awaitable[Taken]]] = {
            (Kind.ONBOARD, "reachable"): self._reachable,
            (Kind.ONBOARD, "authenticated"): self._authenticated,
            (Kind.ONBOARD, "identified"): self._identified,
            (Kind.ONBOARD, "preflight"): self._preflight,
            (Kind.ONBOARD, "formatted"): self._formatted,
            (Kind.ONBOARD, "probed"): self._probed,
            (Kind.ONBOARD, "in the map"): self._in_the_map,
            (Kind.DRAIN, "takes nothing new"): self._takes_nothing_new,
            (Kind.DRAIN, "passed over"): self._passed_over,
            (Kind.UNDRAIN, "takes blocks again"): self._takes_blocks_again,
            (Kind.REPLACE, "identified"): self._replacement_identified,
            (Kind.REPLACE, "preflight"): self._preflight,
            (Kind.REPLACE, "formatted"): self._formatted,
            (Kind.REPLACE, "probed"): self._probed,
            (Kind.REPLACE, "in the map"): self._replaced_in_the_map,
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

    async def _subject(self, operation: Operation) -> _Subject | None:
        enclosure = EnclosureId(operation.enclosure)
        keys = [record_keys.spec(enclosure), record_keys.status(enclosure)]
        found = await self._records.get_many(keys)
        if len(found) < len(keys):
            return None
        spec, status = (found[key] for key in keys)
        return _Subject(
            operation,
            decode(spec.value, EnclosureSpec),
            decode(status.value, EnclosureStatus),
            {key: found[key].revision for key in keys},
        )

    # ------------------------------------------------------------------------------------------- onboarding

    async def _reachable(self, subject: _Subject) -> Taken:
        answers = await self._asking.looked(subject.spec)
        return Taken(reached(answers, len(answers)))

    async def _authenticated(self, subject: _Subject) -> Taken:
        answers = await self._asking.looked(subject.spec)
        return Taken(authenticated(answers, len(answers)))

    async def _identified(self, subject: _Subject) -> Taken:
        answers, spec = await self._asking.looked(subject.spec), subject.spec
        if subject.status.phase is not Phase.ONBOARDING:  # it is reached otherwise, and its drives stay
            nguids = tuple(drive.nguid for drive in subject.status.drives)
            spec = msgspec.structs.replace(spec, drives=nguids)
        verdict, status = identified(answers, spec, subject.status, self._new_format_id)
        return await self._with_uses(subject, verdict, status)

    async def _with_uses(self, subject: _Subject, verdict: Verdict, status: EnclosureStatus) -> Taken:
        """See to it that each chosen drive is this enclosure's alone, and those no longer chosen are free."""
        if not isinstance(verdict, Done):
            return Taken(verdict)
        keys = {record_keys.nguid(drive.nguid): drive for drive in status.drives}
        left = {record_keys.nguid(drive.nguid) for drive in subject.status.drives} - keys.keys()
        uses = await self._records.get_many([*keys, *left])
        for key, drive in keys.items():
            if key in uses and (use := decode(uses[key].value, DriveUse)).enclosure != subject.id:
                return Taken(
                    Failed(
                        f"drive {drive.nguid} is one of enclosure {use.enclosure}: retire it there first, or "
                        "name the drives that are to be used"
                    )
                )
        changes = [
            Written(key, encode(DriveUse(VERSION, subject.id, drive.name))) for key, drive in keys.items()
        ]
        changes += [Written(key, None) for key in left if key in uses]
        unchanged = {key: uses[key].revision if key in uses else ABSENT for key in [*keys, *left]}
        return Taken(verdict, subject.writes(status, *changes), {**subject.revisions, **unchanged})

    async def _preflight(self, subject: _Subject) -> Taken:
        seen = seen_by_all(await self._asking.looked(subject.spec))
        if isinstance(seen, Failed):
            return Taken(seen)
        report = await self._report_of(subject.id)
        verdict = may_be_formatted(
            self._new_drives(subject),
            seen,
            wipe=frozenset((*subject.spec.wipe, *subject.operation.wipe)),
            segment_bytes=subject.spec.segment_bytes,
            report=report,
            volumes=await self._volumes(),
        )
        return Taken(verdict)

    async def _formatted(self, subject: _Subject) -> Taken:
        wipe = {*subject.spec.wipe, *subject.operation.wipe}
        todo = [drive for drive in self._new_drives(subject) if not drive.shard_bytes]
        some = todo[:_AT_ONCE]
        made = await asyncio.gather(
            *(self._asking.format(subject.spec, drive, wipe=drive.nguid in wipe) for drive in some)
        )
        status = subject.status
        for drive, answer in zip(some, made, strict=True):
            if answer.trouble:
                return Taken(Failed(f"{drive.nguid}: {answer.trouble}"))
            done = msgspec.structs.replace(
                drive,
                shard_bytes=answer.size_bytes,
                usable_bytes=answer.usable_bytes,
                block_bytes_max=answer.block_bytes_max,
            )
            status = _with_drive(status, done)
        left = len(todo) - len(some)
        verdict: Verdict = Done(f"{len(self._new_drives(subject))} drives are formatted")
        if left:
            verdict = Again(f"{left} drives are left", 0.0)
        return Taken(verdict, subject.writes(status), subject.revisions)

    async def _probed(self, subject: _Subject) -> Taken:
        results: dict[str, dict[str, float]] = {}
        drives = self._new_drives(subject)
        is_in_map = {drive.id for each in self._membership.map.enclosures.values() for drive in each.drives}
        for begin in range(0, len(drives), _AT_ONCE):
            some = drives[begin : begin + _AT_ONCE]
            asked = (
                self._asking.probe(
                    subject.spec, drive, writes=drive_id(subject.id, drive.name) not in is_in_map
                )
                for drive in some
            )
            for drive, answer in zip(some, await asyncio.gather(*asked), strict=True):
                if answer.trouble:
                    return Taken(Failed(f"{drive.nguid}: {answer.trouble}: replace it, or leave it out"))
                results[drive.name] = {
                    "read_bytes_s": answer.read_bytes_s,
                    "write_bytes_s": answer.write_bytes_s,
                    "read_p50_s": answer.read_p50_s,
                    "read_p99_s": answer.read_p99_s,
                }
        reads = [each["read_bytes_s"] for each in results.values()]
        slowest = min(reads, default=0.0) / 1e6
        return Taken(Done(f"the slowest drive reads {slowest:.0f} MB/s", {"drives": results}))

    async def _in_the_map(self, subject: _Subject) -> Taken:
        there = self._membership.map.enclosures.get(subject.id)
        is_draining = there is not None and there.state is EnclosureState.DRAINING
        wanted = map_record(subject.spec, subject.status, is_draining=is_draining)
        await self._put(wanted, there, subject)
        phase = subject.status.phase if is_draining else Phase.READY
        status = msgspec.structs.replace(subject.status, phase=phase)
        return Taken(
            Done(f"its {len(wanted.drives)} drives take blocks"), subject.writes(status), subject.revisions
        )

    # --------------------------------------------------------------------------------- draining, retiring

    async def _takes_nothing_new(self, subject: _Subject) -> Taken:
        there = self._membership.map.enclosures.get(subject.id)
        if there is not None and there.state is not EnclosureState.DRAINING:
            others = (each for each in self._membership.map.enclosures.values() if each.id != subject.id)
            if not subject.operation.force and not weights_of(others):
                message = "no other enclosure takes blocks, and puts would be declined: add one, or force it"
                return Taken(Failed(message))
            await self._put(there.drained(), there, subject)
        status = msgspec.structs.replace(subject.status, phase=Phase.DRAINING)
        return Taken(Done("new blocks go elsewhere"), subject.writes(status), subject.revisions)

    async def _passed_over(self, subject: _Subject) -> Taken:
        statuses = await self._asking.statuses()
        before = next(each.detail for each in subject.operation.steps if each.name == "passed over")
        verdict = drained(self._membership.map, subject.id, statuses, before, again_s=self._again.passed_s)
        if not isinstance(verdict, Done):
            return Taken(verdict)
        status = msgspec.structs.replace(subject.status, phase=Phase.DRAINED)
        return Taken(verdict, subject.writes(status), subject.revisions)

    async def _takes_blocks_again(self, subject: _Subject) -> Taken:
        there = self._membership.map.enclosures.get(subject.id)
        if there is None:
            return Taken(Failed("it is not in the map"))
        if there.state is EnclosureState.DRAINING:
            await self._put(there.undrained(), there, subject)
        status = msgspec.structs.replace(subject.status, phase=Phase.READY)
        return Taken(Done("it takes blocks again"), subject.writes(status), subject.revisions)

    async def _out_of_the_map(self, subject: _Subject) -> Taken:
        there = self._membership.map.enclosures.get(subject.id)
        if there is not None:
            await self._membership.put_enclosures(
                [], removed=[subject.id], seen={subject.id: there}, force=subject.operation.force
            )
        return Taken(Done("no agent places or owns anything there any more"))

    async def _forgotten(self, subject: _Subject) -> Taken:
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

    # ------------------------------------------------------------------------------------------- replacing

    async def _replacement_identified(self, subject: _Subject) -> Taken:
        seen = seen_by_all(await self._asking.looked(subject.spec))
        if isinstance(seen, Failed):
            return Taken(seen)
        new = {drive.nguid: drive for drive in self._new_drives(subject)}  # of an earlier try, or of this one
        kept = tuple(drive for drive in subject.status.drives if drive.nguid not in new)
        status = msgspec.structs.replace(subject.status, drives=kept)
        found = replacement_of(seen, status, subject.operation.replacement)
        if isinstance(found, Failed):
            return Taken(found)
        if found.nguid in new:
            status = msgspec.structs.replace(status, drives=(*kept, new[found.nguid]))
        else:
            status = chosen(status, found, self._new_format_id())
        verdict = Done(f"{found.nguid} comes for {subject.operation.drive}, as {status.drives[-1].name}")
        return await self._with_uses(subject, verdict, status)

    async def _replaced_in_the_map(self, subject: _Subject) -> Taken:
        old = next((each for each in subject.status.drives if each.name == subject.operation.drive), None)
        kept = tuple(each for each in subject.status.drives if each is not old)
        status = msgspec.structs.replace(subject.status, drives=kept)
        there = self._membership.map.enclosures.get(subject.id)
        is_draining = there is not None and there.state is EnclosureState.DRAINING
        await self._put(map_record(subject.spec, status, is_draining=is_draining), there, subject)
        changes: list[Written] = []
        if old is not None:
            changes.append(Written(record_keys.nguid(old.nguid), None))
        return Taken(
            Done(f"{subject.operation.drive} is out of the fabric: take it out"),
            subject.writes(status, *changes),
            subject.revisions,
        )

    # --------------------------------------------------------------------------------------------- helpers

    def _new_drives(self, subject: _Subject) -> list[ChosenDrive]:
        """Return the drives that an operation brings in: those that are not in the map."""
        there = self._membership.map.enclosures.get(subject.id)
        known = {drive.id for drive in there.drives} if there is not None else set()
        return [drive for drive in subject.status.drives if drive_id(subject.id, drive.name) not in known]

    async def _put(self, wanted: EnclosureRecord, there: EnclosureRecord | None, subject: _Subject) -> None:
        if wanted != there:
            await self._membership.put_enclosures(
                [wanted], seen={wanted.id: there}, force=subject.operation.force
            )


def _with_drive(status: EnclosureStatus, drive: ChosenDrive) -> EnclosureStatus:
    drives = tuple(drive if each.name == drive.name else each for each in status.drives)
    return msgspec.structs.replace(status, drives=drives)
