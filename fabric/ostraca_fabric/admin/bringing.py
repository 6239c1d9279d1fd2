"""Steps that bring drives into an enclosure, whether it is new or in use: they are chosen, looked into,
formatted, measured, and put into the map at once.

Which drives come is said by their records (``ChosenDrive.is_coming``), which are written as the map is: an
admin whose own map is late neither takes a drive of an earlier change for one that failed, nor drops it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from ostraca_fabric import record_keys
from ostraca_fabric.admin.judging import (
    Again,
    Done,
    Failed,
    added,
    chosen,
    identified,
    may_be_formatted,
    replacement_of,
    seen_by_all,
)
from ostraca_fabric.admin.map_records import map_record
from ostraca_fabric.admin.model import VERSION, DriveUse, Kind, Phase, decode, encode
from ostraca_fabric.admin.taking import Taken, put_in_map
from ostraca_fabric.errors import ChangedError
from ostraca_fabric.fabric_map import EnclosureState
from ostraca_fabric.ids import drive_id
from ostraca_fabric.ports.records import ABSENT, Written

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ostraca_fabric.admin.asking import Asking
    from ostraca_fabric.admin.judging import Verdict
    from ostraca_fabric.admin.model import ChosenDrive, EnclosureStatus
    from ostraca_fabric.admin.taking import Subject
    from ostraca_fabric.fabric_map import EnclosureRecord
    from ostraca_fabric.ids import EnclosureId
    from ostraca_fabric.inventory import EnclosureReport
    from ostraca_fabric.ports.membership import Membership
    from ostraca_fabric.ports.records import Records
    from ostraca_fabric.volume import VolumeRecord

_AT_ONCE = 4
"""Drives formatted or measured at once."""

_NOTHING_NEW = Taken(Done("no drive is new"))


class Bringing:
    """Takes these steps by the hands of agents."""

    def __init__(
        self,
        records: Records,
        membership: Membership,
        asking: Asking,
        *,
        report_of: Callable[[EnclosureId], Awaitable[EnclosureReport | None]],
        volumes: Callable[[], Awaitable[Sequence[VolumeRecord]]],
        new_format_id: Callable[[], str],
    ) -> None:
        """As of ``Steps``."""
        self._records = records
        self._membership = membership
        self._asking = asking
        self._report_of = report_of
        self._volumes = volumes
        self._new_format_id = new_format_id

    # -------------------------------------------------------------------------------------------- identified

    async def identified(self, subject: Subject) -> Taken:
        """Choose the drives of an enclosure."""
        answers, spec = await self._asking.looked(subject.spec), subject.spec
        if subject.status.phase is not Phase.ONBOARDING:  # it is reached otherwise, and its drives stay
            nguids = tuple(drive.nguid for drive in subject.status.drives if not drive.is_coming)
            spec = msgspec.structs.replace(spec, drives=nguids)
        verdict, status = identified(answers, spec, subject.status, self._new_format_id)
        return await self._with_uses(subject, verdict, status)

    async def replacement_identified(self, subject: Subject) -> Taken:
        """Choose the drive that comes for another."""
        seen = seen_by_all(await self._asking.looked(subject.spec))
        if isinstance(seen, Failed):
            return Taken(seen)
        coming = {drive.nguid: drive for drive in _coming(subject)}  # of an earlier try, or of this one
        kept = tuple(drive for drive in subject.status.drives if not drive.is_coming)
        status = msgspec.structs.replace(subject.status, drives=kept)
        found = replacement_of(seen, status, subject.operation.replacement)
        if isinstance(found, Failed):
            return Taken(found)
        if found.nguid in coming:
            status = msgspec.structs.replace(status, drives=(*kept, coming[found.nguid]))
        else:
            status = chosen(status, found, self._new_format_id())
        verdict = Done(f"{found.nguid} comes for {subject.operation.drive}, as {status.drives[-1].name}")
        return await self._with_uses(subject, verdict, status)

    async def added_identified(self, subject: Subject) -> Taken:
        """Choose the drives that are added."""
        seen = seen_by_all(await self._asking.looked(subject.spec))
        if isinstance(seen, Failed):
            return Taken(seen)
        verdict, status = added(seen, subject.status, subject.operation.drives, self._new_format_id)
        return await self._with_uses(subject, verdict, status)

    async def _with_uses(self, subject: Subject, verdict: Verdict, status: EnclosureStatus) -> Taken:
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

    # ------------------------------------------------------------------------ looked into, formatted, probed

    async def preflight(self, subject: Subject) -> Taken:
        """See whether the drives that come may be formatted."""
        drives = _coming(subject)
        if not drives:
            return _NOTHING_NEW
        seen = seen_by_all(await self._asking.looked(subject.spec))
        if isinstance(seen, Failed):
            return Taken(seen)
        report = await self._report_of(subject.id)
        verdict = may_be_formatted(
            drives,
            seen,
            wipe=_wipe(subject),
            segment_bytes=subject.spec.segment_bytes,
            report=report,
            volumes=await self._volumes(),
        )
        return Taken(verdict)

    async def formatted(self, subject: Subject) -> Taken:
        """Format some of them."""
        coming, wipe = _coming(subject), _wipe(subject)
        if not coming:
            return _NOTHING_NEW
        todo = [drive for drive in coming if not drive.shard_bytes]
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
        verdict: Verdict = Done(f"{len(coming)} drives are formatted")
        if left:
            verdict = Again(f"{left} drives are left", 0.0)
        return Taken(verdict, subject.writes(status), subject.revisions)

    async def probed(self, subject: Subject) -> Taken:
        """Measure them."""
        drives = _coming(subject)
        if not drives:
            return _NOTHING_NEW
        results: dict[str, dict[str, float]] = {}
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

    # -------------------------------------------------------------------------------------------- in the map

    async def in_the_map(self, subject: Subject) -> Taken:
        """Put the enclosure into the map, or change how it is reached."""
        there = self._membership.map.enclosures.get(subject.id)
        status = _come(subject.status)
        wanted = await self._put(subject, status, there)
        if there is None or there.state is not EnclosureState.DRAINING:
            status = msgspec.structs.replace(status, phase=Phase.READY)
        return Taken(
            Done(f"its {len(wanted.drives)} drives take blocks"), subject.writes(status), subject.revisions
        )

    async def replaced_in_the_map(self, subject: Subject) -> Taken:
        """Put a drive into the map, and another one out of it."""
        old = next((each for each in subject.status.drives if each.name == subject.operation.drive), None)
        kept = tuple(each for each in subject.status.drives if each is not old)
        status = _come(msgspec.structs.replace(subject.status, drives=kept))
        await self._put(subject, status, self._membership.map.enclosures.get(subject.id))
        changes: list[Written] = []
        if old is not None:
            changes.append(Written(record_keys.nguid(old.nguid), None))
        return Taken(
            Done(f"{subject.operation.drive} is out of the fabric: take it out"),
            subject.writes(status, *changes),
            subject.revisions,
        )

    async def added_in_the_map(self, subject: Subject) -> Taken:
        """Put drives into the map beside those that are there."""
        there = self._membership.map.enclosures.get(subject.id)
        if there is None:  # our map is late, or the enclosure is being retired, which ends this
            message = f"enclosure {subject.id} is not in this admin's map"
            raise ChangedError(message)
        status, count = _come(subject.status), len(_coming(subject))
        wanted = await self._put(subject, status, there)
        new = f"{count} of them {'is' if count == 1 else 'are'} new" if count else "and none is new"
        return Taken(
            Done(f"its {len(wanted.drives)} drives take blocks, {new}"),
            subject.writes(status),
            subject.revisions,
        )

    async def _put(
        self, subject: Subject, status: EnclosureStatus, there: EnclosureRecord | None
    ) -> EnclosureRecord:
        """Have the map say of the enclosure what its status says, in one change."""
        is_draining = there is not None and there.state is EnclosureState.DRAINING
        wanted = map_record(subject.spec, status, is_draining=is_draining)
        await put_in_map(self._membership, wanted, there, force=subject.operation.force)
        return wanted


def _coming(subject: Subject) -> list[ChosenDrive]:
    """Return the drives that an operation brings in."""
    return [drive for drive in subject.status.drives if drive.is_coming]


def _come(status: EnclosureStatus) -> EnclosureStatus:
    """Return it with all of its drives in the map."""
    drives = tuple(msgspec.structs.replace(drive, is_coming=False) for drive in status.drives)
    return msgspec.structs.replace(status, drives=drives)


def _wipe(subject: Subject) -> frozenset[str]:
    """Return the drives that this very request named to be wiped: what a registration named long ago may hold
    something else by now.
    """
    is_first = subject.operation.kind is Kind.ONBOARD
    return frozenset(subject.spec.wipe if is_first else subject.operation.wipe)


def _with_drive(status: EnclosureStatus, drive: ChosenDrive) -> EnclosureStatus:
    drives = tuple(drive if each.name == drive.name else each for each in status.drives)
    return msgspec.structs.replace(status, drives=drives)
