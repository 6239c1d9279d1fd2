"""Work on drives outside of the map, requested by an operator: bodies of ``FlashWork``.

An agent does the work because its host has the paths; the admin service may run on a host without any path to
flash. Each request may be repeated: completed work is recognised. No request touches a drive of the map.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

import msgspec

from ostraca_fabric.errors import MalformedError

_Body = TypeVar("_Body")


BUSY = "busy"
"""Refusal code for a drive with the same work already in progress for another caller."""


class TargetText(msgspec.Struct, frozen=True):
    """Target in text form: ``ostraca_fabric.model.target``."""

    nqn: str
    controllers: tuple[str, ...]
    secret: str = ""


class Content(Enum):
    """Content of a drive."""

    BLANK = "blank"
    """Zeroes wherever known formats have an identification."""

    OURS = "ours"
    """A shard of this fabric."""

    OTHER = "other"
    """A shard of another fabric, or of an unreadable release."""

    FOREIGN = "foreign"
    """Any other content."""

    UNREADABLE = "unreadable"


class DiscoverDrives(msgspec.Struct, frozen=True, tag="look"):
    """Request to connect to a target, and to report drives and contents."""

    target: TargetText


class DiscoveredDrive(msgspec.Struct, frozen=True):
    """Drive of a target."""

    nguid: str
    size_bytes: int
    lba_bytes: int
    model: str
    serial: str
    content: Content
    says: str = ""
    """The content found, for people; empty if none."""

    format_id: str = ""
    """For a shard of this fabric, in hexadecimal."""

    shard: str = ""
    """Id of the shard of this fabric on the drive."""


class DiscoveredDrives(msgspec.Struct, frozen=True, tag="looked"):
    """Answer to Look.

    ``stage`` is the last stage reached before ``trouble``: a ``ports.paths.Stage``.
    """

    host: str
    drives: tuple[DiscoveredDrive, ...] = ()
    live_paths: int = 0
    paths: int = 0
    stage: str = ""
    trouble: str = ""


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Request to measure a drive. With ``writes``, the drive's data is overwritten."""

    target: TargetText
    nguid: str
    seconds: float
    writes: bool


class ProbeResult(msgspec.Struct, frozen=True, tag="probed"):
    """Answer to Probe; 0 for values not measured.

    - ``read_bytes_s``, ``write_bytes_s``: bytes per second for 1 MiB operations, four at once
    - ``read_p50_s``, ``read_p99_s``: seconds for 4 KiB reads, in sequence
    """

    read_bytes_s: float = 0.0
    write_bytes_s: float = 0.0
    read_p50_s: float = 0.0
    read_p99_s: float = 0.0
    failed: int = 0
    trouble: str = ""


class Format(msgspec.Struct, frozen=True, tag="format"):
    """Request to format a drive as a shard of this fabric, which empties the drive.

    A drive already formatted under the same ``format_id`` stays as is. ``replaces`` lists the kinds of
    ``Content`` allowed to be overwritten.
    """

    target: TargetText
    nguid: str
    enclosure: str
    drive: str
    format_id: str
    replaces: tuple[Content, ...] = (Content.BLANK,)
    segment_bytes: int = 0
    """0 means derived from the drive's size."""


class FormatResult(msgspec.Struct, frozen=True, tag="formatted"):
    """Answer to Format: the shard's values for the map.

    ``trouble`` is the reason why the drive was not formatted.
    """

    shard: str = ""
    size_bytes: int = 0
    usable_bytes: int = 0
    block_bytes_max: int = 0
    trouble: str = ""


FlashRequest = DiscoverDrives | Probe | Format
FlashAnswer = DiscoveredDrives | ProbeResult | FormatResult

_ask: msgspec.msgpack.Decoder[FlashRequest] = msgspec.msgpack.Decoder(FlashRequest)
_answer: msgspec.msgpack.Decoder[FlashAnswer] = msgspec.msgpack.Decoder(FlashAnswer)


def read_ask(body: bytes) -> FlashRequest:
    """Decode the body of ``FlashWork``. Raises MalformedError."""
    return _read(_ask, body)


def read_answer(body: bytes) -> FlashAnswer:
    """Decode the body of ``FlashWorkResult``. Raises MalformedError."""
    return _read(_answer, body)


def _read(decoder: msgspec.msgpack.Decoder[_Body], body: bytes) -> _Body:
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"no work with flash: {error}") from error
