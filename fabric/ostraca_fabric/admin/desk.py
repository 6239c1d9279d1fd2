"""Takes changes: checks them against what is kept, writes them down with who made them, begins long work.

Each change is one write of records that compares what it was decided on, with its audit entry beside it: two
admins that decide at once are told apart by the store. Nothing here waits for flash.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ostraca_fabric import record_keys
from ostraca_fabric.admin.errors import ConflictError, NotFoundError
from ostraca_fabric.admin.model import (
    STEPS,
    VERSION,
    About,
    AuditEntry,
    DriveUse,
    EnclosureSpec,
    EnclosureStatus,
    Kept,
    Kind,
    Operation,
    Phase,
    State,
    Step,
    decode,
    encode,
)
from ostraca_fabric.admin.rules import (
    check_addition,
    check_changeable,
    check_match,
    check_spec,
    may_cancel,
    may_try_again,
    not_now,
)
from ostraca_fabric.ids import EnclosureId
from ostraca_fabric.ports.records import ABSENT, Written
from ostraca_fabric.target import check_nguid

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ostraca_fabric.admin.audit import Audit, Caller
    from ostraca_fabric.ports.records import Record, Records

_Kept = TypeVar("_Kept", bound=msgspec.Struct)

_TRIES = 8

log = logging.getLogger(__name__)


class Desk:
    """One admin's."""

    def __init__(self, records: Records, audit: Audit) -> None:
        """Keep everything in *records*."""
        self._records = records
        self._audit = audit
        self._unix_s = audit.unix_s
        self._new_id = audit.new_id

    # ------------------------------------------------------------------------------------------- enclosures

    async def register(
        self, spec: EnclosureSpec, caller: Caller, *, if_match: int | None = None
    ) -> tuple[Kept, bool]:
        """Register an enclosure, or change how it is reached; the same again changes nothing, and begins its
        onboarding anew where that has failed. Return what is kept, and whether it is new.

        Raises UsageError, PreconditionError, and ConflictError: another is registered under this name, one of
        its drives is another's, or long work on it runs.
        """
        check_spec(spec)
        enclosure = EnclosureId(spec.name)
        for _ in range(_TRIES):
            known = await self.kept(enclosure)
            check_match(if_match, None if known is None else known.spec_revision)
            if known is not None and known.spec == spec and not may_try_again(known.operation):
                return known, False
            if known is not None:
                check_changeable(known, spec)
            if await self._registered(spec, known, caller):
                kept = await self.kept(enclosure)
                if kept is not None:
                    return kept, known is None
        raise ConflictError(f"others change enclosure {enclosure} all the time: ask again")

    async def _registered(self, spec: EnclosureSpec, known: Kept | None, caller: Caller) -> bool:
        enclosure = EnclosureId(spec.name)
        named = {record_keys.nguid(nguid): nguid for nguid in spec.drives}
        uses = await self._records.get_many(list(named))
        _refuse_others(enclosure, named, uses)
        use = encode(DriveUse(VERSION, enclosure, ""))
        changes = [Written(record_keys.spec(enclosure), encode(spec))]
        changes += [Written(key, use) for key in named if key not in uses]
        unchanged = {
            record_keys.spec(enclosure): ABSENT if known is None else known.spec_revision,
            **{key: uses[key].revision if key in uses else ABSENT for key in named},
        }
        for key, record in (await self._left_out(known, named)).items():
            changes.append(Written(key, None))
            unchanged[key] = record.revision
        is_ready = known is not None and known.status.phase is not Phase.ONBOARDING
        operation = self._operation(Kind.ONBOARD, enclosure, caller)
        if is_ready:  # how it is reached has changed: of its steps the last is what is left
            done = tuple(
                msgspec.structs.replace(each, state=State.DONE, message="it was onboarded before")
                if each.name in ("preflight", "formatted", "probed")
                else each
                for each in operation.steps
            )
            operation = msgspec.structs.replace(operation, steps=done)
        before = EnclosureStatus(VERSION, Phase.ONBOARDING, "") if known is None else known.status
        return await self._begin(operation, before, known, changes, unchanged, caller)

    async def _left_out(self, known: Kept | None, named: Collection[str]) -> Mapping[str, Record]:
        """Return what says whose drives are that were named before, and are not now, nor chosen."""
        if known is None:
            return {}
        chosen = {drive.nguid for drive in known.status.drives}
        before = {record_keys.nguid(nguid) for nguid in known.spec.drives if nguid not in chosen}
        return await self._records.get_many(sorted(before - {*named}))

    async def drain(
        self, enclosure: EnclosureId, caller: Caller, *, if_match: int | None = None, force: bool = False
    ) -> Operation:
        """Let an enclosure take no new blocks, and wait until nothing of it is looked up.

        With *force* it does so though as many placement epochs as may be are still asked.
        """
        return await self._long_work(
            Kind.DRAIN, enclosure, caller, {Phase.READY, Phase.DRAINING}, if_match=if_match, force=force
        )

    async def undrain(
        self, enclosure: EnclosureId, caller: Caller, *, if_match: int | None = None, force: bool = False
    ) -> Operation:
        """Let an enclosure that is drained, or being drained, take blocks again."""
        return await self._long_work(
            Kind.UNDRAIN, enclosure, caller, {Phase.DRAINING, Phase.DRAINED}, if_match=if_match, force=force
        )

    async def retire(
        self, enclosure: EnclosureId, caller: Caller, *, if_match: int | None = None, force: bool = False
    ) -> Operation:
        """Take an enclosure out of the fabric: a drained one, one that never came in, or with *force* any,
        and then its blocks are lost.
        """
        phases = set(Phase) if force else {Phase.DRAINED, Phase.ONBOARDING}
        return await self._long_work(Kind.RETIRE, enclosure, caller, phases, if_match=if_match, force=force)

    async def replace(
        self,
        enclosure: EnclosureId,
        drive: str,
        caller: Caller,
        *,
        replacement: str = "",
        wipe: Sequence[str] = (),
        if_match: int | None = None,
        force: bool = False,
    ) -> Operation:
        """Use another drive in one's place; what the old one holds is lost."""
        for nguid in (*wipe, *([replacement] if replacement else [])):
            check_nguid(nguid)
        known = await self._known(enclosure)
        if not any(each.name == drive for each in known.status.drives):
            names = ", ".join(each.name for each in known.status.drives)
            raise NotFoundError(f"enclosure {enclosure} has no drive {drive}: it has {names or 'none yet'}")
        return await self._long_work(
            Kind.REPLACE,
            enclosure,
            caller,
            {Phase.READY, Phase.DRAINING, Phase.DRAINED},
            if_match=if_match,
            force=force,
            about=About(drive=drive, replacement=replacement, wipe=tuple(wipe)),
        )

    async def expand(
        self,
        enclosure: EnclosureId,
        caller: Caller,
        *,
        drives: Sequence[str] = (),
        wipe: Sequence[str] = (),
        if_match: int | None = None,
        force: bool = False,
    ) -> Operation:
        """Add drives to an enclosure in use: those that are named, or all that it shows and does not use."""
        check_addition(drives, wipe)
        await self._known(enclosure)
        named = {record_keys.nguid(nguid): nguid for nguid in drives}
        _refuse_others(enclosure, named, await self._records.get_many(list(named)))
        return await self._long_work(
            Kind.EXPAND,
            enclosure,
            caller,
            {Phase.READY},
            if_match=if_match,
            force=force,
            about=About(drives=tuple(drives), wipe=tuple(wipe)),
        )

    async def _long_work(
        self,
        kind: Kind,
        enclosure: EnclosureId,
        caller: Caller,
        phases: set[Phase],
        *,
        if_match: int | None,
        force: bool,
        about: About | None = None,
    ) -> Operation:
        about = about or About()
        for _ in range(_TRIES):
            known = await self._known(enclosure)
            check_match(if_match, known.spec_revision)
            running = known.operation if known.operation.state is State.RUNNING else None
            if running is not None and (running.kind, running.about) == (kind, about):
                if not force or running.force:
                    return running
                if await self._forced(known, caller):
                    return msgspec.structs.replace(running, force=True)
                continue
            if known.status.phase not in phases:
                raise ConflictError(not_now(kind, enclosure, known.status.phase))
            if running is not None and not may_cancel(kind, running.kind, force=force):
                raise ConflictError(
                    f"{running.kind.value} of enclosure {enclosure} runs (operation {running.id}): wait "
                    "for it"
                )
            operation = msgspec.structs.replace(
                self._operation(kind, enclosure, caller),
                drive=about.drive,
                replacement=about.replacement,
                wipe=about.wipe,
                drives=about.drives,
                force=force,
            )
            changes, unchanged = list[Written](), {record_keys.spec(enclosure): known.spec_revision}
            if await self._begin(operation, known.status, known, changes, unchanged, caller):
                return operation
        raise ConflictError(f"others change enclosure {enclosure} all the time: ask again")

    async def _forced(self, known: Kept, caller: Caller) -> bool:
        """Force long work that runs, as its caller asks for now: whoever does it reads it again."""
        running = known.operation
        at = record_keys.operation(running.id)
        forced = Written(at, encode(msgspec.structs.replace(running, force=True)))
        audited = self._audit.entry(caller, running.enclosure, f"{running.kind.value} {running.id}, forced")
        changes, unchanged = [forced, audited], {at: known.operation_revision}
        return await self._records.write(changes, unchanged=unchanged) is not None

    async def _begin(
        self,
        operation: Operation,
        status: EnclosureStatus,
        known: Kept | None,
        changes: list[Written],
        unchanged: dict[str, int],
        caller: Caller,
    ) -> bool:
        """Write long work down, with the end of what ran before."""
        enclosure = EnclosureId(operation.enclosure)
        changes += [
            Written(
                record_keys.status(enclosure),
                encode(msgspec.structs.replace(status, operation=operation.id)),
            ),
            Written(record_keys.operation(operation.id), encode(operation)),
            self._audit.entry(caller, enclosure, f"{operation.kind.value} {operation.id}"),
        ]
        unchanged[record_keys.status(enclosure)] = ABSENT if known is None else known.status_revision
        if known is not None and known.operation.state is State.RUNNING:
            cancelled = msgspec.structs.replace(
                known.operation,
                state=State.CANCELLED,
                message=f"{operation.kind.value} was asked for ({operation.id})",
                ended_unix_s=self._unix_s(),
            )
            changes.append(Written(record_keys.operation(cancelled.id), encode(cancelled)))
            unchanged[record_keys.operation(cancelled.id)] = known.operation_revision
        made = await self._records.write(changes, unchanged=unchanged)
        if made is not None:
            log.info(
                "%s (%s) asked for %s of %s: %s, operation %s",
                caller.name,
                caller.role,
                operation.kind.value,
                enclosure,
                caller.action,
                operation.id,
            )
        return made is not None

    # --------------------------------------------------------------------------------------------- read

    async def kept(self, enclosure: EnclosureId) -> Kept | None:
        """Return what is kept of an enclosure, None when it is not registered."""
        at_spec, at_status = record_keys.spec(enclosure), record_keys.status(enclosure)
        found = await self._records.get_many([at_spec, at_status])
        if at_spec not in found or at_status not in found:
            return None
        status = decode(found[at_status].value, EnclosureStatus)
        operation = await self._records.get(record_keys.operation(status.operation))
        if operation is None:  # it was forgotten between the two reads
            return None
        return Kept(
            decode(found[at_spec].value, EnclosureSpec),
            found[at_spec].revision,
            status,
            found[at_status].revision,
            decode(operation.value, Operation),
            operation.revision,
        )

    async def enclosures(self, *, after: str = "", limit: int) -> list[Kept]:
        """Return registered enclosures by name."""
        behind = record_keys.spec(EnclosureId(after)) if after else ""
        listed = await self._records.below(record_keys.SPECS, after=behind, limit=limit)
        names = (EnclosureId(record.key.removeprefix(record_keys.SPECS)) for record in listed)
        return [kept for name in names if (kept := await self.kept(name)) is not None]

    async def operation(self, operation: str) -> Operation:
        """Return long work. Raises NotFoundError."""
        record = await self._records.get(record_keys.operation(operation))
        if record is None:
            raise NotFoundError(f"there is no operation {operation}")
        return decode(record.value, Operation)

    async def operations(self, *, after: str = "", limit: int) -> list[Operation]:
        """Return long work, the oldest first."""
        return await self._listed(record_keys.OPERATIONS, after, limit, Operation)

    async def audit(self, *, after: str = "", limit: int) -> list[AuditEntry]:
        """Return who changed what, the oldest first."""
        return await self._listed(record_keys.AUDIT, after, limit, AuditEntry)

    async def _listed(self, prefix: str, after: str, limit: int, kind: type[_Kept]) -> list[_Kept]:
        behind = f"{prefix}{after}" if after else ""
        listed: tuple[Record, ...] = await self._records.below(prefix, after=behind, limit=limit)
        return [decode(record.value, kind) for record in listed]

    async def _known(self, enclosure: EnclosureId) -> Kept:
        known = await self.kept(enclosure)
        if known is None:
            raise NotFoundError(f"no enclosure {enclosure} is registered")
        return known

    # ------------------------------------------------------------------------------------------- written

    def _operation(self, kind: Kind, enclosure: EnclosureId, caller: Caller) -> Operation:
        steps = tuple(Step(name) for name in STEPS[kind])
        return Operation(VERSION, self._new_id(), kind, enclosure, caller.name, self._unix_s(), steps)


def _refuse_others(enclosure: EnclosureId, named: Mapping[str, str], uses: Mapping[str, Record]) -> None:
    """Refuse drives that are another enclosure's. *named* and *uses* are by key. Raises ConflictError."""
    for key, nguid in named.items():
        if key in uses and (other := decode(uses[key].value, DriveUse)).enclosure != enclosure:
            raise ConflictError(
                f"drive {nguid} is one of enclosure {other.enclosure}: retire it there first, or leave it out"
            )
