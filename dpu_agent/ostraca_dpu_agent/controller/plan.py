"""Plan for the next turn of an agent's controller. Pure.

All agents decide alike, from the same map, who claims a shard without an owner. Agents are ranked by
rendezvous hashing; agents with room come before agents without. The first agent claims the shard at once,
each further agent after a longer wait. So an agent that can't open a shard does not keep the shard from
others.

An agent has *room* while it owns fewer than 1.25 times the even share of all shards. An agent with more hands
over one shard at a time, while nothing else is going on. The store decides between two claims at one time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.fabric_map import DriveRecord, FabricMap, ShardRecord
from ostraca_fabric.model.ids import AgentId, DriveId, ShardId, StartId, drive_of
from ostraca_fabric.policies.placement import agent_draws
from ostraca_fabric.runtime.sentences import counted, named

FAIR_SHARE_MAX = 1.25
"""Limit of an agent's shards before a handover, as a multiple of the even share. A handover costs a recovery;
smaller differences cost next to nothing."""

CLAIM_STAGGER_S = 2.0
"""Wait of each agent for the next preferred agent. A claim takes milliseconds. After a slower claim, two
agents try, and the store admits one of them."""

REJOIN_WITHIN_S = 1.0
"""Time over which agents join again after the loss of all leases at once. Below ``CLAIM_STAGGER_S``, so that
no other agent claims this agent's preferred shards first."""

_draws = lru_cache(maxsize=1 << 10)(agent_draws)
"""Draws of an agent for all shards, 8 bytes each."""


@dataclass(frozen=True, slots=True)
class ObservedState:
    """State of the fabric and of this agent, as seen by the agent."""

    map: FabricMap
    agent: AgentId
    start: StartId
    attached: frozenset[DriveId]
    served: frozenset[ShardId]
    failed: frozenset[ShardId]
    """Shards with a recent failure to open; the next attempt comes later."""

    addresses: tuple[str, ...] = ()
    """Announced addresses of this agent."""

    rejoin_delay_s: float = 0.0
    """Time until this agent joins again."""

    failed_drives: frozenset[DriveId] = frozenset()
    """Drives that have failed for this agent until its next start; their shards are not served here."""

    unresponsive: frozenset[DriveId] = frozenset()
    """Drives with suspended reads. Their shards are not claimed now, and no room is kept for them."""

    unattachable: frozenset[DriveId] = frozenset()
    """Drives not to attach yet: without a path, or refused recently."""

    obsolete: frozenset[DriveId] = frozenset()
    """Attached drives listed elsewhere in the map, or no longer."""

    unowned_s: Mapping[ShardId, float] = field(default_factory=dict)
    """Time of each shard without an owner, as far as this agent has watched."""

    unconfirmed: frozenset[ShardId] = frozenset()
    """Served shards whose present claim is unknown, because the store's answer was lost."""

    stranded: frozenset[ShardId] = frozenset()
    """Served shards without further writes here: another owner has intervened, or a task crashed."""

    handing_over: frozenset[ShardId] = frozenset()
    """Shards with a handover under way."""

    is_leaving: bool = False
    """Whether this agent is about to end, and claims nothing more."""

    is_busy: bool = False
    """Whether recoveries or handovers are under way here."""

    is_backing_off: bool = False
    """Whether handovers are suspended, because no agent took the last one."""


@dataclass(frozen=True, slots=True)
class Join:
    """Register this agent again, after the loss of its lease."""


@dataclass(frozen=True, slots=True)
class Attach:
    """Open the path to a drive, for reads and writes of this agent's data path."""

    drive: DriveRecord


@dataclass(frozen=True, slots=True)
class Detach:
    """Close a drive removed from the map, or moved to another device."""

    drive: DriveId


@dataclass(frozen=True, slots=True)
class Serve:
    """Claim, recover and serve a shard."""

    shard: ShardRecord


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Renew the claim of a served shard, after the loss of the lease or of the store's answer."""

    shard: ShardId


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop serving a shard of another agent, or a shard not servable any more."""

    shard: ShardId
    gives_back: bool = False
    """Whether to release the claim, which is this agent's."""


@dataclass(frozen=True, slots=True)
class RestartShard:
    """Stop a shard without further writes here, so that some agent recovers the shard."""

    shard: ShardId


@dataclass(frozen=True, slots=True)
class ReleaseClaim:
    """Release this agent's claim of a shard not servable here."""

    shard: ShardId


@dataclass(frozen=True, slots=True)
class HandOver:
    """Complete a shard's work, and leave the shard to an agent with room."""

    shard: ShardId


Step = Join | Attach | Detach | Serve | Reclaim | Stop | RestartShard | ReleaseClaim | HandOver


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """Steps of one turn, in order, and a sentence for people."""

    steps: tuple[Step, ...]
    sentence: str


