"""Port to an engine's memory.

Connectors name memory by the engine's own numbers, called rows: a row holds one chunk. Only this port turns
rows into memory: into views, which are copied, or into rows of a region, which are moved in place where the
transport allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ostraca._memory.regions import Region, RegionRows
    from ostraca.client import Client

Block: TypeAlias = NDArray[np.uint8] | Sequence[NDArray[np.uint8]]
"""Memory of one chunk: a view, or its parts in order, as taken by ``Volume.get`` and ``Volume.put``."""

Blocks: TypeAlias = "Sequence[Block] | RegionRows"
"""Memory of several chunks, in order."""


class Rows(Protocol):
    """Rows of an engine's memory. The engine keeps the rows of a job in place until the job's end."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 if rows differ, and the connector counts loaded bytes by itself."""

    def blocks(self, rows: Sequence[int]) -> Blocks:
        """Return the memory of rows, without a copy."""


class PoolRows:
    """Rows of an engine's pool, an array of shape (rows, bytes).

    The rows belong to a region once ``FabricLink.register`` has a client, unless the pool has gaps.
    """

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self._pool = pool
        self._region: Region | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(self._pool.shape[1])

    def register(self, client: Client) -> None:
        """Make the pool a region of the client, until the end of the client or of this object.

        Raises UsageError, as for a pool with gaps, or ClosedError; then the rows remain views.
        """
        self._region = client.register(self._pool)

    def blocks(self, rows: Sequence[int]) -> Blocks:
        """Return the memory of rows."""
        if self._region is None:
            return [self._pool[row] for row in rows]
        return self._region.rows(rows)
