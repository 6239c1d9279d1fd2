"""Asking owners where blocks lie.

All live placement epochs are asked at once. Where several owners have a block, the one that the newest epoch
names is read from; and nobody waits for the word of an older one of what is found already.

The agent that had a shard before its owner is asked, too, and counts only where the owner can't say: one that
has read its whole shard knows better, and what it has not, it may have evicted since.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ostraca_dpu_agent.mover.located import Located, Source
from ostraca_dpu_agent.mover.routes import narrowed
from ostraca_fabric.errors import ConnectError, MalformedError
from ostraca_fabric.ids import AgentId
from ostraca_fabric.outcome import Reason
from ostraca_fabric.tasks import Tasks
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import (
    Release,
    Resolve,
    Resolved,
    SessionEnded,
    ShardKeys,
    ShardRelease,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ostraca_dpu_agent.mover.routes import PartsByOwner, Routes, ShardPart
    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.chain import Span
    from ostraca_fabric.ids import DriveId
    from ostraca_fabric.ports.drive import Drive
    from ostraca_fabric.ports.owners import Owners
    from ostraca_fabric.wire.messages import ShardExtents


log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Extents:
    """Columns of an owner's answer: a value for each block asked for, zeros where it is not found."""

    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    generations: NDArray[np.uint64]
    tags: NDArray[np.uint8]

    @classmethod
    def of(cls, said: ShardExtents, count: int) -> _Extents:
        """Take an answer apart; raises MalformedError."""
        return cls(
            columns.u64(said.offsets, count),
            columns.u32(said.lengths, count),
            columns.u64(said.generations, count),
            columns.rows16(said.tags, count),
        )


