"""What happens to a fabric, as it happens, in server-sent events."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import TYPE_CHECKING

from ostraca_fabric import record_keys
from ostraca_fabric.admin.api.forms import AuditView, OperationView
from ostraca_fabric.admin.model import AuditEntry, Operation, decode
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.ports.records import Record

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection
    from typing import Any

    from ostraca_fabric.ports.records import Records

KEEP_ALIVE_S = 15.0
_WAITING_MAX = 256
"""Events for somebody who reads slowly."""


async def events(
    records: Records, closing: asyncio.Event, *, keep_alive_s: float = KEEP_ALIVE_S
) -> AsyncIterator[str]:
    """Tell every operation as it goes, first those that run, and every change that is made from now on.

    It ends when the service does (*closing*), and when the store no longer tells what changes: whoever asks
    again is told by the answer how that is.
    """
    told: asyncio.Queue[str] = asyncio.Queue(_WAITING_MAX)
    ends = [
        asyncio.ensure_future(_follow(records, record_keys.OPERATIONS, told)),
        asyncio.ensure_future(_follow(records, record_keys.AUDIT, told)),
        asyncio.ensure_future(closing.wait()),
    ]
    try:
        while event := await _next(told, ends, keep_alive_s):
            yield event
    finally:
        for each in ends:
            each.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


async def _next(told: asyncio.Queue[str], ends: Collection[asyncio.Future[Any]], keep_alive_s: float) -> str:
    """Return what is told next, a comment where nothing is for a while; nothing at the end."""
    taken = asyncio.ensure_future(told.get())
    try:
        await asyncio.wait((taken, *ends), timeout=keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
        if taken.done():
            return taken.result()
    finally:
        taken.cancel()
    return "" if any(each.done() for each in ends) else ": nothing new\n\n"


async def _follow(records: Records, prefix: str, told: asyncio.Queue[str]) -> None:
    newest, is_first = 0, True
    async with aclosing(records.changes(prefix)) as changes:  # type: ignore[type-var]  # a generator
        async for changed in changes:
            # All records come again where some changes were missed: what was told is not told once more.
            new = [each for each in changed if isinstance(each, Record) and each.revision > newest]
            for record in new:
                if event := _event(record, is_first=is_first):
                    await told.put(event)  # whoever reads slowly is told late
            newest, is_first = max((newest, *(each.revision for each in new))), False


def _event(record: Record, *, is_first: bool) -> str:
    """Return what is told of a record; of what was there before only what is not over."""
    try:
        if record.key.startswith(record_keys.OPERATIONS):
            operation = decode(record.value, Operation)
            if is_first and operation.ended_unix_s:
                return ""
            kind, shown = "operation", OperationView.of(operation).model_dump(mode="json")
        elif is_first:
            return ""
        else:
            kind, shown = "audit", AuditView.of(decode(record.value, AuditEntry)).model_dump(mode="json")
    except MembershipError:
        return ""
    return f"event: {kind}\ndata: {json.dumps(shown)}\n\n"
