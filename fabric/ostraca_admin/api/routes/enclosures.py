"""Enclosures: register, inspect, drain, retire, expand, and replace drives."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from ostraca_admin.api.context import (
    Admin,
    After,
    Context,
    IfMatch,
    Limit,
    Operator,
    Service,
    Viewer,
    etag,
    revision_of,
)
from ostraca_admin.api.forms import (
    NAME,
    EnclosureForm,
    ExpandForm,
    ForceForm,
    ListPage,
    ReplaceForm,
)
from ostraca_admin.api.views import EnclosureView, OperationView, enclosure_view, operation_view
from ostraca_admin.audit import Requester
from ostraca_admin.model import Operation, OperationKind, Registration
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.ids import EnclosureId

router = APIRouter(prefix="/v1/enclosures", tags=["enclosures"])

EnclosureName = Annotated[str, Path(pattern=NAME, description="Name of the enclosure.")]
DriveName = Annotated[str, Path(pattern=NAME, description="Name of the drive within the enclosure.")]


@router.get("")
async def list_enclosures(
    service: Service, _: Viewer, after: After = "", limit: Limit = 100
) -> ListPage[EnclosureView]:
    """List registered enclosures by name."""
    found = await service.enclosures.page(after=after, limit=limit)
    items = [await _view(service, each) for each in found]
    return ListPage.of(items, limit, lambda enclosure: enclosure.name)


@router.get("/{name}")
async def get_enclosure(
    service: Service, _: Viewer, name: EnclosureName, response: Response
) -> EnclosureView:
    """Return an enclosure. The ETag covers its registration."""
    found = await service.enclosures.get(EnclosureId(name))
    response.headers["ETag"] = etag(found.spec_revision)
    return await _view(service, found)


@router.put("/{name}", status_code=201, responses={200: {"model": EnclosureView}})
async def put_enclosure(
    service: Service,
    admin: Admin,
    name: EnclosureName,
    form: EnclosureForm,
    response: Response,
    if_match: IfMatch = None,
) -> EnclosureView:
    """Register an enclosure and begin its onboarding; 201 if new.

    Repeating the request changes nothing. After a failed onboarding, a repetition begins anew. An enclosure
    in the fabric may receive other controllers or another secret.
    """
    found, is_new = await service.enclosures.register(form.spec(name), admin, if_match=revision_of(if_match))
    response.status_code = 201 if is_new else 200
    response.headers["ETag"] = etag(found.spec_revision)
    started(service, found.operation, response)
    return await _view(service, found)


@router.post("/{name}:drain", status_code=202)
async def drain_enclosure(
    service: Service,
    operator: Operator,
    name: EnclosureName,
    form: ForceForm,
    response: Response,
    if_match: IfMatch = None,
) -> OperationView:
    """Stop new writes to an enclosure; done when no lookup needs the enclosure. Reads continue."""
    return await _start(OperationKind.DRAIN, service, operator, name, form, response, if_match)


@router.post("/{name}:undrain", status_code=202)
async def undrain_enclosure(
    service: Service,
    operator: Operator,
    name: EnclosureName,
    form: ForceForm,
    response: Response,
    if_match: IfMatch = None,
) -> OperationView:
    """Allow new writes to a drained enclosure."""
    return await _start(OperationKind.UNDRAIN, service, operator, name, form, response, if_match)


@router.post("/{name}:retire", status_code=202)
async def retire_enclosure(
    service: Service,
    admin: Admin,
    name: EnclosureName,
    form: ForceForm,
    response: Response,
    if_match: IfMatch = None,
) -> OperationView:
    """Remove a drained enclosure from the fabric; forced, blocks are lost."""
    return await _start(OperationKind.RETIRE, service, admin, name, form, response, if_match)


async def _start(
    kind: OperationKind,
    service: Context,
    requester: Requester,
    name: str,
    form: ForceForm,
    response: Response,
    if_match: str | None,
) -> OperationView:
    operation = await service.enclosures.start(
        kind, EnclosureId(name), requester, if_match=revision_of(if_match), force=form.force
    )
    return started(service, operation, response)


@router.post("/{name}:expand", status_code=202)
async def expand_enclosure(
    service: Service,
    operator: Operator,
    name: EnclosureName,
    form: ExpandForm,
    response: Response,
    if_match: IfMatch = None,
) -> OperationView:
    """Add drives to an enclosure in use: the named drives, or all visible unused drives."""
    operation = await service.enclosures.expand(
        EnclosureId(name),
        operator,
        drives=form.drives,
        wipe=form.wipe,
        if_match=revision_of(if_match),
        force=form.force,
    )
    return started(service, operation, response)


@router.post("/{name}/drives/{drive}:replace", status_code=202)
async def replace_drive(
    service: Service,
    operator: Operator,
    name: EnclosureName,
    drive: DriveName,
    form: ReplaceForm,
    response: Response,
    if_match: IfMatch = None,
) -> OperationView:
    """Replace a drive of an enclosure; blocks on the old drive are lost."""
    if form.wipe and not form.replacement:
        raise UsageError("no drive is named to be wiped: name the replacement")
    operation = await service.enclosures.replace(
        EnclosureId(name),
        drive,
        operator,
        replacement=form.replacement,
        wipe=(form.replacement,) if form.wipe else (),
        if_match=revision_of(if_match),
        force=form.force,
    )
    return started(service, operation, response)


def started(service: Context, operation: Operation, response: Response) -> OperationView:
    """Return the response for a newly recorded operation."""
    service.notify_runner()
    response.headers["Location"] = f"/v1/operations/{operation.id}"
    return operation_view(operation)


async def _view(service: Context, registration: Registration) -> EnclosureView:
    enclosure = EnclosureId(registration.spec.name)
    record = service.membership.map.enclosures.get(enclosure)
    return enclosure_view(registration, record, await service.report_of(enclosure))
