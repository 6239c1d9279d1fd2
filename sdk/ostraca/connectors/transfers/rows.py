"""Port to an engine's memory.

Connectors name memory by the engine's own numbers, called rows: a row holds one chunk. Only this port turns
rows into memory. So another way to reach the memory, such as registration for transfers without a copy, is a
change of the port alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Block: TypeAlias = NDArray[np.uint8] | Sequence[NDArray[np.uint8]]
"""Memory of one chunk: a view, or its parts in order, as taken by ``Volume.get`` and ``Volume.put``."""


class Rows(Protocol):
    """Rows of an engine's memory. The engine keeps the rows of a job in place until the job's end."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 if rows differ, and the connector counts loaded bytes by itself."""

    def blocks(self, rows: Sequence[int]) -> Sequence[Block]:
        """Return the memory of rows, as views without a copy."""


class ArrayRows:
    """Rows of one array: the first axis counts the rows."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(self._array[0].nbytes)

    def blocks(self, rows: Sequence[int]) -> Sequence[NDArray[np.uint8]]:
        """Return the memory of rows."""
        return [self._array[row] for row in rows]
