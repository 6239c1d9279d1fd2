"""Long work, who changed what, and both as they happen."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi.responses import StreamingResponse

from ostraca_fabric.admin.api import telling
from ostraca_fabric.admin.api.context import Service, Viewer
from ostraca_fabric.admin.api.forms import AuditPage, AuditView, OperationPage, OperationView

router = APIRouter(prefix="/v1", tags=["history"])

PAGE_MAX = 500
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
    await service.desk.operations(limit=1)  # where the store is away, that is the answer
    told = telling.events(service.records, service.closing)
    return StreamingResponse(told, media_type="text/event-stream")
