"""What conditions an agent is in, judged from what it says of itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from ostraca_fabric.conditions import READY, Observation
from ostraca_fabric.sentences import counted, named
from ostraca_fabric.status import AgentStatus, MembershipStatus, OwnershipStatus
from ostraca_fabric.unserved import UNOWNED_S, Unserved


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
    troubled += [f"{drive.drive} can't be used ({drive.why})" for drive in status.unserved.drives]
    yield _of_some("drives_good", troubled, "Drives in trouble")
    unreadable = [
        f"{shard.shard} ({counted(shard.unreadable_segments, 'segment')})"
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
    has_map = membership.has_map
    meanwhile = "I work with the last map" if has_map else "I have no map to work with"
    yield Observation(
        "membership_answers",
        not trouble,
        f"The membership store {fails}, and {meanwhile}: {trouble}."
        if trouble
        else "The membership store has not failed since it was last asked.",
    )
    if not has_map:
        sentence = "I have read no map yet, and serve nothing."
    elif membership.map_trouble:
        sentence = f"My map may lack something, or be old: {membership.map_trouble}."
    else:
        sentence = "My map is whole, and follows every change."
    yield Observation("map_current", has_map and not membership.map_trouble, sentence)


def _of_ownership(status: AgentStatus) -> Iterator[Observation]:
    yield _of_unserved(status.unserved)
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
    yield _of_space(status)
    waiting = [
        f"{shard.shard} ({counted(shard.ownership.withheld_segments, 'segment')} for {left_s:.0f} s more)"
        for shard in status.shards
        if (left_s := shard.ownership.retires_in_s) is not None
    ]
    yield _of_some("grants_retired", waiting, "Shards of which an earlier owner's writes may still land")


def _of_unserved(found: Unserved) -> Observation:
    count = counted(found.shard_count, "shard")
    told = [
        f"{shard.shard} (for {shard.unowned_s:.0f} s; {shard.why or 'I leave it to another agent'})"
        for shard in found.shards
    ]
    is_true = found.longest_s < UNOWNED_S
    sentence = (
        f"No shard of the fabric has been without an owner for {UNOWNED_S:.0f} s."
        if is_true
        else f"Nobody serves {count} of the fabric, so that blocks there are misses and puts are declined "
        f"(NO_OWNER): {named(told, found.shard_count)}."
    )
    return Observation("shards_served", is_true, sentence)


def _of_space(status: AgentStatus) -> Observation:
    lacking = [shard for shard in status.shards if shard.ownership.why_no_space]
    told = named([f"{shard.shard} ({_lack(shard.ownership)})" for shard in lacking])
    sentence = (
        f"{len(lacking)} of {counted(len(status.shards), 'shard')} that I own can hand out nothing, and "
        f"puts of new blocks there are declined (NO_SPACE): {told}. Gets go on, and it passes by itself; "
        "where it comes often, give shards more segments: larger ones, or smaller segments."
        if lacking
        else "Every shard that I own and may write to has space to hand out."
    )
    return Observation("shards_have_space", not lacking, sentence)


def _lack(ownership: OwnershipStatus) -> str:
    left_s = ownership.space_in_s
    return ownership.why_no_space + ("" if left_s is None else f", for {left_s:.0f} s more at most")


def _of_peers(status: AgentStatus) -> Observation:
    present = {agent for agent, _ in status.agents}
    peers = [peer for peer in status.peers if peer.agent in present]
    refusing = [f"{peer.agent} ({peer.why})" for peer in peers if peer.is_refused]
    held_off = [f"{peer.agent} ({peer.why})" for peer in peers if peer.is_held_off and not peer.is_refused]
    if refusing:
        sentence = (
            f"Agents that refuse me: {named(refusing)}. Give all agents of a fabric the same file of tokens, "
            "or certificates of the same CA; until then one of us owns shards that the other can't reach."
        )
        return Observation("peers_reachable", is_true=False, sentence=sentence)
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


def _of_some(name: str, bad: list[str], words: str) -> Observation:
    return Observation(name, not bad, f"{words}: {named(bad)}.")


def _of_memory(name: str, used_bytes: int, size_bytes: int, words: str) -> Observation:
    is_full = size_bytes > 0 and used_bytes >= _FULL * size_bytes
    taken = f"{used_bytes} of {size_bytes} bytes are taken"
    return Observation(name, not is_full, f"{taken} of {words}." if is_full else f"{taken}.")
