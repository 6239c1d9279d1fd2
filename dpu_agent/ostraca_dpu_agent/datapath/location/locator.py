"""Location of blocks through shard owners.

All live placement epochs are asked at once: other agents before this agent answers itself, so that all
work in parallel. If several owners have a block, the block is read from the owner under the newest epoch.
Answers for older epochs of blocks already found are not awaited.

The previous owner of a shard is asked too, but counts only while the owner can't tell. An owner that has
read its whole shard is better informed, and may have evicted blocks since.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.location.routing import (
    BlockLocations,
    BlockSource,
    GroupedBlocks,
    PartsByOwner,
    Pins,
    Routes,
    ShardPart,
    restrict,
)
from ostraca_dpu_agent.volumes import ServedVolume
from ostraca_fabric.errors import ConnectError, MalformedError
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.extent import Extents
from ostraca_fabric.model.ids import AgentId, DriveId, ShardId
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.ports.owners import LocalShards, Owners, PendingAnswer, ShardAnswer
from ostraca_fabric.runtime.tasks import Tasks, begun
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import (
    AnswerToAgent,
    Release,
    Resolve,
    Resolved,
    SessionEnded,
    ShardExtents,
    ShardKeys,
    ShardRelease,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class OwnerAnswer:
    """Answer of an owner for a part."""

    part: ShardPart
    source: BlockSource
    answer: ShardAnswer
    is_held_off: bool
    """Whether the drive may not be read now, so that found blocks are misses."""

    @property
    def is_complete(self) -> bool:
        """Whether the owner knows the whole shard."""
        return self.answer.is_found is not None and not self.answer.is_recovering

    @property
    def found_positions(self) -> NDArray[np.intp]:
        """Positions of the readable blocks."""
        positions, is_found = self.part.positions, self.answer.is_found
        return positions[:0] if is_found is None or self.is_held_off else positions[is_found]

    @property
    def pins(self) -> Pins:
        """Pin of the blocks, if any."""
        return _pins(self.source.owner, self.part, self.answer)


@dataclass(slots=True, eq=False)
class _PendingAnswer:
    """Query to an agent."""

    owner: AgentId
    parts: list[ShardPart]
    answer: PendingAnswer | asyncio.Task[AnswerToAgent | None]
    is_last: bool
    """Whether owners named in the answer are not followed."""

    @property
    def answered(self) -> asyncio.Future[Any]:
        """Done once awaiting ``answer`` takes no more time."""
        assert not isinstance(self.answer, Coroutine), "a query among several is under way"
        return self.answer if isinstance(self.answer, asyncio.Task) else self.answer.answered


class Locator:
    """Locator of blocks, asking all owners at once."""

    def __init__(
        self,
        agent: AgentId,
        owners: Owners,
        drives: Mapping[DriveId, Drive],
        here: LocalShards,
    ) -> None:
        """Ask for *agent*: its own shards *here*, others through *owners*.

        Blocks on *drives* with an open circuit breaker are not found.
        """
        self.agent = agent
        self.owners = owners
        self.here = here
        self.drives = drives
        self.tasks = Tasks("asking owners")
        self.found_earlier = 0
        """Blocks found only under an earlier placement epoch."""

    async def locate(  # noqa: PLR0913 (the terms of a query)
        self,
        routes: Routes,
        volume: ServedVolume,
        spans: Sequence[Span],
        keys: NDArray[np.uint8],
        *,
        wanted: NDArray[np.bool_],
        within_s: float,
        pin_s: float,
        is_brief: bool = False,
        is_counted: bool = True,
    ) -> BlockLocations:
        """Locate the *wanted* blocks of a request.

        Blocks of a silent owner are not found. Located blocks stay readable for *pin_s*, counted from
        before this call. Call ``release`` after reading.

        *is_brief*: tell which blocks exist, without their positions and at less cost. With a *pin_s*,
        existing blocks stay available for this time. *is_counted*: count as a read of the blocks found.
        """
        promises = is_brief and pin_s > 0
        terms = Resolve(0, within_s, pin_s, (), promises=promises, is_brief=is_brief, is_counted=is_counted)
        by_owner = routes.by_owner_of_all if routes.has_earlier else routes.by_owner
        return await self._locate(routes, keys, by_owner(volume.placement_secret, spans), wanted, terms)

    async def _locate(
        self,
        routes: Routes,
        keys: NDArray[np.uint8],
        grouped: GroupedBlocks,
        wanted: NDArray[np.bool_],
        terms: Resolve,
    ) -> BlockLocations:
        """Locate blocks *grouped* by owner, as ``Routes.by_owner``."""
        parts, unowned = grouped
        locations = BlockLocations.empty(len(keys))
        if len(unowned):
            locations.reasons[unowned] = Reason.NO_OWNER
        answers = await OwnerQuery(self, routes, keys, terms).run(restrict(parts, wanted))
        if routes.has_earlier:
            answers.sort(key=lambda answer: answer.part.age)
        relevant = drop_superseded(answers) if routes.previous_owners else answers
        for answer in answers:
            blocks = _merge(locations, answer) if answer in relevant else 0
            if answer.part.age and terms.is_counted:
                self.found_earlier += blocks
            if not blocks:
                self.release(answer.pins)
        return locations

    async def exist(
        self,
        routes: Routes,
        volume: ServedVolume,
        spans: Sequence[Span],
        keys: NDArray[np.uint8],
        *,
        wanted: NDArray[np.bool_],
        within_s: float,
        pin_s: float = 0.0,
        is_counted: bool = True,
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
        """Tell which *wanted* blocks exist; also return the reason for each absent block.

        As a brief ``locate``. Without a pin, other owners are asked first, then this agent looks up the
        blocks of its whole shards in one pass.
        """
        if pin_s > 0 or routes.has_earlier:
            locations = await self.locate(
                routes,
                volume,
                spans,
                keys,
                wanted=wanted,
                within_s=within_s,
                pin_s=pin_s,
                is_brief=True,
                is_counted=is_counted,
            )
            return locations.is_found, locations.reasons
        terms = Resolve(0, within_s, 0.0, (), is_brief=True, is_counted=is_counted)
        shards, counts = routes.runs(volume.placement_secret, spans)
        own = {shard for shard in set(shards) if self._is_whole_here(routes, shard)}
        asked: BlockLocations | Awaitable[BlockLocations] | None = None
        if not own.issuperset(shards):
            is_asked = wanted & ~np.repeat([shard in own for shard in shards], counts)
            grouped = routes.by_owner(volume.placement_secret, spans)
            asked = begun(self._locate(routes, keys, grouped, is_asked, terms))
            shards = [shard if shard in own else None for shard in shards]
        rows: slice | NDArray[np.bool_] = slice(None)
        if np.count_nonzero(wanted) < len(wanted):
            firsts = list(itertools.accumulate(counts[:-1], initial=0))
            rows, counts = wanted, np.add.reduceat(wanted, firsts, dtype=np.intp).tolist()
        runs, is_found = list(zip(shards, counts, strict=True)), np.zeros(len(keys), np.bool_)
        is_found[rows] = self.here.has(runs, routes.map.placement_epoch, keys[rows], terms)
        if asked is None:
            return is_found, codec.filled(len(keys), Reason.NOT_FOUND)
        locations = asked if isinstance(asked, BlockLocations) else await asked
        return is_found | locations.is_found, locations.reasons

    def _is_whole_here(self, routes: Routes, shard: ShardId | None) -> bool:
        """Return whether this agent owns a shard, knows all of its blocks, and may read its drive."""
        if shard is None or routes.map.owner(shard) != self.agent:
            return False
        drive = self.drives.get(routes.place(shard)[0])
        return self.here.is_whole(shard) and not (drive is not None and drive.refuses_reads)

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
        """Find *wanted* blocks under earlier placement epochs.

        The second array has the blocks known to previous owners of the current epoch's shards, for callers
        whose owner can't tell. Agents silent for *within_s* count as having no blocks.
        """
        is_found, was_found = np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.bool_)
        parts, _ = routes.by_owner_of_all(volume.placement_secret, spans)
        earlier = {
            owner: some for owner, its in parts.items() if (some := [part for part in its if part.age])
        }
        terms = Resolve(0, within_s, 0.0, (), is_brief=True)
        for answer in drop_superseded(
            await OwnerQuery(self, routes, keys, terms).run(restrict(earlier, wanted))
        ):
            is_current = answer.part.epoch == routes.map.placement_epoch
            (was_found if is_current else is_found)[answer.found_positions] = True
        return is_found, was_found

    def release(self, pins: Pins) -> None:
        """Release the pins of blocks that need no more reads."""
        by_owner: dict[AgentId, list[ShardRelease]] = {}
        for owner, pin in pins:
            by_owner.setdefault(owner, []).append(pin)
        pins.clear()
        for owner, releases in by_owner.items():
            self.owners.tell(owner, Release(tuple(releases)))

    def session_ended(
        self, routes: Routes, volume: ServedVolume, spans: Sequence[Span], keys: NDArray[np.uint8]
    ) -> None:
        """Tell the owners that a session with these blocks has ended."""
        parts, _ = routes.by_owner(volume.placement_secret, spans)
        for owner, shard_parts in parts.items():
            named = (ShardKeys(part.shard, keys[part.positions].tobytes()) for part in shard_parts)
            self.owners.tell(owner, SessionEnded(tuple(named)))


def _merge(locations: BlockLocations, answer: OwnerAnswer) -> int:
    """Merge an answer for blocks not found under a newer epoch.

    Returns the number of blocks for which the pin is needed: all those of the newest epoch, found or not.
    """
    if answer.is_held_off or not answer.is_complete:
        _note_reasons(locations, answer)
    is_found, extents, at = answer.answer.is_found, answer.answer.extents, answer.part.positions
    if is_found is None or answer.is_held_off:
        return 0
    rows: slice | NDArray[np.intp] = slice(None)
    if answer.part.age:
        rows = np.flatnonzero(is_found & ~locations.is_found[at])
        at = at[rows]
        if not len(at):
            return 0
    locations.is_found[at] = is_found[rows]
    if extents is not None:
        locations.offsets[at] = extents.offsets[rows]
        locations.lengths[at] = extents.lengths[rows]
        locations.generations[at] = extents.generations[rows]
        locations.tags[at] = extents.tags[rows]
    locations.source[at] = len(locations.sources)
    locations.sources.append(answer.source)
    locations.pins += answer.pins
    return len(at)


def _note_reasons(locations: BlockLocations, answer: OwnerAnswer) -> None:
    """Note reasons for absent blocks, unless a newer answer gave one."""
    at, is_found = answer.part.positions, answer.answer.is_found
    why = Reason.RECOVERING if answer.answer.is_recovering else Reason.NOT_FOUND
    reasons = codec.filled(len(at), Reason.NO_OWNER if is_found is None else why)
    if answer.is_held_off and is_found is not None:
        reasons[is_found] = Reason.DRIVE_SUSPECT
    is_without = locations.reasons[at] == Reason.NOT_FOUND
    locations.reasons[at[is_without]] = reasons[is_without]


class OwnerQuery:
    """Query of a request: call ``run`` once."""

    def __init__(self, locator: Locator, routes: Routes, keys: NDArray[np.uint8], terms: Resolve) -> None:
        """Ask for a locator's agent, on these *terms* without shards."""
        self._locator = locator
        self._routes = routes
        self._keys = keys
        self._terms = terms
        self._until_s = _now_s() + terms.deadline_s
        self._waiting: list[_PendingAnswer] = []
        self._answers: list[OwnerAnswer] = []

    async def run(self, parts: PartsByOwner) -> list[OwnerAnswer]:
        """Ask every owner; return all answers, or enough to decide."""
        locator, waiting, is_only = self._locator, self._waiting, len(parts) == 1
        try:
            for owner, its in parts.items():
                if owner != locator.agent:
                    self._ask(owner, its, self._terms, is_only=is_only)
            if own := parts.get(locator.agent):
                if any(isinstance(pending.answer, asyncio.Task) for pending in waiting):
                    await asyncio.sleep(0)  # lets the tasks start
                keys, here = self._keys, locator.here
                self._note(
                    locator.agent,
                    own,
                    [
                        here.resolve(each.shard, each.epoch, keys.take(each.positions, 0), self._terms)
                        for each in own
                    ],
                )
            while waiting and not self._is_enough():
                await self._receive(waiting[0] if len(waiting) == 1 else await _first_answered(waiting))
        except BaseException:
            locator.release([pin for answer in self._answers for pin in answer.pins])
            raise
        finally:
            for pending in waiting:
                locator.tasks.spawn(self._release_late(pending))
        return self._answers

    def _ask(
        self,
        owner: AgentId,
        parts: list[ShardPart],
        terms: Resolve,
        *,
        is_only: bool = False,
        is_last: bool = False,
    ) -> None:
        """Ask an agent, without a task if no other agent is waited for."""
        keys = self._keys
        shards = tuple(
            ShardKeys(part.shard, keys.take(part.positions, 0).tobytes(), part.epoch) for part in parts
        )
        asked = self._locator.owners.ask(owner, msgspec.structs.replace(terms, shards=shards))
        has_begun = is_only or not isinstance(asked, Coroutine)
        begun = asked if has_begun else self._locator.tasks.spawn(_answer(asked))
        self._waiting.append(_PendingAnswer(owner, parts, begun, is_last))

    async def _receive(self, pending: _PendingAnswer) -> None:
        """Wait for an answer, then ask the owners named in the answer.

        Owners named by an already named agent are not followed.
        """
        if isinstance(pending.answer, asyncio.Task) and not pending.answer.done():
            # If this wait is cancelled, the query continues and is released later.
            await asyncio.wait([pending.answer])
        self._waiting.remove(pending)
        answers = self._parsed(pending, await _answer(pending.answer))
        self._note(pending.owner, pending.parts, answers, is_last=pending.is_last)

    def _note(
        self, owner: AgentId, parts: list[ShardPart], answers: Sequence[ShardAnswer], *, is_last: bool = False
    ) -> None:
        """Note an agent's answers, and ask the other owners named there."""
        forwarded: PartsByOwner = {}
        for part, answer in zip(parts, answers, strict=True):
            other = AgentId("" if answer.is_owner or is_last else answer.known_owner)
            if other in ("", owner):
                source = BlockSource(owner, part.shard, *self._routes.place(part.shard))
                drive = self._locator.drives.get(source.drive)
                is_held_off = drive is not None and drive.refuses_reads
                self._answers.append(OwnerAnswer(part, source, answer, is_held_off))
            else:
                forwarded.setdefault(other, []).append(part)
        for other, its in forwarded.items():
            again = msgspec.structs.replace(self._terms, deadline_s=max(0.0, self._until_s - _now_s()))
            self._ask(other, its, again, is_last=True)

    async def _release_late(self, pending: _PendingAnswer) -> None:
        """Release pins of an answer that was not awaited."""
        answers = self._parsed(pending, await _answer(pending.answer))
        for part, answer in zip(pending.parts, answers, strict=True):
            self._locator.release(_pins(pending.owner, part, answer))

    def _parsed(self, pending: _PendingAnswer, answer: AnswerToAgent | None) -> list[ShardAnswer]:
        """Parse an answer, one item per part."""
        shards = answer.shards if isinstance(answer, Resolved) else ()
        each = zip_longest(pending.parts, shards[: len(pending.parts)])
        return [self._parse(pending.owner, len(part.positions), found) for part, found in each]

    def _parse(self, owner: AgentId, count: int, answer: ShardExtents | None) -> ShardAnswer:
        if answer is None or not answer.is_owner:
            return ShardAnswer(is_owner=False, known_owner="" if answer is None else answer.known_owner)
        is_found = extents = None
        try:
            if not self._terms.is_brief:
                extents = Extents(
                    codec.u64(answer.offsets, count),
                    codec.u32(answer.lengths, count),
                    codec.u64(answer.generations, count),
                    codec.rows16(answer.tags, count),
                )
            is_found = codec.u8(answer.found, count) != 0
        except MalformedError:
            log.exception("Owner %s gave extents that do not fit its request", owner)
        return ShardAnswer(
            is_owner=True,
            is_found=is_found,
            extents=extents,
            pin=answer.pin,
            is_recovering=answer.is_recovering,
        )

    def _is_enough(self) -> bool:
        """Return whether pending answers cannot change the result.

        This is so if all pending parts are of earlier epochs, and all their blocks were found.
        """
        left = [part for pending in self._waiting for part in pending.parts]
        if not all(part.age for part in left):
            return False
        is_found = np.zeros(len(self._keys), np.bool_)
        for answer in drop_superseded(self._answers):
            is_found[answer.found_positions] = True
        return all(is_found[part.positions].all() for part in left)


def drop_superseded(answers: list[OwnerAnswer]) -> list[OwnerAnswer]:
    """Drop answers of previous owners for shards whose owner knows all."""
    complete = {
        answer.part.shard for answer in answers if answer.is_complete and not answer.part.is_previous_owner
    }
    return [
        answer for answer in answers if not answer.part.is_previous_owner or answer.part.shard not in complete
    ]


def _pins(owner: AgentId, part: ShardPart, answer: ShardAnswer) -> Pins:
    return [(owner, ShardRelease(part.shard, (answer.pin,)))] if answer.pin else []


async def _answer(pending: Awaitable[AnswerToAgent | None]) -> AnswerToAgent | None:
    """Wait for an agent's answer; None without an answer."""
    try:
        return await pending
    except (TimeoutError, ConnectError):
        return None


async def _first_answered(waiting: Iterable[_PendingAnswer]) -> _PendingAnswer:
    """Wait for the first query that is answered; return the query."""
    by_future = {pending.answered: pending for pending in waiting}
    done, _ = await asyncio.wait(by_future, return_when=asyncio.FIRST_COMPLETED)
    return next(pending for answered, pending in by_future.items() if answered in done)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