@dataclass(slots=True, eq=False)
class _Told:
    """What an owner said of one part."""

    part: ShardPart
    source: Source
    reason: Reason
    """Why blocks are not found, or, of a drive that is held off, may not be read."""

    pin: int = 0
    is_found: NDArray[np.bool_] | None = None
    """Of each block; None where the owner said nothing of use."""

    extents: _Extents | None = None
    """None where only that was asked."""

    is_held_off: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the owner knows all that there is in its shard."""
        return self.is_found is not None and self.reason is Reason.NOT_FOUND

    @property
    def found(self) -> NDArray[np.intp]:
        """Positions of the blocks that can be read."""
        positions = self.part.positions
        return positions[:0] if self.is_found is None or self.is_held_off else positions[self.is_found]


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
        told = await self._ask_all(routes, narrowed(parts, wanted), keys, terms)
        if routes.has_earlier:
            told.sort(key=lambda each: each.part.age)
        heeded = _heeded(told) if routes.handed_over else told
        for each in told:
            taken = _take(located, each) if each in heeded else 0
            if each.part.age:
                self.found_earlier += taken
            if not taken:
                self._release_pin(each)
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
        for told in _heeded(await self._ask_all(routes, narrowed(earlier, wanted), keys, terms)):
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

    async def _ask_all(
        self, routes: Routes, parts: PartsByOwner, keys: NDArray[np.uint8], terms: Resolve
    ) -> list[_Told]:
        """Ask every owner; return what they said, or enough of it that more would change nothing."""
        if len(parts) == 1:  # a task for it would cost more than a look-up
            ((owner, its),) = parts.items()
            return await self._ask(routes, owner, its, keys, terms)
        asking = {
            self._asking.spawn(self._ask(routes, owner, its, keys, terms)): its
            for owner, its in parts.items()
            if owner != self._agent
        }
        waiting = set(asking)
        told: list[_Told] = []
        try:
            if self._agent in parts:
                await asyncio.sleep(0)  # so that others are asked, and work while this agent answers itself
                told += await self._ask(routes, self._agent, parts[self._agent], keys, terms)
            while waiting and not _is_enough(
                told, [part for task in waiting for part in asking[task]], len(keys)
            ):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                told.extend(itertools.chain.from_iterable(task.result() for task in done))
        finally:
            for task in waiting:
                task.add_done_callback(self._release_late)
        return told

    def _release_late(self, asking: asyncio.Task[list[_Told]]) -> None:
        """Give back what was pinned for somebody who did not wait for it."""
        if not asking.cancelled() and asking.exception() is None:
            for told in asking.result():
                self._release_pin(told)

    def _release_pin(self, told: _Told) -> None:
        if told.pin:
            self._owners.tell(told.source.owner, Release((ShardRelease(told.source.shard, (told.pin,)),)))

    async def _ask(
        self,
        routes: Routes,
        owner: AgentId,
        parts: list[ShardPart],
        keys: NDArray[np.uint8],
        terms: Resolve,
        *,
        is_told: bool = False,
    ) -> list[_Told]:
        """Ask one agent, and whom it names as the owner instead, unless somebody named this one already."""
        until_s = _now_s() + terms.deadline_s
        shards = tuple(
            ShardKeys(part.shard, keys.take(part.positions, 0).tobytes(), part.epoch) for part in parts
        )
        try:
            answer = await self._owners.ask(owner, msgspec.structs.replace(terms, shards=shards))
        except (TimeoutError, ConnectError):
            answer = None
        known = answer.shards if isinstance(answer, Resolved) else ()
        left_s = until_s - _now_s()
        told: list[_Told] = []
        elsewhere: dict[AgentId, list[ShardPart]] = {}
        for number, part in enumerate(parts):
            said = known[number] if number < len(known) else None
            named = "" if said is None or said.is_owner or is_told or left_s <= 0 else said.known_owner
            if named in ("", owner):
                source = Source(owner, part.shard, *routes.place(part.shard))
                told.append(self._told(part, source, said, is_brief=terms.is_brief))
            else:
                elsewhere.setdefault(AgentId(named), []).append(part)
        if elsewhere:
            again = msgspec.structs.replace(terms, deadline_s=left_s)
            asked = (
                self._ask(routes, other, its, keys, again, is_told=True) for other, its in elsewhere.items()
            )
            told.extend(itertools.chain.from_iterable(await asyncio.gather(*asked)))
        return told

    def _told(self, part: ShardPart, source: Source, said: ShardExtents | None, *, is_brief: bool) -> _Told:
        """Judge an answer."""
        if said is None or not said.is_owner:
            return _Told(part, source, Reason.NO_OWNER)
        count = len(part.positions)
        try:
            is_found = columns.u8(said.found, count) != 0
            extents = None if is_brief else _Extents.of(said, count)
        except MalformedError:
            log.exception("Owner %s gave extents that do not fit its request", source.owner)
            return _Told(part, source, Reason.NO_OWNER, said.pin)
        drive = self._drives.get(source.drive)
        if drive is not None and drive.refuses_reads:
            return _Told(part, source, Reason.DRIVE_SUSPECT, said.pin, is_found, extents, is_held_off=True)
        reason = Reason.RECOVERING if said.is_recovering else Reason.NOT_FOUND
        return _Told(part, source, reason, said.pin, is_found, extents)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _is_enough(told: list[_Told], left: list[ShardPart], blocks: int) -> bool:
    """Whether word of what is *left* would change nothing, of a request of so many blocks: it is all older,
    and found already.
    """
    if not all(part.age for part in left):
        return False
    is_found = np.zeros(blocks, np.bool_)
    for each in _heeded(told):
        is_found[each.found] = True
    return all(is_found[part.positions].all() for part in left)


def _heeded(told: list[_Told]) -> list[_Told]:
    """Leave out what agents say of shards that they had before, where the owner knows all of it."""
    known = {each.part.shard for each in told if each.is_whole and not each.part.is_of_before}
    return [each for each in told if not each.part.is_of_before or each.part.shard not in known]


def _take(located: Located, told: _Told) -> int:
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


def _explain(located: Located, told: _Told) -> None:
    """Note why blocks may not be found, where nothing newer has said it."""
    at = told.part.positions
    if told.is_held_off and told.is_found is not None:
        at = at[told.is_found]
    located.reasons[at[located.reasons[at] == Reason.NOT_FOUND]] = told.reason
