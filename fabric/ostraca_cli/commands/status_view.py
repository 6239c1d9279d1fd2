"""Views of a fabric's status for terminals.

Needs rich, which omits colour on outputs without colour.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import chain

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from ostraca_cli.commands.agent_query import FabricStatus
from ostraca_cli.commands.unavailable_view import silent_sentences, unserved_sentences, unserved_shards
from ostraca_cli.terminal.tables import folded, right, table
from ostraca_cli.terminal.units import duration_text, size_text
from ostraca_fabric.policies.endurance import YEARS_MAX
from ostraca_fabric.runtime.sentences import counted
from ostraca_fabric.telemetry.requests import LATENCY_BOUNDS_S, outcome_text, unhit_sentence
from ostraca_fabric.telemetry.status import AgentStatus, PeerStatus, ShardStatus

_UNRESERVED = ("not registered", "reserved by another holder")
"""States of NVMe reservations in which a drive may refuse writes of the host."""

_INITIATORS = {
    "files": "files",
    "kernel": "the kernel's NVMe initiator",
    "userspace": "the user-space NVMe initiator, slow",
}
"""Names of initiators in sentences."""

_STYLES = {"good": "yellow", "suspect": "yellow", "failed": "red"}
"""Style of a drive's remark, by the drive's condition."""


def fabric_view(status: FabricStatus) -> RenderableType:
    """Return the full view: agents, traffic, shards, and a sentence of each agent."""
    agents = status.agents
    sentences = [Text(f"{agent.agent}: {agent.sentence}") for agent in agents]
    sentences += [Text(f"{agent.agent}: {_index_text(agent)}") for agent in agents if agent.shards]
    sentences += [Text(f"{agent.agent}: {_initiator_text(agent)}") for agent in agents if _initiators(agent)]
    sentences += [
        Text(f"{agent.agent}: flash I/O by {agent.flash_io}.") for agent in agents if agent.flash_io
    ]
    sentences += [
        Text(f"{agent.agent}: drive {drive.drive} {drive.why}.", style=_STYLES[drive.condition])
        for agent in agents
        for drive in agent.drives
        if drive.why
    ]
    sentences += [
        Text(sentence, style="yellow")
        for agent in agents
        for sentence in (*_remarks(agent), *_ruling_sentences(agent), *_ownership_sentences(agent))
    ]
    sentences += [
        Text(f"{agent.agent}: {sentence}", style="yellow")
        for agent in agents
        for sentence in _unhit_sentences(agent)
    ]
    sentences += [Text(sentence, style="red") for sentence in unserved_sentences(status)]
    sentences += [Text(sentence, style="red") for sentence in silent_sentences(status)]
    tables = (_agents(agents), _gets(agents), _puts(agents), _prefetches(agents), _operations(agents))
    peers = [_peers(agents)] if any(agent.peers for agent in agents) else []
    tenants = [_tenants(agents)] if any(_are_several(agent) for agent in agents) else []
    return Group(
        *tables, *tenants, *peers, _shards(status), _ownership(agents), _endurance(agents), *sentences
    )


def _remarks(agent: AgentStatus) -> Iterator[str]:
    """Name what is lost, withheld or full at an agent and its shards."""
    remarks = (
        (
            agent.quarantined_bytes,
            (
                f"{agent.agent}: {size_text(agent.quarantined_bytes)} of staging are in quarantine, under "
                "transfers that are not known to have ended."
            ),
        ),
        (
            agent.quarantined_cached_blocks,
            (
                f"{agent.agent}: {counted(agent.quarantined_cached_blocks, 'block')} of the DRAM cache, "
                f"{size_text(agent.quarantined_cached_bytes)} in all, under transfers that are not known to "
                "have ended: kept until they have."
            ),
        ),
        (
            agent.lost_log_lines,
            (
                f"{agent.agent}: {counted(agent.lost_log_lines, 'log line')} of its process were dropped: "
                "read what it writes to standard error, and see that there is room for it."
            ),
        ),
        *(
            (
                shard.beyond_limit_blocks,
                (
                    f"{shard.shard}: its index may list {counted(shard.blocks_max, 'block')}, "
                    f"{shard.beyond_limit_blocks} fewer than lay on flash when this agent began to own it: "
                    "the oldest are misses."
                ),
            )
            for shard in agent.shards
        ),
        *(
            (
                shard.unreadable_segments,
                (
                    f"{shard.shard}: the summaries of {counted(shard.unreadable_segments, 'segment')} could "
                    "not be read in whole when this agent began to own it: what they list may be misses, and "
                    "its drive may be about to fail."
                ),
            )
            for shard in agent.shards
        ),
        *(
            (
                shard.volumes_left_out,
                (
                    f"{shard.shard}: {counted(shard.volumes_left_out, 'volume')} found no room in its volume "
                    "records: were the fabric rebuilt from its drives, what is left out would have to be "
                    "made again."
                ),
            )
            for shard in agent.shards
        ),
    )
    return (text for count, text in remarks if count)


def _unhit_sentences(agent: AgentStatus) -> Iterator[str]:
    """Name the volumes without a hit so far."""
    for each in agent.unhit.volumes:
        yield unhit_sentence(each.volume, put_blocks=each.put_blocks, asked_blocks=each.asked_blocks)
    more = agent.unhit.count - len(agent.unhit.volumes)
    if more > 0:
        yield f"{counted(more, 'volume')} more have puts and no hit."


def _ruling_sentences(agent: AgentStatus) -> Iterator[str]:
    """Describe the overrides set by operators."""
    if agent.overrides.settings:
        settings = ", ".join(f"{name} = {value}" for name, value in agent.overrides.settings.items())
        yield f"{agent.agent}: operators have set {settings}."
    for volume, switch in agent.overrides.switched.items():
        yield f"{agent.agent}: the switch of volume {volume} says {switch}."


def _ownership_sentences(agent: AgentStatus) -> Iterator[str]:
    """Describe obstacles to serving puts, or to requests to other agents."""
    membership = agent.membership
    if membership.silent_s:
        silent = duration_text(membership.silent_s)
        yield f"{agent.agent}: the membership store has not answered for {silent}: {membership.trouble}."
    elif membership.trouble:
        yield f"{agent.agent}: the membership store answers with errors: {membership.trouble}."
    if membership.map_trouble and membership.map_trouble != membership.trouble:
        yield f"{agent.agent}: its map may lack something, or be old: {membership.map_trouble}."
    for shard in agent.shards:
        if shard.ownership.is_fenced:
            yield f"{shard.shard}: {agent.agent} writes nothing to it, as {shard.ownership.why_fenced}."
        if shard.ownership.why_no_space:
            why = shard.ownership.why_no_space
            lacks = f"{agent.agent} has no space to hand out, and puts wait or are declined"
            yield f"{shard.shard}: {lacks}, as {why}."
    for peer in agent.peers:
        if peer.is_refused:
            yield f"{agent.agent}: agent {peer.agent} refuses it: {peer.why}."
        elif peer.is_held_off:
            yield f"{agent.agent}: agent {peer.agent} is held off: {peer.why}."
    yield from _path_sentences(agent)


def _path_sentences(agent: AgentStatus) -> Iterator[str]:
    """Describe lost paths from an agent's host to enclosures."""
    for enclosure in agent.paths:
        if enclosure.trouble:
            yield f"{agent.agent}: enclosure {enclosure.enclosure} can't be reached: {enclosure.trouble}."
        if enclosure.reservations in _UNRESERVED:
            where = f"{agent.agent}: drives of enclosure {enclosure.enclosure}"
            yield f"{where} may refuse what this host writes: {enclosure.reservations}."
        for path in enclosure.paths:
            if not path.is_live and not enclosure.trouble:
                why = f": {path.detail}" if path.detail else ""
                yield f"{agent.agent}: the path to {enclosure.enclosure} at {path.controller} is lost{why}."


