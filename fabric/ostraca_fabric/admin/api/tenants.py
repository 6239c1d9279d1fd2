"""Tenants: make, look, change what they may use, erase what they have put."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, Field

from ostraca_fabric.admin.api.context import Admin, Context, Service, Viewer, etag, revision_of
from ostraca_fabric.admin.api.enclosures import IfMatch, begun
from ostraca_fabric.admin.api.fabric import asked
from ostraca_fabric.admin.api.forms import NAME, Form, OperationView
from ostraca_fabric.admin.ruling_desk import Ruled
from ostraca_fabric.ids import TenantId
from ostraca_fabric.rulings import VERSION, TenantRuling
from ostraca_fabric.status import AgentStatus

router = APIRouter(prefix="/v1/tenants", tags=["tenants"])

TenantName = Annotated[str, Path(pattern=NAME, description="The tenant.")]
PAGE_MAX = 500
_BYTES_MAX = 1 << 60


class TenantForm(Form):
    """A tenant, and what it may use."""

    flash_bytes: int = Field(
        0, ge=0, le=_BYTES_MAX, description="What its blocks may take on flash; 0: what others leave."
    )
    agent_bytes_per_s: int = Field(
        0, ge=0, le=_BYTES_MAX, description="What it may get and put in a second at each agent; 0: no limit."
    )
    is_erasable: bool = Field(
        default=False,
        description="Whether volumes that it makes can be erased. Agents serve such volumes only while they "
        "hear of the store. Only before its first volume.",
    )


class TenantView(BaseModel):
    """A tenant."""

    name: str
    flash_bytes: int
    agent_bytes_per_s: int
    is_erasable: bool
    volumes: list[str]
    flash_used_bytes: int | None = Field(
        description="Of segments that hold its blocks alone, as far as agents answer; null without a quota, "
        "when nobody counts them apart."
    )

    @classmethod
    async def of(cls, service: Context, ruled: Ruled[TenantRuling], used: Mapping[int, int]) -> TenantView:
        """Show it, with its volumes. *used* says what each pool has."""
        ruling = ruled.ruling
        volumes = await service.tenants.volumes_of(TenantId(ruling.name))
        return cls(
            name=ruling.name,
            flash_bytes=ruling.flash_bytes,
            agent_bytes_per_s=ruling.agent_bytes_per_s,
            is_erasable=ruling.is_erasable,
            volumes=[volume.name for volume in volumes],
            flash_used_bytes=used[ruling.pool] if ruling.pool else None,
        )


class TenantPage(BaseModel):
    """Some tenants by name."""

    items: list[TenantView]
    next: str


class EraseForm(Form):
    """What of a tenant is erased."""

    volume: str = Field(
        "", pattern=r"^([a-z0-9][a-z0-9._-]{0,62})?$", description="One of its volumes; empty: all."
    )


@router.get("")
async def list_tenants(
    service: Service,
    _: Viewer,
    after: Annotated[str, Query(max_length=64, description="Only those behind this name.")] = "",
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
) -> TenantPage:
    """List tenants that were made, by name."""
    found = await service.tenants.tenants(after=after, limit=limit)
    used = await _used(service)
    items = [await TenantView.of(service, each, used) for each in found]
    return TenantPage(items=items, next=items[-1].name if len(items) == limit else "")


@router.get("/{name}")
async def get_tenant(service: Service, _: Viewer, name: TenantName, response: Response) -> TenantView:
    """Return a tenant; its ETag is of what it may use."""
    ruled = await service.tenants.tenant(TenantId(name))
    response.headers["ETag"] = etag(ruled.revision)
    return await TenantView.of(service, ruled, await _used(service))


@router.put("/{name}", status_code=201, responses={200: {"model": TenantView}})
async def put_tenant(
    service: Service,
    admin: Admin,
    name: TenantName,
    form: TenantForm,
    response: Response,
    if_match: IfMatch = None,
) -> TenantView:
    """Make a tenant, or change what it may use; 201 where it is new. The same again changes nothing.

    Who speaks for it is said by the files of tokens on the agents' hosts, and not here.
    """
    ruling = TenantRuling(VERSION, name, form.flash_bytes, form.agent_bytes_per_s, form.is_erasable)
    ruled, is_new = await service.tenants.make(ruling, admin, if_match=revision_of(if_match))
    response.status_code = 201 if is_new else 200
    response.headers["ETag"] = etag(ruled.revision)
    return await TenantView.of(service, ruled, await _used(service))


@router.delete("/{name}")
async def delete_tenant(
    service: Service, admin: Admin, name: TenantName, if_match: IfMatch = None
) -> TenantView:
    """Forget what a tenant may use, and return it as it was: it has no quotas then. What it has put stays:
    erase that first.
    """
    ruled = await service.tenants.tenant(TenantId(name))
    await service.tenants.take_back(TenantId(name), admin, if_match=revision_of(if_match))
    return await TenantView.of(service, ruled, await _used(service))


@router.post("/{name}:erase", status_code=202)
async def erase_tenant(
    service: Service, admin: Admin, name: TenantName, form: EraseForm, response: Response
) -> OperationView:
    """Erase what its volumes hold: NOTHING OF IT IS FOUND AGAIN. They stay, and may be put to again at once.

    Done when no agent can serve it any more, which takes as long as an agent that is cut off from the store
    goes on (`key_ttl_s` of the settings).
    """
    operation = await service.tenants.erase(TenantId(name), admin, volume=form.volume)
    return begun(service, operation, response)


async def _used(service: Context) -> Mapping[int, int]:
    """Return what each pool has on flash."""
    answers = await asyncio.gather(*(asked(service, agent) for agent in service.membership.map.agents))
    used: Counter[int] = Counter()
    for answer in answers:
        for shard in answer.shards if isinstance(answer, AgentStatus) else ():
            used.update(dict(shard.pools))
    return used
