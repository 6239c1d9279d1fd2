"""Asking owners where blocks lie.

All live placement epochs are asked at once. Where several owners have a block, the one that the newest epoch
names is read from; and nobody waits for the word of an older one of what is found already.

The agent that had a shard before its owner is asked, too, and counts only where the owner can't say: one that
has read its whole shard knows better, and what it has not, it may have evicted since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.mover.enquiry import Enquiry, Told, heeded, release_pin
from ostraca_dpu_agent.mover.located import Located
from ostraca_dpu_agent.mover.routes import narrowed
from ostraca_fabric.outcome import Reason
from ostraca_fabric.tasks import Tasks
from ostraca_fabric.wire.messages import Release, Resolve, SessionEnded, ShardKeys, ShardRelease

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ostraca_dpu_agent.mover.routes import PartsByOwner, Routes
    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.chain import Span
    from ostraca_fabric.ids import AgentId, DriveId
    from ostraca_fabric.ports.drive import Drive
    from ostraca_fabric.ports.owners import Owners


class Locator:
    """Resolves keys with the owners of their shards, all owners at once."""

    def __init__(self, agent: AgentId, owners: Owners, drives: Mapping[DriveId, Drive]) -> None:
        """Ask for this *agent*, through *owners*. What lies on *drives* that are held off is not found."""
        self._agent = agent
        self._owners = owners
        self._drives = drives
        self._asking = Tasks("asking owners")
        self.found_earlier = 0
        """Blocks found only where an earlier placement epoch put them."""

    async def locate(
        self,
        routes: Routes,
        volume: ServedVolume,
        spans: Sequence[Span],
        keys: NDArray[np.uint8],
        *,
        wanted: NDArray[np.bool_],
        within_s: float,
        pin_s: float,
    ) -> Located:
        """Locate the *wanted* blocks of a request; an owner that does not answer leaves its blocks not found.

        What is found stays readable for *pin_s* counted from before this call. Call ``release`` when done
        reading.
        """
        return await self._located(routes, volume, spans, keys, wanted, Resolve(0, within_s, pin_s, ()))

    async def look_up(
        self,
        routes: Routes,
        volume: ServedVolume,
        spans: Sequence[Span],
        keys: NDArray[np.uint8],
        *,
        wanted: NDArray[np.bool_],
        within_s: float,
        pin_s: float,
    ) -> Located:
        """Find out which of the *wanted* blocks there are, and not where: as ``locate``, for less.

        With a *pin_s*, what is found can be found again for as long.
        """
        terms = Resolve(0, within_s, pin_s, (), promises=pin_s > 0, is_brief=True)
        return await self._located(routes, volume, spans, keys, wanted, terms)

    async def _located(
        self,
        routes: Routes,
        volume: ServedVolume,
        spans: Sequence[Span],
        keys: NDArray[np.uint8],
        wanted: NDArray[np.bool_],
        terms: Resolve,
    ) -> Located:
        located = Located.nothing(len(keys), is_brief=terms.is_brief)
        by_owner = routes.by_owner_of_all if routes.has_earlier else routes.by_owner
        parts, unowned = by_owner(volume.placement_secret, spans)
        if len(unowned):
            located.reasons[unowned] = Reason.NO_OWNER
        told = await self._asked(routes, narrowed(parts, wanted), keys, terms)
        if routes.has_earlier:
            told.sort(key=lambda each: each.part.age)
        counted = heeded(told) if routes.handed_over else told
        for each in told:
            taken = _take(located, each) if each in counted else 0
            if each.part.age:
                self.found_earlier += taken
            if not taken:
                release_pin(self._owners, each)
        return located

    async def find_earlier(
        self,
        routes: Routes,
        volume: ServedVolume,
        spans: Sequence[Span],
        keys: NDArray[np.uint8],
        *,
        wanted: NDArray[np.bool_],
        within_s: float,
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Say which of the *wanted* blocks can be got where an earlier placement epoch placed them.

        And which of them the agents know that had the shards of the current epoch before their owners: for
        who learns that an owner can't say. Those that do not answer within *within_s* are taken to have none.
        """
        is_found, was_found = np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.bool_)
        if not routes.has_earlier:
            return is_found, was_found
        parts, _ = routes.by_owner_of_all(volume.placement_secret, spans)
        earlier = {
            owner: some for owner, its in parts.items() if (some := [part for part in its if part.age])
        }
        terms = Resolve(0, within_s, 0.0, (), is_brief=True)
        for told in heeded(await self._asked(routes, narrowed(earlier, wanted), keys, terms)):
            is_current = told.part.epoch == routes.map.placement_epoch
            (was_found if is_current else is_found)[told.found] = True
        return is_found, was_found

    def release(self, located: Located) -> None:
        """Give the pins of a finished request back."""
        by_owner: dict[AgentId, list[ShardRelease]] = {}
        for owner, pin in located.pins:
            by_owner.setdefault(owner, []).append(pin)
        located.pins.clear()
        for owner, releases in by_owner.items():
            self._owners.tell(owner, Release(tuple(releases)))

    def session_ended(
        self, routes: Routes, volume: ServedVolume, spans: Sequence[Span], keys: NDArray[np.uint8]
    ) -> None:
        """Tell the owners of these blocks that whoever used them will not come back for them."""
        parts, _ = routes.by_owner(volume.placement_secret, spans)
        for owner, shard_parts in parts.items():
            named = (ShardKeys(part.shard, keys[part.positions].tobytes()) for part in shard_parts)
            self._owners.tell(owner, SessionEnded(tuple(named)))

    async def _asked(
        self, routes: Routes, parts: PartsByOwner, keys: NDArray[np.uint8], terms: Resolve
    ) -> list[Told]:
        enquiry = Enquiry(
            self._agent, self._owners, self._drives, self._asking, routes=routes, keys=keys, terms=terms
        )
        return await enquiry.put(parts)


def _take(located: Located, told: Told) -> int:
    """Note what an owner said that no newer placement epoch has; return how many blocks that is, of the
    newest epoch found or not: its pin is needed for them.
    """
    if told.reason is not Reason.NOT_FOUND:
        _explain(located, told)
    is_found, extents, at = told.is_found, told.extents, told.part.positions
    if is_found is None or told.is_held_off:
        return 0
    rows: slice | NDArray[np.intp] = slice(None)
    if told.part.age:
        rows = np.flatnonzero(is_found & ~located.is_found[at])
        at = at[rows]
        if not len(at):
            return 0
    located.is_found[at] = is_found[rows]
    if extents is not None:
        located.offsets[at] = extents.offsets[rows]
        located.lengths[at] = extents.lengths[rows]
        located.generations[at] = extents.generations[rows]
        located.tags[at] = extents.tags[rows]
    located.source[at] = len(located.sources)
    located.sources.append(told.source)
    if told.pin:
        located.pins.append((told.source.owner, ShardRelease(told.source.shard, (told.pin,))))
    return len(at)


def _explain(located: Located, told: Told) -> None:
    """Note why blocks may not be found, where nothing newer has said it."""
    at = told.part.positions
    if told.is_held_off and told.is_found is not None:
        at = at[told.is_found]
    located.reasons[at[located.reasons[at] == Reason.NOT_FOUND]] = told.reason
