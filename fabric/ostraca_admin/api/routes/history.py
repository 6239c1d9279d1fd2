"""Routes for operations, the audit log, and a stream of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path
from fastapi.responses import StreamingResponse

from ostraca_admin.api.context import After, Credentials, Limit, Service, Viewer, owner_of
from ostraca_admin.api.forms import ListPage
from ostraca_admin.api.views import ApiView, AuditView, OperationView, audit_view, operation_view
from ostraca_admin.model import AuditEntry, Operation, decode
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.model import record_keys
from ostraca_fabric.ports.records import Record, Records

router = APIRouter(prefix="/v1", tags=["history"])

KEEP_ALIVE_S = 15.0
_WAITING_MAX = 256
"""Most events waiting for a slow reader."""

OperationId = Annotated[str, Path(pattern=r"^[0-9a-z-]{1,64}$")]


@router.get("/operations")
async def list_operations(
    service: Service, _: Viewer, after: After = "", limit: Limit = 100
) -> ListPage[OperationView]:
    """List operations, oldest first."""
    found = await service.enclosures.operations(after=after, limit=limit)
    return ListPage.of([*map(operation_view, found)], limit, lambda operation: operation.id)


@router.get("/operations/{operation}")
async def get_operation(service: Service, _: Viewer, operation: OperationId) -> OperationView:
    """Return an operation with its steps."""
    return operation_view(await service.enclosures.operation(operation))


@router.get("/audit")
async def list_audit(
    service: Service, _: Viewer, after: After = "", limit: Limit = 100
) -> ListPage[AuditView]:
    """List changes with their authors, oldest first."""
    found = await service.enclosures.audit(after=after, limit=limit)
    return ListPage.of([*map(audit_view, found)], limit, lambda entry: entry.id)


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def events(service: Service, _: Viewer, credentials: Credentials) -> StreamingResponse:
    """Stream operations in progress, then all changes of operations and new audit entries.

    The server-sent events are ``operation`` and ``audit``.
    """
    await service.enclosures.operations(limit=1)  # fails before the stream starts if the store is unavailable
    stream = event_stream(
        service.records, service.closing, is_allowed=lambda: owner_of(service, credentials) is not None
    )
    return StreamingResponse(stream, media_type="text/event-stream")


async def event_stream(
    records: Records,
    closing: asyncio.Event,
    *,
    is_allowed: Callable[[], bool] = lambda: True,
    keep_alive_s: float = KEEP_ALIVE_S,
) -> AsyncIterator[str]:
    """Yield operations, those in progress first, and all new changes.

    The stream ends with the service (*closing*), with the client's token (*is_allowed*), or if the store no
    longer reports changes. The answer to the client's next request then tells the reason.
    """
    queue: asyncio.Queue[str] = asyncio.Queue(_WAITING_MAX)
    ends = [
        asyncio.ensure_future(_follow(records, record_keys.OPERATIONS, queue)),
        asyncio.ensure_future(_follow(records, record_keys.AUDIT, queue)),
        asyncio.ensure_future(closing.wait()),
    ]
    try:
        while (event := await _next(queue, ends, keep_alive_s)) and is_allowed():
            yield event
    finally:
        for each in ends:
            each.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


async def _next(queue: asyncio.Queue[str], ends: Collection[asyncio.Future[Any]], keep_alive_s: float) -> str:
    """Return the next event, a comment after *keep_alive_s*, or "" at the end."""
    getting = asyncio.ensure_future(queue.get())
    try:
        await asyncio.wait((getting, *ends), timeout=keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            return getting.result()
    finally:
        getting.cancel()
    return "" if any(each.done() for each in ends) else ": keep-alive\n\n"


async def _follow(records: Records, prefix: str, queue: asyncio.Queue[str]) -> None:
    newest, is_first = 0, True
    async with aclosing(records.changes(prefix)) as changes:  # type: ignore[type-var]  # a generator
        async for changed in changes:
            # After missed changes, the store repeats all records: skip records already sent.
            new = [each for each in changed if isinstance(each, Record) and each.revision > newest]
            for record in new:
                if event := _event(record, is_first=is_first):
                    await queue.put(event)  # a slow reader receives events late
            newest, is_first = max((newest, *(each.revision for each in new))), False


def _event(record: Record, *, is_first: bool) -> str:
    """Return the event of a record; "" for old records except operations in progress."""
    try:
        if record.key.startswith(record_keys.OPERATIONS):
            operation = decode(record, Operation)
            if is_first and operation.ended_unix_s:
                return ""
            return _sent("operation", operation_view(operation))
        return "" if is_first else _sent("audit", audit_view(decode(record, AuditEntry)))
    except MembershipError:
        return ""


def _sent(kind: str, view: ApiView) -> str:
    return f"event: {kind}\ndata: {msgspec.json.encode(view).decode()}\n\n"
