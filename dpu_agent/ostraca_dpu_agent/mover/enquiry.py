"""Asking several owners of one request's blocks, all at once, and judging what they say.

Others are asked before this agent answers itself, so that they work meanwhile. Nobody waits for the word of
an owner whose blocks have been found all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ostraca_dpu_agent.mover.located import Source
from ostraca_fabric.errors import ConnectError, MalformedError
from ostraca_fabric.ids import AgentId
from ostraca_fabric.outcome import Reason
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import Release, Resolved, ShardKeys, ShardRelease

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Mapping

    from numpy.typing import NDArray

    from ostraca_dpu_agent.mover.routes import PartsByOwner, Routes, ShardPart
    from ostraca_fabric.ids import DriveId
    from ostraca_fabric.ports.drive import Drive
    from ostraca_fabric.ports.owners import Asked, Owners
    from ostraca_fabric.tasks import Tasks
    from ostraca_fabric.wire.messages import AnswerToAgent, Resolve, ShardExtents

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Extents:
    """Columns of an owner's answer: a value for each block asked for, zeros where it is not found."""

    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    generations: NDArray[np.uint64]
    tags: NDArray[np.uint8]

    @classmethod
    def of(cls, said: ShardExtents, count: int) -> Extents:
        """Take an answer apart; raises MalformedError."""
        return cls(
            columns.u64(said.offsets, count),
            columns.u32(said.lengths, count),
            columns.u64(said.generations, count),
            columns.rows16(said.tags, count),
        )


@dataclass(slots=True, eq=False)
class Told:
    """What an owner said of one part."""

    part: ShardPart
    source: Source
    reason: Reason
    """Why blocks are not found, or, of a drive that is held off, may not be read."""

    pin: int = 0
    is_found: NDArray[np.bool_] | None = None
    """Of each block; None where the owner said nothing of use."""

    extents: Extents | None = None
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


@dataclass(slots=True, eq=False)
class _Question:
    """What one agent was asked."""

    owner: AgentId
    parts: list[ShardPart]
    asked: Asked | asyncio.Task[AnswerToAgent | None]
    is_last: bool
    """Whether nobody is asked instead whom it names."""

    @property
    def answered(self) -> asyncio.Future[Any]:
        """Done once awaiting ``asked`` takes no more time."""
        assert not isinstance(self.asked, Coroutine), "what is one of several has begun"
        return self.asked if isinstance(self.asked, asyncio.Task) else self.asked.answered


