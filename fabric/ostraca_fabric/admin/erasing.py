"""Erases a tenant's volumes: gives each its next incarnation, and waits until nobody serves the one before.

Every agent of the map says up to which ruling it serves nothing erased any more. One that is cut off from the
store is in no map, and may go on serving: but an erasable volume only for ``key_ttl_s`` after it was last
told what is erased. So an erasure is complete that long after it was written, and not sooner. It is counted
by the clock of whichever admin waits, from when that one first saw that it was written: an admin that takes
over begins to count anew.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from ostraca_fabric.admin.judging import Again, Done
from ostraca_fabric.admin.taking import Taken
from ostraca_fabric.errors import OstracaError
from ostraca_fabric.volume import check_erasable

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_fabric.admin.hands import Hands
    from ostraca_fabric.admin.model import Operation, Step
    from ostraca_fabric.ids import AgentId
    from ostraca_fabric.ports.membership import Membership
    from ostraca_fabric.volume import VolumeRecord

_LOOK_EVERY_S = 2.0


class Erasing:
    """One admin's."""

    def __init__(
        self,
        membership: Membership,
        hands: Hands,
        *,
        clock: Callable[[], float],
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        """Ask agents by *hands*; *clock* is monotonic, in seconds."""
        self._membership = membership
        self._hands = hands
        self._clock = clock
        self._look_every_s = look_every_s
        self._written_s: dict[str, float] = {}
        """By operation, when this admin first knew that all was written."""

    async def take(self, operation: Operation, step: Step) -> Taken:
        """Do a step as far as it goes. Raises OstracaError where it has failed, MembershipError where the
        store is away.
        """
        if step.name == "next incarnation":
            return Taken(await self._written(operation, step))
        self._written_s.setdefault(operation.id, self._clock())
        if step.name == "purged":
            return Taken(await self._purged(operation))
        verdict = self._outlived(operation)
        if isinstance(verdict, Done):
            self._written_s.pop(operation.id)
        return Taken(verdict)

    async def _written(self, operation: Operation, step: Step) -> Again | Done:
        """Erase what was there when this was first looked at, and nothing twice."""
        volumes = {volume.name: volume for volume in await self._volumes(operation)}
        if "seen" not in step.detail:
            for volume in volumes.values():
                check_erasable(volume)
            seen = {name: volume.incarnation for name, volume in volumes.items()}
            return Again(f"{_count(len(seen))} to erase", 0.0, detail={"seen": seen})
        seen = step.detail["seen"]
        revision = await self._membership.hear_rulings()
        for name, incarnation in seen.items():
            if name in volumes and volumes[name].incarnation == incarnation:
                revision = await self._membership.erase_volume(volumes[name])
        return Done(f"{_count(len(seen))} begun anew", {"seen": seen, "revision": revision})

    async def _purged(self, operation: Operation) -> Again | Done:
        """Wait for every agent that answers, and for others as long as they may serve it."""
        revision = int(operation.steps[0].detail["revision"])
        agents = sorted(self._membership.map.agents)
        purged = await asyncio.gather(*(self._purged_of(agent) for agent in agents))
        left = [agent for agent, upto in zip(agents, purged, strict=True) if upto is None or upto < revision]
        if not left:
            return Done(f"each of {len(agents)} agents serves nothing of it")
        if (
            self._left_s(operation) <= 0
            and None in purged
            and not any(upto is not None and upto < revision for upto in purged)
        ):
            return Done(f"{', '.join(left)} did not answer, and may serve nothing of it any more by itself")
        return Again(
            f"{len(agents) - len(left)} of {len(agents)} agents serve nothing of it, {', '.join(left)} may",
            self._look_every_s,
            ends_in_s=max(0.0, self._left_s(operation)),
            detail={"waits_for": left},
        )

    def _outlived(self, operation: Operation) -> Again | Done:
        left_s = self._left_s(operation)
        if left_s <= 0:
            return Done("nothing that was put before can be got from anybody")
        return Again(
            "no agent of the fabric serves it; one that is cut off from the store may yet",
            min(left_s, self._look_every_s),
            ends_in_s=left_s,
        )

    def _left_s(self, operation: Operation) -> float:
        live = self._membership.rulings.live
        return self._written_s[operation.id] + live.key_ttl_longest_s - self._clock()

    async def _purged_of(self, agent: AgentId) -> int | None:
        try:
            return (await self._hands.status(agent)).purged
        except (OstracaError, TimeoutError):
            return None

    async def _volumes(self, operation: Operation) -> list[VolumeRecord]:
        await self._membership.hear_rulings()
        async with aclosing(self._membership.volume_changes()) as changes:  # type: ignore[type-var]  # a generator
            volumes = await anext(changes)
        return [
            volume
            for volume in volumes
            if volume.tenant == operation.tenant and operation.volume in ("", volume.name)
        ]


def _count(volumes: int) -> str:
    return "1 volume" if volumes == 1 else f"{volumes} volumes"
