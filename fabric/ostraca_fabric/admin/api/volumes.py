"""Volumes: which there are, and the switch of each."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Header, Path, Query, Response
from pydantic import BaseModel, Field

from ostraca_fabric import record_keys
from ostraca_fabric.admin.api.context import Context, Operator, Service, Viewer, etag, revision_of
from ostraca_fabric.admin.api.forms import NAME, Form
from ostraca_fabric.admin.errors import NotFoundError
from ostraca_fabric.admin.ruling_desk import Ruled
from ostraca_fabric.ids import TenantId
from ostraca_fabric.ports.records import ABSENT
from ostraca_fabric.rulings import VERSION, Switch, VolumeRuling
from ostraca_fabric.volume import VolumeRecord

router = APIRouter(prefix="/v1/volumes", tags=["volumes"])

PAGE_MAX = 2000
TenantName = Annotated[str, Path(pattern=NAME, description="Whose volume it is.")]
VolumeName = Annotated[str, Path(pattern=NAME, description="The volume.")]
SwitchText = Literal["off", "shadow", "on"]


class SwitchForm(Form):
    """What is to become of requests for a volume."""

    switch: SwitchText = Field(
        description="off: every block is declined; shadow: blocks are looked up, loaded and verified, and "
        "not handed over, while puts go on; on."
    )


class VolumeView(BaseModel):
    """A volume."""

    tenant: str
    name: str
    block_bytes: int
    incarnation: int
    model: str
    switch: SwitchText

    @classmethod
    def of(cls, volume: VolumeRecord, switch: Switch) -> VolumeView:
        """Show it."""
        return cls(
            tenant=volume.tenant,
            name=volume.name,
            block_bytes=volume.block_bytes,
            incarnation=volume.incarnation,
            model=volume.layout.model,
            switch=switch.value,
        )


class VolumePage(BaseModel):
    """Some volumes by tenant and name."""

    items: list[VolumeView]
    next: str


@router.get("")
async def list_volumes(
    service: Service,
    _: Viewer,
    after: Annotated[str, Query(max_length=256, description="Only those behind this name.")] = "",
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 500,
) -> VolumePage:
    """List volumes by tenant and name."""
    known = sorted((f"{volume.tenant}/{volume.name}", volume) for volume in await service.volumes())
    found = [(name, volume) for name, volume in known if name > after][:limit]
    # Only volumes that are there were ever switched: of the first so many, none is left out.
    ruled = await service.rulings.below(record_keys.SWITCHES, VolumeRuling, after=after, limit=limit)
    switches = {f"{each.ruling.tenant}/{each.ruling.name}": each.ruling.switch for each in ruled}
    items = [VolumeView.of(volume, switches.get(name, Switch.ON)) for name, volume in found]
    return VolumePage(items=items, next=found[-1][0] if len(found) == limit else "")


@router.get("/{tenant}/{name}")
async def get_volume(
    service: Service, _: Viewer, tenant: TenantName, name: VolumeName, response: Response
) -> VolumeView:
    """Return a volume; its ETag is of its switch."""
    volume = await volume_of(service, tenant, name)
    ruled = await service.rulings.ruled(record_keys.switch(volume.tenant, name), VolumeRuling)
    return _shown(volume, ruled, response)


@router.put("/{tenant}/{name}/switch")
async def put_switch(
    service: Service,
    operator: Operator,
    tenant: TenantName,
    name: VolumeName,
    form: SwitchForm,
    response: Response,
    if_match: Annotated[str | None, Header(description="An ETag: refuse if it was switched since.")] = None,
) -> VolumeView:
    """Switch a volume off, on, or let it be tried out; agents that hear of etcd obey within a second.

    Requests under way may end. The same again changes nothing.
    """
    volume = await volume_of(service, tenant, name)
    ruled, _ = await service.rulings.rule(
        record_keys.switch(volume.tenant, name),
        VolumeRuling(VERSION, tenant, name, Switch(form.switch)),
        operator,
        f"{tenant}/{name}",
        if_match=revision_of(if_match),
    )
    return _shown(volume, ruled, response)


def _shown(volume: VolumeRecord, ruled: Ruled[VolumeRuling] | None, response: Response) -> VolumeView:
    response.headers["ETag"] = etag(ABSENT if ruled is None else ruled.revision)
    return VolumeView.of(volume, Switch.ON if ruled is None else ruled.ruling.switch)


async def volume_of(service: Context, tenant: str, name: str) -> VolumeRecord:
    """Return a volume's record. Raises NotFoundError."""
    for volume in await service.volumes():
        if (volume.tenant, volume.name) == (TenantId(tenant), name):
            return volume
    raise NotFoundError(f"tenant {tenant} has no volume {name}: workers make volumes when they open them")
