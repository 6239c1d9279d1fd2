"""Drives: what the map, the agents that use them, and the enclosures' own daemons say of each."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal, get_args

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from ostraca_fabric.admin.api.context import Context, Service, Viewer
from ostraca_fabric.admin.api.forms import WearView
from ostraca_fabric.errors import OstracaError
from ostraca_fabric.fabric_map import DriveRecord, EnclosureRecord
from ostraca_fabric.ids import AgentId, DriveId
from ostraca_fabric.inventory import DriveReport, EnclosureReport
from ostraca_fabric.status import AgentStatus, DriveStatus

router = APIRouter(prefix="/v1", tags=["fabric"])

PAGE_MAX = 2000

Health = Literal["unknown", "good", "held off", "suspect", "failed"]
"""By how bad it is, from that of which no agent says anything."""

_HEALTHS: tuple[Health, ...] = get_args(Health)


class TroubleView(BaseModel):
    """What an agent holds against a drive."""

    agent: str
    health: Health
    why: str


class DriveView(BaseModel):
    """A drive of the map."""

    id: str
    enclosure: str
    nguid: str = Field(description="Empty of a drive with a path of its own.")
    path: str
    size_bytes: int = Field(description="Of its shards.")
    state: str = Field(description="That of its enclosure: ready or draining.")
    hits: int = Field(
        description="Blocks that gets found there, by agents that answered, since they started."
    )
    health: Health = Field(
        description="The worst that an agent which answered says of it. Held off: reads or writes fail at "
        "once, and are tried now and then. Unknown: none of them has a path to it, or none answered."
    )
    troubles: list[TroubleView]
    wear: WearView | None = Field(
        description="As its enclosure's own daemon said last; null where none does."
    )


class DrivePage(BaseModel):
    """Some drives by name."""

    items: list[DriveView]
    next: str


@router.get("/drives")
async def list_drives(
    service: Service,
    _: Viewer,
    after: Annotated[str, Query(max_length=256, description="Only those behind this name.")] = "",
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 500,
) -> DrivePage:
    """List the drives of the map by name, with their health and wear."""
    known = sorted(
        (drive.id, drive, enclosure)
        for enclosure in service.membership.map.enclosures.values()
        for drive in enclosure.drives
        if drive.id > after
    )[:limit]
    beliefs, reports = await _beliefs(service), await _reports(service, {each.id: each for *_, each in known})
    items = [_view(drive, enclosure, beliefs, reports.get(drive.nguid)) for _, drive, enclosure in known]
    return DrivePage(items=items, next=items[-1].id if len(items) == limit else "")


async def _beliefs(service: Context) -> dict[AgentId, dict[DriveId, DriveStatus]]:
    """Return what each agent that answers believes of each drive."""
    names = sorted(service.membership.map.agents)
    asked = (service.hands.status(agent) for agent in names)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, OstracaError | TimeoutError):
            raise answer
    return {
        agent: {DriveId(drive.drive): drive for drive in answer.drives}
        for agent, answer in zip(names, answers, strict=True)
        if isinstance(answer, AgentStatus)
    }


async def _reports(service: Context, enclosures: dict[str, EnclosureRecord]) -> dict[str, DriveReport]:
    """Return what enclosures' daemons say of their drives, by NGUID."""
    asked = (service.report_of(record.id) for record in enclosures.values())
    told: list[EnclosureReport | None] = await asyncio.gather(*asked)
    return {drive.nguid: drive for report in told if report is not None for drive in report.drives}


def _view(
    drive: DriveRecord,
    enclosure: EnclosureRecord,
    beliefs: dict[AgentId, dict[DriveId, DriveStatus]],
    report: DriveReport | None,
) -> DriveView:
    held = {agent: drives[drive.id] for agent, drives in beliefs.items() if drive.id in drives}
    return DriveView(
        id=drive.id,
        enclosure=enclosure.id,
        nguid=drive.nguid,
        path=drive.path,
        size_bytes=sum(shard.size_bytes for shard in enclosure.shards if shard.drive == drive.id),
        state=enclosure.state.value,
        hits=sum(each.hits for each in held.values()),
        health=max(map(_health, held.values()), key=_HEALTHS.index, default="unknown"),
        troubles=[
            TroubleView(agent=agent, health=_health(each), why=each.why)
            for agent, each in held.items()
            if each.why
        ],
        wear=WearView.of(report.wear if report else None),
    )


def _health(drive: DriveStatus) -> Health:
    match drive.condition:
        case "suspect" | "failed" as condition:
            return condition
    return "held off" if drive.reads_held_off or drive.writes_held_off else "good"
