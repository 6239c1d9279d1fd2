"""What `ostraca doctor` found, in sentences."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ostraca.cli.sizes import size_text
from ostraca_fabric.flash.geometry import ENTRIES_PER_PAGE, TAIL_SLOTS
from ostraca_fabric.sentences import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ostraca.cli.doctor.findings import (
        DriveFinding,
        ReadBack,
        SegmentFinding,
        ShardFinding,
        Trouble,
        VolumesFinding,
    )


def drive_lines(found: DriveFinding) -> Iterator[str]:
    """Explain one drive."""
    yield f"{found.path}: {size_text(found.size_bytes)}" if found.size_bytes else f"{found.path}:"
    if found.is_running:
        yield _line("running", "a fabric uses this drive now; a page that it is writing may look damaged")
    yield from _trouble_lines(found.troubles)
    for shard in found.shards:
        yield from _shard_lines(shard)
    if found.shards and found.shards[0].shard and found.bytes_behind:
        yield _line("behind", f"{size_text(found.bytes_behind)} belong to no shard")


def last_line(found: Sequence[DriveFinding]) -> str:
    """Sum it up."""
    bad = sum(not drive.is_good for drive in found)
    drives = counted(len(found), "drive")
    return f"{drives}, {bad} with trouble." if bad else f"{drives}, no trouble."


def _line(label: str, text: str) -> str:
    return f"  {label:<12} {text}"


def _shard_lines(found: ShardFinding) -> Iterator[str]:
    states = [copy.state for copy in found.copies]
    if not found.shard:
        yield _line("superblock", f"{states[0]}; its copy: {states[1]}")
        yield from _trouble_lines(found.troubles)
        yield _line("verdict", "`ostraca up` can't use it.")
        return
    yield _line("shard", f"{found.shard}, at byte {found.offset}")
    yield _line("", f"of fabric {found.fabric}, formatted as {found.format_id}")
    yield _line("superblock", f"{states[0]}; its copy: {states[1]}")
    entries_max = (found.summary_pages - TAIL_SLOTS) * ENTRIES_PER_PAGE
    yield _line(
        "geometry",
        f"{found.segments} segments of {size_text(found.segment_bytes)}, each with {found.summary_pages} "
        f"summary pages for at most {entries_max} blocks",
    )
    if found.volumes is not None:
        yield _line("volumes", _volumes_text(found.volumes))
    yield from _fill_lines(found)
    if found.read_back is not None:
        yield from _read_back_lines(found.read_back)
    yield from _trouble_lines(found.troubles)
    yield _line("verdict", f"`ostraca up` {'can' if found.can_be_used else 'refuses to'} use it.")


def _volumes_text(found: VolumesFinding) -> str:
    count = len(found.volumes)
    said = f"{count} volume record{'s' * (count != 1)}" if found.sequence else "no volume records"
    return f"{said}; the first copy: {found.copies[0]}; the second: {found.copies[1]}"


def _fill_lines(found: ShardFinding) -> Iterator[str]:
    segments = found.segments_found
    written = [segment for segment in segments if segment.count]
    yield _line(
        "filled", f"{_counted(written)}, of {found.segments}" if written else "nothing was written yet"
    )
    epochs: dict[int, list[SegmentFinding]] = defaultdict(list)
    for segment in written:
        epochs[segment.epoch].append(segment)
    for epoch, of_epoch in sorted(epochs.items()):
        counts = [segment.count for segment in of_epoch]
        yield _line("", f"generations {epoch}.{min(counts)} to {epoch}.{max(counts)}: {_counted(of_epoch)}")
    damaged = sum(segment.pages_damaged for segment in segments)
    missing = sum(segment.pages_missing for segment in segments)
    refused = sum(segment.entries_refused for segment in segments)
    yield _line("summaries", f"{damaged} pages damaged, {missing} missing; {refused} entries refused")
    other = sum(segment.pages_other for segment in segments)
    if other:
        yield _line("", f"{other} pages from before the last format, or of another shard: never believed")


def _counted(segments: Sequence[SegmentFinding]) -> str:
    entries = sum(segment.entries for segment in segments)
    entry_bytes = sum(segment.entry_bytes for segment in segments)
    return (
        f"{len(segments)} segment{'s' * (len(segments) != 1)}, {entries} block{'s' * (entries != 1)}, "
        f"{size_text(entry_bytes)}"
    )


def _read_back_lines(found: ReadBack) -> Iterator[str]:
    good = found.blocks - found.blocks_unreadable - found.blocks_damaged
    yield _line(
        "read back",
        f"{good} of {found.blocks} blocks are good by their tags, {size_text(found.block_bytes)} in all",
    )
    for key in found.first_bad:
        yield _line("", f"not good: key {key}")


def _trouble_lines(troubles: Sequence[Trouble]) -> Iterator[str]:
    for trouble in troubles:
        yield _line("TROUBLE", trouble.what)
        yield _line("what to do", trouble.advice)
