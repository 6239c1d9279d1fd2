"""Request traces: times, and shared parts of prompts.

The public format is JSON lines with a request each, as published by Mooncake (FAST'25). ``timestamp`` is in
milliseconds, ``input_length`` and ``output_length`` in tokens. ``hash_ids`` holds a number for every 512
tokens of the prompt from its beginning. Two requests with equal first numbers begin with equal tokens.
Further fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import UsageError

TOKENS_PER_BLOCK = 512
"""Tokens of a hash id."""

_MS_PER_S = 1000.0
_PROGRESS_EVERY = 4096

_TIMESTAMP_MAX = 1e15
"""About 30,000 years; a float still resolves milliseconds."""

_TOKENS_MAX = 1 << 40
_LINE_BYTES_MAX = 64 << 20
"""Maximum length of a line: a prompt of four billion tokens. Files without lines would fill the memory."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
}
"""First bytes of compressed files."""


class Request(msgspec.Struct, frozen=True, gc=False):
    """Line of a trace."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=_TIMESTAMP_MAX)]
    """Time in milliseconds, from any origin."""

    input_length: Annotated[int, msgspec.Meta(ge=0, le=_TOKENS_MAX)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=_TOKENS_MAX)]
    hash_ids: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in order of time; blocks are numbered from 0 by first use."""

    times_s: NDArray[np.float64]
    """Shape (requests,), increasing from 0."""

    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    blocks: NDArray[np.int64]
    """Blocks of all requests, request by request."""

    bounds: NDArray[np.int64]
    """Shape (requests + 1,): the blocks of request *i* are ``blocks[bounds[i]:bounds[i + 1]]``."""

    unique_blocks: int

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Self:
        """Build a trace from requests in order of time."""
        numbers: dict[int, int] = {}
        blocks = [numbers.setdefault(each, len(numbers)) for made in requests for each in made.hash_ids]
        times_ms = np.array([made.timestamp for made in requests], np.float64)
        assert (np.diff(times_ms) >= 0).all(), "requests are in order of time"
        counts = [len(made.hash_ids) for made in requests]
        return cls(
            (times_ms - times_ms[0]) / _MS_PER_S if len(requests) else times_ms,
            np.array([made.input_length for made in requests], np.int64),
            np.array([made.output_length for made in requests], np.int64),
            np.array(blocks, np.int64),
            np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]),
            len(numbers),
        )

    def __len__(self) -> int:
        return len(self.times_s)

    @property
    def span_s(self) -> float:
        """Return the time from the first request to the last."""
        return float(self.times_s[-1]) if len(self) else 0.0

    def chain(self, request: int) -> NDArray[np.int64]:
        """Return the blocks of a request, from the beginning of its prompt."""
        return self.blocks[self.bounds[request] : self.bounds[request + 1]]

    def accelerate(self, times: float) -> Trace:
        """Return the same requests, accelerated by the factor *times*."""
        return Trace(
            self.times_s / times,
            self.input_tokens,
            self.output_tokens,
            self.blocks,
            self.bounds,
            self.unique_blocks,
        )


def read_trace(path: Path, on_progress: Callable[[float], None] = lambda _part: None) -> Trace:
    """Read a file of JSON lines; *on_progress* receives the part read, 0 to 1.

    Raises UsageError with the first bad line and advice, also for a file that is unreadable or without
    requests.
    """
    try:
        size = max(1, path.stat().st_size)
        with path.open("rb") as lines:
            requests = list(
                _requests(
                    path, _lines(path, lines), lambda bytes_read: on_progress(min(1.0, bytes_read / size))
                )
            )
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}") from error
    if not any(made.hash_ids for made in requests):
        raise UsageError(f"{path} requests no block: a trace needs at least one line with hash_ids")
    return Trace.of(requests)


def write_trace(requests: Iterable[Request], path: Path) -> None:
    """Write JSON lines for ``read_trace``."""
    with path.open("w") as lines:
        for made in requests:
            lines.write(json.dumps(msgspec.to_builtins(made)) + "\n")


def _lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield lines, without a byte-order mark at the start.

    Raises UsageError for a file that is compressed, or has no lines.
    """
    number = 0
    while line := file.readline(_LINE_BYTES_MAX):
        number += 1
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
            packed = next((kind for magic, kind in _PACKED.items() if line.startswith(magic)), "")
            if packed:
                raise UsageError(f"{path} is a {packed} file: unpack the file to JSON lines first")
        if len(line) >= _LINE_BYTES_MAX:
            raise UsageError(
                f"{path}, line {number} is longer than {_LINE_BYTES_MAX >> 20} MiB: each line must hold "
                "a JSON object"
            )
        yield line


def _requests(path: Path, lines: Iterable[bytes], on_bytes: Callable[[int], None]) -> Iterable[Request]:
    decoder, before_ms, bytes_read = msgspec.json.Decoder(Request), 0.0, 0
    for number, line in enumerate(lines, 1):
        bytes_read += len(line)
        if number % _PROGRESS_EVERY == 0:
            on_bytes(bytes_read)
        if not line.strip():
            continue
        try:
            made = decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise UsageError(
                f"{path}, line {number}: {error}. A line is a JSON object with timestamp (milliseconds), "
                "input_length and output_length (tokens) and hash_ids (whole numbers): correct or remove "
                "the line"
            ) from error
        if made.timestamp < before_ms:
            raise UsageError(
                f"{path}, line {number}: the timestamp {made.timestamp:g} precedes the timestamp above, "
                f"{before_ms:g}: sort the lines by timestamp"
            )
        before_ms = made.timestamp
        yield made
    on_bytes(bytes_read)
