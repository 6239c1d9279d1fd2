"""Request traces: what was asked when, and which pieces of prompts it had in common.

The public form is JSON lines, one request each, as Mooncake publishes them (FAST'25): ``timestamp`` in
milliseconds, ``input_length`` and ``output_length`` in tokens, and ``hash_ids``, one number for every 512
tokens of the prompt from its beginning. Two requests that begin with the same numbers begin with the same
tokens. Further fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import UsageError

TOKENS_PER_BLOCK = 512
"""What one hash id stands for."""

_MS_PER_S = 1000.0
_SAY_EVERY = 4096


class Request(msgspec.Struct, frozen=True, gc=False):
    """One line of a trace."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """In milliseconds, from any beginning."""

    input_length: Annotated[int, msgspec.Meta(ge=0)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order of their times. Blocks are numbered anew, from 0, as they come."""

    times_s: NDArray[np.float64]
    """Shape (requests,), rising from 0."""

    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    blocks: NDArray[np.int64]
    """Those of all requests, one request after the other."""

    bounds: NDArray[np.int64]
    """Shape (requests + 1,): the blocks of request *i* are ``blocks[bounds[i]:bounds[i + 1]]``."""

    unique_blocks: int

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Self:
        """Make a trace of requests that are in the order of their times."""
        numbers: dict[int, int] = {}
        blocks = [numbers.setdefault(each, len(numbers)) for made in requests for each in made.hash_ids]
        times_ms = np.array([made.timestamp for made in requests], np.float64)
        assert (np.diff(times_ms) >= 0).all(), "requests come in the order of their times"
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
        """Return the blocks of one request, from the beginning of its prompt."""
        return self.blocks[self.bounds[request] : self.bounds[request + 1]]

    def faster(self, times: float) -> Trace:
        """Return the same requests in a fraction of the time."""
        return Trace(
            self.times_s / times,
            self.input_tokens,
            self.output_tokens,
            self.blocks,
            self.bounds,
            self.unique_blocks,
        )


def read_trace(path: Path, on_progress: Callable[[float], None] = lambda _part: None) -> Trace:
    """Read a file of JSON lines. *on_progress* gets the part read so far, 0 to 1.

    Raises UsageError that names the first bad line and says what to do; also where the file can't be read or
    holds no request.
    """
    try:
        size = max(1, path.stat().st_size)
        with path.open("rb") as lines:
            requests = list(
                _requests(path, lines, lambda bytes_read: on_progress(min(1.0, bytes_read / size)))
            )
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}") from error
    if not any(made.hash_ids for made in requests):
        raise UsageError(f"{path} asks for no block: a trace has at least one line with hash_ids")
    return Trace.of(requests)


def write_trace(requests: Iterable[Request], path: Path) -> None:
    """Write JSON lines that ``read_trace`` reads."""
    with path.open("w") as lines:
        for made in requests:
            lines.write(json.dumps(msgspec.to_builtins(made)) + "\n")


def _requests(path: Path, lines: Iterable[bytes], on_bytes: Callable[[int], None]) -> Iterable[Request]:
    decoder, before_ms, bytes_read = msgspec.json.Decoder(Request), 0.0, 0
    for number, line in enumerate(lines, 1):
        bytes_read += len(line)
        if number % _SAY_EVERY == 0:
            on_bytes(bytes_read)
        if not line.strip():
            continue
        try:
            made = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise UsageError(
                f"{path}, line {number}: {error}. A line is one JSON object with timestamp (milliseconds), "
                "input_length and output_length (tokens) and hash_ids (whole numbers): correct or remove it"
            ) from error
        if made.timestamp < before_ms:
            raise UsageError(
                f"{path}, line {number}: its timestamp {made.timestamp:g} is before the line above it, "
                f"{before_ms:g}: sort the lines by timestamp"
            )
        before_ms = made.timestamp
        yield made
    on_bytes(bytes_read)
