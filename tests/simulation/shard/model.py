"""The oracle: a dictionary of what was put, and what answers of an owner may say of it.

- What verifies is exactly one put of that block that was completed up to its commit.
- A block that was committed, or found by a successor, is found until it is evicted or dropped for damage.
- A block that is found can be read.

A fault of the drive excuses an answer only where it touched what that answer depends on: the pages of the
extent, every page that lists the block, or the page that would have shown the entry to be of an older
generation.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
from tests.simulation.shard.blocks import Block, key_of
from tests.simulation.shard.listings import Copy, Listings
from tests.simulation.shard.seam import Listed, Owner
from tests.support.simulated.drives.drive_faults import Befell
from tests.support.simulated.drives.simulated_flash import SimulatedFlash

from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.telemetry.explain import EventKind


class ViolationError(AssertionError):
    """Something that must never be."""


class Model:
    """What is known of one shard, over all its owners."""

    def __init__(self, flash: SimulatedFlash, superblock: Superblock) -> None:
        self.flash = flash
        self.geometry = superblock.geometry
        self.base = superblock.drive_offset
        self._listings = Listings(flash, superblock)
        self.puts: defaultdict[int, dict[bytes, Block]] = defaultdict(dict)
        """By number and tag: every put that may have been listed."""

        self.must: dict[int, Block] = {}
        """What the present owner lists, as far as anybody was told."""

        self.departures: Counter[int] = Counter()
        """How often each block has left an index."""

        self.excused: Counter[str] = Counter()
        self._misread: set[int] = set()
        """Segments of which the present owner may have seen something else than is there."""

        self._left: set[int] = set()
        self._left_lately: list[Block] = []
        """What left the index since a recovery began."""

        self._reported: dict[int, tuple[Listed, int]] = {}
        self._versions = 0

    def new_block(self, number: int, length: int) -> Block:
        self._versions += 1
        return Block(number, self._versions, length)

    # ------------------------------------------------------------------------------ what movers are told

    def offered(self, block: Block) -> None:
        """Note that a commit goes to an owner: from now on the put may be listed."""
        self.puts[block.number][block.tag] = block
        self._left.discard(block.number)

    def refused(self, block: Block) -> None:
        """Note the owner's answer that it never took the commit."""
        self.puts[block.number].pop(block.tag, None)

    def committed(self, block: Block) -> None:
        if block.number not in self._left:
            self.must[block.number] = block

    def reserved(self, number: int) -> None:
        """Space was given for it, which nobody gives for a block that can be got."""
        if number in self.must:
            raise ViolationError(f"block {number} was committed, and the owner takes it for new")

    def exists(self, owner: Owner, number: int, departures: int) -> None:
        """Check EXISTS: the block can be got, unless it left the index since the request."""
        if self.departures[number] > departures:
            return
        found, _ = owner.resolve([number], 0.0)
        if found[0] is None:
            raise ViolationError(f"block {number} EXISTS, and is not found")
        self.listing_is_true(found[0])

    def not_found(self, number: int) -> None:
        if number in self.must:
            raise ViolationError(f"block {number} was committed, and is not found")

    def found(self, listed: Listed, *, is_recovering: bool) -> None:
        """Check a found extent: a put of that block, and the one committed last."""
        if listed.tag not in self.puts[listed.number]:
            raise ViolationError(f"block {listed.number} is found under a tag that nobody committed")
        must = self.must.get(listed.number)
        if must is not None and must.tag != listed.tag and not is_recovering:
            raise ViolationError(f"an older put of block {listed.number} is found")

    def verified(self, listed: Listed, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Check bytes with a good tag: they are those of one put."""
        block = self.puts[listed.number].get(listed.tag)
        if block is None or block.length != listed.length or not np.array_equal(block.data, data):
            raise ViolationError(f"WRONG BYTES of block {listed.number} verify")

    def unreadable(self, listed: Listed, mishaps: int) -> None:
        """Check bytes with a bad tag; *mishaps* is the count when the reader asked."""
        begin = self.base + listed.offset
        if self.flash.befell_since(mishaps, begin, begin + listed.length, Befell.ROT_ON_READ):
            self.excused["rot on a read"] += 1
        elif not self._is_excused(listed):
            raise ViolationError(
                f"block {listed.number} is found, and nothing damaged it, and it can't be read"
            )

    def reported(self, listed: Listed) -> None:
        """Report damage to the owner, which reads again itself."""
        self._reported[listed.number] = (listed, len(self.flash.mishaps))

    def gone(self, kind: EventKind, numbers: list[int]) -> None:
        """Check removed blocks: the owner must itself have found a dropped block damaged."""
        for number in numbers:
            self._left.add(number)
            self.departures[number] += 1
            block = self.must.pop(number, None)
            if block is not None and kind is EventKind.EVICTED:
                self._left_lately.append(block)
            if kind is EventKind.DROPPED:
                if number not in self._reported:
                    raise ViolationError(f"block {number} was dropped, and nobody had reported it")
                self.unreadable(*self._reported[number])

    # -------------------------------------------------------------------------------- what owners believe

    def recovering(self) -> None:
        """Note that an owner begins to recover."""
        self._left_lately.clear()

    def taken_over(self, owner: Owner, mishaps: int) -> None:
        """Check a recovery; *mishaps* is the count when the recovery began."""
        self._misread = self._listings.misread(mishaps)
        listed = {each.number: each for each in owner.listed()}
        for number, block in list(self.must.items()):
            found = listed.get(number)
            if found is None or found.tag != block.tag:
                self._lost(owner, block, found)
        self._left.clear()
        segment_at = self._listings.segment_at
        in_turn = (each for each in listed.values() if not owner.has_kept(segment_at(each.offset)))
        oldest: dict[int, int] = {}
        for each in in_turn:
            pool = owner.found_of(segment_at(each.offset))
            oldest[pool] = min(each.generation, oldest.get(pool, each.generation))
        for block in self._left_lately:
            if block.number not in listed and self._is_newer(owner, block, oldest):
                raise ViolationError(
                    f"block {block.number} was left out, and older ones of its pool are listed"
                )
        for number, each in listed.items():
            self.found(each, is_recovering=False)
            self.listing_is_true(each)
            if self._listings.segment_at(each.offset) not in self._misread:
                self.must[number] = self.puts[number][each.tag]

    def holds(self, owner: Owner) -> None:
        """Between two recoveries: what must be listed is, and what is listed can be read."""
        listed = {each.number: each for each in owner.listed()}
        for number in self.must:
            if number not in listed:
                raise ViolationError(f"block {number} was committed, and is not listed any more")
        for each in listed.values():
            self.found(each, is_recovering=False)
            self.listing_is_true(each)

    def listing_is_true(self, listed: Listed) -> None:
        """Check that a listed extent holds the block, unless a fault of the drive explains it."""
        block = self.puts[listed.number].get(listed.tag)
        if block is None:
            raise ViolationError(f"block {listed.number} is listed under a tag that nobody committed")
        begin = self.base + listed.offset
        there = self.flash.image[begin : begin + listed.length]
        if not np.array_equal(there, block.data) and not self._is_excused(listed):
            raise ViolationError(f"block {listed.number} is listed, nothing damaged it, and it is not there")

    # ------------------------------------------------------------------------------------------- excuses

    def _is_excused(self, listed: Listed) -> bool:
        begin = self.base + listed.offset
        if self.flash.is_spoilt(begin, begin + listed.length):
            self.excused["a spoilt extent"] += 1
            return True
        segment = self._listings.segment_at(listed.offset)
        if segment in self._misread or any(
            generation > listed.generation for generation in self._listings.spoilt_generations(segment)
        ):
            self.excused["a spoilt page of a newer generation"] += 1
            return True
        return False

    def _lost(self, owner: Owner, block: Block, found: Listed | None) -> None:
        """Check a committed block that was not recovered: its listings must be damaged.

        Or a put of it that was never answered is listed too, in a newer generation: an older owner's last
        summary has landed since.
        """
        del self.must[block.number]
        copies = self._copies(block)
        if found is not None and copies and all(found.generation > copy.generation for copy in copies):
            return
        for copy in copies:
            is_current = copy.generation == owner.generation_of(copy.segment)
            if is_current and not copy.is_spoilt and copy.segment not in self._misread:
                raise ViolationError(f"block {block.number} is listed on flash, and was not recovered")
        if not any(
            copy.is_spoilt or copy.segment in self._misread or self._listings.is_superseded(copy)
            for copy in copies
        ):
            raise ViolationError(f"block {block.number} was committed, and no page on flash lists it")
        self.excused["a spoilt listing"] += 1

    def _is_newer(self, owner: Owner, block: Block, oldest: dict[int, int]) -> bool:
        """Say whether a page believed by an owner lists a block in a newer segment.

        Newer means: newer than the *oldest* segment of the segment's pool.
        """
        copies = [
            copy for copy in self._copies(block) if not copy.is_spoilt and copy.segment not in self._misread
        ]
        return any(
            oldest.get(owner.found_of(copy.segment), copy.generation)
            < copy.generation
            == owner.generation_of(copy.segment)
            for copy in copies
        )

    def _copies(self, block: Block) -> list[Copy]:
        return self._listings.copies(key_of(block.number) + block.tag)
