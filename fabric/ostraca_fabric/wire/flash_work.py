"""What an operator has an agent do with drives that are not in the map yet: bodies of ``FlashWork``.

An agent does it because its host has the paths: the admin service may run where no flash can be reached.
Every piece may be asked for again: what is done already is found so. None of it touches a drive of the map.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

import msgspec

from ostraca_fabric.errors import MalformedError

_Body = TypeVar("_Body")


BUSY = "busy"
"""How an agent refuses what it is just doing to the same drive, for somebody else."""


class TargetText(msgspec.Struct, frozen=True):
    """A target, as people write it: ``ostraca_fabric.target``."""

    nqn: str
    controllers: tuple[str, ...]
    secret: str = ""


class Content(Enum):
    """What lies on a drive."""

    BLANK = "blank"
    """Nothing that was found: zeroes where anything would be known by."""

    OURS = "ours"
    """A shard of this fabric."""

    OTHER = "other"
    """A shard of another fabric, or of a release that this one does not read."""

    FOREIGN = "foreign"
    """Something else."""

    UNREADABLE = "unreadable"


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Connect to a target, and say what its drives are and what lies on them."""

    target: TargetText


class SeenDrive(msgspec.Struct, frozen=True):
    """One drive of a target."""

    nguid: str
    size_bytes: int
    lba_bytes: int
    model: str
    serial: str
    content: Content
    says: str = ""
    """What was found, for people; empty when nothing was."""

    format_id: str = ""
    """Of a shard of this fabric, in hexadecimal."""

    shard: str = ""
    """Which shard of this fabric it is."""


class Looked(msgspec.Struct, frozen=True, tag="looked"):
    """Answer to Look. ``stage``: how far it came when ``trouble`` ended it, a ``ports.paths.Stage``."""

    host: str
    drives: tuple[SeenDrive, ...] = ()
    live_paths: int = 0
    paths: int = 0
    stage: str = ""
    trouble: str = ""


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Measure a drive. ``writes``: its data may be written over, and is."""

    target: TargetText
    nguid: str
    seconds: float
    writes: bool


class Probed(msgspec.Struct, frozen=True, tag="probed"):
    """Answer to Probe: of 1 MiB read and written, four at once, bytes per second; of 4 KiB read, one after
    the other, seconds. 0 where nothing was measured.
    """

    read_bytes_s: float = 0.0
    write_bytes_s: float = 0.0
    read_p50_s: float = 0.0
    read_p99_s: float = 0.0
    failed: int = 0
    trouble: str = ""


class Format(msgspec.Struct, frozen=True, tag="format"):
    """Make a drive one shard of this fabric, which empties it. Nothing is done where that was done already,
    under the same ``format_id``.

    ``replaces``: what may lie there, of ``Content``: anything else is left alone.
    """

    target: TargetText
    nguid: str
    enclosure: str
    drive: str
    format_id: str
    replaces: tuple[Content, ...] = (Content.BLANK,)
    segment_bytes: int = 0
    """0: as follows from the drive's size."""


class Formatted(msgspec.Struct, frozen=True, tag="formatted"):
    """Answer to Format: what the map is to say of the shard. ``trouble``: why it was not formatted."""

    shard: str = ""
    size_bytes: int = 0
    usable_bytes: int = 0
    block_bytes_max: int = 0
    trouble: str = ""


FlashAsk = Look | Probe | Format
FlashAnswer = Looked | Probed | Formatted

_ask: msgspec.msgpack.Decoder[FlashAsk] = msgspec.msgpack.Decoder(FlashAsk)
_answer: msgspec.msgpack.Decoder[FlashAnswer] = msgspec.msgpack.Decoder(FlashAnswer)


def read_ask(body: bytes) -> FlashAsk:
    """Read the body of ``FlashWork``. Raises MalformedError."""
    return _read(_ask, body)


def read_answer(body: bytes) -> FlashAnswer:
    """Read the body of ``FlashWorked``. Raises MalformedError."""
    return _read(_answer, body)


def _read(decoder: msgspec.msgpack.Decoder[_Body], body: bytes) -> _Body:
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"no work with flash: {error}") from error
