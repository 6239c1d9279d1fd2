"""What an owner may write, and until when: its grant of segments, and its fence.

A *grant* says which segments an owner epoch may write. Only segments of the own grant are opened, and none
that lies under an earlier grant before that is retired: such segments are *withheld*. Space is handed out,
and summaries are written, only until the *fence*: the time until which the owner was told that its claim
stands. It passes by itself, is put off by the next word, and comes for good where a higher epoch was seen on
flash or in the membership store. Where somebody only names one, as a commit does, the claim is *doubted*:
nothing is handed out or written until the store was asked again. Nobody but the store can end an owner.

What is wanted for the grant is what is in use, and the segments next in line to be opened. Whoever has it
recorded says so with ``granted``; until then what was asked for last stays so, and what it leaves out is not
opened any more. A segment leaves the grant ``late_write_s`` after its last reservation has ended or its last
summary write has: then no write to it is left.
"""

from __future__ import annotations

import math
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.owner.core.segments import SegmentState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ostraca_dpu_agent.owner.core.pools import Pool
    from ostraca_dpu_agent.owner.core.segments import Segment
    from ostraca_dpu_agent.owner.core.shard import ShardCore

AHEAD_S = 600.0
"""A grant reaches for so long at the rate of the write budget: etcd is asked no more often than every five
minutes, and may be down for as long."""

AHEAD_BYTES_S = 1e9
"""The rate where there is no budget."""

AHEAD_MAX = 1024
"""A record of more segments would be long; an extension every minute costs as little."""

_SHARD_SHARE = 4
"""At most one in so many segments is granted ahead: a successor has the others at once."""

_ASK_BELOW = 0.5
_ASK_BELOW_OF_PART = 0.25
_REMEMBERED = 2
"""Of what pools have taken so many times the line is remembered, and half of that at least."""

_DAY_S = 86_400.0


_DOUBTS_APART_S = 1.0
"""A claim that was doubted, and found to stand, is not doubted again so soon: who names higher epochs all the
time keeps an owner from writing for one question to the store in each of these, and not for ever."""