def _initiators(agent: AgentStatus) -> Counter[str]:
    """Count enclosures by the host side of their paths; agents of the release before name none."""
    return Counter(paths.initiator for paths in agent.paths if paths.initiator)


def _initiator_text(agent: AgentStatus) -> str:
    """Name the host side of the paths to enclosures."""
    found = sorted(_initiators(agent).items())
    ways = (f"{counted(count, 'enclosure')} by {_INITIATORS.get(each, each)}" for each, count in found)
    return f"reaches {', '.join(ways)}."


def _index_text(agent: AgentStatus) -> str:
    """Return the maximum memory of all indexes.

    The maximum grows with the number of blocks, not with their size.
    """
    count = len(agent.shards)
    most = size_text(sum(shard.index_bytes for shard in agent.shards))
    subject = "the index of its shard takes" if count == 1 else f"the indexes of its {count} shards take"
    return f"{subject} at most {most} of memory."


def _agents(agents: tuple[AgentStatus, ...]) -> Table:
    rows = (
        (
            *(agent.agent, duration_text(agent.uptime_s), ", ".join(agent.transports), str(agent.workers)),
            _fill(agent.staging_used_bytes, agent.staging_bytes),
            _fill(agent.cache_used_bytes, agent.cache_bytes),
        )
        for agent in agents
    )
    return table(rows, "agent", "up", "moves by", *right("workers", "staging", "DRAM cache"), title="Agents")


