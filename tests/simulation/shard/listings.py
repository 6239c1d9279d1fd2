"""What the summary pages of a shard say of blocks, and what faults of its drive have done to them.

Looked at from outside, on the flash itself: so an excuse for a lost block is as small as the fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from tests.support.simulated.drives.drive_faults import Befell, Mishap
from tests.support.simulated.drives.simulated_flash import SimulatedFlash

from ostraca_fabric.flash.summary import PAGE, page_checksum
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.model.extent import PAGE_BYTES, SUPERBLOCK_COPIES

_READS_OF_AN_AREA = 2
"""Recovery reads a page once more, by itself, before it gives it up."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A summary page that lists a block, or should."""

    segment: int
    generation: int
    is_spoilt: bool


class Listings:
    """The summary areas of one shard."""

    def __init__(self, flash: SimulatedFlash, superblock: Superblock) -> None:
        self.flash = flash
        self.geometry = superblock.geometry
        self.base = superblock.drive_offset
        self._seed = superblock.identity.seed

    @property
    def has_superblock(self) -> bool:
        """Whether a fault has left at least one of its copies whole."""
        first = self.base // PAGE_BYTES
        return not all(self._is_spoilt(page) for page in range(first, first + SUPERBLOCK_COPIES))

    def segment_at(self, offset: int) -> int:
        """Return the segment of what begins at *offset* of the shard."""
        return (offset - self.geometry.first_segment_offset) // self.geometry.segment_bytes

    def copies(self, entry: bytes) -> list[Copy]:
        """Return every whole page that lists a block, and every spoilt one that does or should.

        *entry*: what the page holds of it, as far as that is known: its key, or key and tag.
        """
        found = []
        for segment in range(self.geometry.segments):
            for page in self._area(segment):
                there, should_be = self._there(page), self.flash.owed.get(page, b"")
                is_spoilt = self._is_spoilt(page)
                if entry in there and (is_spoilt or _is_whole(there, self._seed)):
                    found.append(Copy(segment, _generation(there), is_spoilt))
                held = (should_be, *self.flash.covered.get(page, ()))
                found += [Copy(segment, _generation(each), is_spoilt) for each in held if entry in each]
        return found

    def spoilt_generations(self, segment: int) -> list[int]:
        """Return of which generations pages of a summary area should be that a fault has spoilt."""
        spoilt = filter(self._is_spoilt, self._area(segment))
        return [_generation(self.flash.owed.get(page) or self._there(page)) for page in spoilt]

    def is_superseded(self, copy: Copy) -> bool:
        """Say whether a page of a newer generation lies there by a fault: a late one, of an opening."""
        pages = self._area(copy.segment)
        return any(
            _generation(self._there(page)) > copy.generation for page in pages if page in self.flash.owed
        )

    def misread(self, mishaps: int) -> set[int]:
        """Return segments with an unreadable or altered summary area, and segments lost by a drive.

        Only faults after *mishaps* count. A drive loses a segment that only its cache had shown.
        """
        lately = self.flash.mishaps[mishaps:]
        kinds = (Befell.READ_ERROR, Befell.POWER_CUT, Befell.ROT_ON_READ)
        return self._misread_by([each for each in lately if each.kind in kinds]) if lately else set()

    def was_spoilt(self, mishaps: int) -> bool:
        """Say whether a summary page was changed or became unreadable since there were so many mishaps.

        It may have been written over since, and tell nothing of it any more.
        """
        kinds = (Befell.ROT, Befell.UNREADABLE, Befell.MISDIRECTED)
        lately = [each for each in self.flash.mishaps[mishaps:] if each.kind in kinds]
        begins = [self.base + self.geometry.summary_offset(each) for each in range(self.geometry.segments)]
        return any(
            each.touches(begin, begin + self.geometry.summary_bytes) for each in lately for begin in begins
        )

    def _misread_by(self, mishaps: Iterable[Mishap]) -> set[int]:
        found = set()
        for segment in range(self.geometry.segments):
            begin = self.base + self.geometry.summary_offset(segment)
            here = (begin, begin + self.geometry.summary_bytes)
            befell = Counter(each.kind for each in mishaps if each.touches(*here))
            unread = befell[Befell.READ_ERROR] + befell[Befell.POWER_CUT]
            has_changed = befell[Befell.POWER_CUT] and self.flash.has_volatile_cache
            if unread >= _READS_OF_AN_AREA or befell[Befell.ROT_ON_READ] or has_changed:
                found.add(segment)
        return found

    def _is_spoilt(self, page: int) -> bool:
        return page in self.flash.owed or page in self.flash.unreadable

    def _there(self, page: int) -> bytes:
        return self.flash.image[page * PAGE_BYTES : (page + 1) * PAGE_BYTES].tobytes()

    def _area(self, segment: int) -> range:
        """Return the numbers of a summary area's pages."""
        first = (self.base + self.geometry.summary_offset(segment)) // PAGE_BYTES
        return range(first, first + self.geometry.summary_pages)


def _generation(page: bytes) -> int:
    return int(np.frombuffer(page, PAGE)["generation"][0])


def _is_whole(page: bytes, seed: int) -> bool:
    """Say whether a summary page is as it was written: not torn."""
    return int(np.frombuffer(page, PAGE)["checksum"][0]) == page_checksum(memoryview(page), seed)
