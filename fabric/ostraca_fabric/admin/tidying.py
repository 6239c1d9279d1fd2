"""Forgets the oldest of what would grow without end: audit entries, and operations that have ended."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ostraca_fabric import record_keys
from ostraca_fabric.admin.model import EnclosureStatus, Operation, State, decode
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.ports.records import Written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostraca_fabric.ports.records import Record, Records

log = logging.getLogger(__name__)

_TURN_S = 60.0
_AT_ONCE = 64
"""Records in one change."""


class Tidying:
    """One admin's; those of several do no harm to each other."""

    def __init__(self, records: Records, *, audit_max: int, operations_max: int) -> None:
        """Keep so many of each, the newest."""
        self._records = records
        self._audit_max = audit_max
        self._operations_max = operations_max

    async def run(self) -> None:
        """Tidy up now and then until cancelled."""
        while True:
            try:
                await self.turn()
            except MembershipError as error:
                log.warning("Old audit entries stay for now: %s", error)
            await asyncio.sleep(_TURN_S)

    async def turn(self) -> None:
        """Tidy up. Raises MembershipError."""
        audit = await self._records.below(record_keys.AUDIT)
        await self._forget(audit[: max(0, len(audit) - self._audit_max)])
        statuses = await self._records.below(record_keys.STATUSES)
        shown = {decode(record.value, EnclosureStatus).operation for record in statuses}
        ended = []
        for record in await self._records.below(record_keys.OPERATIONS):
            operation = decode(record.value, Operation)
            if operation.state is not State.RUNNING and operation.id not in shown:
                ended.append(record)
        await self._forget(ended[: max(0, len(ended) - self._operations_max)])

    async def _forget(self, old: Sequence[Record]) -> None:
        for begin in range(0, len(old), _AT_ONCE):
            some = old[begin : begin + _AT_ONCE]
            await self._records.write(
                [Written(record.key, None) for record in some],
                unchanged={record.key: record.revision for record in some},
            )