def rejoin_wait_s(start: StartId) -> float:
    """Return the delay before joining again, after the loss of all leases at once.

    Each start has its own delay, up to ``REJOIN_WITHIN_S``.
    """
    return REJOIN_WITHIN_S * int.from_bytes(start[:4]) / (1 << 32)


def plan(state: ObservedState) -> TurnPlan:
    """Plan to attach all drives of the map, and to own this agent's part of the shards."""
    if (without_shards := _plan_without_shards(state)) is not None:
        return without_shards
    fabric_map, known = state.map, state.attached | state.unattachable
    attach = [
        Attach(drive)
        for enclosure in fabric_map.enclosures.values()
        for drive in enclosure.drives
        if drive.id not in known
    ]
    attached = state.attached | {step.drive.id for step in attach}
    reachable = attached - state.failed_drives - state.obsolete
    claimable = reachable - state.unresponsive
    stops = list(_stops(state))
    skipped = state.handing_over | {step.shard for step in stops}
    owners = [fabric_map.owner(shard.id) for shard in fabric_map.shards()]
    owned = Counter(owner for owner in owners if owner is not None)
    own: list[Step] = []
    free: list[int] = []
    for number, (shard, owner) in enumerate(zip(fabric_map.shards(), owners, strict=True)):
        if shard.id in skipped:
            continue
        if shard.id in state.served or _is_own(state, shard.id):
            own += _own_steps(state, shard, reachable)
        elif owner is None and shard.id not in state.failed and shard.drive in claimable:
            free.append(number)
    in_use = {drive_of(shard) for shard in state.served | state.handing_over}
    detach = [Detach(drive) for drive in sorted(state.obsolete - in_use)]
    steps = sorted([*stops, *own, *detach, *attach, *_claims_due(state, free, owned)], key=_order)
    if all(isinstance(step, ReleaseClaim | Detach | Attach) for step in steps):
        steps += _handovers(state, owned)
    return TurnPlan(tuple(steps), _sentence(state, steps))


def _plan_without_shards(state: ObservedState) -> TurnPlan | None:
    """Return the plan of a leaving or unregistered agent; None for any other agent."""
    record = state.map.agents.get(state.agent)
    if state.is_leaving:
        return TurnPlan(tuple(_stops(state)), "leaving all shards to other agents, then ending")
    if record is None and state.rejoin_delay_s > 0:
        return TurnPlan((), "joining the fabric again within a second: all agents' leases expired")
    if record is None:
        return TurnPlan((Join(),), "joining the fabric again: the lease of this agent expired")
    if record.start == state.start:
        return None
    if record.addresses and record.addresses == state.addresses:
        return TurnPlan(
            tuple(_stops(state)),
            f"waiting without shards: another start of {state.agent} is registered with the same addresses. "
            "If the membership store was restored from a backup, this is an earlier start of this process, "
            "and the agent joins again when the old lease expires. If this state stays, another process "
            "runs with the same settings: end that process",
        )
    return TurnPlan(
        tuple(_stops(state)),
        f"waiting without shards: another process joined later as {state.agent}, at "
        f"{' '.join(record.addresses) or 'no address'}: rename or end one of the two agents",
    )


_ORDER = (Stop, RestartShard, ReleaseClaim, Reclaim, Detach, Attach, Serve)


def _order(step: Step) -> tuple[int, str]:
    return _ORDER.index(type(step)), step.shard.id if isinstance(step, Serve) else ""


def _own_steps(state: ObservedState, shard: ShardRecord, reachable: frozenset[DriveId]) -> Iterator[Step]:
    """Yield the step for a shard served or owned by this agent."""
    if shard.id in state.served:
        if state.map.owner(shard.id) is None or shard.id in state.unconfirmed:
            yield Reclaim(shard.id)
        elif shard.id in state.stranded:
            yield RestartShard(shard.id)
    elif shard.id in state.failed or shard.drive not in reachable:
        yield ReleaseClaim(shard.id)
    else:
        yield Serve(shard)


def _stops(state: ObservedState) -> Iterator[Stop]:
    known = {shard.id for shard in state.map.shards()}
    unusable = state.failed_drives | state.obsolete
    for shard in sorted(state.served):
        if state.map.owner(shard) is not None and not _is_own(state, shard):
            yield Stop(shard)
        elif drive_of(shard) in unusable or shard not in known:
            yield Stop(shard, gives_back=True)


def _is_own(state: ObservedState, shard: ShardId) -> bool:
    claim = state.map.claims.get(shard)
    return claim is not None and (claim.agent, claim.start) == (state.agent, state.start)


def _permanent_agents(fabric_map: FabricMap) -> tuple[AgentId, ...]:
    """Return the agents that share all shards: all agents not about to end."""
    return tuple(sorted(agent.id for agent in fabric_map.agents.values() if not agent.is_leaving))