def _gets(agents: tuple[AgentStatus, ...]) -> Table:
    names = ("hits", "share", "from DRAM", "direct", "misses", "late", "declined", "damaged", "bytes")
    rows = (
        (
            agent.agent,
            str(count.get_hits),
            _share(count.get_hits, count.get_hits + count.get_misses),
            str(count.get_hits_from_cache + count.get_hits_from_staging),
            *map(str, (count.get_hits_direct, count.get_misses, count.get_late, count.get_declined)),
            *(str(count.damaged), size_text(count.get_bytes)),
        )
        for agent in agents
        for count in (agent.counters,)
    )
    return table(rows, "agent", *right(*names), title="Blocks got since start")


def _puts(agents: tuple[AgentStatus, ...]) -> Table:
    rows = (
        (
            *(agent.agent, str(count.put_committed), str(count.put_exists), str(count.put_declined)),
            size_text(count.put_bytes),
        )
        for agent in agents
        for count in (agent.counters,)
    )
    columns = right("committed", "existed", "declined", "bytes")
    return table(rows, "agent", *columns, title="Blocks put since start")


def _prefetches(agents: tuple[AgentStatus, ...]) -> Table:
    names = ("brought", "got since", "dropped unread", "bytes brought", "got", "dropped")
    rows = (
        (
            *(agent.agent, str(count.blocks), str(count.useful_blocks), str(count.useless_blocks)),
            *map(size_text, (count.bytes, count.useful_bytes, count.useless_bytes)),
        )
        for agent in agents
        for count in (agent.counters.prefetched,)
    )
    return table(rows, "agent", *right(*names), title="Blocks prefetched since start")


def _operations(agents: tuple[AgentStatus, ...]) -> Table:
    rows = (
        (
            *(agent.agent, tally.operation, str(tally.requests)),
            *(latency_text(tally.latency_s(share)) for share in (0.5, 0.99)),
            outcome_text(tally.blocks),
        )
        for agent in agents
        for tally in agent.operations
        if tally.requests
    )
    return table(
        rows,
        "agent",
        "operation",
        *right("count", "half within", "99 % within"),
        folded("blocks, and why"),
        title="Requests since start",
    )


def latency_text(seconds: float) -> str:
    """Write the bound of a latency bucket for people: ``0.05 ms``, ``20 ms``, ``5 s``."""
    if math.isinf(seconds):
        return f"over {LATENCY_BOUNDS_S[-1]:g} s"
    return f"{seconds:g} s" if seconds >= 1 else f"{1000 * seconds:g} ms"


def _shards(status: FabricStatus) -> Table:
    served = (
        (
            *(shard.shard, agent.agent, str(shard.owner_epoch), str(shard.blocks)),
            *(_fill(shard.used_bytes, shard.size_bytes), str(shard.evicted_blocks), _health(shard)),
        )
        for agent in status.agents
        for shard in agent.shards
    )
    unserved = (
        (each.shard, "none", *["–"] * 4, "unserved" if each.is_overdue else "to be claimed")
        for each in unserved_shards(status)
    )
    return table(
        chain(served, unserved),
        folded("shard"),
        "owner",
        *right("epoch", "blocks", "fill", "evicted"),
        "health",
        title="Shards",
    )


