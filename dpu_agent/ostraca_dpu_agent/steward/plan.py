"""What the steward does next. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_fabric.ids import drive_of
from ostraca_fabric.placement import preferred_agent

if TYPE_CHECKING:
    from ostraca_fabric.fabric_map import DriveRecord, FabricMap, ShardRecord
    from ostraca_fabric.ids import AgentId, DriveId, ShardId, StartId


@dataclass(frozen=True, slots=True)
class Observed:
    """What this agent sees of the fabric and of itself."""

    map: FabricMap
    agent: AgentId
    start: StartId
    attached: frozenset[DriveId]
    served: frozenset[ShardId]
    failed: frozenset[ShardId]
    """Shards that could not be opened; they are not tried again before the next change of the map."""

    broken: frozenset[DriveId] = frozenset()
    """Drives that have failed for this agent, until it starts anew. It serves nothing that lies there."""


@dataclass(frozen=True, slots=True)
class Attach:
    """Open the path to a drive, so that this agent's mover reads and writes it."""

    drive: DriveRecord


@dataclass(frozen=True, slots=True)
class Serve:
    """Recover a shard, claim it and answer for it."""

    shard: ShardRecord


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop answering for a shard that is no longer this agent's, or that it can't serve any more."""

    shard: ShardId
    gives_back: bool = False
    """Whether the claim is this agent's to give back."""


Step = Attach | Serve | Stop


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of one turn, in order, and what to tell people."""

    steps: tuple[Step, ...]
    sentence: str


def plan(observed: Observed) -> Plan:
    """Attach every drive of the fabric; own the shards whose claim is ours, or is nobody's and we are
    preferred.
    """
    fabric_map = observed.map
    attach = [
        Attach(drive)
        for enclosure in fabric_map.enclosures.values()
        for drive in enclosure.drives
        if drive.id not in observed.attached
    ]
    reachable = (observed.attached | {step.drive.id for step in attach}) - observed.broken
    agents = sorted(fabric_map.agents)
    serve, stop = [], []
    for shard in fabric_map.shards():
        claim = fabric_map.claims.get(shard.id)
        is_ours = claim is not None and (claim.agent, claim.start) == (observed.agent, observed.start)
        is_served = shard.id in observed.served
        if is_served and not is_ours:
            stop.append(Stop(shard.id))
        elif is_served and drive_of(shard.id) in observed.broken:
            stop.append(Stop(shard.id, gives_back=True))
        elif not is_served and shard.id not in observed.failed and drive_of(shard.id) in reachable:
            is_free = claim is None or claim.agent not in fabric_map.agents
            if is_ours or (is_free and agents and preferred_agent(shard.id, agents) == observed.agent):
                serve.append(Serve(shard))
    return Plan((*stop, *attach, *serve), _sentence(observed, attach, serve, stop))


def _sentence(observed: Observed, attach: list[Attach], serve: list[Serve], stop: list[Stop]) -> str:
    shards = len(observed.map.shards())
    failed = f"; {len(observed.failed)} could not be opened" if observed.failed else ""
    if observed.broken:
        failed += f"; I leave {len(observed.broken)} drives alone that have failed"
    lost = [step for step in stop if not step.gives_back]
    broken = [step for step in stop if step.gives_back]
    if not (attach or serve or stop):
        served = len(observed.served)
        return f"I serve {served} of the fabric's {shards} shards and have nothing to change{failed}."
    parts = [
        (lost, f"stop serving {len(lost)} shards that another agent owns"),
        (broken, f"stop serving {len(broken)} shards whose drives have failed"),
        (attach, f"attach {len(attach)} drives that are new in the map"),
        (serve, f"claim {len(serve)} shards that nobody owns and that I am preferred for"),
    ]
    return f"I will {', '.join(words for steps, words in parts if steps)}{failed}."
