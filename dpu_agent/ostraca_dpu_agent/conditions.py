"""What conditions an agent is in, judged from what it says of itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from ostraca_fabric.conditions import READY, Observation
from ostraca_fabric.status import AgentStatus, MembershipStatus


class Phase(Enum):
    """Where an agent is between its start and its end."""

    STARTING = "I do not serve gets yet: I am starting."
    SERVING = "I serve gets."
    STOPPING = "I am to be asked for no more: I am stopping."


def observe(status: AgentStatus, phase: Phase, doing: str = "") -> Iterator[Observation]:
    """Judge what an agent believes; *doing* is what it does or waits for in its phase, as a sentence."""
    yield Observation(READY, phase is Phase.SERVING, f"{phase.value} {doing}".rstrip())
    yield from _of_membership(status.membership)
    yield from _of_ownership(status)
    yield _of_peers(status)
    yield _of_paths(status)
    troubled = [f"{drive.drive} {drive.why}" for drive in status.drives if drive.why]
    yield _of_some("drives_good", troubled, "Drives in trouble")
    unreadable = [
        f"{shard.shard} ({shard.unreadable_segments} segments)"
        for shard in status.shards
        if shard.unreadable_segments
    ]
    yield _of_some(
        "summaries_readable",
        unreadable,
        "Shards that lost blocks because flash that lists them can't be read",
    )
    full = [shard.shard for shard in status.shards if 0 < shard.blocks_max <= shard.blocks]
    yield _of_some("indexes_have_room", full, "Shards that list as many blocks as their index may")
    spent = [
        shard.shard
        for shard in status.shards
        if shard.years_left is not None and shard.budget_level_bytes < 0
    ]
    yield _of_some("write_budget_left", spent, "Shards that were written more than their budget allows")
    yield _of_memory(
        "cache_has_room",
        status.cache_used_bytes,
        status.cache_bytes,
        "the DRAM cache, and what was used least gives way",
    )
    yield _of_memory(
        "staging_has_room",
        status.staging_used_bytes,
        status.staging_bytes,
        "staging, and requests are declined for it",
    )


def _of_membership(membership: MembershipStatus) -> Iterator[Observation]:
    trouble = membership.trouble
    fails = "does not answer" if membership.silent_s else "answers, and not as it should"
    yield Observation(
        "membership_answers",
        not trouble,
        f"The membership store {fails}, and I work with the last map: {trouble}."
        if trouble
        else "The membership store has not failed since it was last asked.",
    )
    yield Observation(
        "map_current",
        not membership.map_trouble,
        f"My map may lack something, or be old: {membership.map_trouble}."
        if membership.map_trouble
        else "My map is whole, and follows every change.",
    )


def _of_ownership(status: AgentStatus) -> Iterator[Observation]:
    recovering = [f"{shard.shard} ({shard.recovered:.0%})" for shard in status.shards if shard.recovered < 1]
    yield _of_some(
        "shards_recovered", recovering, "Shards being recovered, which take no puts before they are"
    )
    fenced = [
        f"{shard.shard} ({shard.ownership.why_fenced})"
        for shard in status.shards
        if shard.ownership.is_fenced
    ]
    yield _of_some("shards_writable", fenced, "Shards that I own and may not write to")
    waiting = [
        f"{shard.shard} ({shard.ownership.withheld_segments} segments for {left_s:.0f} s more)"
        for shard in status.shards
        if (left_s := shard.ownership.retires_in_s) is not None
    ]
    yield _of_some("grants_retired", waiting, "Shards of which an earlier owner's writes may still land")


def _of_peers(status: AgentStatus) -> Observation:
    present = {agent for agent, _ in status.agents}
    held_off = [
        f"{peer.agent} ({peer.why})" for peer in status.peers if peer.is_held_off and peer.agent in present
    ]
    return _of_some("peers_reachable", held_off, "Agents that I ask for nothing for a while")


def _of_paths(status: AgentStatus) -> Observation:
    lost = [
        f"{each.enclosure} ({each.trouble or f'{live} of {len(each.paths)} paths are live'})"
        for each in status.paths
        if (live := sum(path.is_live for path in each.paths)) < len(each.paths) or each.trouble
    ]
    return _of_some("paths_live", lost, "Enclosures that I have lost paths to")


_FULL = 0.95
"""The share of memory from which it is called full: what comes in pieces never fills it to the last byte."""

_SHOWN = 4


def _of_some(name: str, bad: list[str], words: str) -> Observation:
    more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return Observation(name, not bad, f"{words}: {', '.join(bad[:_SHOWN]) or 'none'}{more}.")


def _of_memory(name: str, used_bytes: int, size_bytes: int, words: str) -> Observation:
    is_full = size_bytes > 0 and used_bytes >= _FULL * size_bytes
    taken = f"{used_bytes} of {size_bytes} bytes are taken"
    return Observation(name, not is_full, f"{taken} of {words}." if is_full else f"{taken}.")
