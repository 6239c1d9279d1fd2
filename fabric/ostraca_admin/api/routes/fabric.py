"""Contents of the fabric: agents, drives, shards, map and capacity.

Drives are shown as seen by the map, by agents, and by the enclosure daemons.
"""

from __future__ import annotations

import asyncio
from typing import get_args

from fastapi import APIRouter

from ostraca_admin.agent_queries import statuses
from ostraca_admin.api.context import After, Context, LongLimit, Service, Viewer
from ostraca_admin.api.forms import ListPage
from ostraca_admin.api.views import (
    AgentView,
    CapacityView,
    DriveProblemView,
    DriveView,
    Health,
    MapView,
    PathView,
    ShardView,
    view_of,
)
from ostraca_fabric.model.fabric_map import DriveRecord, EnclosureRecord, FabricMap
from ostraca_fabric.model.ids import AgentId, DriveId, enclosure_of
from ostraca_fabric.model.inventory import DriveReport, EnclosureReport
from ostraca_fabric.telemetry.status import AgentStatus, DriveStatus

router = APIRouter(prefix="/v1", tags=["fabric"])


@router.get("/map")
async def get_map(service: Service, _: Viewer) -> MapView:
    """Return a summary of the newest map."""
    fabric_map = service.membership.map
    shards = fabric_map.shards()
    return MapView(
        fabric=fabric_map.fabric.hex(),
        revision=fabric_map.revision,
        placement_epoch=fabric_map.placement_epoch,
        earlier_placement_epochs=tuple(record.epoch for record in fabric_map.earlier_placements),
        agents=len(fabric_map.agents),
        enclosures=len(fabric_map.enclosures),
        drives=sum(len(enclosure.drives) for enclosure in fabric_map.enclosures.values()),
        shards=len(shards),
        unowned_shards=sum(fabric_map.owner(shard.id) is None for shard in shards),
    )


@router.get("/agents")
async def list_agents(
    service: Service, _: Viewer, after: After = "", limit: LongLimit = 200
) -> ListPage[AgentView]:
    """List agents by name, with their status."""
    fabric_map = service.membership.map
    found = await statuses(
        service.agents, [agent for agent in sorted(fabric_map.agents) if agent > after][:limit]
    )
    items = [_agent(fabric_map, agent, answer) for agent, answer in found.items()]
    return ListPage.of(items, limit, lambda agent: agent.id)


@router.get("/shards")
async def list_shards(
    service: Service, _: Viewer, after: After = "", limit: LongLimit = 500
) -> ListPage[ShardView]:
    """List shards by name, with their owners."""
    fabric_map = service.membership.map
    epochs = {shard: claim.epoch for shard, claim in fabric_map.claims.items()}
    items = [
        view_of(
            ShardView,
            shard,
            enclosure=enclosure_of(shard.id),
            owner=fabric_map.owner(shard.id) or "",
            owner_epoch=epochs.get(shard.id, 0),
        )
        for shard in [each for each in fabric_map.shards() if each.id > after][:limit]
    ]
    return ListPage.of(items, limit, lambda shard: shard.id)


@router.get("/capacity")
async def get_capacity(service: Service, _: Viewer) -> CapacityView:
    """Return capacity and usage of flash."""
    fabric_map = service.membership.map
    answers = await statuses(service.agents, service.membership.map.agents)
    owned = [shard for each in answers.values() if isinstance(each, AgentStatus) for shard in each.shards]
    shards = fabric_map.shards()
    return CapacityView(
        usable_bytes=sum(shard.weight for shard in shards),
        draining_bytes=sum(shard.usable_bytes for shard in shards if not shard.weight),
        blocks=sum(shard.blocks for shard in owned),
        written_bytes_per_day=sum(shard.written_bytes_per_day for shard in owned),
        silent_agents=tuple(agent for agent, each in answers.items() if not isinstance(each, AgentStatus)),
    )


def _agent(fabric_map: FabricMap, agent: AgentId, answer: AgentStatus | str) -> AgentView:
    record = fabric_map.agents[agent]
    owned = sum(claim.agent == agent for claim in fabric_map.claims.values())
    status = answer if isinstance(answer, AgentStatus) else None
    return AgentView(
        id=agent,
        addresses=record.addresses,
        is_leaving=record.is_leaving,
        shards=owned,
        version=status.version if status else "",
        message=status.sentence if status else "",
        error="" if isinstance(answer, AgentStatus) else answer,
        paths=tuple(
            view_of(
                PathView,
                each,
                live_paths=sum(path.is_live for path in each.paths),
                paths=len(each.paths),
                error=each.trouble,
            )
            for each in (status.paths if status else ())
        ),
        overrides_revision=status.overrides.revision if status else 0,
        settings=status.overrides.settings if status else {},
    )


_HEALTHS: tuple[Health, ...] = get_args(Health)


@router.get("/drives")
async def list_drives(
    service: Service, _: Viewer, after: After = "", limit: LongLimit = 500
) -> ListPage[DriveView]:
    """List the drives of the map by name, with health and wear."""
    known = sorted(
        (drive.id, drive, enclosure)
        for enclosure in service.membership.map.enclosures.values()
        for drive in enclosure.drives
        if drive.id > after
    )[:limit]
    reports = await _reports(service, {each.id: each for *_, each in known})
    beliefs = {
        agent: {DriveId(drive.drive): drive for drive in status.drives}
        for agent, status in (await statuses(service.agents, service.membership.map.agents)).items()
        if isinstance(status, AgentStatus)
    }
    items = [_drive(drive, enclosure, beliefs, reports.get(drive.nguid)) for _, drive, enclosure in known]
    return ListPage.of(items, limit, lambda drive: drive.id)


async def _reports(service: Context, enclosures: dict[str, EnclosureRecord]) -> dict[str, DriveReport]:
    """Return the reports of enclosures' daemons on drives, by NGUID."""
    reading = (service.report_of(record.id) for record in enclosures.values())
    reports: list[EnclosureReport | None] = await asyncio.gather(*reading)
    return {drive.nguid: drive for report in reports if report is not None for drive in report.drives}


def _drive(
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
        problems=tuple(
            DriveProblemView(agent, _health(each), each.why) for agent, each in held.items() if each.why
        ),
        wear=report.wear if report else None,
    )


def _health(drive: DriveStatus) -> Health:
    match drive.condition:
        case "suspect" | "failed" as condition:
            return condition
    return "held off" if drive.reads_held_off or drive.writes_held_off else "good"
