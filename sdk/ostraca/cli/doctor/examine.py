"""Examining drives: read, compare with what should be there, say what is wrong. Never writes.

One summary area is in memory at a time, so a large drive takes time and not memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ostraca.cli.doctor.drives import DriveFile, Home
from ostraca.cli.doctor.findings import (
    CopyFinding,
    DriveFinding,
    ReadBack,
    SegmentFinding,
    ShardFinding,
    Trouble,
)
from ostraca.cli.doctor.volumes import volumes_finding, volumes_troubles
from ostraca_fabric.extent import PAGE_BYTES, generation_parts, rounded_up
from ostraca_fabric.flash.geometry import FIRST_SEGMENT_OFFSET, MIB, SEGMENTS_MIN, SUPERBLOCK_COPIES
from ostraca_fabric.flash.recovery import recover
from ostraca_fabric.flash.summary import PAGE, PageState, page_states
from ostraca_fabric.flash.superblock import CopyState, chosen_copy, examine_superblock
from ostraca_fabric.sentences import counted
from ostraca_fabric.tags import matches

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ostraca_fabric.flash.recovery import RecoveredAreas
    from ostraca_fabric.flash.superblock import Superblock, SuperblockCopy

SUPERBLOCK_BYTES = SUPERBLOCK_COPIES * PAGE_BYTES
_SHARD_BYTES_MIN = FIRST_SEGMENT_OFFSET + SEGMENTS_MIN * MIB
_SHOWN_BAD = 10
_ANOTHERS = frozenset({CopyState.FOREIGN.value, CopyState.NEWER.value})

Copies = tuple["SuperblockCopy", "SuperblockCopy"]


def examine_drive(path: Path, *, is_verifying: bool = False) -> DriveFinding:
    """Say what is on a drive, and what is wrong with it. What can't be read is trouble, not an error."""
    home = Home.of(path)
    is_running = home is not None and home.is_running
    belongs = home.shard_at(path) if home is not None else None
    try:
        with DriveFile(path) as drive:
            finding = DriveFinding(str(path), drive.size_bytes, is_running)
            if drive.size_bytes < SUPERBLOCK_BYTES:
                short = Trouble(
                    f"it has {drive.size_bytes} bytes, and the smallest shard has {_SHARD_BYTES_MIN}: it was "
                    "cut short, or is no drive",
                    _away(path, home) if belongs else "restore it, or take another drive",
                )
                return replace(finding, troubles=(short,))
            shards, end = [], 0
            for offset, copies in shards_of(drive):
                found = _examined(drive, offset, copies, is_verifying=is_verifying)
                shards.append(_judged(found, path, drive.size_bytes, home))
                end = offset + found.shard_bytes
            return replace(finding, shards=tuple(shards), bytes_behind=max(0, drive.size_bytes - end))
    except OSError as error:
        return DriveFinding(str(path), 0, is_running, troubles=(_unreadable(error, belongs),))


def shards_of(drive: DriveFile) -> Iterator[tuple[int, Copies]]:
    """Give the place of each shard with what is at its beginning: the first always, good or not, and those
    that follow it end to end. Raises OSError.
    """
    offset = 0
    while True:
        copies = examine_superblock(drive.read(offset, SUPERBLOCK_BYTES))
        states = {copy.state for copy in copies}
        if offset and states <= {CopyState.BLANK, CopyState.FOREIGN, CopyState.CUT_SHORT}:
            return
        yield offset, copies
        superblock = chosen_copy(copies).superblock
        if superblock is None:
            return
        offset += rounded_up(superblock.geometry.shard_bytes)
        if offset + SUPERBLOCK_BYTES > drive.size_bytes:
            return


def segments_of(
    drive: DriveFile, superblock: Superblock, offset: int, wanted: int | None = None
) -> Iterator[tuple[int, bytes | None, RecoveredAreas | None]]:
    """Read the segments of the shard at *offset*, one after another: number, summary area, what it says.

    Only the one *wanted*, when it is given. The last two are None where the area can't be read.
    """
    geometry = superblock.geometry
    for number in range(geometry.segments) if wanted is None else (wanted,):
        try:
            area = drive.read(offset + geometry.summary_offset(number), geometry.summary_bytes)
        except OSError:
            area = b""
        if len(area) < geometry.summary_bytes:
            yield number, None, None
        else:
            rows = np.frombuffer(area, np.uint8).reshape(1, -1)
            yield number, area, recover(superblock, np.array([number]), rows)


