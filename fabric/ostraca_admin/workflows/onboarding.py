"""Steps to add drives to a new or used enclosure.

Drives are chosen, inspected, formatted, measured, and then put into the map in one change. The records of
drives (``ChosenDrive.is_coming``) say which drives are being added, and are written together with the map.
Otherwise, an admin with a late map could take a drive of an earlier change for a failed drive, or drop the
drive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from ostraca_admin.agent_queries import AgentQueries
from ostraca_admin.model import (
    VERSION,
    ChosenDrive,
    DriveUse,
    EnclosurePhase,
    OperationKind,
    RegistrationStatus,
    decode,
    encode,
    map_record,
)
from ostraca_admin.workflows.preflight import (
    StepDone,
    StepFailed,
    StepPending,
    Verdict,
    choose_additions,
    choose_drives,
    choose_replacement,
    format_verdict,
    visible_drives,
    with_drive,
)
from ostraca_admin.workflows.step_context import StepResult, Subject, put_in_map
from ostraca_fabric.errors import ChangedError
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.fabric_map import EnclosureRecord, EnclosureState
from ostraca_fabric.model.ids import EnclosureId, drive_id
from ostraca_fabric.model.inventory import EnclosureReport
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.ports.records import ABSENT, RecordChange, Records
from ostraca_fabric.runtime.sentences import counted

_AT_ONCE = 4
"""Drives formatted or measured concurrently."""

_NOTHING_NEW = StepResult(StepDone("no new drives"))


class OnboardingSteps:
    """Steps of onboarding, executed by agents."""

    def __init__(
        self,
        records: Records,
        membership: Membership,
        queries: AgentQueries,
        *,
        report_of: Callable[[EnclosureId], Awaitable[EnclosureReport | None]],
        volumes: Callable[[], Awaitable[Sequence[VolumeRecord]]],
        new_format_id: Callable[[], str],
    ) -> None:
        """Store the dependencies, as in ``Steps``."""
        self._records = records
        self._membership = membership
        self._queries = queries
        self._report_of = report_of
        self._volumes = volumes
        self._new_format_id = new_format_id

    # -------------------------------------------------------------------------------------------- identified

    async def identify(self, subject: Subject) -> StepResult:
        """Choose the drives of an enclosure."""
        answers, spec = await self._queries.look(subject.spec), subject.spec
        if subject.status.phase is not EnclosurePhase.ONBOARDING:  # only the paths change, the drives stay
            nguids = tuple(drive.nguid for drive in subject.status.drives if not drive.is_coming)
            spec = msgspec.structs.replace(spec, drives=nguids)
        verdict, status = choose_drives(answers, spec, subject.status, self._new_format_id)
        return await self._with_uses(subject, verdict, status)

    async def identify_replacement(self, subject: Subject) -> StepResult:
        """Choose the drive to replace another."""
        seen = visible_drives(await self._queries.look(subject.spec))
        if isinstance(seen, StepFailed):
            return StepResult(seen)
        new_drives = {
            drive.nguid: drive for drive in _new_drives(subject)
        }  # from an earlier try, or from this try
        kept = tuple(drive for drive in subject.status.drives if not drive.is_coming)
        status = msgspec.structs.replace(subject.status, drives=kept)
        found = choose_replacement(seen, status, subject.operation.replacement)
        if isinstance(found, StepFailed):
            return StepResult(found)
        if found.nguid in new_drives:
            status = msgspec.structs.replace(status, drives=(*kept, new_drives[found.nguid]))
        else:
            status = with_drive(status, found, self._new_format_id())
        verdict = StepDone(f"{found.nguid} replaces {subject.operation.drive}, as {status.drives[-1].name}")
        return await self._with_uses(subject, verdict, status)

    async def identify_additions(self, subject: Subject) -> StepResult:
        """Choose the drives to add."""
        seen = visible_drives(await self._queries.look(subject.spec))
        if isinstance(seen, StepFailed):
            return StepResult(seen)
        verdict, status = choose_additions(
            seen, subject.status, subject.operation.drives, self._new_format_id
        )
        return await self._with_uses(subject, verdict, status)

    async def _with_uses(self, subject: Subject, verdict: Verdict, status: RegistrationStatus) -> StepResult:
        """Assign each chosen drive to this enclosure only, and free the others."""
        if not isinstance(verdict, StepDone):
            return StepResult(verdict)
        keys = {record_keys.nguid(drive.nguid): drive for drive in status.drives}
        left = {record_keys.nguid(drive.nguid) for drive in subject.status.drives} - keys.keys()
        uses = await self._records.get_many([*keys, *left])
        for key, drive in keys.items():
            if key in uses and (use := decode(uses[key], DriveUse)).enclosure != subject.id:
                return StepResult(
                    StepFailed(
                        f"drive {drive.nguid} belongs to enclosure {use.enclosure}: retire that enclosure "
                        "first, or list the drives to use"
                    )
                )
        changes = [
            RecordChange(key, encode(DriveUse(VERSION, subject.id, drive.name)))
            for key, drive in keys.items()
        ]
        changes += [RecordChange(key, None) for key in left if key in uses]
        unchanged = {key: uses[key].revision if key in uses else ABSENT for key in [*keys, *left]}
        return StepResult(verdict, subject.writes(status, *changes), {**subject.revisions, **unchanged})

    # -------------------------------------------------------------------------- inspected, formatted, probed

    async def check(self, subject: Subject) -> StepResult:
        """Check whether the new drives may be formatted."""
        drives = _new_drives(subject)
        if not drives:
            return _NOTHING_NEW
        seen = visible_drives(await self._queries.look(subject.spec))
        if isinstance(seen, StepFailed):
            return StepResult(seen)
        report = await self._report_of(subject.id)
        verdict = format_verdict(
            drives,
            seen,
            wipe=_wipeable(subject),
            segment_bytes=subject.spec.segment_bytes,
            report=report,
            volumes=await self._volumes(),
        )
        return StepResult(verdict)

    async def format(self, subject: Subject) -> StepResult:
        """Format some of the new drives."""
        new_drives, wipe = _new_drives(subject), _wipeable(subject)
        if not new_drives:
            return _NOTHING_NEW
        todo = [drive for drive in new_drives if not drive.shard_bytes]
        some = todo[:_AT_ONCE]
        results = await asyncio.gather(
            *(self._queries.format(subject.spec, drive, wipe=drive.nguid in wipe) for drive in some)
        )
        status = subject.status
        for drive, answer in zip(some, results, strict=True):
            if answer.trouble:
                return StepResult(StepFailed(f"{drive.nguid}: {answer.trouble}"))
            done = msgspec.structs.replace(
                drive,
                shard_bytes=answer.size_bytes,
                usable_bytes=answer.usable_bytes,
                block_bytes_max=answer.block_bytes_max,
            )
            status = _with_drive(status, done)
        left = len(todo) - len(some)
        verdict: Verdict = StepDone(f"{counted(len(new_drives), 'drive')} formatted")
        if left:
            verdict = StepPending(f"{counted(left, 'drive')} left", 0.0)
        return StepResult(verdict, subject.writes(status), subject.revisions)

    async def probe(self, subject: Subject) -> StepResult:
        """Measure the new drives."""
        drives = _new_drives(subject)
        if not drives:
            return _NOTHING_NEW
        results: dict[str, dict[str, float]] = {}
        is_in_map = {drive.id for each in self._membership.map.enclosures.values() for drive in each.drives}
        for begin in range(0, len(drives), _AT_ONCE):
            some = drives[begin : begin + _AT_ONCE]
            probes = (
                self._queries.probe(
                    subject.spec, drive, writes=drive_id(subject.id, drive.name) not in is_in_map
                )
                for drive in some
            )
            for drive, answer in zip(some, await asyncio.gather(*probes), strict=True):
                if answer.trouble:
                    return StepResult(
                        StepFailed(f"{drive.nguid}: {answer.trouble}: replace or omit the drive")
                    )
                results[drive.name] = {
                    "read_bytes_s": answer.read_bytes_s,
                    "write_bytes_s": answer.write_bytes_s,
                    "read_p50_s": answer.read_p50_s,
                    "read_p99_s": answer.read_p99_s,
                }
        reads = [each["read_bytes_s"] for each in results.values()]
        slowest = min(reads, default=0.0) / 1e6
        return StepResult(StepDone(f"the slowest drive reads {slowest:.0f} MB/s", {"drives": results}))

    # -------------------------------------------------------------------------------------------- in the map

    async def add_to_map(self, subject: Subject) -> StepResult:
        """Put the enclosure into the map, or change the paths there."""
        current = self._membership.map.enclosures.get(subject.id)
        status = _all_in_map(subject.status)
        target = await self._put(subject, status, current)
        if current is None or current.state is not EnclosureState.DRAINING:
            status = msgspec.structs.replace(status, phase=EnclosurePhase.READY)
        return StepResult(
            StepDone(f"{counted(len(target.drives), 'drive')} in the map"),
            subject.writes(status),
            subject.revisions,
        )

    async def replace_in_map(self, subject: Subject) -> StepResult:
        """Put the new drive into the map, and remove the old drive."""
        old = next((each for each in subject.status.drives if each.name == subject.operation.drive), None)
        kept = tuple(each for each in subject.status.drives if each is not old)
        status = _all_in_map(msgspec.structs.replace(subject.status, drives=kept))
        await self._put(subject, status, self._membership.map.enclosures.get(subject.id))
        changes: list[RecordChange] = []
        if old is not None:
            changes.append(RecordChange(record_keys.nguid(old.nguid), None))
        return StepResult(
            StepDone(f"{subject.operation.drive} is out of the map: remove the drive"),
            subject.writes(status, *changes),
            subject.revisions,
        )

    async def expand_in_map(self, subject: Subject) -> StepResult:
        """Put the new drives into the map, beside the present drives."""
        current = self._membership.map.enclosures.get(subject.id)
        if current is None:  # the map is late, or the enclosure is being retired, so that the operation ends
            raise ChangedError(f"enclosure {subject.id} is not in this admin's map")
        status, count = _all_in_map(subject.status), len(_new_drives(subject))
        target = await self._put(subject, status, current)
        return StepResult(
            StepDone(f"{counted(len(target.drives), 'drive')} in the map, {count} new"),
            subject.writes(status),
            subject.revisions,
        )

    async def _put(
        self, subject: Subject, status: RegistrationStatus, current: EnclosureRecord | None
    ) -> EnclosureRecord:
        """Write the enclosure's status to the map, in one change."""
        is_draining = current is not None and current.state is EnclosureState.DRAINING
        target = map_record(subject.spec, status, is_draining=is_draining)
        await put_in_map(self._membership, subject, target, current)
        return target


def _new_drives(subject: Subject) -> list[ChosenDrive]:
    """Return the drives to be added by an operation."""
    return [drive for drive in subject.status.drives if drive.is_coming]


def _all_in_map(status: RegistrationStatus) -> RegistrationStatus:
    """Return the status with all drives in the map."""
    drives = tuple(msgspec.structs.replace(drive, is_coming=False) for drive in status.drives)
    return msgspec.structs.replace(status, drives=drives)


def _wipeable(subject: Subject) -> frozenset[str]:
    """Return the drives to wipe according to this very request.

    A drive named in an old registration may have other contents by now.
    """
    is_first = subject.operation.kind is OperationKind.ONBOARD
    return frozenset(subject.spec.wipe if is_first else subject.operation.wipe)


def _with_drive(status: RegistrationStatus, drive: ChosenDrive) -> RegistrationStatus:
    drives = tuple(drive if each.name == drive.name else each for each in status.drives)
    return msgspec.structs.replace(status, drives=drives)
