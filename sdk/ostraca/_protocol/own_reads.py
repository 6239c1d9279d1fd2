"""Blocks of a get that this worker reads from drives itself. Pure.

The agent is told of the end of all reads, for the sake of its pins. Failed blocks are requested again.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import MalformedError
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import ExtentsRead, GetExtents


class OwnRead(IntEnum):
    """State of a block."""

    NONE = 0
    """Left to the agent."""

    READING = 1
    VERIFIED = 2
    FAILED = 3
    """Not read, or damaged: to be requested again."""

    LOST = 4
    """The drive is silent: the read may still use the slot."""


class OwnReads:
    """Blocks of ``GetExtents``."""

    def __init__(self, extents: GetExtents, is_landed: NDArray[np.bool_]) -> None:
        """Expect the end of all reads; *is_landed* has a value per block of the request.

        Raises MalformedError for mismatched columns, and for blocks named twice or landed before.
        """
        positions = codec.positions(extents.positions, len(is_landed))
        blocks = len(positions)
        codec.u32(extents.drives, blocks)
        codec.u64(extents.offsets, blocks)
        tags = codec.rows16(extents.tags, blocks)
        self._states = np.zeros(len(is_landed), np.uint8)  # OwnRead.NONE
        self._states[positions] = OwnRead.READING
        if not blocks or np.count_nonzero(self._states) < blocks or is_landed[positions].any():
            raise MalformedError("GetExtents without blocks, or with blocks that were named before")
        self._tags = np.zeros((len(is_landed), codec.TAG_BYTES), np.uint8)
        self._tags[positions] = tags
        self.is_over = False
        """Whether the end of all reads was reported."""

    def tags(self, positions: NDArray[np.uint32]) -> NDArray[np.uint8]:
        """Return the tags of blocks. Shape (n, 16)."""
        return self._tags[positions]

    def is_mine(self, positions: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Tell which blocks the agent must not deliver."""
        is_mine: NDArray[np.bool_] = self._states[positions] != OwnRead.NONE
        return is_mine

    def are(self, state: OwnRead) -> NDArray[np.bool_]:
        """Tell which blocks of the request have a state."""
        return self._states == state  # type: ignore[no-any-return]  # of columns

    def end(self, positions: NDArray[np.uint32], state: OwnRead) -> None:
        """Note the end of reads."""
        self._states[positions] = state

    def column(self, state: OwnRead) -> bytes:
        """Return the positions of blocks with a state, as a u32 column."""
        return np.flatnonzero(self.are(state)).astype(codec.U32).tobytes()

    def report(self, request: int) -> ExtentsRead | None:
        """Return the report on *request*, once: when no read is under way any more."""
        if self.is_over or self.are(OwnRead.READING).any():
            return None
        self.is_over = True
        return ExtentsRead(request, self.column(OwnRead.VERIFIED), self.column(OwnRead.FAILED))
