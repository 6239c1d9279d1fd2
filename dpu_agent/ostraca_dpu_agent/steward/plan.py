"""What the steward does next. Pure.

Who claims a shard that nobody owns is decided by every agent alike, from the same map: agents are ranked by
rendezvous, those that have room before those that have none; the first claims it at once, and each further
one when it has waited longer. So agents that can't open a shard do not keep it from the others. An agent has
*room* while it owns fewer than 1.25 times the even share of the shards; one that owns more hands over one
shard at a time, when all is calm. Two that claim at one time are told apart by the store.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.ids import drive_of
from ostraca_fabric.placement import agent_draws
from ostraca_fabric.sentences import counted, named

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ostraca_fabric.fabric_map import DriveRecord, FabricMap, ShardRecord
    from ostraca_fabric.ids import AgentId, DriveId, ShardId, StartId

FAIR_SHARE_MAX = 1.25
"""What an agent may own of the even share of all shards before it hands any over. Each hand-over costs a
recovery, and shares that differ by less cost next to nothing."""

PATIENCE_S = 2.0
"""How long each agent waits for the one that is preferred to it. A claim takes milliseconds, and one that
takes longer than this is tried by two: the store lets one of them have it."""

REJOIN_WITHIN_S = 1.0
"""The time over which agents that were all forgotten at once join again. Less than ``PATIENCE_S``, after
which the next agent claims what this one is preferred for."""

_draws = lru_cache(maxsize=1 << 10)(agent_draws)
"""Every agent's draws for all shards: 8 bytes for each."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What this agent sees of the fabric and of itself."""

    map: FabricMap
    agent: AgentId
    start: StartId
    attached: frozenset[DriveId]
    served: frozenset[ShardId]
    failed: frozenset[ShardId]
    """Shards that could not be opened a while ago, and are left alone for now."""

    addresses: tuple[str, ...] = ()
    """Where this agent has said that it is reached."""

    joins_in_s: float = 0.0
    """How long it waits before it joins again."""

    broken: frozenset[DriveId] = frozenset()
    """Drives that have failed for this agent, until it starts anew. It serves nothing that lies there."""

    held_off: frozenset[DriveId] = frozenset()
    """Drives whose reads are held off for now. Nothing that lies there is claimed, nor room kept for it."""

    waiting: frozenset[DriveId] = frozenset()
    """Drives that are not to be attached yet: there is no path to them, or they were refused a moment ago."""

    moved: frozenset[DriveId] = frozenset()
    """Drives that are attached, and that the map has no longer, or has elsewhere."""

    unowned_s: Mapping[ShardId, float] = field(default_factory=dict)
    """How long each shard has been without an owner, as far as this agent has watched."""

    unsure: frozenset[ShardId] = frozenset()
    """Shards that are served under a claim of which it is not known that it is the one they are served under:
    the answer to it was lost."""

    stranded: frozenset[ShardId] = frozenset()
    """Shards that are served by an owner that never writes again: another one has come after it, though the
    claim is this agent's, or a part of it has crashed."""

    leaving: frozenset[ShardId] = frozenset()
    """Shards that are being handed over."""

    is_leaving: bool = False
    """This agent is about to end, and claims nothing any more."""

    is_busy: bool = False
    """Shards are being recovered here, or handed over."""

    is_in_vain: bool = False
    """What this agent handed over last nobody took: it keeps what it has for a while."""


@dataclass(frozen=True, slots=True)
class Join:
    """Announce this agent again: its lease ran out, and the store has forgotten it."""


@dataclass(frozen=True, slots=True)
class Attach:
    """Open the path to a drive, so that this agent's mover reads and writes it."""

    drive: DriveRecord


@dataclass(frozen=True, slots=True)
class Detach:
    """Let a drive go that the map has no longer, or that turned up elsewhere."""

    drive: DriveId


@dataclass(frozen=True, slots=True)
class Serve:
    """Recover a shard, claim it and answer for it."""

    shard: ShardRecord


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Claim a shard that this agent serves and whose claim has ended with its lease, before anybody else; or
    find out whether that was done.
    """

    shard: ShardId


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop answering for a shard that is no longer this agent's, or that it can't serve any more."""

    shard: ShardId
    gives_back: bool = False
    """Whether the claim is this agent's to give back."""


@dataclass(frozen=True, slots=True)
class BeginAnew:
    """Stop serving a shard that is written no more, though its claim is this agent's: it is to be read anew,
    by this agent or another one.
    """

    shard: ShardId


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Give back the claim of a shard that is not served here and can't be: of one that was made, and nobody
    was told, or that could not be given back before.
    """

    shard: ShardId


@dataclass(frozen=True, slots=True)
class HandOver:
    """Let everything that is under way for a shard end, and leave it to an agent that has room."""

    shard: ShardId


Step = Join | Attach | Detach | Serve | Reclaim | Stop | BeginAnew | GiveBack | HandOver


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of one turn, in order, and what to tell people."""

    steps: tuple[Step, ...]
    sentence: str


