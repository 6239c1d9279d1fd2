"""Staged blocks: blocks of puts, readable at this agent before flash has them.

A put's group adds blocks after the check of the tags, and removes the blocks after the commit. A block is
readable while the reservation of its space stands: the owner grants space for a key to a single put at a
time, so all readers of the fabric see the same content (ADR 0038).

Readers share the slots of the put, whose lease ends after the last reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.staging.leases import StagingLease
from ostraca_dpu_agent.datapath.staging.staging import Staging
from ostraca_fabric.tables.keyed_rows import KeyedRows

_ROWS_AT_FIRST = 256

_ABSENT = -1

_numbers = count()

IN_STAGING = "staging"
"""Key of ``DataPathCounters.hits_on`` for staged blocks."""


class StagedGroup:
    """Blocks of a put's group: a row per block, in slots of one lease."""

    def __init__(
        self,
        lease: StagingLease,
        keys: NDArray[np.uint8],
        lengths: NDArray[np.uint32],
        tags: NDArray[np.uint8],
        are_reserved: Callable[[NDArray[np.intp]], NDArray[np.bool_]],
    ) -> None:
        """Begin with the columns of all blocks; *are_reserved* tells which rows' reservations stand now."""
        self.number = next(_numbers)
        self.lease = lease
        self.keys = keys
        self.lengths = lengths
        self.tags = tags
        self.are_reserved = are_reserved
        self.staged_rows = np.full(len(keys), _ABSENT, np.int64)
        """Row of each block among the staged blocks; -1 for absent blocks."""


@dataclass(frozen=True, slots=True)
class StagedWave:
    """Staged blocks of one group, asked for by a get."""

    positions: NDArray[np.intp]
    """Positions in the get."""

    rows: NDArray[np.intp]
    """Rows of the group."""

    group: StagedGroup
    source: ClassVar = IN_STAGING

    @property
    def slot_bytes(self) -> int:
        """Size of a slot."""
        return self.group.lease.slot_bytes

    @property
    def tags(self) -> NDArray[np.uint8]:
        """Tags of the blocks, shape (n, 16)."""
        return self.group.tags[self.rows]

    def some(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> StagedWave:
        """Return a part of the wave, by indexes or by mask."""
        return StagedWave(self.positions[chosen], self.rows[chosen], self.group)

    def use(self) -> NDArray[np.int64]:
        """Return the blocks' offsets in memory."""
        return self.group.lease.offsets[self.rows]

    def left(self, _keys: NDArray[np.uint8], _lengths: NDArray[np.uint32]) -> StagedWave:
        """Return the part still readable."""
        is_here = self.group.staged_rows[self.rows] != _ABSENT
        return self.some(is_here & self.group.are_reserved(self.rows))

    def hold(self, staging: Staging, lease: StagingLease) -> None:
        """Read the slots under a CACHED lease, until its release."""
        staging.share(lease, self.group.lease, self.rows)


class StagedBlocks:
    """Staged blocks of an agent, by key. Use on the event loop's thread only."""

    def __init__(self) -> None:
        """Begin empty."""
        self._rows = KeyedRows(_ROWS_AT_FIRST, self._grow)
        self._lengths = np.zeros(_ROWS_AT_FIRST, np.uint32)
        self._group = np.zeros(_ROWS_AT_FIRST, np.int64)
        self._row = np.zeros(_ROWS_AT_FIRST, np.intp)
        self.groups: dict[int, StagedGroup] = {}
        """Groups with staged blocks, by number; read only."""

    def add(self, group: StagedGroup, rows: NDArray[np.intp]) -> None:
        """Add blocks of a group, whose bytes and tags match. A key of another group stays with that group."""
        staged, is_new = self._rows.add(group.keys[rows])
        rows = rows[is_new]
        self._lengths[staged], self._group[staged], self._row[staged] = (
            group.lengths[rows],
            group.number,
            rows,
        )
        group.staged_rows[rows] = staged
        self.groups[group.number] = group

    def remove(self, group: StagedGroup, rows: NDArray[np.intp] | slice = slice(None)) -> None:
        """Remove blocks of a group, by default all."""
        its = group.staged_rows[rows]
        self._rows.remove(its[its != _ABSENT])
        group.staged_rows[rows] = _ABSENT
        if (group.staged_rows == _ABSENT).all():
            self.groups.pop(group.number, None)

    def contains(self, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return which of *keys*, shape (n, 16), are readable."""
        is_here = np.zeros(len(keys), np.bool_)
        if self.groups:
            staged = self._rows.find(keys)
            for wave in self._readable(np.flatnonzero(staged >= 0), staged[staged >= 0]):
                is_here[wave.positions] = True
        return is_here

    def find(self, keys: NDArray[np.uint8], lengths: NDArray[np.uint32]) -> list[StagedWave]:
        """Find readable blocks of the given lengths: a wave per group."""
        return list(self._readable(*self._rows.match(keys, self._lengths, lengths)))

    def _readable(self, positions: NDArray[np.int64], staged: NDArray[np.int64]) -> Iterator[StagedWave]:
        groups = self._group[staged]
        for number in np.unique(groups).tolist():
            group, its = self.groups[number], groups == number
            rows = self._row[staged[its]]
            good = group.are_reserved(rows)
            if good.any():
                yield StagedWave(positions[its][good], rows[good], group)

    def _grow(self, rows: int) -> None:
        added = rows - len(self._lengths)
        self._lengths = np.concatenate((self._lengths, np.zeros(added, np.uint32)))
        self._group = np.concatenate((self._group, np.zeros(added, np.int64)))
        self._row = np.concatenate((self._row, np.zeros(added, np.intp)))
