"""Audit entries with their authors, and retention of audit entries and operations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ostraca_admin.model import (
    VERSION,
    AuditEntry,
    Operation,
    OperationState,
    RegistrationStatus,
    decode,
    decode_readable,
    encode,
)
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.model import record_keys
from ostraca_fabric.ports.records import Record, RecordChange, Records


@dataclass(frozen=True, slots=True)
class Requester:
    """Author of a change."""

    name: str
    role: str
    action: str
    """The request as received: ``PUT /v1/enclosures/shelf-1``."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Factory of audit entries, each written together with the change."""

    unix_s: Callable[[], float]
    """Present time, for people."""

    new_id: Callable[[], str]
    """Makes ids with the time at the beginning, so that ids are ordered."""

    def entry(self, caller: Requester, subject: str, detail: str) -> RecordChange:
        """Return the write of an audit entry."""
        entry = AuditEntry(
            VERSION, self.new_id(), self.unix_s(), caller.name, caller.role, caller.action, subject, detail
        )
        return RecordChange(record_keys.audit(entry.id), encode(entry))


log = logging.getLogger(__name__)

_TURN_S = 60.0
_AT_ONCE = 64
"""Most records deleted in one change."""


class Retention:
    """Retention of an admin; several admins may run concurrently."""

    def __init__(self, records: Records, *, audit_max: int, operations_max: int) -> None:
        """Keep at most this many of each kind, the newest."""
        self._records = records
        self._audit_max = audit_max
        self._operations_max = operations_max

    async def run(self) -> None:
        """Delete old records periodically until cancelled."""
        while True:
            try:
                await self.turn()
            except MembershipError as error:
                log.warning("Old audit entries are not deleted, retrying: %s", error)
            await asyncio.sleep(_TURN_S)

    async def turn(self) -> None:
        """Delete old records. Raises MembershipError."""
        audit = await self._records.below(record_keys.AUDIT)
        await self._delete(audit[: max(0, len(audit) - self._audit_max)])
        statuses = await self._records.below(record_keys.STATUSES)
        latest = {decode(record, RegistrationStatus).operation for record in statuses}
        operations = await self._records.below(record_keys.OPERATIONS)
        ended = [
            record
            for record, operation in decode_readable(operations, Operation)
            if operation.state is not OperationState.RUNNING and operation.id not in latest
        ]
        await self._delete(ended[: max(0, len(ended) - self._operations_max)])

    async def _delete(self, old: Sequence[Record]) -> None:
        for begin in range(0, len(old), _AT_ONCE):
            some = old[begin : begin + _AT_ONCE]
            await self._records.write(
                [RecordChange(record.key, None) for record in some],
                unchanged={record.key: record.revision for record in some},
            )