def rejoin_wait_s(start: StartId) -> float:
    """Return how long an agent waits before it joins again, where all were forgotten at once: any time up to
    ``REJOIN_WITHIN_S``, one for each start.
    """
    return REJOIN_WITHIN_S * int.from_bytes(start[:4]) / (1 << 32)


def plan(observed: Observed) -> Plan:
    """Attach every drive of the fabric; own the shards whose claim is ours, or nobody's and falls to us."""
    fabric_map = observed.map
    known = fabric_map.agents.get(observed.agent)
    if observed.is_leaving:
        return Plan(tuple(_to_stop(observed)), "I leave my shards to the other agents, and end.")
    if known is None and observed.joins_in_s > 0:
        return Plan((), "I will join the fabric again within a second: it has forgotten us all.")
    if known is None:
        return Plan((Join(),), "I will join the fabric again, which has forgotten me: my lease ran out.")
    if known.start != observed.start and known.addresses and known.addresses == observed.addresses:
        return Plan(
            tuple(_to_stop(observed)),
            f"I wait, and own nothing: another start of {observed.agent} is in the fabric, at my own "
            "addresses. Where the membership store has gone back to an older state it is an earlier one of "
            "mine: I join again when its lease has run out. If it stays, another process runs with my "
            "settings: end it.",
        )
    if known.start != observed.start:
        return Plan(
            tuple(_to_stop(observed)),
            f"I wait, and own nothing: another process has joined as {observed.agent} since I did, at "
            f"{' '.join(known.addresses) or 'no address'}. Give one of us another name, or end it.",
        )
    attach = [
        Attach(drive)
        for enclosure in fabric_map.enclosures.values()
        for drive in enclosure.drives
        if drive.id not in observed.attached | observed.waiting
    ]
    attached = observed.attached | {step.drive.id for step in attach}
    reachable = attached - observed.broken - observed.moved
    readable = reachable - observed.held_off
    stop = list(_to_stop(observed))
    stopped = frozenset(step.shard for step in stop)
    owners = [fabric_map.owner(shard.id) for shard in fabric_map.shards()]
    owned = Counter(owner for owner in owners if owner is not None)
    own: list[BeginAnew | GiveBack | Reclaim | Serve] = []
    free: list[int] = []
    for number, (shard, owner) in enumerate(zip(fabric_map.shards(), owners, strict=True)):
        if shard.id in stopped or shard.id in observed.leaving:
            continue
        if shard.id in observed.served or (owner is not None and _is_ours(observed, shard.id)):
            own += _with_own(observed, shard, reachable)
        elif owner is None and shard.id not in observed.failed and shard.drive in readable:
            free.append(number)
    anew = [step for step in own if isinstance(step, BeginAnew)]
    give_back = [step for step in own if isinstance(step, GiveBack)]
    reclaim = [step for step in own if isinstance(step, Reclaim)]
    serve = [step for step in own if isinstance(step, Serve)]
    serve = sorted([*serve, *_fall_to_us(observed, free, owned)], key=lambda step: step.shard.id)
    hand_over = [] if stop or anew or serve or reclaim else list(_to_hand_over(observed, owned))
    in_use = {drive_of(shard) for shard in observed.served | observed.leaving}
    detach = [Detach(drive) for drive in sorted(observed.moved - in_use)]
    steps: tuple[Step, ...] = (*stop, *anew, *give_back, *reclaim, *detach, *attach, *serve, *hand_over)
    return Plan(steps, _sentence(observed, steps))


def _with_own(
    observed: Observed, shard: ShardRecord, reachable: frozenset[DriveId]
) -> Iterator[BeginAnew | GiveBack | Reclaim | Serve]:
    """Say what to do with a shard that this agent serves, or owns."""
    if shard.id in observed.served:
        if observed.map.owner(shard.id) is None or shard.id in observed.unsure:
            yield Reclaim(shard.id)
        elif shard.id in observed.stranded:
            yield BeginAnew(shard.id)
    elif shard.id in observed.failed or shard.drive not in reachable:
        yield GiveBack(shard.id)
    else:
        yield Serve(shard)


def _to_stop(observed: Observed) -> Iterator[Stop]:
    known = {shard.id for shard in observed.map.shards()}
    for shard in sorted(observed.served):
        if observed.map.owner(shard) is not None and not _is_ours(observed, shard):
            yield Stop(shard)
        elif drive_of(shard) in observed.broken | observed.moved or shard not in known:
            yield Stop(shard, gives_back=True)


def _is_ours(observed: Observed, shard: ShardId) -> bool:
    claim = observed.map.claims.get(shard)
    return claim is not None and (claim.agent, claim.start) == (observed.agent, observed.start)


def _staying(fabric_map: FabricMap) -> tuple[AgentId, ...]:
    """Return the agents that all shards are divided among: those that are not about to end."""
    return tuple(sorted(agent.id for agent in fabric_map.agents.values() if not agent.is_leaving))


def _room(fabric_map: FabricMap) -> int:
    """Return how many shards an agent may own before it hands any over."""
    even = len(fabric_map.shards()) / max(1, len(_staying(fabric_map)))
    return max(math.ceil(even), math.floor(FAIR_SHARE_MAX * even))


