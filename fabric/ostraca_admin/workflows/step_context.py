"""Subject and result of a step, and changes of the map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ostraca_admin.model import EnclosureSpec, Operation, RegistrationStatus, encode
from ostraca_admin.workflows.preflight import Verdict
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.fabric_map import EnclosureRecord
from ostraca_fabric.model.ids import EnclosureId
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.ports.records import RecordChange, RecordLock


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step, with records to write if *unchanged* still holds."""

    verdict: Verdict
    changes: tuple[RecordChange, ...] = ()
    unchanged: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Subject:
    """Enclosure of an operation, as read."""

    operation: Operation
    spec: EnclosureSpec
    status: RegistrationStatus
    revisions: dict[str, int]
    hold: RecordLock
    """Proof that this admin holds the operation."""

    @property
    def id(self) -> EnclosureId:
        """Id of the enclosure."""
        return EnclosureId(self.spec.name)

    def writes(self, status: RegistrationStatus, *more: RecordChange) -> tuple[RecordChange, ...]:
        """Return the changes for a new status."""
        return (RecordChange(record_keys.status(self.id), encode(status)), *more)


async def put_in_map(
    membership: Membership,
    subject: Subject,
    target: EnclosureRecord,
    current: EnclosureRecord | None,
    unchanged: Sequence[EnclosureRecord] = (),
) -> None:
    """Write *target* to the map, if *current* and *unchanged* are there and the operation still held."""
    if target != current:
        seen = {target.id: current, **{each.id: each for each in unchanged}}
        await membership.put_enclosures(
            [target], seen=seen, under=subject.hold, force=subject.operation.force
        )
