"""What a step of long work is about, what it came to, and how it changes the map."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ostraca_fabric import record_keys
from ostraca_fabric.admin.model import encode
from ostraca_fabric.ids import EnclosureId
from ostraca_fabric.ports.records import Written

if TYPE_CHECKING:
    from ostraca_fabric.admin.judging import Verdict
    from ostraca_fabric.admin.model import EnclosureSpec, EnclosureStatus, Operation
    from ostraca_fabric.fabric_map import EnclosureRecord
    from ostraca_fabric.ports.membership import Membership


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step came to, and what is to be written with it, if *unchanged* is still so."""

    verdict: Verdict
    changes: tuple[Written, ...] = ()
    unchanged: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Subject:
    """The enclosure that an operation is about, as it was read."""

    operation: Operation
    spec: EnclosureSpec
    status: EnclosureStatus
    revisions: dict[str, int]

    @property
    def id(self) -> EnclosureId:
        """The enclosure's."""
        return EnclosureId(self.spec.name)

    def writes(self, status: EnclosureStatus, *more: Written) -> tuple[Written, ...]:
        """Return what writes another status."""
        return (Written(record_keys.status(self.id), encode(status)), *more)


async def put_in_map(
    membership: Membership, wanted: EnclosureRecord, there: EnclosureRecord | None, *, force: bool
) -> None:
    """Have the map say *wanted* of an enclosure, of which it said *there* when that was decided."""
    if wanted != there:
        await membership.put_enclosures([wanted], seen={wanted.id: there}, force=force)
