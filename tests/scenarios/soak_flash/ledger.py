"""What the fabric has said of each block, held against what lies on flash and what it says later.

A block that a put called COMMITTED may go by eviction alone, and eviction takes whole segments, the oldest
first. Two looks tell an evicted block from a lost one, and neither asks the fabric:

- *On flash*, between a kill and the next start. A block seen there before must be there again unless its
  segment has a newer generation by now. A block committed since must be in a generation begun since, unless
  a segment begun since has been used again already: the ring went round within one life, and nobody can
  tell. Such blocks are counted, so that a run shows how much it could tell.
- *From the fabric*. An owner keeps at most a third of its segments free. A miss of a block that lies in a
  younger segment than those is a loss, whatever the reason, and so is a second COMMITTED for it. No owner
  lists a block and then finds other bytes, unless somebody has damaged them. Where agents are several, and a
  shard was handed over since flash was last seen, all that is so only while all of them are at peace: an
  agent that was cut off may still ask the owner before, whose segments others write over by and by.

Pure: it is told everything.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

COUNT_BITS = 32
"""The lower part of a generation, which rises with every segment that is opened."""

FREE_SHARE = 3
"""An owner keeps at most one in so many segments free."""

SHOWN_MAX = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block is listed."""

    shard: str
    segment: int
    generation: int


