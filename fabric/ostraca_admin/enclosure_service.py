"""Enclosure service: checks and records changes, and starts long operations.

A change is a single write, conditional on the records behind the decision, with an audit entry. If two admins
decide concurrently, the store accepts only the first write. No call here waits for flash.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import msgspec

from ostraca_admin.audit import Audit, Requester
from ostraca_admin.errors import ConflictError, NotFoundError
from ostraca_admin.model import (
    STEPS,
    VERSION,
    AuditEntry,
    DriveUse,
    EnclosurePhase,
    EnclosureSpec,
    Operation,
    OperationDrives,
    OperationKind,
    OperationState,
    Registration,
    RegistrationStatus,
    Step,
    decode,
    encode,
)
from ostraca_admin.rules import (
    check_addition,
    check_changeable,
    check_match,
    check_phase,
    check_spec,
    may_cancel,
    may_try_again,
)
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.ids import EnclosureId
from ostraca_fabric.model.target import check_nguid
from ostraca_fabric.ports.records import ABSENT, Record, RecordChange, Records

_Record = TypeVar("_Record", bound=msgspec.Struct)

_TRIES = 8

log = logging.getLogger(__name__)


class EnclosureService:
    """Enclosure service of an admin."""

    def __init__(self, records: Records, audit: Audit) -> None:
        """Store all state in *records*."""
        self._records = records
        self._audit = audit
        self._unix_s = audit.unix_s
        self._new_id = audit.new_id

    # ------------------------------------------------------------------------------------------- enclosures

    async def register(
        self,
        spec: EnclosureSpec,
        requester: Requester,
        *,
        if_match: int | None = None,
        may_return: bool = True,
    ) -> tuple[Registration, bool]:
        """Register an enclosure or change paths; return the records and whether new.

        Repeating the call changes nothing, but restarts a failed onboarding. *may_return*: register a retired
        enclosure, too.

        Raises UsageError, PreconditionError, and ConflictError: the name is taken by another enclosure, a
        drive belongs to another, an operation is in progress, or the enclosure is retired.
        """
        check_spec(spec)
        enclosure = EnclosureId(spec.name)
        for _ in range(_TRIES):
            known = await self.find(enclosure)
            check_match(if_match, None if known is None else known.spec_revision)
            if known is not None and known.spec == spec and not may_try_again(known.operation):
                return known, False
            if known is not None:
                check_changeable(known, spec)
            if await self._register_once(spec, known, requester, may_return=may_return):
                registration = await self.find(enclosure)
                if registration is not None:
                    return registration, known is None
        raise _constant_changes(enclosure)

    async def _register_once(
        self, spec: EnclosureSpec, known: Registration | None, requester: Requester, *, may_return: bool
    ) -> bool:
        enclosure = EnclosureId(spec.name)
        named = {record_keys.nguid(nguid): nguid for nguid in spec.drives}
        at_retired = record_keys.retired(enclosure)
        found = await self._records.get_many([*named, at_retired])
        uses, retired = {key: found[key] for key in named if key in found}, found.get(at_retired)
        if retired is not None and not may_return:
            raise ConflictError(
                f"enclosure {enclosure} is retired: end its daemon, or register it again with "
                f"`ostraca enclosure add {enclosure}`"
            )
        _check_owner(enclosure, named, uses)
        use = encode(DriveUse(VERSION, enclosure, ""))
        changes = [RecordChange(record_keys.spec(enclosure), encode(spec))]
        changes += [RecordChange(key, use) for key in named if key not in uses]
        unchanged = {
            record_keys.spec(enclosure): ABSENT if known is None else known.spec_revision,
            **{key: found[key].revision if key in found else ABSENT for key in (*named, at_retired)},
        }
        if retired is not None:
            changes.append(RecordChange(at_retired, None))
        for key, record in (await self._omitted_uses(known, named)).items():
            changes.append(RecordChange(key, None))
            unchanged[key] = record.revision
        is_ready = known is not None and known.status.phase is not EnclosurePhase.ONBOARDING
        operation = self._operation(OperationKind.ONBOARD, enclosure, requester)
        if is_ready:  # only the paths have changed: skip the steps on drives
            done = tuple(
                msgspec.structs.replace(
                    each, state=OperationState.DONE, message="skipped: done by an earlier onboarding"
                )
                if each.name in ("preflight", "formatted", "probed")
                else each
                for each in operation.steps
            )
            operation = msgspec.structs.replace(operation, steps=done)
        before = RegistrationStatus(VERSION, EnclosurePhase.ONBOARDING, "") if known is None else known.status
        return await self._begin(operation, before, known, changes, unchanged, requester)

    async def _omitted_uses(self, known: Registration | None, named: Collection[str]) -> Mapping[str, Record]:
        """Return the use records of drives named before, now neither named nor chosen."""
        if known is None:
            return {}
        chosen = {drive.nguid for drive in known.status.drives}
        before = {record_keys.nguid(nguid) for nguid in known.spec.drives if nguid not in chosen}
        return await self._records.get_many(sorted(before - {*named}))

    async def start(
        self,
        kind: OperationKind,
        enclosure: EnclosureId,
        requester: Requester,
        *,
        if_match: int | None = None,
        force: bool = False,
        drives: OperationDrives | None = None,
    ) -> Operation:
        """Start an operation on a registered enclosure, or return the same operation if running.

        A drain closes the enclosure to new blocks and waits until no lookup needs the enclosure. Undrain
        reopens a drained or draining enclosure. Retire removes an enclosure that is drained or never
        completed onboarding. *force*: change the map even at the limit of placement epochs still searched,
        and retire any enclosure, with a loss of its blocks.

        Raises NotFoundError, PreconditionError, and ConflictError if the phase or another operation forbids
        the start.
        """
        drives = drives or OperationDrives()
        for _ in range(_TRIES):
            known = await self.get(enclosure)
            check_match(if_match, known.spec_revision)
            running = known.operation if known.operation.state is OperationState.RUNNING else None
            if running is not None and (running.kind, running.affected_drives) == (kind, drives):
                if not force or running.force:
                    return running
                if await self._record_force(known, requester):
                    return msgspec.structs.replace(running, force=True)
                continue
            is_closing = running is not None and running.kind is OperationKind.DRAIN
            phase = EnclosurePhase.DRAINING if is_closing else known.status.phase
            check_phase(kind, enclosure, phase, force=force)
            if running is not None and not may_cancel(kind, running.kind, force=force):
                raise ConflictError(
                    f"operation {running.id} ({running.kind.value}) of enclosure {enclosure} is running: "
                    "wait for its end"
                )
            operation = msgspec.structs.replace(
                self._operation(kind, enclosure, requester),
                drive=drives.drive,
                replacement=drives.replacement,
                wipe=drives.wipe,
                drives=drives.drives,
                force=force,
            )
            changes, unchanged = list[RecordChange](), {record_keys.spec(enclosure): known.spec_revision}
            if await self._begin(operation, known.status, known, changes, unchanged, requester):
                return operation
        raise _constant_changes(enclosure)

    async def replace(
        self,
        enclosure: EnclosureId,
        drive: str,
        requester: Requester,
        *,
        replacement: str = "",
        wipe: Sequence[str] = (),
        if_match: int | None = None,
        force: bool = False,
    ) -> Operation:
        """Replace a drive by another; blocks on the old drive are lost."""
        for nguid in (*wipe, *([replacement] if replacement else [])):
            check_nguid(nguid)
        known = await self.get(enclosure)
        if not any(each.name == drive for each in known.status.drives):
            names = ", ".join(each.name for each in known.status.drives)
            raise NotFoundError(
                f"enclosure {enclosure} has no drive {drive}: name one of its drives ({names or 'none yet'})"
            )
        return await self.start(
            OperationKind.REPLACE,
            enclosure,
            requester,
            if_match=if_match,
            force=force,
            drives=OperationDrives(drive=drive, replacement=replacement, wipe=tuple(wipe)),
        )

    async def expand(
        self,
        enclosure: EnclosureId,
        requester: Requester,
        *,
        drives: Sequence[str] = (),
        wipe: Sequence[str] = (),
        if_match: int | None = None,
        force: bool = False,
    ) -> Operation:
        """Add drives to an enclosure in use: the named drives, or all visible unused drives."""
        check_addition(drives, wipe)
        await self.get(enclosure)
        named = {record_keys.nguid(nguid): nguid for nguid in drives}
        _check_owner(enclosure, named, await self._records.get_many(list(named)))
        return await self.start(
            OperationKind.EXPAND,
            enclosure,
            requester,
            if_match=if_match,
            force=force,
            drives=OperationDrives(drives=tuple(drives), wipe=tuple(wipe)),
        )

    async def _record_force(self, known: Registration, requester: Requester) -> bool:
        """Record *force* for a running operation; the running admin reads the record again."""
        running = known.operation
        at = record_keys.operation(running.id)
        forced = RecordChange(at, encode(msgspec.structs.replace(running, force=True)))
        audited = self._audit.entry(
            requester, running.enclosure, f"{running.kind.value} {running.id}, forced"
        )
        changes, unchanged = [forced, audited], {at: known.operation_revision}
        return await self._records.write(changes, unchanged=unchanged) is not None

    async def _begin(
        self,
        operation: Operation,
        status: RegistrationStatus,
        known: Registration | None,
        changes: list[RecordChange],
        unchanged: dict[str, int],
        requester: Requester,
    ) -> bool:
        """Record an operation, together with the end of the previous operation."""
        enclosure = EnclosureId(operation.enclosure)
        changes += [
            RecordChange(
                record_keys.status(enclosure),
                encode(msgspec.structs.replace(status, operation=operation.id)),
            ),
            RecordChange(record_keys.operation(operation.id), encode(operation)),
            self._audit.entry(requester, enclosure, f"{operation.kind.value} {operation.id}"),
        ]
        unchanged[record_keys.status(enclosure)] = ABSENT if known is None else known.status_revision
        if known is not None and known.operation.state is OperationState.RUNNING:
            cancelled = msgspec.structs.replace(
                known.operation,
                state=OperationState.CANCELLED,
                message=f"superseded by {operation.kind.value} (operation {operation.id})",
                ended_unix_s=self._unix_s(),
            )
            changes.append(RecordChange(record_keys.operation(cancelled.id), encode(cancelled)))
            # Without the hold, the cancelled operation's admin can no longer change the map.
            changes.append(RecordChange(record_keys.work(cancelled.id), None))
            unchanged[record_keys.operation(cancelled.id)] = known.operation_revision
        written = await self._records.write(changes, unchanged=unchanged)
        if written is not None:
            log.info(
                "%s (%s) requested %s of %s: %s, operation %s",
                requester.name,
                requester.role,
                operation.kind.value,
                enclosure,
                requester.action,
                operation.id,
            )
        return written is not None

    # --------------------------------------------------------------------------------------------- read

    async def find(self, enclosure: EnclosureId) -> Registration | None:
        """Return the records of an enclosure, or None if not registered.

        Raises ConflictError if the records change constantly.
        """
        at_spec, at_status = record_keys.spec(enclosure), record_keys.status(enclosure)
        for _ in range(_TRIES):
            found = await self._records.get_many([at_spec, at_status])
            if at_spec not in found or at_status not in found:
                return None
            status = decode(found[at_status], RegistrationStatus)
            operation = await self._records.get(record_keys.operation(status.operation))
            if operation is not None:
                return Registration(
                    decode(found[at_spec], EnclosureSpec),
                    found[at_spec].revision,
                    status,
                    found[at_status].revision,
                    decode(operation, Operation),
                    operation.revision,
                )
            # A later operation began between the two reads, and retention deleted this one.
        raise _constant_changes(enclosure)

    async def get(self, enclosure: EnclosureId) -> Registration:
        """Return the records of an enclosure. Raises NotFoundError."""
        known = await self.find(enclosure)
        if known is None:
            raise NotFoundError(
                f"enclosure {enclosure} is not registered: list all by `ostraca enclosure list`, or at "
                "/v1/enclosures"
            )
        return known

    async def page(self, *, after: str = "", limit: int) -> list[Registration]:
        """Return registered enclosures by name."""
        behind, found = record_keys.spec(EnclosureId(after)) if after else "", list[Registration]()
        while len(found) < limit:
            listed = await self._records.below(record_keys.SPECS, after=behind, limit=limit - len(found))
            if not listed:
                break
            behind = listed[-1].key
            names = (EnclosureId(record.key.removeprefix(record_keys.SPECS)) for record in listed)
            found += [each for name in names if (each := await self.find(name)) is not None]
        return found

    async def operation(self, operation: str) -> Operation:
        """Return an operation. Raises NotFoundError."""
        record = await self._records.get(record_keys.operation(operation))
        if record is None:
            raise NotFoundError(
                f"operation {operation} does not exist: list all by `ostraca operation list`, or at "
                "/v1/operations"
            )
        return decode(record, Operation)

    async def operations(self, *, after: str = "", limit: int) -> list[Operation]:
        """Return operations, oldest first."""
        return await self._listed(record_keys.OPERATIONS, after, limit, Operation)

    async def audit(self, *, after: str = "", limit: int) -> list[AuditEntry]:
        """Return audit entries, oldest first."""
        return await self._listed(record_keys.AUDIT, after, limit, AuditEntry)

    async def _listed(self, prefix: str, after: str, limit: int, kind: type[_Record]) -> list[_Record]:
        behind = f"{prefix}{after}" if after else ""
        listed: tuple[Record, ...] = await self._records.below(prefix, after=behind, limit=limit)
        return [decode(record, kind) for record in listed]

    # ------------------------------------------------------------------------------------------- written

    def _operation(self, kind: OperationKind, enclosure: EnclosureId, requester: Requester) -> Operation:
        steps = tuple(Step(name) for name in STEPS[kind])
        return Operation(VERSION, self._new_id(), kind, enclosure, requester.name, self._unix_s(), steps)


def _check_owner(enclosure: EnclosureId, named: Mapping[str, str], uses: Mapping[str, Record]) -> None:
    """Refuse drives of other enclosures. *named* and *uses* are by key.

    Raises ConflictError.
    """
    for key, nguid in named.items():
        if key in uses and (other := decode(uses[key], DriveUse)).enclosure != enclosure:
            raise ConflictError(
                f"drive {nguid} belongs to enclosure {other.enclosure}: retire that enclosure first, or omit "
                "the drive"
            )


def _constant_changes(enclosure: EnclosureId) -> ConflictError:
    return ConflictError(f"enclosure {enclosure} changes constantly: retry")
