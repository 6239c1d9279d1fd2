"""Asking owners where blocks lie."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ostraca_fabric.errors import ConnectError, MalformedError
from ostraca_fabric.ids import AgentId
from ostraca_fabric.outcome import Reason
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

    from ostraca_dpu_agent.mover.routes import Routes, ShardPart
    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.chain import Span
    from ostraca_fabric.ids import DriveId, ShardId
    from ostraca_fabric.ports.drive import Drive
    from ostraca_fabric.ports.owners import Owners
    from ostraca_fabric.wire.messages import ShardExtents

    _Part = tuple[ShardPart, NDArray[np.intp]]
    """Blocks wanted of one shard: their positions in the request."""


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """A shard that some of a request's blocks lie in."""

    owner: AgentId
    shard: ShardId
    drive: DriveId
    base: int
    """The shard's first byte on the drive."""


@dataclass(slots=True)
class Located:
    """Where the blocks of one request lie: a row per block of the request."""

    is_found: NDArray[np.bool_]
    reasons: NDArray[np.uint8]
    """Why a block isn't found."""

    sources: list[Source]
    source: NDArray[np.intp]
    """Which of ``sources`` a block lies in."""

    offsets: NDArray[np.uint64]
    """In the shard, bytes."""

    lengths: NDArray[np.uint32]
    generations: NDArray[np.uint64]
    tags: NDArray[np.uint8]
    """Shape (n, 16)."""

    pins: list[tuple[AgentId, ShardRelease]] = field(default_factory=list)

    def by_drive(self, positions: NDArray[np.intp]) -> list[tuple[DriveId, NDArray[np.intp]]]:
        """Sort out found blocks by the drives they lie on, each drive's in their order."""
        numbers: dict[DriveId, int] = {}
        of_source = [numbers.setdefault(source.drive, len(numbers)) for source in self.sources]
        if len(numbers) == 1:
            return [(drive, positions) for drive in numbers if len(positions)]
        drives = np.array(of_source, np.intp)[self.source[positions]]
        sorted_out = [(drive, positions[drives == number]) for drive, number in numbers.items()]
        return [(drive, its) for drive, its in sorted_out if len(its)]

    def bytes_by_drive(self, positions: NDArray[np.intp]) -> dict[DriveId, int]:
        """Add up the lengths of found blocks on each drive."""
        sizes = np.bincount(self.source[positions], self.lengths[positions], len(self.sources))
        found: dict[DriveId, int] = {}
        for source, size in zip(self.sources, sizes.tolist(), strict=True):
            if size:
                found[source.drive] = found.get(source.drive, 0) + int(size)
        return found

    @classmethod
    def nothing(cls, blocks: int) -> Located:
        """Begin with no block found."""
        return cls(
            is_found=np.zeros(blocks, np.bool_),
            reasons=np.full(blocks, Reason.NOT_FOUND, np.uint8),
            sources=[],
            source=np.zeros(blocks, np.intp),
            offsets=np.zeros(blocks, np.uint64),
            lengths=np.zeros(blocks, np.uint32),
            generations=np.zeros(blocks, np.uint64),
            tags=np.zeros((blocks, columns.TAG_BYTES), np.uint8),
        )


class Locator:
    """Resolves keys with the owners of their shards, all owners at once."""

    def __init__(self, owners: Owners, drives: Mapping[DriveId, Drive]) -> None:
        """Ask through *owners*. What lies on *drives* that are held off is not found."""
        self._owners = owners
        self._drives = drives

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
        promises: bool = False,
    ) -> Located:
        """Locate the *wanted* blocks of a request; an owner that does not answer leaves its blocks not found.

        What is found stays readable for *pin_s* counted from before this call, and with *promises* can be
        found again for as long. Call ``release`` when done reading.
        """
        terms = Resolve(0, within_s, pin_s, (), promises=promises)
        located = Located.nothing(len(keys))
        parts, unowned = routes.by_owner(volume.placement_secret, spans)
        located.reasons[unowned] = Reason.NO_OWNER
        asked = []
        for owner, shard_parts in parts.items():
            narrowed = [(part, part.positions[wanted[part.positions]]) for part in shard_parts]
            wanted_parts = [(part, positions) for part, positions in narrowed if len(positions)]
            if wanted_parts:
                asked.append(self._ask(routes, owner, wanted_parts, keys, located, terms))
        if len(asked) == 1:  # a task for it would cost more than a look-up
            await asked[0]
        else:
            await asyncio.gather(*asked)
        self._leave_out_refused(located)
        return located

    def _leave_out_refused(self, located: Located) -> None:
        for number, source in enumerate(located.sources):
            drive = self._drives.get(source.drive)
            if drive is not None and drive.refuses_reads:
                is_there = located.is_found & (located.source == number)
                located.is_found[is_there] = False
                located.reasons[is_there] = Reason.DRIVE_SUSPECT

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

    async def _ask(
        self,
        routes: Routes,
        owner: AgentId,
        parts: list[_Part],
        keys: NDArray[np.uint8],
        located: Located,
        terms: Resolve,
        *,
        is_told: bool = False,
    ) -> None:
        """Ask one agent, and whom it names as the owner instead, unless somebody named this one already."""
        until_s = _now_s() + terms.deadline_s
        shards = tuple(ShardKeys(part.shard, keys[positions].tobytes()) for part, positions in parts)
        try:
            answer = await self._owners.ask(owner, msgspec.structs.replace(terms, shards=shards))
        except (TimeoutError, ConnectError):
            answer = None
        known = answer.shards if isinstance(answer, Resolved) else ()
        elsewhere: dict[AgentId, list[_Part]] = {}
        for number, (part, positions) in enumerate(parts):
            located.reasons[positions] = Reason.NO_OWNER
            if number >= len(known):
                continue
            extents = known[number]
            if extents.is_owner:
                self._found(routes, owner, (part, positions), located, extents)
            elif extents.known_owner not in ("", owner):
                elsewhere.setdefault(AgentId(extents.known_owner), []).append((part, positions))
        if elsewhere and not is_told and (left_s := until_s - _now_s()) > 0:
            again = msgspec.structs.replace(terms, deadline_s=left_s)
            await asyncio.gather(
                *(
                    self._ask(routes, other, its, keys, located, again, is_told=True)
                    for other, its in elsewhere.items()
                )
            )

    def _found(
        self, routes: Routes, owner: AgentId, asked: _Part, located: Located, extents: ShardExtents
    ) -> None:
        """Take what an owner knows."""
        part, positions = asked
        if extents.pin:
            located.pins.append((owner, ShardRelease(part.shard, (extents.pin,))))
        drive, base = routes.place(part.shard)
        try:
            _fill(located, positions, Source(owner, part.shard, drive, base), extents)
        except MalformedError:
            log.exception("Owner %s gave extents that do not fit its request", owner)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _fill(located: Located, positions: NDArray[np.intp], source: Source, extents: ShardExtents) -> None:
    count = len(positions)
    is_found = columns.u8(extents.found, count) != 0
    located.offsets[positions] = columns.u64(extents.offsets, count)
    located.lengths[positions] = columns.u32(extents.lengths, count)
    located.generations[positions] = columns.u64(extents.generations, count)
    located.tags[positions] = columns.rows16(extents.tags, count)
    located.source[positions] = len(located.sources)
    located.sources.append(source)
    located.is_found[positions] = is_found
    located.reasons[positions] = Reason.RECOVERING if extents.is_recovering else Reason.NOT_FOUND
