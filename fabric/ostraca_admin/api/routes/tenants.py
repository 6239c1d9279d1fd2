"""Tenants: create, inspect, limit, and erase blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Path, Response
from pydantic import Field

from ostraca_admin.agent_queries import statuses
from ostraca_admin.api.context import (
    Admin,
    After,
    Context,
    IfMatch,
    Limit,
    Service,
    Viewer,
    etag,
    revision_of,
)
from ostraca_admin.api.forms import NAME, Form, ListPage
from ostraca_admin.api.routes.enclosures import started
from ostraca_admin.api.views import OperationView, TenantView, view_of
from ostraca_admin.override_service import StoredOverride
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.overrides import VERSION, TenantOverride
from ostraca_fabric.telemetry.status import AgentStatus

router = APIRouter(prefix="/v1/tenants", tags=["tenants"])

TenantName = Annotated[str, Path(pattern=NAME, description="Name of the tenant.")]
_BYTES_MAX = 1 << 60


class TenantForm(Form):
    """Tenant with limits."""

    flash_bytes: int = Field(
        0, ge=0, le=_BYTES_MAX, description="Flash reserved for the tenant, and its limit; 0: shared flash."
    )
    agent_bytes_per_s: int = Field(
        0, ge=0, le=_BYTES_MAX, description="Rate limit for gets and puts at each agent; 0: no limit."
    )
    is_erasable: bool = Field(
        default=False,
        description="Allow erasure of the tenant's volumes; only before the first volume. Agents cut off "
        "from etcd stop serving erasable volumes.",
    )


class EraseForm(Form):
    """Scope of an erasure."""

    volume: str = Field(
        "", pattern=r"^([a-z0-9][a-z0-9._-]{0,62})?$", description="Volume to erase; empty: all volumes."
    )


@router.get("")
async def list_tenants(
    service: Service, _: Viewer, after: After = "", limit: Limit = 100
) -> ListPage[TenantView]:
    """List created tenants by name."""
    found = await service.tenants.page(after=after, limit=limit)
    used = await _used(service)
    items = [await _view(service, each, used) for each in found]
    return ListPage.of(items, limit, lambda tenant: tenant.name)


@router.get("/{name}")
async def get_tenant(service: Service, _: Viewer, name: TenantName, response: Response) -> TenantView:
    """Return a tenant. The ETag covers its quotas."""
    stored = await service.tenants.get(TenantId(name))
    response.headers["ETag"] = etag(stored.revision)
    return await _view(service, stored, await _used(service))


@router.put("/{name}", status_code=201, responses={200: {"model": TenantView}})
async def put_tenant(
    service: Service,
    admin: Admin,
    name: TenantName,
    form: TenantForm,
    response: Response,
    if_match: IfMatch = None,
) -> TenantView:
    """Create a tenant, or change its quotas; 201 if new. Repeating the request changes nothing.

    Tokens of a tenant are in the files of tokens on the agents' hosts, not here.
    """
    limits = TenantOverride(VERSION, name, form.flash_bytes, form.agent_bytes_per_s, form.is_erasable)
    stored, is_new = await service.tenants.put(limits, admin, if_match=revision_of(if_match))
    response.status_code = 201 if is_new else 200
    response.headers["ETag"] = etag(stored.revision)
    return await _view(service, stored, await _used(service))


@router.delete("/{name}")
async def delete_tenant(
    service: Service, admin: Admin, name: TenantName, if_match: IfMatch = None
) -> TenantView:
    """Delete a tenant's quotas; return the tenant as before. Stored blocks stay: erase them first."""
    stored = await service.tenants.get(TenantId(name))
    await service.tenants.delete(TenantId(name), admin, if_match=revision_of(if_match))
    return await _view(service, stored, await _used(service))


@router.post("/{name}:erase", status_code=202)
async def erase_tenant(
    service: Service, admin: Admin, name: TenantName, form: EraseForm, response: Response
) -> OperationView:
    """Erase the contents of a tenant's volumes: NO BLOCK IS FOUND AGAIN.

    Volumes stay and accept puts at once. Done when no agent can serve a block any more. An agent cut off from
    the store serves for at most `key_ttl_s` of the settings.
    """
    return started(service, await service.tenants.erase(TenantId(name), admin, volume=form.volume), response)


async def _view(
    service: Context, stored: StoredOverride[TenantOverride], used: Mapping[int, int]
) -> TenantView:
    """Return the view of a tenant with volumes. *used* is flash usage by pool."""
    limits = stored.override
    volumes = tuple(volume.name for volume in await service.tenants.volumes_of(TenantId(limits.name)))
    flash_used_bytes = used[limits.pool] if limits.pool else None
    return view_of(TenantView, limits, volumes=volumes, flash_used_bytes=flash_used_bytes)


async def _used(service: Context) -> Mapping[int, int]:
    """Return the bytes on flash of each pool."""
    used: Counter[int] = Counter()
    for answer in (await statuses(service.agents, service.membership.map.agents)).values():
        for shard in answer.shards if isinstance(answer, AgentStatus) else ():
            used.update(dict(shard.pools))
    return used
