"""The drives of a fabric: what befalls them, and which lost blocks that excuses.

A fault excuses a block only where it touched what the block depends on: its extent, a summary page that lists
it, the page that would have shown the listing to be of an older generation, or all of its drive; or where its
summary area could not be read again and again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tests.simulation.fabric.world.volume_records import are_volume_records
from tests.simulation.shard.listings import Listings
from tests.simulation.shard.model import ViolationError
from tests.support.simulated.drives.drive_faults import Befell, DriveFaults
from tests.support.simulated.drives.simulated_flash import SimulatedFlash

from ostraca_fabric.flash.rebuild import FoundShard
from ostraca_fabric.flash.superblock import Superblock, chosen_copy, encode_superblock, examine_superblock
from ostraca_fabric.flash.volume_records import COPIES, copy_bytes, copy_offset, examine_volumes
from ostraca_fabric.model.extent import (
    FIRST_SEGMENT_OFFSET,
    MIB,
    PAGE_BYTES,
    SUPERBLOCK_COPIES,
    Geometry,
    rounded_up,
)
from ostraca_fabric.model.fabric_map import DriveRecord, EnclosureRecord, ShardRecord
from ostraca_fabric.model.ids import EnclosureId, FabricId, drive_id, drive_of, shard_id

if TYPE_CHECKING:
    from ostraca_dpu_agent.shards.shard import OwnedShard
    from ostraca_fabric.model.extent import Pieces
    from ostraca_fabric.model.ids import DriveId, ShardId

FABRIC = FabricId(bytes(16))
ILLS = ("read_errors", "write_errors", "no_space", "rot", "rot_on_read", "unreadable", "misdirected")
"""Kinds of ``DriveFaults`` that end, and may leave something behind."""

_DEAD = DriveFaults(read_errors=1.0, write_errors=1.0)


class Drives:
    """All drives that were ever made, with one shard each, from its beginning on."""

    def __init__(self, dice: random.Random, usual: DriveFaults, *, segments: int) -> None:
        self.flashes: dict[DriveId, SimulatedFlash] = {}
        self.dead: set[DriveId] = set()
        """Those that have failed for good."""

        self.superblocks: dict[ShardId, Superblock] = {}
        self._dice = dice
        self._usual = usual
        self._segments = segments
        self._weights: dict[ShardId, int] = {}
        self._listings: dict[ShardId, Listings] = {}
        self._mishaps_seen: Counter[DriveId] = Counter()
        self._enclosures = 0

    def made_enclosure(self, drives: int) -> EnclosureRecord:
        """Format an enclosure's drives.

        No name is used twice: the store may have forgotten an enclosure that agents know still.
        """
        enclosure = EnclosureId(f"e{self._enclosures}")
        self._enclosures += 1
        made = [self._made(enclosure, number) for number in range(drives)]
        return EnclosureRecord(
            enclosure, tuple(drive for drive, _ in made), tuple(shard for _, shard in made)
        )

    def _made(self, enclosure: EnclosureId, number: int) -> tuple[DriveRecord, ShardRecord]:
        shard_bytes = FIRST_SEGMENT_OFFSET + self._segments * MIB
        geometry = Geometry.planned(shard_bytes, segment_bytes=MIB, block_bytes=4096)
        drive = drive_id(enclosure, f"d{number}")
        shard = shard_id(drive, 0)
        flash = SimulatedFlash(shard_bytes, self._dice)
        superblock = Superblock(FABRIC, bytes(16), enclosure, drive, shard, 0, geometry)
        pages = np.frombuffer(encode_superblock(superblock), np.uint8)
        flash.land(flash.next_number(), 0, pages, lambda: False)
        flash.faults = self._usual
        self.flashes[drive] = flash
        self.superblocks[shard] = superblock
        self._listings[shard] = Listings(flash, superblock)
        data_bytes = geometry.segments * geometry.data_bytes
        self._weights[shard] = data_bytes
        record = ShardRecord(shard, drive, 0, shard_bytes, data_bytes, geometry.data_bytes)
        return DriveRecord(drive, str(drive)), record

    def weight_of(self, shard: ShardId) -> int:
        """Return the weight that a shard has while it takes blocks."""
        return self._weights[shard]

    # ------------------------------------------------------------------------------------- what befalls them

    @property
    def living(self) -> list[DriveId]:
        return [drive for drive in self.flashes if drive not in self.dead]

    def befall(self, drive: DriveId, **chances: float) -> None:
        """Let a drive have these faults beside its usual ones, until it is ``well`` again."""
        if drive not in self.dead:
            self.flashes[drive].faults = replace(self._usual, **chances)  # type: ignore[arg-type]  # no field of these is a bool

    def well(self, drive: DriveId) -> None:
        """Let a drive have its usual faults. What they have left behind stays."""
        self.befall(drive)

    def all_well(self) -> None:
        """Let no drive have any fault but what it is slow by."""
        quiet = DriveFaults(service_s=self._usual.service_s, late=self._usual.late, late_s=self._usual.late_s)
        for drive in self.living:
            self.flashes[drive].faults = quiet

    def all_as_usual(self) -> None:
        """Let every drive have its usual faults."""
        for drive in self.living:
            self.well(drive)

    def die(self, drive: DriveId) -> None:
        """Let every I/O of a drive fail from now on."""
        self.dead.add(drive)
        self.flashes[drive].faults = _DEAD

    def found_shards(self) -> list[FoundShard]:
        """Return what can be read of the drives by whoever makes a lost store anew."""
        found = []
        for shard, listings in self._listings.items():
            drive, flash = drive_of(shard), listings.flash
            pages = (
                flash.image[: SUPERBLOCK_COPIES * PAGE_BYTES].copy().reshape(SUPERBLOCK_COPIES, PAGE_BYTES)
            )
            pages[[page for page in range(SUPERBLOCK_COPIES) if page in flash.unreadable]] = 0
            superblock = chosen_copy(examine_superblock(pages.tobytes())).superblock
            if drive not in self.dead and superblock is not None:
                area = flash.image[copy_offset(superblock.geometry, 0) :][
                    : COPIES * copy_bytes(superblock.geometry)
                ]
                copies = examine_volumes(superblock, area.tobytes())
                found.append(FoundShard(str(drive), 0, superblock, copies))
        return found

    # ------------------------------------------------------------------------------------- what they excuse

    def mishaps(self, shard: ShardId) -> int:
        """Count what has befallen a shard so far."""
        return len(self._listings[shard].flash.mishaps)

    def have_unreadable(self, shards: Iterable[ShardId]) -> bool:
        """Say whether a page of one of these shards can't be read."""
        return any(self._listings[shard].flash.unreadable for shard in shards)

    def are_of_summaries(self, drive: DriveId, pieces: Pieces) -> bool:
        """Say whether a write to a drive is of summaries, rather than of blocks or of what is for all."""
        superblock = next(each for each in self.superblocks.values() if each.drive == drive)
        geometry, at = superblock.geometry, int(pieces.drive_offsets[0]) - superblock.drive_offset
        within = at - geometry.first_segment_offset
        return within >= 0 and within % geometry.segment_bytes < geometry.summary_bytes

    def may_hide_owners(self, shard: ShardId, mishaps: int) -> bool:
        """Say whether mishaps of a shard may hide earlier epochs from its next owner.

        *mishaps*: their count at the start of the interval.
        """
        listings = self._listings[shard]
        return listings.was_spoilt(mishaps) or bool(listings.misread(mishaps))

    def why_gone(self, shard: ShardId, drive: DriveId) -> str:
        """Say why nobody can answer for a shard any more; nothing if somebody must."""
        if drive in self.dead:
            return "a dead drive"
        return "" if self._listings[shard].has_superblock else "a spoilt superblock"

    def excuse(self, owned: OwnedShard, key: bytes, mishaps: int) -> str:
        """Say why a block that was committed here, when there had been so many *mishaps*, may be a miss.

        *owned*: the shard, at its owner. Says nothing where it must be found.
        """
        listings = self._listings[owned.record.id]
        misread = listings.misread(mishaps)
        (row,) = found = owned.core.index.find(np.frombuffer(key, np.uint8).reshape(1, -1))
        if row < 0:
            copies = listings.copies(key)
            spoilt = (
                copy.is_spoilt or copy.segment in misread or listings.is_superseded(copy) for copy in copies
            )
            if not copies and listings.was_spoilt(mishaps):
                return "a spoilt listing, written over since"
            return "a spoilt listing" if any(spoilt) else ""
        begin, length = int(owned.core.index.offsets(found)[0]), int(owned.core.index.lengths(found)[0])
        if listings.flash.is_spoilt(begin, begin + length):
            return "a spoilt extent"
        is_old = self._is_of_an_older_generation(owned, begin) or listings.segment_at(begin) in misread
        return "a spoilt page of a newer generation" if is_old else ""

    def _is_of_an_older_generation(self, owned: OwnedShard, offset: int) -> bool:
        """Whether an owner goes by the listing before the newest, which is spoilt: other blocks lie there."""
        listings = self._listings[owned.record.id]
        segment = listings.segment_at(offset)
        generation = owned.core.ring.segments[segment].generation
        return any(each > generation for each in listings.spoilt_generations(segment))

    def check_damage(self, owned: OwnedShard, offset: int, length: int) -> None:
        """Check damage found by an owner: there must be some, or have seemed to be.

        The damage is in a block of *length* bytes at *offset* of the shard, or in the summary area that
        begins there if *length* is 0.
        """
        flash, geometry = self.flashes[owned.record.drive], self._listings[owned.record.id].geometry
        end = offset + (rounded_up(length) or geometry.summary_bytes)
        if not (
            flash.is_spoilt(offset, end)
            or flash.befell_since(0, offset, end, Befell.ROT_ON_READ)
            or (length and self._is_of_an_older_generation(owned, offset))
        ):
            raise ViolationError(
                f"{owned.record.id} is called damaged at {offset}, and nothing has damaged it"
            )

    def check_listed(self, shard: ShardId, entries: NDArray[np.uint8]) -> None:
        """Check committed blocks: a summary page on flash lists each, or did before a fault.

        *entries*: key and tag of each, shape (n, 32).
        """
        listings = self._listings[shard]
        if not all(listings.copies(entry.tobytes()) for entry in entries):
            raise ViolationError(f"blocks are called committed, and no page of {shard} lists them")

    def check_writes(self) -> int:
        """No write may land over what was submitted after it; return how many volume records did.

        No grant covers those.
        """
        excused = 0
        for drive, flash in self.flashes.items():
            seen, self._mishaps_seen[drive] = self._mishaps_seen[drive], len(flash.mishaps)
            for mishap in flash.mishaps[seen:] if seen < len(flash.mishaps) else ():
                if mishap.kind is Befell.LATE and are_volume_records(mishap):
                    excused += 1
                elif mishap.kind is Befell.LATE:
                    raise ViolationError(
                        f"a write to {drive} landed at {mishap.begin} over what was submitted after it"
                    )
        return excused
