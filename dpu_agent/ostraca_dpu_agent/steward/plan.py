"""What the steward does next. Pure.

Who claims a shard that nobody owns is decided by every agent alike, from the same map: agents that have room
are ranked by rendezvous, the first claims it at once, and each further one when it has waited longer. So an
agent that can't open a shard does not keep it from the others. An agent has *room* while it owns fewer than
1.25 times the even share of the shards; one that owns more hands over one shard at a time, when all is calm.
Two that claim at one time are told apart by the store.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from ostraca_fabric.ids import drive_of
from ostraca_fabric.placement import ranked_agents

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ostraca_fabric.fabric_map import DriveRecord, FabricMap, ShardRecord
    from ostraca_fabric.ids import AgentId, DriveId, ShardId, StartId

FAIR_SHARE_MAX = 1.25
"""What an agent may own of the even share of all shards before it hands any over. Each hand-over costs a
recovery, and shares that differ by less cost next to nothing."""

PATIENCE_S = 2.0
"""How long each agent waits for the one that is preferred to it. A claim takes milliseconds, and one that
takes longer than this is tried by two: the store lets one of them have it."""

_ranked = lru_cache(maxsize=1 << 14)(ranked_agents)


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

    unowned_s: Mapping[ShardId, float] = field(default_factory=dict)
    """How long each shard has been without an owner, as far as this agent has watched."""

    leaving: frozenset[ShardId] = frozenset()
    """Shards that are being handed over."""

    is_leaving: bool = False
    """This agent is about to end, and claims nothing any more."""

    is_busy: bool = False
    """Shards are being recovered here, or handed over."""


@dataclass(frozen=True, slots=True)
class Join:
    """Announce this agent again: its lease ran out, and the store has forgotten it."""


@dataclass(frozen=True, slots=True)
class Attach:
    """Open the path to a drive, so that this agent's mover reads and writes it."""

    drive: DriveRecord


@dataclass(frozen=True, slots=True)
class Serve:
    """Recover a shard, claim it and answer for it."""

    shard: ShardRecord


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Claim a shard that this agent serves and whose claim has ended with its lease, before anybody else."""

    shard: ShardId


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop answering for a shard that is no longer this agent's, or that it can't serve any more."""

    shard: ShardId
    gives_back: bool = False
    """Whether the claim is this agent's to give back."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """Let everything that is under way for a shard end, and leave it to an agent that has room."""

    shard: ShardId


Step = Join | Attach | Serve | Reclaim | Stop | HandOver


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of one turn, in order, and what to tell people."""

    steps: tuple[Step, ...]
    sentence: str


def plan(observed: Observed) -> Plan:
    """Attach every drive of the fabric; own the shards whose claim is ours, or nobody's and falls to us."""
    fabric_map = observed.map
    known = fabric_map.agents.get(observed.agent)
    if observed.is_leaving:
        return Plan(tuple(_to_stop(observed)), "I leave my shards to the other agents, and end.")
    if known is None or known.start != observed.start:
        return Plan((Join(),), "I will join the fabric again, which has forgotten me: my lease ran out.")
    attach = [
        Attach(drive)
        for enclosure in fabric_map.enclosures.values()
        for drive in enclosure.drives
        if drive.id not in observed.attached
    ]
    reachable = (observed.attached | {step.drive.id for step in attach}) - observed.broken
    stop = list(_to_stop(observed))
    stopped = {step.shard for step in stop}
    owned = Counter(owner for shard in fabric_map.shards() if (owner := fabric_map.owner(shard.id)))
    serve: list[Serve] = []
    reclaim: list[Reclaim] = []
    for shard in fabric_map.shards():
        is_ours = _is_ours(observed, shard.id)
        is_free = fabric_map.owner(shard.id) is None
        if shard.id in observed.served:
            if is_free and shard.id not in stopped:
                reclaim.append(Reclaim(shard.id))
        elif shard.id in observed.failed | observed.leaving or shard.drive not in reachable:
            continue
        elif is_ours:
            serve.append(Serve(shard))
        elif is_free and _falls_to_us(observed, shard.id, owned):
            serve.append(Serve(shard))
            owned[observed.agent] += 1
    hand_over = [] if stop or serve or reclaim else list(_to_hand_over(observed, owned))
    steps: tuple[Step, ...] = (*stop, *reclaim, *attach, *serve, *hand_over)
    return Plan(steps, _sentence(observed, steps))


def _to_stop(observed: Observed) -> Iterator[Stop]:
    for shard in sorted(observed.served):
        if observed.map.owner(shard) is not None and not _is_ours(observed, shard):
            yield Stop(shard)
        elif drive_of(shard) in observed.broken:
            yield Stop(shard, gives_back=True)


def _is_ours(observed: Observed, shard: ShardId) -> bool:
    claim = observed.map.claims.get(shard)
    return claim is not None and (claim.agent, claim.start) == (observed.agent, observed.start)


def _staying(fabric_map: FabricMap) -> tuple[AgentId, ...]:
    """Return the agents that all shards are divided among: those that are not about to end."""
    return tuple(sorted(agent.id for agent in fabric_map.agents.values() if not agent.is_leaving))


def _room(fabric_map: FabricMap) -> int:
    """Return how many shards an agent may own before it hands any over."""
    return math.ceil(FAIR_SHARE_MAX * len(fabric_map.shards()) / max(1, len(_staying(fabric_map))))


def _falls_to_us(observed: Observed, shard: ShardId, owned: Mapping[AgentId, int]) -> bool:
    """Say whether it is this agent's turn to claim a shard that nobody owns."""
    room = _room(observed.map)
    if owned.get(observed.agent, 0) >= room:
        return False
    ranked = _ranked(shard, _staying(observed.map))
    before = ranked[: ranked.index(observed.agent)]
    rank = sum(1 for agent in before if owned.get(agent, 0) < room)
    return observed.unowned_s.get(shard, 0.0) >= rank * PATIENCE_S


def _to_hand_over(observed: Observed, owned: Mapping[AgentId, int]) -> Iterator[HandOver]:
    """Name one shard to leave to others, when this agent has too many and nothing else is going on."""
    fabric_map = observed.map
    is_calm = not observed.is_busy and all(fabric_map.owner(shard.id) for shard in fabric_map.shards())
    if is_calm and observed.served and owned[observed.agent] > _room(fabric_map):
        agents = _staying(fabric_map)
        yield HandOver(
            max(observed.served, key=lambda shard: (_ranked(shard, agents).index(observed.agent), shard))
        )


def _sentence(observed: Observed, steps: tuple[Step, ...]) -> str:
    shards = len(observed.map.shards())
    failed = f"; {len(observed.failed)} could not be opened" if observed.failed else ""
    if observed.broken:
        failed += f"; I leave {len(observed.broken)} drives alone that have failed"
    if not steps:
        served = len(observed.served)
        return f"I serve {served} of the fabric's {shards} shards and have nothing to change{failed}."
    kinds = Counter(
        "give back" if isinstance(step, Stop) and step.gives_back else type(step).__name__ for step in steps
    )
    words = {
        "Stop": "stop serving {} shards that another agent owns",
        "give back": "stop serving {} shards whose drives have failed",
        "Reclaim": "claim {} shards again that I serve and whose claims ran out with my lease",
        "Attach": "attach {} drives that are new in the map",
        "Serve": "claim {} shards that nobody owns and that fall to me",
        "HandOver": "hand over {} shard, because I own more than my share",
    }
    parts = [text.format(kinds[kind]) for kind, text in words.items() if kinds[kind]]
    return f"I will {', '.join(parts)}{failed}."