def _examined(drive: DriveFile, offset: int, copies: Copies, *, is_verifying: bool) -> ShardFinding:
    told = tuple(CopyFinding(copy.state.value, copy.version, copy.why) for copy in copies)
    superblock = chosen_copy(copies).superblock
    if superblock is None:
        return ShardFinding(offset, told)
    geometry = superblock.geometry
    segments: list[SegmentFinding] = []
    read_back = ReadBack(0, 0, 0, 0, ()) if is_verifying else None
    volumes = volumes_finding(drive, superblock, offset)
    for number, area, read in segments_of(drive, superblock, offset):
        if area is None or read is None:
            segments.append(SegmentFinding(number, 0, 0, 0, 0, 0, 0, 0, 0, is_readable=False))
            continue
        if area == bytes(len(area)):
            continue
        segments.append(_segment(superblock, number, area, read))
        if read_back is not None:
            read_back = _read_back(drive, offset, read, read_back)
    return ShardFinding(
        offset,
        told,
        shard=superblock.shard,
        fabric=superblock.fabric.hex(),
        format_id=superblock.format_id.hex(),
        enclosure=superblock.enclosure,
        drive=superblock.drive,
        drive_offset=superblock.drive_offset,
        shard_bytes=geometry.shard_bytes,
        segment_bytes=geometry.segment_bytes,
        segments=geometry.segments,
        summary_pages=geometry.summary_pages,
        volumes=volumes,
        segments_found=tuple(segments),
        read_back=read_back,
        troubles=(*_copies_apart(copies), *volumes_troubles(volumes)),
    )


def _segment(superblock: Superblock, number: int, area: bytes, read: RecoveredAreas) -> SegmentFinding:
    states = page_states(superblock.identity, np.array([number]), np.frombuffer(area, PAGE).reshape(1, -1))
    entries, epoch, count = 0, 0, 0
    entry_bytes, pages_missing = 0, 0
    for found in read.segments:
        entries, pages_missing = len(found.entries), found.pages_missing
        entry_bytes = int(found.entries["length"].sum(dtype=np.int64))
        epoch, count = generation_parts(found.generation)
    return SegmentFinding(
        number,
        epoch,
        count,
        entries,
        entry_bytes,
        int((states == PageState.DAMAGED).sum()),
        pages_missing,
        int((states == PageState.OTHER).sum()),
        read.entries_refused,
        is_readable=True,
    )


def _read_back(drive: DriveFile, offset: int, read: RecoveredAreas, so_far: ReadBack) -> ReadBack:
    """Read every block that a segment lists, and check its tag."""
    entries = [entry for found in read.segments for entry in found.entries]
    unreadable: list[str] = []
    damaged: list[str] = []
    for entry in entries:
        length = int(entry["length"])
        try:
            block = drive.read(offset + int(entry["first_page"]) * PAGE_BYTES, length)
        except OSError:
            block = b""
        if len(block) < length:
            unreadable.append(entry["key"].tobytes().hex())
        elif not matches(block, int(entry["seed"]), entry["tag"].tobytes()):
            damaged.append(entry["key"].tobytes().hex())
    return ReadBack(
        so_far.blocks + len(entries),
        so_far.block_bytes + sum(int(entry["length"]) for entry in entries),
        so_far.blocks_unreadable + len(unreadable),
        so_far.blocks_damaged + len(damaged),
        (*so_far.first_bad, *unreadable, *damaged)[:_SHOWN_BAD],
    )


def _copies_apart(copies: Copies) -> tuple[Trouble, ...]:
    """Say what is wrong with the copies of a superblock of which one is good."""
    first, second = copies
    if first.superblock is None or second.superblock is None:
        bad, which = (second, "copy") if first.superblock is not None else (first, "first page")
        return (
            Trouble(
                f"the superblock's {which} is {bad.state.value}, and the other is good",
                "nothing has to be done now: the good one counts. If that goes, too, the shard's blocks are "
                "lost; format it anew when it may be emptied",
            ),
        )
    if first.superblock != second.superblock:
        return (
            Trouble(
                "the superblock and its copy are both good and differ: formatting was cut off, or one is "
                "another drive's",
                "the first counts; format the shard anew when it may be emptied",
            ),
        )
    return ()


