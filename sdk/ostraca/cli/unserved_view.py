"""What nobody serves, as ``ostraca status`` shows it: of all that agents said, each shard once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca.cli.durations import duration_text
from ostraca_fabric.sentences import counted, named
from ostraca_fabric.unserved import UNOWNED_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ostraca.cli.status import FabricStatus


@dataclass(frozen=True, slots=True)
class Nobodys:
    """A shard that nobody serves."""

    shard: str
    unowned_s: float
    """For how long, as the agent says that has watched it longest."""

    reasons: tuple[tuple[str, str], ...]
    """(agent, why it does not serve it), of the agents that know."""

    @property
    def is_overdue(self) -> bool:
        """Whether somebody should have claimed it by now."""
        return self.unowned_s >= UNOWNED_S


def served_by_nobody(status: FabricStatus) -> tuple[Nobodys, ...]:
    """Return the shards that no agent serves, as far as any that answered names them."""
    served = {shard.shard for agent in status.agents for shard in agent.shards}
    found: dict[str, list[tuple[str, float, str]]] = {}
    for agent in status.agents:
        for shard in agent.unserved.shards:
            if shard.shard not in served:
                found.setdefault(shard.shard, []).append((agent.agent, shard.unowned_s, shard.why))
    return tuple(
        Nobodys(
            shard,
            max(seconds for _, seconds, _ in told),
            tuple((agent, why) for agent, _, why in told if why),
        )
        for shard, told in sorted(found.items())
    )


def unserved_sentences(status: FabricStatus) -> Iterator[str]:
    """Say which shards nobody serves and why, then which drives agents can't use beside those."""
    alike: dict[tuple[tuple[str, str], ...], list[Nobodys]] = {}
    for each in served_by_nobody(status):
        alike.setdefault(each.reasons, []).append(each)
    explained: set[tuple[str, str]] = set()
    for reasons, shards in alike.items():
        explained.update(reasons)
        longest = duration_text(max(each.unowned_s for each in shards))
        why = "; ".join(f"{agent}: {why}" for agent, why in reasons) or "no agent says why"
        which = named([each.shard for each in shards])
        have = "has" if len(shards) == 1 else "have"
        yield f"{which} {have} been served by nobody for {longest}, and blocks there are misses. {why}."
    for agent in status.agents:
        for drive in agent.unserved.drives:
            if (agent.agent, drive.why) not in explained:
                yield f"{agent.agent}: drive {drive.drive} can't be used: {drive.why}."


def silent_sentences(status: FabricStatus) -> Iterator[str]:
    """Say who does not answer, and what that agent owns."""
    owns = {owner: shards for agent in status.agents for owner, shards in agent.owners}
    for agent, where, _ in status.silent:
        shards = owns.get(agent, 0)
        what = f"; it owns {counted(shards, 'shard')}, whose blocks are misses meanwhile" if shards else ""
        yield f"{agent}: no answer from {where}{what}"
