"""Who asks for a change, and what is written down of it with the change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_fabric import record_keys
from ostraca_fabric.admin.model import VERSION, AuditEntry, encode
from ostraca_fabric.ports.records import Written

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks for a change."""

    name: str
    role: str
    action: str
    """What was asked, as it came: ``PUT /v1/enclosures/shelf-1``."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Makes audit entries; each is written with what it tells of, or not at all."""

    unix_s: Callable[[], float]
    """The time, for people."""

    new_id: Callable[[], str]
    """Makes ids that begin with the time, so that they are in order."""

    def entry(self, caller: Caller, subject: str, detail: str) -> Written:
        """Return what says that a change was made."""
        entry = AuditEntry(
            VERSION, self.new_id(), self.unix_s(), caller.name, caller.role, caller.action, subject, detail
        )
        return Written(record_keys.audit(entry.id), encode(entry))
