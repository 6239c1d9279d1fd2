"""Pages of a fed volume: known blocks, presence in the fabric, and announcements. Pure.

A page is announced while all its blocks are found, one for each rank and KV group, and the page before is
announced too: a router credits pages after a hole, which no engine can use. A page whose predecessor is
unknown counts by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ostraca_fabric.model.chain import Span
from ostraca_fabric.policies.rounds import Rounds

Part = tuple[int, int]
"""Rank and KV group."""


class PageEvent(NamedTuple):
    """News of a page."""

    page: bytes
    is_removed: bool


@dataclass(slots=True)
class FedPage:
    """Page with at least one known block."""

    name: bytes
    depth: int
    """Depth in its first known chain; smaller for the page before. So pages never follow each other in a
    circle."""

    units: dict[Part, bytes] = field(default_factory=dict)
    """Placement hash of each known block."""

    before: bytes | None = None
    """The page before, if known."""

    after: set[bytes] = field(default_factory=set)
    """Pages that follow in some chain."""

    is_found: bool = False
    announced_s: float | None = None
    """Time of the last announcement; None while not announced."""


class FedPages:
    """Known pages, the oldest forgotten beyond a limit."""

    def __init__(
        self, rounds: Rounds[FedPage], *, parts: Iterable[Part], pages_max: int, repeat_s: float
    ) -> None:
        """Begin without pages. A page has a block for each of *parts*.

        Announcements are repeated after *repeat_s*.
        """
        self._rounds = rounds
        self._parts = frozenset(parts)
        self._pages_max = pages_max
        self._repeat_s = repeat_s
        self._pages: OrderedDict[bytes, FedPage] = OrderedDict()  # a dict is slow to find its oldest item
        self._events: list[PageEvent] = []
        self.announced = 0
        """Announced pages."""

    def __len__(self) -> int:
        """Count the known pages."""
        return len(self._pages)

    def learn(self, spans: Iterable[Span]) -> None:
        """Note the names of blocks; ignore blocks of other ranks and groups than the volume's."""
        for span in spans:
            part = span.rank, span.group
            if part not in self._parts:
                continue
            before = None
            for depth, (page, unit) in enumerate(_named(span), span.depth):
                known = self._pages.get(page)
                if known is None:
                    known = self._pages[page] = FedPage(page, depth)
                    self._rounds.add(known)
                known.units[part] = unit
                if before is not None and known.before is None and self._pages[before].depth < known.depth:
                    known.before = before
                    self._pages[before].after.add(page)
                before = page if span.chain_blocks else None
        while len(self._pages) > self._pages_max:
            self._forget(next(iter(self._pages)))

    def take_due(self, most: int) -> tuple[list[bytes], float]:
        """Return the pages to look up next, about *most*, and the pause before."""
        # A page forgotten and learned again has a new turn, and loses the old one.
        due, pause_s = self._rounds.take_due(
            lambda known: int(self._pages.get(known.name) is known), most=most, total=len(self._pages)
        )
        return [known.name for known in due], pause_s

    def spans(self, pages: Sequence[bytes]) -> list[tuple[Span, list[bytes]]]:
        """Return the known blocks of pages as spans, with the page of each block."""
        by_part: dict[Part, list[tuple[bytes, bytes]]] = {}
        for page in pages:
            for part, unit in self._pages[page].units.items():
                by_part.setdefault(part, []).append((page, unit))
        found = []
        for (rank, group), named in by_part.items():
            names = [page for page, _ in named]
            units = b"".join(unit for _, unit in named)
            width = len(names[0])
            found.append((Span(b"".join(names), width, units, (1,) * len(names), rank, group), names))
        return found

    def record(self, blocks: Mapping[bytes, Mapping[Part, bool]], now_s: float) -> None:
        """Note which blocks of pages are in the fabric; pages without a certain answer are left out."""
        for page, found in blocks.items():
            known = self._pages.get(page)
            if known is not None:
                known.is_found = self._parts <= {part for part, is_there in found.items() if is_there}
                self._settle(page, now_s)

    def repeat_all(self) -> None:
        """Announce all pages again at their next turn: a router begins without any."""
        for known in self._pages.values():
            if known.announced_s is not None:
                known.announced_s = float("-inf")

    def take_events(self) -> list[PageEvent]:
        """Return the news since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _settle(self, first: bytes, now_s: float) -> None:
        """Announce or withdraw a page, and then the pages after."""
        pending = [first]
        while pending:
            page = pending.pop()
            known = self._pages[page]
            before = None if known.before is None else self._pages.get(known.before)
            may_stand = known.is_found and (before is None or before.announced_s is not None)
            was_announced = known.announced_s is not None
            if may_stand and (known.announced_s is None or now_s - known.announced_s >= self._repeat_s):
                known.announced_s = now_s
                self._events.append(PageEvent(page, is_removed=False))
            elif was_announced and not may_stand:
                known.announced_s = None
                self._events.append(PageEvent(page, is_removed=True))
            if may_stand != was_announced:
                self.announced += 1 if may_stand else -1
                pending.extend(known.after)

    def _forget(self, page: bytes) -> None:
        known = self._pages.pop(page)
        if known.before is not None:
            self._pages[known.before].after.discard(page)
        for each in known.after:
            self._pages[each].before = None
        if known.announced_s is not None:
            self.announced -= 1
            self._events.append(PageEvent(page, is_removed=True))


def _named(span: Span) -> Iterator[tuple[bytes, bytes]]:
    """Yield the hash and the placement hash of each block."""
    width, at = span.hash_bytes, 0
    for number, blocks in enumerate(span.unit_blocks):
        unit = span.units[number * width : (number + 1) * width]
        for _ in range(blocks):
            yield span.hashes[at : at + width], unit
            at += width