@dataclass(frozen=True, slots=True)
class ShardSeen:
    """A shard's segments, as they lie on flash."""

    segments: int
    generations: dict[int, int]
    """Of those ever written."""

    withheld: frozenset[int] = frozenset()
    """Those that owners before the last one may still be writing. The last one may use none of them, and
    empties others instead."""

    @property
    def newest_count(self) -> int:
        """How often a segment has been opened, as far as flash can tell."""
        return max((_count(each) for each in self.generations.values()), default=0)


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that flash lists, read while no fabric runs."""

    shards: dict[str, ShardSeen]
    places: dict[int, Place]
    """Of each block by its number: its newest."""


@dataclass(slots=True)
class Ledger:
    """The journal of one run. Not thread-safe."""

    is_strict: bool = True
    """Whether what was committed must outlive the outage. Without, nothing is ever called lost."""

    is_calm: bool = True
    """Whether no agent is disturbed now."""

    damaged: set[int] = field(default_factory=set)
    """Blocks whose bytes somebody damaged on flash. They are listed, and nothing is asked of them."""

    _damaged_at: set[tuple[int, Place]] = field(default_factory=set)
    """Where such blocks were listed, ever."""

    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    _seen: Seen = field(default_factory=lambda: Seen({}, {}))
    _committed: set[int] = field(default_factory=set)
    """Since flash was last seen."""

    _missed: dict[int, tuple[str, bool]] = field(default_factory=dict)
    """Since then, and not put again since: what the fabric said, and whether all was calm."""

    _dropped: set[int] = field(default_factory=set)
    """Blocks that were listed while not all was calm, and whose bytes their owner found to be others."""

    _again: set[int] = field(default_factory=set)
    """Blocks that were committed for sure when a put of them began."""

    _rewritten: dict[int, bool] = field(default_factory=dict)
    """Those of them that were committed once more, and whether all was calm."""

    _tried: set[int] = field(default_factory=set)
    _sure: dict[int, int] = field(default_factory=dict)
    """Blocks that were committed when last heard of, with no put begun since; and which news that was."""

    _news: Iterator[int] = field(default_factory=itertools.count)

    @property
    def listed(self) -> dict[int, Place]:
        """What flash listed when it was last seen."""
        return self._seen.places

    def see_damaged(
        self, places: Mapping[int, Place], anywhere: Collection[tuple[int, Place]] = (), *, by_us: bool
    ) -> set[int]:
        """Note where flash lists blocks whose bytes are wrong, at their newest *places* and *anywhere*.

        Return those of which nobody has damaged the bytes. *by_us*: somebody has damaged flash since
        it was last seen.

        A block that was put again or carried forward, and whose newer bytes were evicted first, is listed
        once more where its bytes were damaged before: its owner has dropped it from memory alone, or nobody
        has seen it.
        """
        fresh: set[int] = set()
        if not by_us:
            fresh = {
                number
                for number, place in places.items()
                if number not in self.damaged and (number, place) not in self._damaged_at
            }
        self.damaged = places.keys() - fresh
        self._damaged_at |= {(number, places[number]) for number in self.damaged}
        if by_us:
            self._damaged_at.update(anywhere)
        return fresh

    def trying(self, numbers: Iterable[int]) -> None:
        """Note that a put of these begins."""
        for number in numbers:
            self._tried.add(number)
            self._missed.pop(number, None)
            if self._sure.pop(number, None) is not None:
                self._again.add(number)

    def committed(self, number: int) -> None:
        """Note that a put was answered COMMITTED."""
        self._committed.add(number)
        self._sure[number] = next(self._news)
        self.damaged.discard(number)
        if number in self._again:
            self._rewritten[number] = self.is_calm
        self.counts["committed"] += 1

    def found(self, number: int) -> None:
        """Note that a get or a look-up found a block: it is committed, or a put of it is staged."""
        if number not in self._tried or number in self._committed or number in self._seen.places:
            self.existed(number)

    def existed(self, number: int) -> None:
        """Note that a put was answered EXISTS: the block is committed."""
        if number not in self._tried:
            self.violations.append(f"block {number} was never put, and was found")
        if number in self.damaged:
            return
        self._again.discard(number)
        if number not in self._seen.places:
            self._committed.add(number)
        self._sure[number] = next(self._news)

    def sure(self, numbers: Iterable[int]) -> dict[int, int]:
        """Return which of these are committed for sure, or evicted. Ask before the fabric is asked."""
        return {number: self._sure[number] for number in numbers if number in self._sure}

    def missed(self, number: int, why: str, *, before: dict[int, int]) -> None:
        """Note that the fabric did not find a block; what that means is for the next look at flash.

        *before* is what ``sure`` said. A block that was put meanwhile may be missed, and be there now.
        """
        if number in before and self._sure.get(number) == before[number]:
            self._missed[number] = (why, self.is_calm)

    def dropped(self, number: int) -> None:
        """Note that an owner listed a block, and found other bytes when it was got."""
        if not self.is_strict or number in self.damaged:
            return
        if self.is_calm:
            self.violations.append(f"LOST: block {number} is listed, and DAMAGED")
        else:
            self._dropped.add(number)

    def missed_after_start(self, number: int, why: str) -> None:
        """Judge at once that a fabric that has just started does not find a block that flash listed."""
        place = self._seen.places[number]
        self.counts["evicted at start"] += 1
        if self.is_strict and not _may_be_free(self._seen, place):
            self.violations.append(f"LOST: block {number} at {place} is not found after a restart: {why}")

    def see(self, seen: Seen, *, handed_over: frozenset[str] = frozenset()) -> None:
        """Hold what flash lists now against what it listed and what was acknowledged since.

        *handed_over* are the shards that had another owner meanwhile, or still have.
        """
        if self.is_strict:
            lost = [
                *self._lost(seen),
                *self._lost_since(seen),
                *self._not_found(seen, handed_over),
                *self._found_to_be_others(seen, handed_over),
                *self._written_twice(seen, handed_over),
            ]
            self.violations += lost[:SHOWN_MAX]
            if len(lost) > SHOWN_MAX:
                self.violations.append(f"LOST: {len(lost) - SHOWN_MAX} more blocks")
            if lost:
                self.violations += [
                    f"{name}: {len(shard.generations)} of {shard.segments} segments written, "
                    f"{self._newest_count_before(name)} openings before, {shard.newest_count} now"
                    for name, shard in seen.shards.items()
                ]
        self.counts["listed, and never acknowledged"] += sum(
            number not in self._committed and number not in self._seen.places for number in seen.places
        )
        self._seen = seen
        self._committed.clear()
        self._missed.clear()
        self._dropped.clear()
        self._again.clear()
        self._rewritten.clear()
        self._sure = {number: next(self._news) for number in seen.places}

    def withhold(self, withheld: Mapping[str, frozenset[int]]) -> None:
        """Know that these segments are withheld since flash was last seen."""
        shards = {
            name: replace(shard, withheld=shard.withheld | withheld.get(name, frozenset()))
            for name, shard in self._seen.shards.items()
        }
        self._seen = replace(self._seen, shards=shards)

    def _lost(self, seen: Seen) -> Iterable[str]:
        """Name the blocks that were on flash, and are gone without their segment having been used again."""
        for number, place in self._seen.places.items():
            if number in seen.places or number in self._committed:
                continue
            now = seen.shards[place.shard].generations.get(place.segment, 0)
            if now > place.generation:
                self.counts["evicted"] += 1
            else:
                yield f"LOST: block {number} was listed at {place}, which has not been used again since"

    def _lost_since(self, seen: Seen) -> Iterable[str]:
        """Name the blocks acknowledged since, and in no segment begun since."""
        went_round = any(
            shard.newest_count - before > sum(_count(each) > before for each in shard.generations.values())
            for shard, before in self._with_counts_before(seen)
        )
        before_of = {name: self._newest_count_before(name) for name in seen.shards}
        for number in sorted(self._committed):
            place = seen.places.get(number)
            if place is not None and _count(place.generation) > before_of[place.shard]:
                self.counts["acknowledged, and on flash"] += 1
            elif went_round:
                self.counts["acknowledged, and the ring went round"] += 1
            else:
                yield f"LOST: block {number} was acknowledged, and no segment begun since lists it ({place})"

    def _not_found(self, seen: Seen, handed_over: frozenset[str]) -> Iterable[str]:
        """Name the blocks that the fabric did not find though they lie in no segment that may be free."""
        for number, (why, was_calm) in self._missed.items():
            place = seen.places.get(number)
            if place is None or _may_be_free(seen, place):
                continue
            if place.shard in handed_over and not was_calm:
                self.counts["missed around a hand-over"] += 1
            else:
                yield f"LOST: block {number} is listed at {place}, and the fabric did not find it: {why}"

    def _found_to_be_others(self, seen: Seen, handed_over: frozenset[str]) -> Iterable[str]:
        """Name the blocks that were listed by an owner that had to know, and were not there."""
        for number in sorted(self._dropped):
            place = seen.places.get(number) or self._seen.places.get(number)
            if handed_over if place is None else place.shard in handed_over:
                self.counts["damaged around a hand-over"] += 1
            else:
                yield f"LOST: block {number} at {place} was listed, and DAMAGED"

    def _written_twice(self, seen: Seen, handed_over: frozenset[str]) -> Iterable[str]:
        """Name blocks committed twice while the first copy is intact.

        The first copy's segment must not be free.
        """
        for number, was_calm in self._rewritten.items():
            place = self._seen.places.get(number)
            if (
                place is None
                or seen.shards[place.shard].generations.get(place.segment) != place.generation
                or _may_be_free(seen, place)
            ):
                continue
            if place.shard in handed_over and not was_calm:
                self.counts["written twice around a hand-over"] += 1
            else:
                yield f"WRITTEN TWICE: block {number} at {place} was put again, and COMMITTED, not EXISTS"

    def _with_counts_before(self, seen: Seen) -> Iterable[tuple[ShardSeen, int]]:
        return ((shard, self._newest_count_before(name)) for name, shard in seen.shards.items())

    def _newest_count_before(self, shard: str) -> int:
        before = self._seen.shards.get(shard)
        return before.newest_count if before else 0


def _count(generation: int) -> int:
    return generation & ((1 << COUNT_BITS) - 1)


def _may_be_free(seen: Seen, place: Place) -> bool:
    """Say whether a block's segment is among the oldest, which an owner may have taken out of use.

    Segments never written are free without that, unless they are withheld. One more than may be free may be
    draining, and of those written withheld ones are passed over.
    """
    shard = seen.shards[place.shard]
    free = shard.segments - len(shard.generations.keys() | shard.withheld)
    evicted_max = max(0, shard.segments // FREE_SHARE + 1 - free)
    evicted_max += len(shard.generations.keys() & shard.withheld) if evicted_max else 0
    return place.generation in itertools.islice(sorted(shard.generations.values()), evicted_max)
