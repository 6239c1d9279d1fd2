"""Conditions of an agent, derived from its status. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from ostraca_fabric.runtime.sentences import counted, named
from ostraca_fabric.telemetry.conditions import READY, Observation
from ostraca_fabric.telemetry.status import AgentStatus, MembershipStatus, OwnershipStatus
from ostraca_fabric.telemetry.unavailable import UNOWNED_S, Unavailable


class AgentPhase(Enum):
    """Phase between an agent's start and end."""

    STARTING = "Not ready: starting."
    SERVING = "Ready: serving gets."
    STOPPING = "Not ready: stopping."


def observe(status: AgentStatus, phase: AgentPhase, activity: str = "") -> Iterator[Observation]:
    """Derive conditions from a status.

    *activity* describes the current activity in the phase, as a sentence.
    """
    yield Observation(READY, phase is AgentPhase.SERVING, f"{phase.value} {activity}".rstrip())
    yield from _of_membership(status.membership)
    yield from _of_ownership(status)
    yield _of_peers(status)
    yield _of_paths(status)
    troubled = [f"{drive.drive} {drive.why}" for drive in status.drives if drive.why]
    troubled += [f"{drive.drive} is unusable ({drive.why})" for drive in status.unserved.drives]
    yield _of_some("drives_good", troubled, "Unhealthy drives")
    unreadable = [
        f"{shard.shard} ({counted(shard.unreadable_segments, 'segment')})"
        for shard in status.shards
        if shard.unreadable_segments
    ]
    yield _of_some(
        "summaries_readable",
        unreadable,
        "Shards with unreadable summaries and lost blocks",
    )
    full = [shard.shard for shard in status.shards if shard.is_index_full]
    yield _of_some("indexes_have_room", full, "Shards with a full index")
    spent = [
        shard.shard
        for shard in status.shards
        if shard.years_left is not None and shard.budget_level_bytes < 0
    ]
    yield _of_some("write_budget_left", spent, "Shards above their write budget")
    yield _of_memory(
        "cache_has_room",
        status.cache_used_bytes,
        status.cache_bytes,
        "the DRAM cache are used: the least recently used blocks are evicted",
    )
    yield _of_memory(
        "staging_has_room",
        status.staging_used_bytes,
        status.staging_bytes,
        "staging are used: requests are declined",
    )


def _of_membership(membership: MembershipStatus) -> Iterator[Observation]:
    trouble = membership.trouble
    fails = "does not answer" if membership.silent_s else "answers with errors"
    has_map = membership.has_map
    meanwhile = "the agent continues with the last map" if has_map else "the agent has no map"
    yield Observation(
        "membership_answers",
        not trouble,
        f"The membership store {fails}, and {meanwhile}: {trouble}."
        if trouble
        else "The last request to the membership store succeeded.",
    )
    if not has_map:
        sentence = "The agent has no map yet and serves nothing."
    elif membership.map_trouble:
        sentence = f"The map may be incomplete or stale: {membership.map_trouble}."
    else:
        sentence = "The map is complete and current."
    yield Observation("map_current", has_map and not membership.map_trouble, sentence)


def _of_ownership(status: AgentStatus) -> Iterator[Observation]:
    yield _of_unserved(status.unserved)
    recovering = [f"{shard.shard} ({shard.recovered:.0%})" for shard in status.shards if shard.recovered < 1]
    yield _of_some("shards_recovered", recovering, "Shards in recovery, without puts until its end")
    fenced = [
        f"{shard.shard} ({shard.ownership.why_fenced})"
        for shard in status.shards
        if shard.ownership.is_fenced
    ]
    yield _of_some("shards_writable", fenced, "Owned shards that are fenced")
    yield _of_space(status)
    waiting = [
        f"{shard.shard} ({counted(shard.ownership.withheld_segments, 'segment')} for {left_s:.0f} s more)"
        for shard in status.shards
        if (left_s := shard.ownership.retires_in_s) is not None
    ]
    yield _of_some("grants_retired", waiting, "Shards with possible late writes of an earlier owner")


def _of_unserved(found: Unavailable) -> Observation:
    shards = [
        f"{shard.shard} (for {shard.unowned_s:.0f} s; {shard.why or 'left to another agent'})"
        for shard in found.shards
    ]
    is_true = found.longest_s < UNOWNED_S
    sentence = (
        f"No shard of the fabric has been without an owner for {UNOWNED_S:.0f} s."
        if is_true
        else "Shards without an owner, where gets are misses and puts are declined (NO_OWNER): "
        f"{named(shards, found.shard_count)}."
    )
    return Observation("shards_served", is_true, sentence)


def _of_space(status: AgentStatus) -> Observation:
    lacking = [shard for shard in status.shards if shard.ownership.why_no_space]
    shards = named([f"{shard.shard} ({_lack(shard.ownership)})" for shard in lacking])
    sentence = (
        f"{len(lacking)} of {counted(len(status.shards), 'owned shard')} without free space, where new puts "
        f"wait or are declined (NO_SPACE, BUSY): {shards}. Gets continue. If this happens often, use larger "
        "shards or smaller segments."
        if lacking
        else "Every writable shard of this agent has free space."
    )
    return Observation("shards_have_space", not lacking, sentence)


def _lack(ownership: OwnershipStatus) -> str:
    left_s = ownership.space_in_s
    return ownership.why_no_space + ("" if left_s is None else f", for at most {left_s:.0f} s more")


def _of_peers(status: AgentStatus) -> Observation:
    present = {agent for agent, _ in status.agents}
    peers = [peer for peer in status.peers if peer.agent in present]
    refusing = [f"{peer.agent} ({peer.why})" for peer in peers if peer.is_refused]
    held_off = [f"{peer.agent} ({peer.why})" for peer in peers if peer.is_held_off and not peer.is_refused]
    if refusing:
        sentence = (
            f"Agents that refuse this agent: {named(refusing)}. Give all agents of the fabric the same token "
            "file, or certificates of the same CA; until then some shards are unreachable."
        )
        return Observation("peers_reachable", is_true=False, sentence=sentence)
    return _of_some("peers_reachable", held_off, "Agents with an open circuit breaker")


def _of_paths(status: AgentStatus) -> Observation:
    lost = [
        f"{each.enclosure} ({each.trouble or f'{live} of {len(each.paths)} paths are live'})"
        for each in status.paths
        if (live := sum(path.is_live for path in each.paths)) < len(each.paths) or each.trouble
    ]
    return _of_some("paths_live", lost, "Enclosures with lost paths")


_FULL = 0.95
"""Share of memory that counts as full: pieces rarely fill the memory to the last byte."""


def _of_some(name: str, bad: list[str], words: str) -> Observation:
    return Observation(name, not bad, f"{words}: {named(bad)}.")


def _of_memory(name: str, used_bytes: int, size_bytes: int, words: str) -> Observation:
    is_full = size_bytes > 0 and used_bytes >= _FULL * size_bytes
    share = f"{used_bytes} of {size_bytes} bytes"
    return Observation(name, not is_full, f"{share} of {words}." if is_full else f"{share} are used.")
