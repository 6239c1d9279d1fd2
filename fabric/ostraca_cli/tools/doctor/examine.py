"""Examination of drives: read, compare with expectations, report. Never writes.

Memory holds a single summary area at a time, so a large drive costs time, not memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from ostraca_cli.tools.doctor.drives import DriveFile, FabricDirectory
from ostraca_cli.tools.doctor.findings import (
    CopyFinding,
    DriveFinding,
    DriveProblem,
    ReadBack,
    SegmentFinding,
    ShardFinding,
)
from ostraca_cli.tools.doctor.volumes import volumes_finding, volumes_problems
from ostraca_fabric.drives.flash_files import FlashFileError
from ostraca_fabric.flash.recovery import RecoveredAreas, recover
from ostraca_fabric.flash.summary import PAGE, PageState, page_states
from ostraca_fabric.flash.superblock import (
    CopyState,
    Superblock,
    SuperblockCopy,
    chosen_copy,
    examine_superblock,
)
from ostraca_fabric.model.extent import (
    FIRST_SEGMENT_OFFSET,
    MIB,
    PAGE_BYTES,
    SEGMENTS_MIN,
    SUPERBLOCK_COPIES,
    generation_parts,
    rounded_up,
)
from ostraca_fabric.runtime.os_errors import state_and_remedy
from ostraca_fabric.runtime.sentences import counted
from ostraca_fabric.tables.digests import matches

SUPERBLOCK_BYTES = SUPERBLOCK_COPIES * PAGE_BYTES
_SHARD_BYTES_MIN = FIRST_SEGMENT_OFFSET + SEGMENTS_MIN * MIB
_SHOWN_BAD = 10
_FOREIGN_STATES = frozenset({CopyState.FOREIGN.value, CopyState.NEWER.value})

Copies = tuple["SuperblockCopy", "SuperblockCopy"]


def examine_drive(path: Path, *, is_verifying: bool = False) -> DriveFinding:
    """Return content and problems of a drive; unreadable parts become problems."""
    home = FabricDirectory.of(path)
    is_running = home is not None and home.is_running
    try:
        with DriveFile(path) as drive:
            finding = DriveFinding(str(path), drive.size_bytes, is_running)
            if drive.size_bytes < SUPERBLOCK_BYTES:
                short = DriveProblem(
                    (
                        f"the drive has {drive.size_bytes} bytes, and the smallest shard has "
                        f"{_SHARD_BYTES_MIN}: the drive was truncated, or is no drive"
                    ),
                    f"restore the drive; {_replacement_advice(path, home, is_occupied=True)}",
                )
                return replace(finding, problems=(short,))
            shards, end = [], 0
            for offset, copies in shards_of(drive):
                found = _examine_shard(drive, offset, copies, is_verifying=is_verifying)
                shards.append(_with_problems(found, path, drive.size_bytes, home))
                end = offset + found.shard_bytes
            return replace(finding, shards=tuple(shards), bytes_behind=max(0, drive.size_bytes - end))
    except FlashFileError as error:
        problem = _open_problem(error, path, home)
    except OSError as error:
        state, remedy = state_and_remedy(error)
        problem = DriveProblem(
            f"the drive can't be read: {state}", remedy or "read the kernel's log; replace the drive"
        )
    return DriveFinding(str(path), 0, is_running, problems=(problem,))


def shards_of(drive: DriveFile) -> Iterator[tuple[int, Copies]]:
    """Yield offset and superblock copies of each shard, end to end.

    The first place is always included, even if damaged. Raises OSError.
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
    """Yield number, summary area and recovered content of a shard's segments.

    *offset* is the shard's position; *wanted* selects a single segment. Summary area and content are None if
    the area is unreadable.
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


def _examine_shard(drive: DriveFile, offset: int, copies: Copies, *, is_verifying: bool) -> ShardFinding:
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
        problems=(*_copy_disagreements(copies), *volumes_problems(volumes)),
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
    """Read every block listed in a segment, and check its tag."""
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


def _copy_disagreements(copies: Copies) -> tuple[DriveProblem, ...]:
    """Report disagreement of two superblock copies with at least one good copy."""
    first, second = copies
    if first.superblock is None or second.superblock is None:
        bad, which = (second, "copy") if first.superblock is not None else (first, "first page")
        return (
            DriveProblem(
                f"the superblock's {which} is {bad.state.value}, and the other is good",
                (
                    "no action is needed: the good copy is valid. Loss of the good copy, too, would lose "
                    "the shard's blocks; format the shard once its blocks may be lost"
                ),
            ),
        )
    if first.superblock != second.superblock:
        return (
            DriveProblem(
                (
                    "the superblock and its copy are both valid but differ: formatting was interrupted, "
                    "or a copy belongs to another drive"
                ),
                "the first copy is used; format the shard once its blocks may be lost",
            ),
        )
    return ()


def _with_problems(
    found: ShardFinding, path: Path, drive_bytes: int, home: FabricDirectory | None
) -> ShardFinding:
    """Add problems, and whether `ostraca up` would start with the shard."""
    if not found.shard:
        first, second = found.copies
        is_second = first.state == CopyState.BLANK.value and second.state != CopyState.BLANK.value
        why = (second if is_second else first).why
        may_be_anothers = {first.state, second.state} & _FOREIGN_STATES
        advice = _foreign_content_advice(path, home) if may_be_anothers else _format_advice(path, home)
        return replace(found, problems=(DriveProblem(why, advice),))
    refusals = tuple(_refusals(found, path, drive_bytes, home))
    losses = tuple(_losses(found))
    return replace(found, can_be_used=not refusals, problems=(*found.problems, *refusals, *losses))


def _refusals(
    found: ShardFinding, path: Path, drive_bytes: int, home: FabricDirectory | None
) -> Iterator[DriveProblem]:
    """Yield obstacles to a start of `ostraca up` with a good superblock."""
    if found.drive_offset != found.offset:
        yield DriveProblem(
            (
                f"the shard lies at byte {found.offset} of this drive, and its superblock says "
                f"{found.drive_offset}: the shard was copied from another place"
            ),
            "put the shard back at the place in the superblock",
        )
    missing_bytes = found.offset + found.shard_bytes - drive_bytes
    if missing_bytes > 0:
        yield DriveProblem(
            (f"the drive ends {missing_bytes} bytes before the end of its shard: the drive was truncated"),
            f"restore the drive; {_replacement_advice(path, home, is_occupied=True)}",
        )
    if home is None:
        return
    wanted = home.shard_at(path)
    if home.fabric is None:
        yield DriveProblem(f"the fabric's own record can't be read: {home.problem}", "restore it")
    elif (found.fabric, found.shard) != (home.fabric.hex(), wanted):
        yield DriveProblem(
            (
                f"the drive holds shard {found.shard} of fabric {found.fabric}; the fabric in "
                f"{home.directory} is {home.fabric.hex()}, with {wanted or 'no drive of this name'} here"
            ),
            "move the drive to the right place: `ostraca up` leaves foreign drives alone; "
            + _replacement_advice(path, home, is_occupied=True),
        )


def _losses(found: ShardFinding) -> list[DriveProblem]:
    """Return losses of a shard with a good superblock."""
    segments = found.segments_found
    unreadable = sum(not segment.is_readable for segment in segments)
    damaged = sum(segment.pages_damaged for segment in segments)
    missing = sum(segment.pages_missing for segment in segments)
    refused = sum(segment.entries_refused for segment in segments)
    blocks = found.read_back or ReadBack(0, 0, 0, 0, ())
    losses = (
        (
            unreadable,
            f"the summaries of {counted(unreadable, 'segment')} can't be read",
            "their blocks are misses; the segments are used again. Replace the drive after repeated findings",
        ),
        (
            damaged + missing,
            f"{damaged} summary pages are damaged, and {missing} required pages are missing",
            (
                "no action is needed: blocks on these pages alone are misses. A power cut leaves at most a "
                "few such pages among the newest; more indicate a failing drive"
            ),
        ),
        (
            refused,
            f"{refused} entries name impossible extents, or a transform of a later release",
            "no action is needed: their blocks are misses. This release did not write these entries",
        ),
        (
            blocks.blocks_unreadable,
            f"{blocks.blocks_unreadable} of {blocks.blocks} listed blocks can't be read",
            "the blocks are misses; replace the drive",
        ),
        (
            blocks.blocks_damaged,
            f"{blocks.blocks_damaged} of {blocks.blocks} listed blocks have wrong content",
            (
                "no action is needed: the blocks are misses, and are removed at their next use. Replace the "
                "drive after repeated findings"
            ),
        ),
    )
    return [DriveProblem(description, advice) for count, description, advice in losses if count]


def _format_advice(path: Path, home: FabricDirectory | None) -> str:
    """Advise how to format an unusable drive without foreign content."""
    wanted = home.shard_at(path) if home is not None else None
    if wanted is None:
        return "the shard of this place is unknown: the drive is in no fabric's directory"
    return f"`ostraca doctor {path} --format {wanted}` makes it an empty shard"


def _foreign_content_advice(path: Path, home: FabricDirectory | None) -> str:
    """Advise on a drive with possibly foreign content."""
    if home is None or home.shard_at(path) is None:
        return "leave the drive alone: `ostraca doctor` does not format content of other software"
    return f"put back the drive that belongs here; {_replacement_advice(path, home, is_occupied=True)}"


def _replacement_advice(path: Path, home: FabricDirectory | None, *, is_occupied: bool) -> str:
    """Advise how to replace a lost drive by an empty drive.

    *is_occupied*: the place is occupied.
    """
    wanted = home.shard_at(path) if home is not None else None
    if wanted is None:
        return "or take another drive"
    first = "move away what lies there, then " if is_occupied else ""
    run = f"`ostraca doctor {path} --format {wanted}`"
    return f"or, to go on with an empty drive, stop the fabric, {first}run {run}"


def _open_problem(error: FlashFileError, path: Path, home: FabricDirectory | None) -> DriveProblem:
    """Report a missing drive, or other content in its place."""
    wanted = home.shard_at(path) if home is not None else None
    belongs = f": shard {wanted} belongs here" if wanted is not None else ""
    empty = _replacement_advice(path, home, is_occupied=not error.is_missing)
    return DriveProblem(f"it {error.state}{belongs}", "; ".join(filter(None, (error.remedy, empty))))