def _fall_to_us(observed: Observed, free: Sequence[int], owned: Mapping[AgentId, int]) -> Iterator[Serve]:
    """Name the shards whose turn it is to be claimed by this agent, of those of the map with these numbers,
    which nobody owns.
    """
    if not free:
        return
    shards, room = observed.map.shards(), _room(observed.map)
    left = room - owned.get(observed.agent, 0)
    with_room: list[AgentId] = []
    full: list[AgentId] = []
    for agent in _staying(observed.map):
        (with_room if owned.get(agent, 0) < room else full).append(agent)
    numbers = np.array(free, np.intp)
    among_first = _ranks(observed, with_room, numbers).tolist()
    among_last = (len(set(with_room) - {observed.agent}) + _ranks(observed, full, numbers)).tolist()
    for number, first, last in zip(free, among_first, among_last, strict=True):
        if observed.unowned_s.get(shards[number].id, 0.0) >= (first if left > 0 else last) * PATIENCE_S:
            yield Serve(shards[number])
            left -= 1
            if left < 0:  # beyond its room one in a turn: others may have come to have some
                return


def _ranks(observed: Observed, others: Sequence[AgentId], numbers: NDArray[np.intp]) -> NDArray[np.intp]:
    """Count how many of these agents are preferred to this one, for each shard of the map with these numbers,
    shape (n,).
    """
    shards = tuple(shard.id for shard in observed.map.shards())
    own = _draws(observed.agent, shards)[numbers]
    ranks = np.zeros(len(numbers), np.intp)
    for agent in others:
        theirs = _draws(agent, shards)[numbers]
        ranks += (theirs > own) | (agent > observed.agent) & (theirs == own)
    return ranks


def _to_hand_over(observed: Observed, owned: Counter[AgentId]) -> Iterator[HandOver]:
    """Name one shard to leave to others, when this agent has too many and nothing else is going on."""
    shards = observed.map.shards()
    is_calm = not observed.is_busy and not observed.is_in_vain and not _may_be_claimed(observed)
    if is_calm and observed.served and owned[observed.agent] > _room(observed.map):
        served = [number for number, shard in enumerate(shards) if shard.id in observed.served]
        ranks = _ranks(observed, _staying(observed.map), np.array(served, np.intp)).tolist()
        _, number = max(zip(ranks, served, strict=True), default=(0, None))
        if number is not None:
            yield HandOver(shards[number].id)


def _may_be_claimed(observed: Observed) -> bool:
    """Say whether there are shards without an owner that somebody may yet claim: whose turn it was with all
    agents, one after the other, nobody can open.
    """
    patience_s = PATIENCE_S * (len(observed.map.agents) + 1)
    unowned = (shard.id for shard in observed.map.shards() if observed.map.owner(shard.id) is None)
    return any(observed.unowned_s.get(shard, 0.0) < patience_s for shard in unowned)


_WORDS = {
    "Stop": ("stop serving {} that another agent owns",) * 2,
    "give back": (
        "stop serving {} whose drive has failed or is gone",
        "stop serving {} whose drives have failed or are gone",
    ),
    "BeginAnew": ("begin {} anew that I write no more",) * 2,
    "GiveBack": ("give back {} that I can't serve",) * 2,
    "Reclaim": (
        "claim {} again that I serve and whose claim ran out with my lease",
        "claim {} again that I serve and whose claims ran out with my lease",
    ),
    "Detach": ("let {} go that is no longer there", "let {} go that are no longer there"),
    "Attach": ("attach {} that is new in the map", "attach {} that are new in the map"),
    "Serve": (
        "claim {} that nobody owns and that falls to me",
        "claim {} that nobody owns and that fall to me",
    ),
    "HandOver": ("hand over {}, because I own more than my share",) * 2,
}
"""What is to be done with one thing, and with several."""


def _sentence(observed: Observed, steps: tuple[Step, ...]) -> str:
    shards, lacking = counted(len(observed.map.shards()), "shard"), _lacking(observed)
    if not steps:
        return f"I serve {len(observed.served)} of the fabric's {shards} and have nothing to change{lacking}."
    kinds = Counter(
        "give back" if isinstance(step, Stop) and step.gives_back else type(step).__name__ for step in steps
    )
    parts = [
        (several if kinds[kind] > 1 else one).format(
            counted(kinds[kind], "drive" if kind in ("Attach", "Detach") else "shard")
        )
        for kind, (one, several) in _WORDS.items()
        if kinds[kind]
    ]
    return f"I will {', '.join(parts)}{lacking}."


def _lacking(observed: Observed) -> str:
    """Name what can't be used."""
    parts = []
    if observed.failed:
        parts.append(
            f"{counted(len(observed.failed), 'shard')} could not be opened: {_named(observed.failed)}"
        )
    if observed.broken:
        broken = counted(len(observed.broken), "drive")
        parts.append(f"I leave {broken} alone after failures: {_named(observed.broken)}")
    if observed.waiting:
        parts.append(f"I can't use {counted(len(observed.waiting), 'drive')}: {_named(observed.waiting)}")
    return "".join(f"; {part}" for part in parts)


def _named(names: Iterable[str]) -> str:
    return named(sorted(names))