def _judged(found: ShardFinding, path: Path, drive_bytes: int, home: Home | None) -> ShardFinding:
    """Add what is wrong, and whether `ostraca up` would start with the shard."""
    if not found.shard:
        first, second = found.copies
        is_second = first.state == CopyState.BLANK.value and second.state != CopyState.BLANK.value
        why = (second if is_second else first).why
        may_be_anothers = {first.state, second.state} & _ANOTHERS
        advice = _away(path, home) if may_be_anothers else _anew(path, home)
        return replace(found, troubles=(Trouble(why, advice),))
    refusals = tuple(_refusals(found, path, home))
    losses = tuple(_losses(found, drive_bytes))
    return replace(found, can_be_used=not refusals, troubles=(*found.troubles, *refusals, *losses))


def _refusals(found: ShardFinding, path: Path, home: Home | None) -> Iterator[Trouble]:
    """Say why `ostraca up` would not start with a shard whose superblock is good."""
    if found.drive_offset != found.offset:
        yield Trouble(
            f"it lies at byte {found.offset} of this drive, and its superblock says {found.drive_offset}: it "
            "was copied from elsewhere",
            "put it back at its place",
        )
    if home is None:
        return
    wanted = home.shard_at(path)
    if home.fabric is None:
        yield Trouble(f"the fabric's own record can't be read: {home.why}", "restore it")
    elif (found.fabric, found.shard) != (home.fabric.hex(), wanted):
        yield Trouble(
            f"it is shard {found.shard} of fabric {found.fabric}, and the fabric in {home.directory} is "
            f"{home.fabric.hex()}, with {wanted or 'no drive of this name'} here",
            "move it to where it belongs; `ostraca up` leaves it alone",
        )


def _losses(found: ShardFinding, drive_bytes: int) -> Iterator[Trouble]:
    """Say what was lost of a shard whose superblock is good."""
    missing_bytes = found.offset + found.shard_bytes - drive_bytes
    if missing_bytes > 0:
        yield Trouble(
            f"the drive ends {missing_bytes} bytes before its shard does",
            "restore the drive; blocks that lay behind its end are misses, and new ones can't be put there",
        )
    segments = found.segments_found
    unreadable = sum(not segment.is_readable for segment in segments)
    if unreadable:
        yield Trouble(
            f"the summaries of {counted(unreadable, 'segment')} can't be read",
            "their blocks are misses; the segments are used again. Replace a drive that shows this often",
        )
    damaged = sum(segment.pages_damaged for segment in segments)
    missing = sum(segment.pages_missing for segment in segments)
    if damaged or missing:
        yield Trouble(
            f"{damaged} summary pages are damaged, and {missing} that others build on are not there",
            "nothing has to be done: blocks that only they list are misses. A power cut leaves at most a few "
            "of the newest; more speak of a failing drive",
        )
    refused = sum(segment.entries_refused for segment in segments)
    if refused:
        yield Trouble(
            f"{refused} entries name extents that can't be true",
            "nothing has to be done: their blocks are misses. They were not written by Ostraca like that",
        )
    if found.read_back is not None and found.read_back.blocks_unreadable:
        yield Trouble(
            f"{found.read_back.blocks_unreadable} of {found.read_back.blocks} listed blocks can't be read",
            "they are misses; replace the drive",
        )
    if found.read_back is not None and found.read_back.blocks_damaged:
        yield Trouble(
            f"{found.read_back.blocks_damaged} of {found.read_back.blocks} listed blocks do not hold what "
            "was put",
            "nothing has to be done: they are misses, and go when they are asked for. Replace a drive that "
            "shows this often",
        )


def _anew(path: Path, home: Home | None) -> str:
    """Say how a drive is made anew that can't be used and is nobody else's."""
    wanted = home.shard_at(path) if home is not None else None
    if wanted is None:
        return "nothing says which shard belongs here: the drive is in no fabric's directory"
    return (
        f"`ostraca doctor {path} --format {wanted}` makes it an empty shard; or remove the file, and "
        "`ostraca up` makes a new one"
    )


def _away(path: Path, home: Home | None) -> str:
    """Say what to do about a drive that may be somebody else's."""
    if home is None or home.shard_at(path) is None:
        return "leave it alone: `ostraca doctor` does not format what may be somebody else's"
    return "move the file away, and `ostraca up` makes a new, empty drive in its place"


def _unreadable(error: OSError, belongs: str | None) -> Trouble:
    if isinstance(error, FileNotFoundError):
        return Trouble(
            f"it is missing: shard {belongs} belongs here",
            "restore it; or start `ostraca up`, which makes a new, empty one",
        )
    if isinstance(error, PermissionError):
        return Trouble("you may not read it", "ask again as its owner, or as root")
    return Trouble(f"it can't be read: {error.strerror}", "look at the kernel's log; replace the drive")