def _ownership(agents: tuple[AgentStatus, ...]) -> Table:
    rows = (
        (
            *(shard.shard, _may_write_text(shard)),
            *map(str, (own.granted_segments, own.granted_ahead_segments, own.withheld_segments)),
            "–" if own.retires_in_s is None else duration_text(own.retires_in_s),
            str(own.adopted_blocks),
        )
        for agent in agents
        for shard in agent.shards
        for own in (shard.ownership,)
    )
    columns = right("granted", "in line", "withheld", "for", "adopted")
    may_write = Column("may write", justify="right", no_wrap=True)
    return table(rows, folded("shard"), may_write, *columns, title="What owners may write")


def _may_write_text(shard: ShardStatus) -> str:
    if shard.recovered < 1:
        return "not yet"
    if shard.ownership.is_fenced:
        return "no more" if shard.ownership.is_superseded else "not now"
    if shard.ownership.why_no_space:
        left_s = shard.ownership.space_in_s
        return "no space" if left_s is None else f"no space for {left_s:.0f} s"
    left_s = shard.ownership.may_write_for_s
    return "ever" if left_s is None else f"{left_s:.1f} s"


def _are_several(agent: AgentStatus) -> bool:
    """Return whether more than one tenant is connected."""
    return sum(tenant.connections > 0 for tenant in agent.tenants) > 1


def _tenants(agents: tuple[AgentStatus, ...]) -> Table:
    rows = (
        (
            *(agent.agent, each.tenant, str(each.connections), str(each.requests)),
            *(size_text(each.staging_bytes), size_text(each.cache_bytes)),
        )
        for agent in filter(_are_several, agents)
        for each in agent.tenants
    )
    columns = right("connections", "requests", "staging", "DRAM cache")
    return table(rows, "agent", "tenant", *columns, title="Tenants")


def _peers(agents: tuple[AgentStatus, ...]) -> Table:
    rows = (
        (
            *(agent.agent, peer.agent, _peer_text(peer)),
            *map(str, (asks.answered, asks.refused, asks.late, asks.unreachable, peer.held_off)),
        )
        for agent in agents
        for peer in agent.peers
        for asks in (peer.asks,)
    )
    return table(
        rows,
        "agent",
        "to",
        "is",
        *right("answered", "refused", "late", "unreached", "held off"),
        title="Requests to other agents since start",
    )


def _peer_text(peer: PeerStatus) -> str:
    if peer.is_refused:
        return "refusing"
    if peer.is_held_off:
        return "held off"
    return "connected" if peer.is_connected else "not connected"


def _endurance(agents: tuple[AgentStatus, ...]) -> Table:
    rows = (_endurance_row(shard) for agent in agents for shard in agent.shards)
    columns = right("written", "a day", "budget a day", "left of it", "years left")
    return table(rows, folded("shard"), *columns, title="Flash written since start")


def _endurance_row(shard: ShardStatus) -> tuple[str, ...]:
    written = (shard.shard, size_text(shard.written_bytes), size_text(int(shard.written_bytes_per_day)))
    if shard.years_left is None:
        return (*written, "none", "–", "–")
    return (
        *written,
        size_text(int(shard.budget_bytes_per_day)),
        size_text(max(0, int(shard.budget_level_bytes))),
        f"{shard.years_left:.1f}" if shard.years_left < YEARS_MAX else f"over {YEARS_MAX:.0f}",
    )


def _health(shard: ShardStatus) -> str:
    if shard.recovered < 1:
        return f"recovering, {shard.recovered:.0%}"
    if shard.is_failing:
        return "failing"
    if shard.ownership.is_fenced:
        return "fenced"
    return "no space" if shard.ownership.why_no_space else "good"


def _fill(used_bytes: int, size_bytes: int) -> str:
    return f"{_share(used_bytes, size_bytes)} of {size_text(size_bytes)}" if size_bytes else "off"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "–"
