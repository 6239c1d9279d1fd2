"""Pieces joined to I/Os, as a drive gets them: those that begin where the one before ends go together."""

from __future__ import annotations

import asyncio
import itertools
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.extent import Pieces

_Result = TypeVar("_Result")


def ios(pieces: Pieces) -> list[slice]:
    """Return the rows of each I/O."""
    if not len(pieces):
        return []
    ends = pieces.drive_offsets + pieces.lengths
    firsts = (np.flatnonzero(pieces.drive_offsets[1:] != ends[:-1]) + 1).tolist()
    return [slice(*pair) for pair in itertools.pairwise([0, *firsts, len(pieces)])]


def io_of(pieces: Pieces, rows: slice) -> tuple[int, int, list[NDArray[np.uint8]]]:
    """Return where an I/O begins and ends on the drive, and the memory of its pieces."""
    starts, lengths = pieces.memory_offsets[rows].tolist(), pieces.lengths[rows].tolist()
    parts = [pieces.memory[at : at + length] for at, length in zip(starts, lengths, strict=True)]
    assert [len(part) for part in parts] == lengths, "a piece lies outside of its memory"
    begin = int(pieces.drive_offsets[rows.start])
    return begin, begin + sum(lengths), parts


def resolve(future: asyncio.Future[_Result], result: _Result) -> None:
    """Resolve a future unless whoever waited has gone away."""
    if not future.done():
        future.set_result(result)