class Grants:
    """What one owner epoch may write. Nothing, at first."""

    def __init__(self, core: ShardCore) -> None:
        """Be granted nothing, with the fence passed."""
        geometry = core.geometry
        self._core = core
        self.own: frozenset[int] = frozenset()
        """As recorded, and nothing that it leaves out may be written by this epoch."""

        self.is_withheld = np.zeros(geometry.segments, np.bool_)
        """Of each segment, whether it lies under an unretired grant."""

        self.until_s = -math.inf
        """The fence."""

        self.is_fenced = False
        """For good."""

        self.is_doubted = False
        """Whether somebody has named a higher epoch, and the store was not asked since."""

        self._doubted_s = -math.inf
        self._trusted_until_s = -math.inf

        self._resumed: frozenset[int] = frozenset()
        self._asked: frozenset[int] | None = None

    @property
    def withheld(self) -> frozenset[int]:
        """The segments under unretired grants."""
        return frozenset(np.flatnonzero(self.is_withheld).tolist())

    def withhold(self, segments: frozenset[int], resumed: frozenset[int]) -> None:
        """Withhold segments; those *resumed* stay in the own grant meanwhile."""
        self.is_withheld[list(segments | resumed)] = True
        self._resumed = resumed

    def retire(self, segments: Iterable[int]) -> None:
        """Withhold these no more."""
        numbers = list(segments)
        self.is_withheld[numbers] = False
        self._resumed -= frozenset(numbers)

    def confirm(self, until_s: float, asked_s: float) -> None:
        """Put the fence off, unless it has come for good. A doubt ends when this was asked for after it."""
        self.until_s = max(self.until_s, until_s)
        if self.is_doubted and asked_s >= self._doubted_s:
            self.is_doubted = False
            self._trusted_until_s = self._doubted_s + _DOUBTS_APART_S

    def fence(self) -> None:
        """Write nothing any more."""
        self.is_fenced = True

    def doubt(self, now_s: float) -> None:
        """Write nothing until the store was asked again: somebody says that there is a higher epoch.

        Not where there is no store, which is where the fence never passes.
        """
        if not self.is_doubted and now_s >= self._trusted_until_s and self.until_s < math.inf:
            self.is_doubted, self._doubted_s = True, now_s

    def may_write(self, now_s: float) -> bool:
        """Say whether space may be handed out now, and summaries written."""
        return not self.is_doubted and not self.has_ended(now_s)

    def has_ended(self, now_s: float) -> bool:
        """Say whether the fence has come, by itself or for good; a doubt is to be waited for."""
        return now_s >= self.until_s or self.is_fenced

    def may_open(self, number: int) -> bool:
        """Say whether a segment may be opened, as far as grants go."""
        is_asked = self._asked is None or number in self._asked
        return number in self.own and is_asked and not self.is_withheld[number]

    def first_free(self) -> Segment | None:
        """Return the next free segment to open; None when no one near the head of the line may be."""
        few = islice(self._core.ring.free, self.ahead)
        return next((segment for segment in few if self.may_open(segment.number)), None)

    def oldest_sealed(self, pool: Pool, *, for_itself: bool = False) -> Iterator[Segment]:
        """Yield sealed segments of a pool that may be opened once they are empty, those first whose turn is
        next.

        It gives up where too many others stand before them: the line is to be granted anew then, and of a
        long ring no call looks at more than its head. A pool that makes room *for itself* only has to have
        less: where another segment can be opened, its oldest goes, granted or not.
        """
        passed_by, any_will_do = 0, for_itself and self.first_free() is not None
        for segment in pool.sealed:
            if any_will_do or self.may_open(segment.number):
                yield segment
            elif (passed_by := passed_by + 1) > self.ahead:
                return

    def may_spare(self, number: int) -> bool:
        """Say whether a sealed segment that is next in line may stay as it is, as far as grants go.

        A granted one may while that leaves one less than half of the line granted, and one at least: there
        may be nobody to ask for more.
        """
        if not self.may_open(number):
            return True
        granted = self.own if self._asked is None else self.own & self._asked
        return len(granted.intersection(self._line()) - {number}) >= max(1, self._granted_least - 1)

    @property
    def ahead(self) -> int:
        """How many segments that are next in line the grant should hold."""
        core = self._core
        rate = core.spending.budget_bytes_per_day / _DAY_S or AHEAD_BYTES_S
        wanted = math.ceil(AHEAD_S * rate / core.geometry.segment_bytes)
        return max(core.ring.ready_least, min(wanted, core.geometry.segments // _SHARD_SHARE, AHEAD_MAX))

    def wanted(self, now_s: float) -> tuple[int, ...] | None:
        """Return what to have recorded as the own grant, in place of what it was; None while that will do.

        Once it was returned it stays so until ``granted``.
        """
        core = self._core
        if core.is_recovering or self.is_fenced or not core.is_writable:
            return None
        if self._asked is None:
            line = self._line()
            # Sealed ones that are granted, having been written lately, are of no use while others are free.
            has_next = not core.ring.free or self.first_free() is not None
            if has_next and self._granted_of(line) >= self._granted_least and not self._any_lacks():
                return None
            in_use = (number for number in self.own if self._is_in_use(number, now_s))
            wanted = frozenset(line).union(in_use, self._resumed)
            if wanted <= self.own:
                return None
            self._asked = wanted
        return tuple(sorted(self._asked))

    def in_doubt(self, now_s: float) -> tuple[int, ...]:
        """Return the granted segments that a write may reach yet although nothing is handed out any more.

        They are those that this epoch would not use again itself: on which space is held, or a write was
        abandoned or has failed within ``late_write_s``. What has ended well has ended.
        """
        return tuple(number for number in sorted(self.own) if self._may_be_reached(number, now_s))

    @property
    def granted_ahead(self) -> int:
        """How many segments that are next in line are granted."""
        return self._granted_of(self._line())

    def _line(self) -> list[int]:
        ring, ahead = self._core.ring, self.ahead
        if not ring.pools:
            in_line = chain(ring.free, ring.draining, ring.common.sealed)
            return [segment.number for segment in islice(in_line, ahead)]
        heads = chain.from_iterable(islice(pool.sealed, part) for pool, part in self._parts())
        in_line = chain(ring.free, ring.draining, heads)
        return [segment.number for segment in islice(in_line, ahead)]

    def _parts(self) -> list[tuple[Pool, int]]:
        """Return how many of each pool's oldest are in line behind what is free.

        What pools have taken of late tells what they will. One that is at its share takes its own; what the
        others take is that of whoever is farthest above its share.
        """
        ring = self._core.ring
        left = self.ahead - len(ring.free) - len(ring.draining)
        if left <= 0:
            return []
        pools = [pool for pool in ring.all_pools() if pool.sealed]
        gives_way = max(pools, key=lambda pool: pool.segments - pool.part.segments_max, default=ring.common)
        takes = {pool.number: 0.0 for pool in pools}
        for pool in ring.all_pools():
            giver = pool if pool.has_share and pool.segments >= pool.part.segments_max - 1 else gives_way
            takes[giver.number] = takes.get(giver.number, 0.0) + pool.taken
        weights = [takes[pool.number] for pool in pools]
        if not any(weights):
            weights = [float(len(pool.sealed)) for pool in pools]
        whole = sum(weights)
        parts: list[tuple[Pool, int]] = []
        for pool, weight in sorted(zip(pools, weights, strict=True), key=itemgetter(1), reverse=True):
            part = min(left - sum(part for _, part in parts), math.ceil(left * weight / whole))
            if part > 0:
                parts.append((pool, part))
        return parts

    def _any_lacks(self) -> bool:
        """Say whether of some pool's part of the line next to nothing is granted, however much of others'."""
        if not self._core.ring.pools:
            return False
        for pool, part in self._parts():
            heads = [segment.number for segment in islice(pool.sealed, part)]
            if heads and self._granted_of(heads) < max(1, _ASK_BELOW_OF_PART * len(heads)):
                return True
        return False

    def _granted_of(self, line: list[int]) -> int:
        return sum(number in self.own for number in line)

    def granted(self, segments: Iterable[int]) -> None:
        """Take the own grant as it is recorded now."""
        self.own, self._asked = frozenset(segments), None
        pools = list(self._core.ring.all_pools())
        if sum(pool.taken for pool in pools) > _REMEMBERED * self.ahead:
            for pool in pools:
                pool.taken /= 2

    def check(self) -> None:
        """Assert that nothing is open outside the grant, nor anything withheld."""
        ring = self._core.ring
        for segment in (ring.opening, *ring.ready, *(pool.current for pool in ring.all_pools())):
            if segment is not None:
                assert segment.number in self.own, "what is open is granted"
                assert self._asked is None or segment.number in self._asked, "and stays so"
        withheld = {segment.number for segment in ring.withheld}
        assert withheld == self.withheld, "what is withheld is in its place"
        assert not (withheld - self._resumed) & self.own, "a grant holds nothing of an unretired one"

    @property
    def _granted_least(self) -> float:
        return max(1, _ASK_BELOW * self.ahead)

    def _may_be_reached(self, number: int, now_s: float) -> bool:
        segment = self._core.ring.segments[number]
        return segment.is_busy or now_s < segment.quiet_at_s

    def _is_in_use(self, number: int, now_s: float) -> bool:
        segment = self._core.ring.segments[number]
        is_open = segment.state in (SegmentState.OPENING, SegmentState.OPEN)
        return is_open or segment.is_busy or now_s < segment.touched_s + self._core.settings.late_write_s