class Enquiry:
    """One, of one request: ``put`` it once."""

    def __init__(
        self,
        own: AgentId,
        owners: Owners,
        drives: Mapping[DriveId, Drive],
        tasks: Tasks,
        *,
        routes: Routes,
        keys: NDArray[np.uint8],
        terms: Resolve,
    ) -> None:
        """Ask for the agent *own*, on these *terms*, which name no shards yet; *tasks* outlive this."""
        self._own = own
        self._owners = owners
        self._drives = drives
        self._tasks = tasks
        self._routes = routes
        self._keys = keys
        self._terms = terms
        self._until_s = _now_s() + terms.deadline_s
        self._waiting: list[_Question] = []
        self._told: list[Told] = []

    async def put(self, parts: PartsByOwner) -> list[Told]:
        """Ask every owner; return what they said, or enough of it that more would change nothing."""
        waiting, is_only = self._waiting, len(parts) == 1
        try:
            for owner, its in parts.items():
                if owner != self._own:
                    self._ask(owner, its, self._terms, is_only=is_only)
            if own := parts.get(self._own):
                if any(isinstance(question.asked, asyncio.Task) for question in waiting):
                    await asyncio.sleep(0)  # so that they begin
                self._ask(self._own, own, self._terms, is_only=True)
                await self._hear(waiting[-1])
            while waiting and not self._is_enough():
                await self._hear(waiting[0] if len(waiting) == 1 else await _first_answered(waiting))
        except BaseException:
            for told in self._told:
                release_pin(self._owners, told)
            raise
        finally:
            for question in waiting:
                self._tasks.spawn(self._let_go(question))
        return self._told

    def _ask(
        self,
        owner: AgentId,
        parts: list[ShardPart],
        terms: Resolve,
        *,
        is_only: bool = False,
        is_last: bool = False,
    ) -> None:
        """Ask one agent. Who waits for nobody else meanwhile needs no task for it."""
        keys = self._keys
        shards = tuple(
            ShardKeys(part.shard, keys.take(part.positions, 0).tobytes(), part.epoch) for part in parts
        )
        asked = self._owners.ask(owner, msgspec.structs.replace(terms, shards=shards))
        has_begun = is_only or not isinstance(asked, Coroutine)
        begun = asked if has_begun else self._tasks.spawn(_answer(asked))
        self._waiting.append(_Question(owner, parts, begun, is_last))

    async def _hear(self, question: _Question) -> None:
        """Wait for an answer; ask those whom it names as owners instead, unless somebody named this one."""
        if isinstance(question.asked, asyncio.Task) and not question.asked.done():
            await asyncio.wait([question.asked])  # it goes on where this is cancelled, and is let go then
        self._waiting.remove(question)
        answer = await _answer(question.asked)
        told, elsewhere = self._judged(question, answer)
        self._told += told
        if not elsewhere:
            return
        again = msgspec.structs.replace(self._terms, deadline_s=max(0.0, self._until_s - _now_s()))
        for owner, parts in elsewhere.items():
            self._ask(owner, parts, again, is_last=True)

    async def _let_go(self, question: _Question) -> None:
        """Give back what was pinned for somebody who did not wait for it."""
        for told in self._judged(question, await _answer(question.asked))[0]:
            release_pin(self._owners, told)

    def _judged(self, question: _Question, answer: AnswerToAgent | None) -> tuple[list[Told], PartsByOwner]:
        """Judge an answer; return also the parts of which it names another owner, by that."""
        known = answer.shards if isinstance(answer, Resolved) else ()
        told: list[Told] = []
        elsewhere: PartsByOwner = {}
        for number, part in enumerate(question.parts):
            said = known[number] if number < len(known) else None
            named = "" if said is None or said.is_owner or question.is_last else said.known_owner
            if named in ("", question.owner):
                source = Source(question.owner, part.shard, *self._routes.place(part.shard))
                told.append(self._judged_part(part, source, said))
            else:
                elsewhere.setdefault(AgentId(named), []).append(part)
        return told, elsewhere

    def _judged_part(self, part: ShardPart, source: Source, said: ShardExtents | None) -> Told:
        if said is None or not said.is_owner:
            return Told(part, source, Reason.NO_OWNER)
        count = len(part.positions)
        try:
            is_found = columns.u8(said.found, count) != 0
            extents = None if self._terms.is_brief else Extents.of(said, count)
        except MalformedError:
            log.exception("Owner %s gave extents that do not fit its request", source.owner)
            return Told(part, source, Reason.NO_OWNER, said.pin)
        drive = self._drives.get(source.drive)
        if drive is not None and drive.refuses_reads:
            return Told(part, source, Reason.DRIVE_SUSPECT, said.pin, is_found, extents, is_held_off=True)
        reason = Reason.RECOVERING if said.is_recovering else Reason.NOT_FOUND
        return Told(part, source, reason, said.pin, is_found, extents)

    def _is_enough(self) -> bool:
        """Whether word of those that are waited for would change nothing: all is older, and found already."""
        left = [part for question in self._waiting for part in question.parts]
        if not all(part.age for part in left):
            return False
        is_found = np.zeros(len(self._keys), np.bool_)
        for each in heeded(self._told):
            is_found[each.found] = True
        return all(is_found[part.positions].all() for part in left)


def heeded(told: list[Told]) -> list[Told]:
    """Leave out what agents say of shards that they had before, where the owner knows all of it."""
    known = {each.part.shard for each in told if each.is_whole and not each.part.is_of_before}
    return [each for each in told if not each.part.is_of_before or each.part.shard not in known]


def release_pin(owners: Owners, told: Told) -> None:
    """Give back what an owner pinned, if it did."""
    if told.pin:
        owners.tell(told.source.owner, Release((ShardRelease(told.source.shard, (told.pin,)),)))


async def _answer(asked: Awaitable[AnswerToAgent | None]) -> AnswerToAgent | None:
    """Wait for an agent's answer; None where there is none."""
    try:
        return await asked
    except (TimeoutError, ConnectError):
        return None


async def _first_answered(waiting: Iterable[_Question]) -> _Question:
    """Wait until one of several need not be waited for any more; return it."""
    questions = {question.answered: question for question in waiting}
    done, _ = await asyncio.wait(questions, return_when=asyncio.FIRST_COMPLETED)
    return next(question for answered, question in questions.items() if answered in done)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
