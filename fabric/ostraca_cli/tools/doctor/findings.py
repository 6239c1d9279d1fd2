"""Findings of `ostraca doctor`, as values and in sentences; ``--json`` prints the values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ostraca_cli.terminal.units import size_text
from ostraca_fabric.model.extent import ENTRIES_PER_PAGE, TAIL_SLOTS
from ostraca_fabric.runtime.sentences import counted


@dataclass(frozen=True, slots=True)
class DriveProblem:
    """Problem with advice."""

    description: str
    advice: str


@dataclass(frozen=True, slots=True)
class CopyFinding:
    """Copy of a superblock."""

    state: str
    """Value of ``flash.superblock.CopyState``."""

    version: int | None
    why: str


@dataclass(frozen=True, slots=True)
class SegmentFinding:
    """Written or unreadable segment."""

    number: int
    epoch: int
    """Epoch of the generation; 0 with a count of 0 without any valid page."""

    count: int
    entries: int
    entry_bytes: int
    pages_damaged: int
    pages_missing: int
    pages_other: int
    """Pages of another shard, or of this shard before its last format."""

    entries_refused: int
    is_readable: bool


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Result of ``--verify``."""

    blocks: int
    block_bytes: int
    blocks_unreadable: int
    blocks_damaged: int
    """Readable blocks with a wrong tag."""

    first_bad: tuple[str, ...]
    """Keys of the first unreadable or damaged blocks."""


@dataclass(frozen=True, slots=True)
class VolumesFinding:
    """Volume records of a shard."""

    copies: tuple[str, ...]
    """State of each copy, as in ``flash.volume_records.VolumesState``."""

    epoch: int = 0
    """Epoch of the owner that wrote the newest copy; further fields describe the same copy."""

    sequence: int = 0
    volumes: tuple[str, ...] = ()
    """Names of the form ``<tenant>/<name>``."""

    left_out: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class ShardFinding:
    """Shard, or an expected shard."""

    offset: int
    copies: tuple[CopyFinding, ...]
    shard: str = ""
    fabric: str = ""
    format_id: str = ""
    enclosure: str = ""
    drive: str = ""
    drive_offset: int = 0
    """Position of the shard according to its superblock."""

    shard_bytes: int = 0
    segment_bytes: int = 0
    segments: int = 0
    summary_pages: int = 0
    volumes: VolumesFinding | None = None
    segments_found: tuple[SegmentFinding, ...] = ()
    read_back: ReadBack | None = None
    can_be_used: bool = False
    """Whether `ostraca up` would start with the shard, as far as known from the drive alone outside a
    fabric's directory."""

    problems: tuple[DriveProblem, ...] = ()


@dataclass(frozen=True, slots=True)
class DriveFinding:
    """Examined drive."""

    path: str
    size_bytes: int
    is_running: bool
    """Whether the drive's fabric runs now and may be writing to the drive."""

    bytes_behind: int = 0
    """Bytes after the last shard."""

    shards: tuple[ShardFinding, ...] = ()
    problems: tuple[DriveProblem, ...] = ()

    @property
    def is_good(self) -> bool:
        """Return whether there are no problems."""
        return not self.problems and not any(shard.problems for shard in self.shards)


def drive_lines(found: DriveFinding) -> Iterator[str]:
    """Explain a drive."""
    yield f"{found.path}: {size_text(found.size_bytes)}" if found.size_bytes else f"{found.path}:"
    if found.is_running:
        yield _line("running", "a fabric uses this drive now; a page under write may look damaged")
    yield from _problem_lines(found.problems)
    for shard in found.shards:
        yield from _shard_lines(shard)
    if found.shards and found.shards[0].shard and found.bytes_behind:
        yield _line("behind", f"{size_text(found.bytes_behind)} belong to no shard")


def last_line(found: Sequence[DriveFinding]) -> str:
    """Summarise all drives."""
    bad = sum(not drive.is_good for drive in found)
    drives = counted(len(found), "drive")
    return f"{drives}, {bad} with problems." if bad else f"{drives}, no problems."


def _line(label: str, text: str) -> str:
    return f"  {label:<12} {text}"


def _shard_lines(found: ShardFinding) -> Iterator[str]:
    states = [copy.state for copy in found.copies]
    if not found.shard:
        yield _line("superblock", f"{states[0]}; its copy: {states[1]}")
        yield from _problem_lines(found.problems)
        yield _line("verdict", "`ostraca up` can't use the drive.")
        return
    yield _line("shard", f"{found.shard}, at byte {found.offset}")
    yield _line("", f"fabric {found.fabric}, format id {found.format_id}")
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
    yield from _problem_lines(found.problems)
    yield _line("verdict", (f"`ostraca up` {'can' if found.can_be_used else 'refuses to'} use the drive."))


def _volumes_text(found: VolumesFinding) -> str:
    count = len(found.volumes)
    said = f"{count} volume record{'s' * (count != 1)}" if found.sequence else "no volume records"
    return f"{said}; the first copy: {found.copies[0]}; the second: {found.copies[1]}"


def _fill_lines(found: ShardFinding) -> Iterator[str]:
    segments = found.segments_found
    written = [segment for segment in segments if segment.count]
    yield _line("filled", f"{_totals_text(written)}, of {found.segments}" if written else "empty")
    epochs: dict[int, list[SegmentFinding]] = defaultdict(list)
    for segment in written:
        epochs[segment.epoch].append(segment)
    for epoch, of_epoch in sorted(epochs.items()):
        counts = [segment.count for segment in of_epoch]
        yield _line(
            "", f"generations {epoch}.{min(counts)} to {epoch}.{max(counts)}: {_totals_text(of_epoch)}"
        )
    damaged = sum(segment.pages_damaged for segment in segments)
    missing = sum(segment.pages_missing for segment in segments)
    refused = sum(segment.entries_refused for segment in segments)
    yield _line("summaries", f"{damaged} pages damaged, {missing} missing; {refused} entries refused")
    other = sum(segment.pages_other for segment in segments)
    if other:
        yield _line("", f"{other} pages from before the last format, or of another shard: never believed")


def _totals_text(segments: Sequence[SegmentFinding]) -> str:
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
        f"{good} of {found.blocks} blocks have correct tags, {size_text(found.block_bytes)} in all",
    )
    yield from (_line("", f"not good: key {key}") for key in found.first_bad)


def _problem_lines(problems: Sequence[DriveProblem]) -> Iterator[str]:
    for problem in problems:
        yield _line("PROBLEM", problem.description)
        yield _line("remedy", problem.advice)
