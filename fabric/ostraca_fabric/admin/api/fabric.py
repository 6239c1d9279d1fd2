"""What there is in the fabric: agents, shards, the map, how full it is."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from ostraca_fabric.admin.api.context import Context, Service, Viewer
from ostraca_fabric.errors import OstracaError
from ostraca_fabric.fabric_map import FabricMap
from ostraca_fabric.ids import AgentId, enclosure_of
from ostraca_fabric.status import AgentStatus

router = APIRouter(prefix="/v1", tags=["fabric"])

PAGE_MAX = 2000
After = Annotated[str, Query(max_length=256, description="Only those behind this name.")]
Limit = Annotated[int, Query(ge=1, le=PAGE_MAX)]


class PathView(BaseModel):
    """How an agent's host reaches an enclosure."""

    enclosure: str
    live_paths: int
    paths: int
    trouble: str
    reservations: str = Field(
        description="How far its NVMe reservations are; empty where none are asked for."
    )


class AgentView(BaseModel):
    """An agent of the fabric."""

    id: str
    addresses: list[str]
    is_leaving: bool
    shards: int = Field(description="Those that it owns.")
    version: str = Field(description="Empty where it does not answer.")
    sentence: str = Field(description="What it decided last, and why.")
    trouble: str = Field(description="Why nothing was heard of it; empty where it answers.")
    paths: list[PathView]
    rulings_revision: int = Field(description="Of the last ruling that it obeys; 0 where it does not answer.")
    settings: dict[str, bool | int | float | str] = Field(description="Live settings that it goes by.")


class AgentPage(BaseModel):
    """Some agents by name."""

    items: list[AgentView]
    next: str


class ShardView(BaseModel):
    """A shard."""

    id: str
    enclosure: str
    drive: str
    size_bytes: int
    weight: int = Field(description="Its part of what is placed: usable bytes, 0 while draining.")
    owner: str = Field(description="Empty while nobody owns it.")
    owner_epoch: int


class ShardPage(BaseModel):
    """Some shards by name."""

    items: list[ShardView]
    next: str


class MapView(BaseModel):
    """One state of the fabric map."""

    fabric: str
    revision: int
    placement_epoch: int
    earlier_placement_epochs: list[int] = Field(description="Those that are still asked.")
    agents: int
    enclosures: int
    drives: int
    shards: int
    unowned_shards: int


class CapacityView(BaseModel):
    """How much flash there is, and how full it is."""

    usable_bytes: int = Field(description="Of shards that take blocks.")
    draining_bytes: int = Field(description="Of shards that take none.")
    blocks: int = Field(description="As far as their owners answered.")
    written_bytes_per_day: float
    silent_agents: list[str]


@router.get("/map")
async def get_map(service: Service, _: Viewer) -> MapView:
    """Return the newest map in short."""
    fabric_map = service.membership.map
    shards = fabric_map.shards()
    return MapView(
        fabric=fabric_map.fabric.hex(),
        revision=fabric_map.revision,
        placement_epoch=fabric_map.placement_epoch,
        earlier_placement_epochs=[record.epoch for record in fabric_map.earlier_placements],
        agents=len(fabric_map.agents),
        enclosures=len(fabric_map.enclosures),
        drives=sum(len(enclosure.drives) for enclosure in fabric_map.enclosures.values()),
        shards=len(shards),
        unowned_shards=sum(fabric_map.owner(shard.id) is None for shard in shards),
    )


@router.get("/agents")
async def list_agents(service: Service, _: Viewer, after: After = "", limit: Limit = 200) -> AgentPage:
    """List agents by name, with what each says of itself."""
    fabric_map = service.membership.map
    names = [agent for agent in sorted(fabric_map.agents) if agent > after][:limit]
    answers = await asyncio.gather(*(asked(service, agent) for agent in names))
    items = [_agent(fabric_map, agent, answer) for agent, answer in zip(names, answers, strict=True)]
    return AgentPage(items=items, next=names[-1] if len(names) == limit else "")


@router.get("/shards")
async def list_shards(service: Service, _: Viewer, after: After = "", limit: Limit = 500) -> ShardPage:
    """List shards by name, with their owners."""
    fabric_map = service.membership.map
    found = [shard for shard in fabric_map.shards() if shard.id > after][:limit]
    items = []
    for shard in found:
        claim = fabric_map.claims.get(shard.id)
        items.append(
            ShardView(
                id=shard.id,
                enclosure=enclosure_of(shard.id),
                drive=shard.drive,
                size_bytes=shard.size_bytes,
                weight=shard.weight,
                owner=fabric_map.owner(shard.id) or "",
                owner_epoch=0 if claim is None else claim.epoch,
            )
        )
    return ShardPage(items=items, next=items[-1].id if len(items) == limit else "")


@router.get("/capacity")
async def get_capacity(service: Service, _: Viewer) -> CapacityView:
    """Return how much flash there is, and how full it is."""
    fabric_map = service.membership.map
    names = sorted(fabric_map.agents)
    answers = await asyncio.gather(*(asked(service, agent) for agent in names))
    owned = [shard for answer in answers if isinstance(answer, AgentStatus) for shard in answer.shards]
    shards = fabric_map.shards()
    return CapacityView(
        usable_bytes=sum(shard.weight for shard in shards),
        draining_bytes=sum(shard.usable_bytes for shard in shards if not shard.weight),
        blocks=sum(shard.blocks for shard in owned),
        written_bytes_per_day=sum(shard.written_bytes_per_day for shard in owned),
        silent_agents=[
            agent for agent, answer in zip(names, answers, strict=True) if not isinstance(answer, AgentStatus)
        ],
    )


async def asked(service: Context, agent: AgentId) -> AgentStatus | str:
    """Return what an agent says of itself; why it does not, where that is so."""
    try:
        return await service.hands.status(agent)
    except TimeoutError:
        return "nothing was heard of it in time"
    except OstracaError as error:
        return str(error)


def _agent(fabric_map: FabricMap, agent: AgentId, answer: AgentStatus | str) -> AgentView:
    record = fabric_map.agents[agent]
    owned = sum(claim.agent == agent for claim in fabric_map.claims.values())
    said = answer if isinstance(answer, AgentStatus) else None
    return AgentView(
        id=agent,
        addresses=list(record.addresses),
        is_leaving=record.is_leaving,
        shards=owned,
        version=said.version if said else "",
        sentence=said.sentence if said else "",
        trouble="" if isinstance(answer, AgentStatus) else answer,
        paths=[
            PathView(
                enclosure=each.enclosure,
                live_paths=sum(path.is_live for path in each.paths),
                paths=len(each.paths),
                trouble=each.trouble,
                reservations=each.reservations,
            )
            for each in (said.paths if said else ())
        ],
        rulings_revision=said.rulings.revision if said else 0,
        settings=said.rulings.settings if said else {},
    )
