"""Raw content of a drive, field by field, for debugging.

Yields a row at a time, in bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ostraca_cli.tools.doctor.drives import DriveFile
from ostraca_cli.tools.doctor.examine import SUPERBLOCK_BYTES, Copies, segments_of, shards_of
from ostraca_cli.tools.doctor.volumes import Row, volume_rows
from ostraca_fabric.errors import UsageError
from ostraca_fabric.flash.summary import PAGE, PageState, page_states
from ostraca_fabric.flash.superblock import Superblock, chosen_copy, examine_superblock
from ostraca_fabric.model.extent import PAGE_BYTES, TAIL_SLOTS, Generation, generation_parts


def dump(path: Path, kind: str, segment: int | None) -> Iterator[Row]:
    """Yield the records of kind *kind*: superblocks, volumes, summary pages or entries.

    Pages and entries are of *segment*, or of all segments. Raises OSError, and UsageError for a segment
    beyond the shard.
    """
    with DriveFile(path) as drive:
        for offset, copies in shards_of(drive):
            if kind == "superblock":
                yield from _superblock_rows(drive.read(offset, SUPERBLOCK_BYTES), offset)
                continue
            superblock = chosen_copy(copies).superblock
            if superblock is None:
                raise UsageError(f"{path} has no good superblock: the positions of other records are unknown")
            if kind == "volumes":
                yield from volume_rows(drive, superblock, offset)
                continue
            if segment is not None and segment >= superblock.geometry.segments:
                raise UsageError(
                    f"shard {superblock.shard} has segments 0 to {superblock.geometry.segments - 1}"
                )
            rows = _page_rows if kind == "summary" else _entry_rows
            yield from rows(drive, superblock, offset, segment)


def row_text(row: Row) -> str:
    """Write a row for people."""
    return "  ".join(f"{name}={value}" for name, value in row.items() if value is not None)


def _superblock_rows(pages: bytes, offset: int) -> Iterator[Row]:
    copies: Copies = examine_superblock(pages)
    for number, copy in enumerate(copies):
        row: Row = {
            "offset": offset + number * PAGE_BYTES,
            "state": copy.state.value,
            "version": copy.version,
        }
        found = copy.superblock
        if found is None:
            begin = pages[number * PAGE_BYTES :][:32].hex()
            yield {**row, "reason": copy.why, "begins_with": begin}
            continue
        geometry = found.geometry
        yield {
            **row,
            "fabric": found.fabric.hex(),
            "format": found.format_id.hex(),
            "enclosure": found.enclosure,
            "drive": found.drive,
            "shard": found.shard,
            "drive_offset": found.drive_offset,
            "shard_bytes": geometry.shard_bytes,
            "segment_bytes": geometry.segment_bytes,
            "first_segment_offset": geometry.first_segment_offset,
            "segments": geometry.segments,
            "summary_pages": geometry.summary_pages,
            "digest": found.identity.digest.hex(),
        }


def _page_rows(drive: DriveFile, superblock: Superblock, offset: int, segment: int | None) -> Iterator[Row]:
    """Yield the present pages; good pages of the newest generation are marked."""
    for number, area, read in segments_of(drive, superblock, offset, segment):
        if area is None or read is None:
            yield {"shard": superblock.shard, "segment": number, "state": "unreadable"}
            continue
        newest = max((found.generation for found in read.segments), default=None)
        pages = np.frombuffer(area, PAGE).reshape(1, -1)
        states = page_states(superblock.identity, np.array([number]), pages)
        for place, state in enumerate(states[0].tolist()):
            if state == PageState.NONE:
                continue
            page = pages[0, place]
            epoch, count = generation_parts(Generation(int(page["generation"])))
            yield {
                "shard": superblock.shard,
                "segment": number,
                "place": f"tail {place}" if place < TAIL_SLOTS else f"full {place - TAIL_SLOTS}",
                "state": PageState(state).name.lower(),
                "is_newest": state == PageState.GOOD and int(page["generation"]) == newest,
                "generation": f"{epoch}.{count}",
                "page": int(page["page"]),
                "sequence": int(page["sequence"]),
                "entries": int(page["count"]),
                "owner_epoch": int(page["owner_epoch"]),
            }


def _entry_rows(drive: DriveFile, superblock: Superblock, offset: int, segment: int | None) -> Iterator[Row]:
    """Yield the entries accepted by recovery, in order."""
    for number, _, read in segments_of(drive, superblock, offset, segment):
        for found in () if read is None else read.segments:
            epoch, count = generation_parts(found.generation)
            for entry in found.entries:
                yield {
                    "shard": superblock.shard,
                    "segment": number,
                    "generation": f"{epoch}.{count}",
                    "key": entry["key"].tobytes().hex(),
                    "tag": entry["tag"].tobytes().hex(),
                    "seed": int(entry["seed"]),
                    "offset": int(entry["first_page"]) * PAGE_BYTES,
                    "length": int(entry["length"]),
                }
