"""Enclosures: register, look, drain, retire, add and replace drives."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Response

from ostraca_fabric.admin.api.context import Admin, Context, Operator, Service, Viewer, etag, revision_of
from ostraca_fabric.admin.api.forms import (
    NAME,
    EnclosureForm,
    EnclosurePage,
    EnclosureView,
    ExpandForm,
    ForceForm,
    OperationView,
    ReplaceForm,
)
from ostraca_fabric.admin.errors import NotFoundError
from ostraca_fabric.admin.model import Kept, Operation
from ostraca_fabric.ids import EnclosureId

router = APIRouter(prefix="/v1/enclosures", tags=["enclosures"])

EnclosureName = Annotated[str, Path(pattern=NAME, description="The enclosure.")]
DriveName = Annotated[str, Path(pattern=NAME, description="The drive's name within its enclosure.")]
IfMatch = Annotated[str | None, Header(description="An ETag: refuse if it was changed since.")]
PAGE_MAX = 500


@router.get("")
async def list_enclosures(
    service: Service,
    _: Viewer,
    after: Annotated[str, Query(max_length=64, description="Only those behind this name.")] = "",
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
) -> EnclosurePage:
    """List registered enclosures by name."""
    found = await service.desk.enclosures(after=after, limit=limit)
    items = [await _view(service, kept) for kept in found]
    return EnclosurePage(items=items, next=items[-1].name if len(items) == limit else "")


@router.get("/{name}")
async def get_enclosure(
    service: Service, _: Viewer, name: EnclosureName, response: Response
) -> EnclosureView:
    """Return an enclosure; its ETag is of what was registered."""
    kept = await service.desk.kept(EnclosureId(name))
    if kept is None:
        raise NotFoundError(f"no enclosure {name} is registered")
    response.headers["ETag"] = etag(kept.spec_revision)
    return await _view(service, kept)


@router.put("/{name}", status_code=201, responses={200: {"model": EnclosureView}})
async def put_enclosure(
    service: Service,
    admin: Admin,
    name: EnclosureName,
    form: EnclosureForm,
    response: Response,
    if_match: IfMatch = None,
) -> EnclosureView:
    """Register an enclosure, which begins its onboarding; 201 where it is new.

    The same again changes nothing, and begins the onboarding anew where that has failed. One that is in the
    fabric may be reached otherwise: other controllers, another secret.
    """
    kept, is_new = await service.desk.register(form.spec(name), admin, if_match=revision_of(if_match))
    service.work_was_written()
    response.status_code = 201 if is_new else 200
    response.headers["ETag"] = etag(kept.spec_revision)
    response.headers["Location"] = f"/v1/operations/{kept.operation.id}"
    return await _view(service, kept)


@router.post("/{name}:drain", status_code=202)
async def drain_enclosure(
    service: Service,
    operator: Operator,
    name: EnclosureName,
    form: ForceForm,
    response: Response,
    if_match: IfMatch = None,
) -> OperationView:
    """Let it take no new blocks; done when nothing of it is looked up any more. Reads go on."""
    operation = await service.desk.drain(
        EnclosureId(name), operator, if_match=revision_of(if_match), force=form.force
    )
    return begun(service, operation, response)


@router.post("/{name}:undrain", status_code=202)
async def undrain_enclosure(
    service: Service,
    operator: Operator,
    name: EnclosureName,
    form: ForceForm,
    response: Response,
    if_match: IfMatch = None,
) -> OperationView:
    """Let it take blocks again."""
    operation = await service.desk.undrain(
        EnclosureId(name), operator, if_match=revision_of(if_match), force=form.force
    )
    return begun(service, operation, response)


@router.post("/{name}:retire", status_code=202)
async def retire_enclosure(
    service: Service,
    admin: Admin,
    name: EnclosureName,
    form: ForceForm,
    response: Response,
    if_match: IfMatch = None,
) -> OperationView:
    """Take it out of the fabric, once it is drained; forced, its blocks are lost."""
    operation = await service.desk.retire(
        EnclosureId(name), admin, if_match=revision_of(if_match), force=form.force
    )
    return begun(service, operation, response)


@router.post("/{name}:expand", status_code=202)
async def expand_enclosure(
    service: Service,
    operator: Operator,
    name: EnclosureName,
    form: ExpandForm,
    response: Response,
    if_match: IfMatch = None,
) -> OperationView:
    """Add drives to it while it is used: those that are named, or all that it shows and does not use."""
    operation = await service.desk.expand(
        EnclosureId(name),
        operator,
        drives=form.drives,
        wipe=form.wipe,
        if_match=revision_of(if_match),
        force=form.force,
    )
    return begun(service, operation, response)


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
    """Use another drive in its place; what the old one holds is lost."""
    operation = await service.desk.replace(
        EnclosureId(name),
        drive,
        operator,
        replacement=form.replacement,
        wipe=(form.replacement,) if form.wipe and form.replacement else (),
        if_match=revision_of(if_match),
        force=form.force,
    )
    return begun(service, operation, response)


def begun(service: Context, operation: Operation, response: Response) -> OperationView:
    """Answer that long work was written down."""
    service.work_was_written()
    response.headers["Location"] = f"/v1/operations/{operation.id}"
    return OperationView.of(operation)


async def _view(service: Context, kept: Kept) -> EnclosureView:
    enclosure = EnclosureId(kept.spec.name)
    record = service.membership.map.enclosures.get(enclosure)
    return EnclosureView.of(kept, record, await service.report_of(enclosure))
