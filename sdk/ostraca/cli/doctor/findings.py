"""What `ostraca doctor` finds, as values; ``--json`` prints them as they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that is not as it should be."""

    what: str
    advice: str


@dataclass(frozen=True, slots=True)
class CopyFinding:
    """One copy of a superblock."""

    state: str
    """As in ``flash.superblock.CopyState``."""

    version: int | None
    why: str


@dataclass(frozen=True, slots=True)
class SegmentFinding:
    """One segment that was written, or that could not be read."""

    number: int
    epoch: int
    """Of its generation; 0 with a count of 0 where nothing in it is to be believed."""

    count: int
    entries: int
    entry_bytes: int
    pages_damaged: int
    pages_missing: int
    pages_other: int
    """Of another shard, or of this one before it was formatted anew."""

    entries_refused: int
    is_readable: bool


@dataclass(frozen=True, slots=True)
class ReadBack:
    """What ``--verify`` read."""

    blocks: int
    block_bytes: int
    blocks_unreadable: int
    blocks_damaged: int
    """Read, and not what was put: they fail their tags."""

    first_bad: tuple[str, ...]
    """Keys of blocks that are one or the other, some of them."""


@dataclass(frozen=True, slots=True)
class VolumesFinding:
    """The volume records of a shard."""

    copies: tuple[str, ...]
    """What each copy is, as in ``flash.volume_records.VolumesState``."""

    epoch: int = 0
    """Of the owner that wrote the copy that counts; the rest is from that one, too."""

    sequence: int = 0
    volumes: tuple[str, ...] = ()
    """``<tenant>/<name>`` each."""

    left_out: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class ShardFinding:
    """One shard, or the place where one should be."""

    offset: int
    copies: tuple[CopyFinding, ...]
    shard: str = ""
    fabric: str = ""
    format_id: str = ""
    enclosure: str = ""
    drive: str = ""
    drive_offset: int = 0
    """Where its superblock says that it lies."""

    shard_bytes: int = 0
    segment_bytes: int = 0
    segments: int = 0
    summary_pages: int = 0
    volumes: VolumesFinding | None = None
    segments_found: tuple[SegmentFinding, ...] = ()
    read_back: ReadBack | None = None
    can_be_used: bool = False
    """Whether `ostraca up` would start with it; for a drive that is in no directory of a fabric, as far as
    the drive alone can say.
    """

    troubles: tuple[Trouble, ...] = ()


@dataclass(frozen=True, slots=True)
class DriveFinding:
    """One drive."""

    path: str
    size_bytes: int
    is_running: bool
    """Whether a fabric that it belongs to runs now, and may be writing to it."""

    bytes_behind: int = 0
    """Behind its last shard."""

    shards: tuple[ShardFinding, ...] = ()
    troubles: tuple[Trouble, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether there is no trouble at all."""
        return not self.troubles and not any(shard.troubles for shard in self.shards)
