"""Long work, who changed what, and both as they happen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi.responses import StreamingResponse

from ostraca_fabric import record_keys
from ostraca_fabric.admin.api.context import Context, Service, Viewer
from ostraca_fabric.admin.api.forms import AuditPage, AuditView, OperationPage, OperationView
from ostraca_fabric.admin.model import AuditEntry, Operation, decode
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.ports.records import Record

router = APIRouter(prefix="/v1", tags=["history"])

PAGE_MAX = 500
_KEEP_ALIVE_S = 15.0
_WAITING_MAX = 256
"""Events for somebody who reads slowly."""
Id = Annotated[str, Path(pattern=r"^[0-9a-z-]{1,64}$")]
After = Annotated[str, Query(max_length=64, description="Only those behind this id.")]
Limit = Annotated[int, Query(ge=1, le=PAGE_MAX)]


@router.get("/operations")
async def list_operations(
    service: Service, _: Viewer, after: After = "", limit: Limit = 100
) -> OperationPage:
    """List long work, the oldest first."""
    found = [OperationView.of(each) for each in await service.desk.operations(after=after, limit=limit)]
    return OperationPage(items=found, next=found[-1].id if len(found) == limit else "")


@router.get("/operations/{operation}")
async def get_operation(service: Service, _: Viewer, operation: Id) -> OperationView:
    """Return long work with its steps."""
    return OperationView.of(await service.desk.operation(operation))


@router.get("/audit")
async def list_audit(service: Service, _: Viewer, after: After = "", limit: Limit = 100) -> AuditPage:
    """List who changed what, the oldest first."""
    found = [AuditView.of(each) for each in await service.desk.audit(after=after, limit=limit)]
    return AuditPage(items=found, next=found[-1].id if len(found) == limit else "")


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def events(service: Service, _: Viewer) -> StreamingResponse:
    """Tell every operation as it goes, and every change as it is made: server-sent events ``operation`` and
    ``audit``, first what runs now.
    """
    return StreamingResponse(_events(service), media_type="text/event-stream")


async def _events(service: Context) -> AsyncIterator[str]:
    told: asyncio.Queue[str] = asyncio.Queue(_WAITING_MAX)
    followed = [
        asyncio.ensure_future(_follow(service, prefix, told))
        for prefix in (record_keys.OPERATIONS, record_keys.AUDIT)
    ]
    try:
        while True:
            try:
                async with asyncio.timeout(_KEEP_ALIVE_S):
                    yield await told.get()
            except TimeoutError:
                yield ": nothing new\n\n"
    finally:
        for each in followed:
            each.cancel()
        await asyncio.gather(*followed, return_exceptions=True)


async def _follow(service: Context, prefix: str, told: asyncio.Queue[str]) -> None:
    is_first = True
    async with aclosing(service.records.changes(prefix)) as changes:  # type: ignore[type-var]  # a generator
        async for changed in changes:
            for each in changed:
                if isinstance(each, Record) and (event := _event(each, is_first=is_first)):
                    await told.put(event)  # whoever reads slowly is told late
            is_first = False


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
