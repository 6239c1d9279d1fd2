"""Unavailable shards in ``ostraca status``, each listed once for all agents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ostraca_cli.commands.agent_query import FabricStatus
from ostraca_cli.terminal.units import duration_text
from ostraca_fabric.runtime.sentences import counted, named
from ostraca_fabric.telemetry.unavailable import UNOWNED_S


@dataclass(frozen=True, slots=True)
class ShardOutage:
    """Shard without an agent that serves the shard."""

    shard: str
    unowned_s: float
    """Longest time without an owner seen by any agent."""

    reasons: tuple[tuple[str, str], ...]
    """(agent, reason for not serving the shard), for agents with a reason."""

    @property
    def is_overdue(self) -> bool:
        """Return whether an agent should have claimed the shard by now."""
        return self.unowned_s >= UNOWNED_S


def unserved_shards(status: FabricStatus) -> tuple[ShardOutage, ...]:
    """Return the unserved shards named by the agents that responded."""
    served = {shard.shard for agent in status.agents for shard in agent.shards}
    found: dict[str, list[tuple[str, float, str]]] = {}
    for agent in status.agents:
        for shard in agent.unserved.shards:
            if shard.shard not in served:
                found.setdefault(shard.shard, []).append((agent.agent, shard.unowned_s, shard.why))
    return tuple(
        ShardOutage(
            shard,
            max(seconds for _, seconds, _ in reports),
            tuple((agent, why) for agent, _, why in reports if why),
        )
        for shard, reports in sorted(found.items())
    )


def unserved_sentences(status: FabricStatus) -> Iterator[str]:
    """Name unserved shards with reasons, then other unusable drives."""
    alike: dict[tuple[tuple[str, str], ...], list[ShardOutage]] = {}
    for each in unserved_shards(status):
        alike.setdefault(each.reasons, []).append(each)
    explained: set[tuple[str, str]] = set()
    for reasons, shards in alike.items():
        explained.update(reasons)
        longest = duration_text(max(each.unowned_s for each in shards))
        why = "; ".join(f"{agent}: {why}" for agent, why in reasons) or "no agent reports a reason"
        which = named([each.shard for each in shards])
        have = "has" if len(shards) == 1 else "have"
        yield f"{which} {have} been unserved for {longest}, and blocks there are misses. {why}."
    for agent in status.agents:
        for drive in agent.unserved.drives:
            if (agent.agent, drive.why) not in explained:
                yield f"{agent.agent}: drive {drive.drive} is unusable: {drive.why}."


def silent_sentences(status: FabricStatus) -> Iterator[str]:
    """Name the silent agents, the reasons, and the number of shards of each."""
    owns = {owner: shards for agent in status.agents for owner, shards in agent.owners}
    for agent, where, why in status.silent:
        shards = owns.get(agent, 0)
        owned = f"; owner of {counted(shards, 'shard')}" if shards else ""
        yield f"{agent}: no answer from {where}: {why}{owned}"