def _room(fabric_map: FabricMap) -> int:
    """Return the number of shards that an agent may own without a handover."""
    even = len(fabric_map.shards()) / max(1, len(_permanent_agents(fabric_map)))
    return max(math.ceil(even), math.floor(FAIR_SHARE_MAX * even))


def _claims_due(state: ObservedState, free: Sequence[int], owned: Mapping[AgentId, int]) -> Iterator[Serve]:
    """Yield the unowned shards to claim now; *free* are their numbers in the map."""
    if not free:
        return
    shards, room = state.map.shards(), _room(state.map)
    left = room - owned.get(state.agent, 0)
    with_room: list[AgentId] = []
    full: list[AgentId] = []
    for agent in _permanent_agents(state.map):
        (with_room if owned.get(agent, 0) < room else full).append(agent)
    numbers = np.array(free, np.intp)
    among_first = _ranks(state, with_room, numbers).tolist()
    among_last = (len(set(with_room) - {state.agent}) + _ranks(state, full, numbers)).tolist()
    for number, first, last in zip(free, among_first, among_last, strict=True):
        if state.unowned_s.get(shards[number].id, 0.0) >= (first if left > 0 else last) * CLAIM_STAGGER_S:
            yield Serve(shards[number])
            left -= 1
            if left < 0:  # without room one claim a turn: others may have room by then
                return


def _ranks(state: ObservedState, others: Sequence[AgentId], numbers: NDArray[np.intp]) -> NDArray[np.intp]:
    """Count, for each shard number, the *others* preferred to this agent; shape (n,)."""
    shards = tuple(shard.id for shard in state.map.shards())
    own = _draws(state.agent, shards)[numbers]
    ranks = np.zeros(len(numbers), np.intp)
    for agent in others:
        theirs = _draws(agent, shards)[numbers]
        ranks += (theirs > own) | (agent > state.agent) & (theirs == own)
    return ranks


def _handovers(state: ObservedState, owned: Counter[AgentId]) -> Iterator[HandOver]:
    """Yield a shard to hand over, if this agent has too many and nothing else is going on."""
    shards = state.map.shards()
    is_calm = not state.is_busy and not state.is_backing_off and not _may_be_claimed(state)
    if is_calm and state.served and owned[state.agent] > _room(state.map):
        served = [number for number, shard in enumerate(shards) if shard.id in state.served]
        ranks = _ranks(state, _permanent_agents(state.map), np.array(served, np.intp)).tolist()
        _, number = max(zip(ranks, served, strict=True), default=(0, None))
        if number is not None:
            yield HandOver(shards[number].id)


def _may_be_claimed(state: ObservedState) -> bool:
    """Return whether any unowned shard may still be claimed.

    A shard still unowned after every agent's turn can't be opened by any agent.
    """
    all_turns_s = CLAIM_STAGGER_S * (len(state.map.agents) + 1)
    unowned = (shard.id for shard in state.map.shards() if state.map.owner(shard.id) is None)
    return any(state.unowned_s.get(shard, 0.0) < all_turns_s for shard in unowned)


_PHRASES: Mapping[tuple[type[Step], bool], tuple[str, str]] = {
    (Stop, False): ("shard", "stopping {}: owned by another agent"),
    (Stop, True): ("shard", "stopping {}: drive failed or removed"),
    (RestartShard, False): ("shard", "restarting {}: writes have ended here"),
    (ReleaseClaim, False): ("shard", "releasing {}: not servable here"),
    (Reclaim, False): ("shard", "claiming {} again: the claim ended with the lease"),
    (Detach, False): ("drive", "detaching {}: removed or moved"),
    (Attach, False): ("drive", "attaching {}"),
    (Serve, False): ("shard", "claiming {}"),
    (HandOver, False): ("shard", "handing over {}: above the fair share"),
}
"""By kind of step, and whether a claim is released: the noun, and the phrase with its count."""


def _sentence(state: ObservedState, steps: Sequence[Step]) -> str:
    parts = [f"serving {len(state.served)} of {counted(len(state.map.shards()), 'shard')}"]
    kinds = Counter((type(step), isinstance(step, Stop) and step.gives_back) for step in steps)
    parts += [
        phrase.format(counted(kinds[kind], noun)) for kind, (noun, phrase) in _PHRASES.items() if kinds[kind]
    ] or ["no changes"]
    for noun, names, phrase in (
        ("shard", state.failed, "can't open"),
        ("drive", state.failed_drives, "not using, after failures,"),
        ("drive", state.unattachable, "can't use"),
    ):
        if names:
            parts.append(f"{phrase} {counted(len(names), noun)} ({named(sorted(names))})")
    return "; ".join(parts)
