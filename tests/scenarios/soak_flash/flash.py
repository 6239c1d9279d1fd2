"""What lies on the drives of a fabric that does not run, read by the tests' own small reader.

It shares no code with Ostraca: keys come from the second implementation, pages from the reader that was
written from the format's page, and bytes are compared with what was put.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tests.fabric.flash import small_reader
from tests.fabric.second_implementation import key, volume_secret
from tests.scenarios.soak_flash.content import content, hash_of, length_of
from tests.scenarios.soak_flash.ledger import Place, Seen, ShardSeen
from tests.support.fabric.fabric_host import drive_files


class FlashReader:
    """Reads one fabric's drives, and knows one volume's blocks by their keys."""

    def __init__(
        self, directory: Path, *, tenant: str, volume: str, incarnation: int, is_alone: bool = True
    ) -> None:
        """*is_alone* says that no other volume has blocks there."""
        self.damaged: dict[int, str] = {}
        """Blocks of which the newest place does not hold their bytes, when last looked, and which place."""

        self.damaged_anywhere: set[tuple[int, Place]] = set()
        """All places of blocks that did not hold their bytes, when last looked: also those that a newer place
        of the same block makes up for."""

        self._directory = directory
        self._is_alone = is_alone
        self._secret = volume_secret((directory / "fabric.key").read_bytes(), tenant, volume, incarnation)
        self._numbers: dict[bytes, int] = {}

    def know(self, numbers: Iterable[int]) -> None:
        """Recognise these blocks from now on."""
        for number in numbers:
            self._numbers[key(self._secret, hash_of(number), 0, 0)] = number

    def look(self) -> tuple[Seen, list[str]]:
        """Return what is listed, and name each listed block that does not hold what was put."""
        shards: dict[str, ShardSeen] = {}
        places: dict[int, Place] = {}
        wrong: list[str] = []
        self.damaged, self.damaged_anywhere = {}, set()
        for path in drive_files(self._directory):
            with _mapped(path) as image:
                shard = small_reader.superblock(image)
                shards[shard.shard] = ShardSeen(shard.segments, small_reader.generations(image))
                for block in small_reader.blocks(image):
                    number = self._numbers.get(block.key)
                    if number is None:
                        if self._is_alone:
                            wrong.append(
                                f"a block never put, listed in segment {block.segment} of {shard.shard}"
                            )
                        continue
                    words = f"block {number}, listed in segment {block.segment} of {shard.shard}"
                    place = Place(shard.shard, block.segment, block.generation)
                    is_right = _is_right(number, block.data)
                    if not is_right:
                        wrong.append(words)
                        self.damaged_anywhere.add((number, place))
                    before = places.get(number)
                    if before is None or before.generation < block.generation:
                        places[number] = place
                        self.damaged.pop(number, None)
                        if not is_right:
                            self.damaged[number] = words
        return Seen(shards, places), wrong


def newest_summary(directory: Path) -> tuple[Path, int] | None:
    """Return drive and offset of the summary page that was written last, of those that list blocks."""
    best = (0, 0, Path(), 0)
    for path in drive_files(directory):
        with _mapped(path) as image:
            shard = small_reader.superblock(image)
            for segment in range(shard.segments):
                begin = shard.first_segment + segment * shard.segment_bytes
                for (generation, number), (sequence, page) in small_reader.pages_of(
                    image, shard, segment
                ).items():
                    places = (0, 1, 2 + number)
                    at = [begin + place * small_reader.PAGE for place in places]
                    (offset,) = [each for each in at if image[each : each + small_reader.PAGE] == page]
                    if int.from_bytes(page[20:24], "little"):
                        best = max(best, (generation, sequence, path, offset))
    return (best[2], best[3]) if best[0] else None


def _is_right(number: int, data: bytes) -> bool:
    return len(data) == length_of(number) and np.array_equal(np.frombuffer(data, np.uint8), content(number))


@contextmanager
def _mapped(path: Path) -> Iterator[bytes]:
    """Map a drive, as if all of it were bytes: slices of a map are.

    What the page cache has of it goes first: the fabric writes past it.
    """
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            yield image  # type: ignore[misc]
