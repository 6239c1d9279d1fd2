"""Volumes and their switches."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Response
from pydantic import Field

from ostraca_admin.api.context import (
    After,
    Context,
    IfMatch,
    LongLimit,
    Operator,
    Service,
    Viewer,
    etag,
    revision_of,
)
from ostraca_admin.api.forms import NAME, Form, ListPage
from ostraca_admin.api.views import VolumeView, view_of
from ostraca_admin.errors import NotFoundError
from ostraca_admin.override_service import StoredOverride
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.overrides import VERSION, Switch, VolumeOverride
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.ports.records import ABSENT

router = APIRouter(prefix="/v1/volumes", tags=["volumes"])

TenantName = Annotated[str, Path(pattern=NAME, description="Tenant of the volume.")]
VolumeName = Annotated[str, Path(pattern=NAME, description="Name of the volume.")]
SwitchText = Literal["off", "shadow", "on"]


class SwitchForm(Form):
    """Switch of a volume."""

    switch: SwitchText = Field(
        description="off: every block is declined; shadow: gets load and verify blocks without delivery, "
        "while puts go on; on: normal service."
    )


@router.get("")
async def list_volumes(
    service: Service, _: Viewer, after: After = "", limit: LongLimit = 500
) -> ListPage[VolumeView]:
    """List volumes by tenant and name."""
    known = sorted((f"{volume.tenant}/{volume.name}", volume) for volume in await service.volumes())
    found = [(name, volume) for name, volume in known if name > after][:limit]
    # Only existing volumes have switches, so the first *limit* switches cover the page.
    stored = await service.overrides.page(record_keys.SWITCHES, VolumeOverride, after=after, limit=limit)
    switches = {f"{each.override.tenant}/{each.override.name}": each.override.switch for each in stored}
    items = [_shown(volume, switches.get(name, Switch.ON)) for name, volume in found]
    return ListPage.of(items, limit, lambda volume: f"{volume.tenant}/{volume.name}")


@router.get("/{tenant}/{name}")
async def get_volume(
    service: Service, _: Viewer, tenant: TenantName, name: VolumeName, response: Response
) -> VolumeView:
    """Return a volume. The ETag covers its switch."""
    volume = await volume_of(service, tenant, name)
    stored = await service.overrides.get(record_keys.switch(volume.tenant, name), VolumeOverride)
    return _view(volume, stored, response)


@router.put("/{tenant}/{name}/switch")
async def put_switch(
    service: Service,
    operator: Operator,
    tenant: TenantName,
    name: VolumeName,
    form: SwitchForm,
    response: Response,
    if_match: IfMatch = None,
) -> VolumeView:
    """Switch a volume off, on or to shadow mode; agents with etcd apply the switch within a second.

    Requests in progress may end. Repeating the request changes nothing.
    """
    volume = await volume_of(service, tenant, name)
    stored, _ = await service.overrides.put(
        record_keys.switch(volume.tenant, name),
        VolumeOverride(VERSION, tenant, name, Switch(form.switch)),
        operator,
        f"{tenant}/{name}",
        if_match=revision_of(if_match),
    )
    return _view(volume, stored, response)


def _view(
    volume: VolumeRecord, stored: StoredOverride[VolumeOverride] | None, response: Response
) -> VolumeView:
    response.headers["ETag"] = etag(ABSENT if stored is None else stored.revision)
    return _shown(volume, Switch.ON if stored is None else stored.override.switch)


def _shown(volume: VolumeRecord, switch: Switch) -> VolumeView:
    return view_of(VolumeView, volume, model=volume.layout.model, switch=switch.value)


async def volume_of(service: Context, tenant: str, name: str) -> VolumeRecord:
    """Return a volume's record. Raises NotFoundError."""
    for volume in await service.volumes():
        if (volume.tenant, volume.name) == (TenantId(tenant), name):
            return volume
    raise NotFoundError(f"tenant {tenant} has no volume {name}: a worker creates a volume by opening it")
