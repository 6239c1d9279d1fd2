"""The DRAM cache: blocks kept in staging memory after they passed through.

Keys are derived under a volume's secret, so an entry answers its own tenant alone. Blocks are immutable, so
an entry is never stale. ``cache_parts`` says whose go first when room is needed, and ``segmented_lru`` which
of a tenant's; an entry in use by a transfer stays until that has ended, however full the cache is. Pure
bookkeeping: it owns slots, it does not know memory.

A block is a row of a few columns, and calls are for many of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.mover.cache_parts import CacheParts
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.key_table import KeyTable
from ostraca_fabric.keys import KEY_BYTES
from ostraca_fabric.segmented_lru import SegmentedLru
from ostraca_fabric.status import PrefetchCounters
from ostraca_fabric.tags import TAG_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping

    from numpy.typing import NDArray

_ROWS_AT_FIRST = 1024
_NOTHING: Mapping[Hashable, int] = MappingProxyType({})
_TAG = np.dtype((np.void, TAG_BYTES))


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks that lie in slots of one size, for the cache to keep: a row for each."""

    keys: NDArray[np.uint8]
    """Shape (n, 16)."""

    tags: NDArray[np.uint8]
    """Shape (n, 16)."""

    lengths: NDArray[np.uint32]
    is_kept: NDArray[np.bool_]
    """Which ones may be kept. Looked at when the offer is taken up, not before."""

    uses: int = 1
    """What brought them: 1 a get or a put, 0 a prefetch, of which nobody knows yet whether it was of use."""

    tenant: Hashable = None
    """Whose they are."""


class BlockCache:
    """Blocks by key, bounded in bytes of slots.

    ``put`` and ``shrink`` return the offsets of slots that are the caller's to free.
    """

    def __init__(
        self, limit_bytes: int, *, protected_share: float, members: Collection[Hashable] = ()
    ) -> None:
        """Begin empty; a limit of 0 keeps nothing. *protected_share* is protected's part of the limit;
        *members* is a view of the tenants that are connected now.
        """
        self.limit_bytes = limit_bytes
        self.on_evicted: Callable[[NDArray[np.uint8]], None] = lambda _keys: None
        """Is told the keys of blocks that had to go, shape (n, 16)."""
        rows = max(1, min(_ROWS_AT_FIRST, limit_bytes // PAGE_BYTES))
        self._order = SegmentedLru(rows, protected_max_bytes=int(protected_share * limit_bytes))
        self._parts = CacheParts(
            self._order, limit_bytes=limit_bytes, protected_share=protected_share, members=members
        )
        self._keys = np.zeros((rows, KEY_BYTES), np.uint8)
        self._tags = np.zeros(rows, _TAG)
        self.lengths = np.zeros(rows, np.uint32)
        """Of each row; read only."""
        self.offsets = np.zeros(rows, np.int64)
        """Of each row's slot; read only."""
        self._table = KeyTable(self._keys)
        self.prefetched = PrefetchCounters()
        self.left = 0
        """Blocks that have left since the start. While it stays the same, rows stay valid."""
        self._free = np.arange(rows)
        """Rows without a block; the first ``_free_rows`` count."""
        self._free_rows = rows

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self._table)

    @property
    def slot_bytes(self) -> NDArray[np.int64]:
        """Of each row's slot; read only."""
        return self._order.bytes

    def contains(self, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Tell of each of *keys*, shape (n, 16), whether its block is here. That is no use of it."""
        if not len(self):
            return np.zeros(len(keys), np.bool_)
        is_here: NDArray[np.bool_] = self._table.find(keys) >= 0
        return is_here

    def find(
        self, keys: NDArray[np.uint8], lengths: NDArray[np.uint32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find the blocks that are here in the length asked for: their positions in *keys*, and their rows.

        Rows are valid while ``left`` stays the same, and those given to ``take`` until given back.
        """
        return self._table.match(keys, self.lengths, lengths)

    def tags(self, rows: NDArray[np.int64]) -> bytes:
        """Return the tags of these blocks, one after another."""
        return self._tags[rows].tobytes()

    def take(self, rows: NDArray[np.int64]) -> None:
        """Use blocks and hold them until ``give_back``."""
        if self._has_unread:
            unread = np.unique(self._unread(rows))
            self.prefetched.useful_blocks += len(unread)
            self.prefetched.useful_bytes += int(self.lengths[unread].sum())
        self._order.hold(rows)

    def give_back(self, rows: NDArray[np.int64]) -> None:
        """End a use of each of these blocks."""
        self._order.let_go(rows)

    def demote(self, keys: NDArray[np.uint8]) -> None:
        """Let those of these blocks that are here go before blocks that were used again."""
        rows = self._table.find(keys)
        self._order.demote(rows[rows >= 0])

    def put(self, offer: Offer, offsets: NDArray[np.int64], slot_bytes: int) -> NDArray[np.int64]:
        """Keep the blocks offered, which lie at *offsets*, as far as there is room for them beside those in
        use and those that need not give way; returns the slots this frees: of blocks that go, and of those
        not kept.
        """
        chosen = np.flatnonzero(offer.is_kept)[: self.limit_bytes // slot_bytes]
        part = self._parts.number(offer.tenant) if len(chosen) else None
        if part is None:
            return offsets
        rows, is_new = self._enter(offer.keys[chosen])
        if len(rows) < len(chosen):
            chosen = chosen[is_new]
        wanted_bytes = len(rows) * slot_bytes
        freed = self._evict(
            self.used_bytes + wanted_bytes - self.limit_bytes,
            offer.tenant,
            {offer.tenant: wanted_bytes},
        )
        room = (self.limit_bytes - self.used_bytes) // slot_bytes
        if room < len(rows):
            self._leave(rows[room:])
            rows, chosen = rows[:room], chosen[:room]
        self._tags[rows] = offer.tags[chosen].view(_TAG)[:, 0]
        self.lengths[rows] = offer.lengths[chosen]
        self.offsets[rows] = offsets[chosen]
        self._order.enter(rows, slot_bytes, uses=offer.uses, part=part)
        self._parts.share_out()
        if not offer.uses:
            self.prefetched.blocks += len(rows)
            self.prefetched.bytes += int(self.lengths[rows].sum())
        if len(rows) == len(offsets):
            return freed
        is_left = np.ones(len(offsets), np.bool_)
        is_left[chosen] = False
        return np.concatenate((freed, offsets[is_left]))

    def shrink(self, to_bytes: int) -> NDArray[np.int64]:
        """Drop blocks until at most *to_bytes* are used, as far as none is in use; returns their slots."""
        return self.lend(self.used_bytes - to_bytes, None)

    def lend(
        self,
        wanted_bytes: int,
        asker: Hashable,
        *,
        beside: Mapping[Hashable, int] = _NOTHING,
        equal_bytes: float | None = None,
    ) -> NDArray[np.int64]:
        """Drop blocks to make room for what *asker*, a tenant, needs memory for; returns their slots.

        *beside* says what memory tenants have beside the cache, for the asker with what it needs now, and
        *equal_bytes* what each may have of both together, whatever others need: by default an equal part of
        the cache.
        """
        freed = self._evict(wanted_bytes, asker, beside, equal_bytes)
        self._parts.share_out()
        return freed

    def _evict(
        self,
        wanted_bytes: int,
        asker: Hashable,
        beside: Mapping[Hashable, int],
        equal_bytes: float | None = None,
    ) -> NDArray[np.int64]:
        rows = self._parts.evict(wanted_bytes, asker, beside=beside, equal_bytes=equal_bytes)
        if len(rows):
            self._leave(rows)
            self.on_evicted(self._keys[rows])
        if self._has_unread:
            unread = self._unread(rows)
            self.prefetched.useless_blocks += len(unread)
            self.prefetched.useless_bytes += int(self.lengths[unread].sum())
        return self.offsets[rows]

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots of all blocks."""
        return self._order.entered_bytes

    @property
    def bytes_of(self) -> Mapping[Hashable, int]:
        """Bytes of the slots of each tenant's blocks."""
        return self._parts.bytes_of

    @property
    def held_blocks(self) -> int:
        """Count the blocks in use by transfers."""
        return len(self._order.held)

    def check(self) -> None:
        """Assert what must hold after every call."""
        self._order.check()
        self._parts.check()
        rows = self._order.entered
        assert self.used_bytes <= self.limit_bytes
        assert self._table.find(self._keys[rows]).tolist() == rows.tolist()
        assert len(self._table) == len(rows)
        count = self.prefetched
        unread = count.blocks - count.useful_blocks - count.useless_blocks
        assert unread == len(self._unread(rows))
        unread_bytes = count.bytes - count.useful_bytes - count.useless_bytes
        assert unread_bytes == self.lengths[self._unread(rows)].sum()
        assert len(set(self.offsets[rows].tolist())) == len(rows)
        free = self._free[: self._free_rows].tolist()
        assert sorted([*free, *rows.tolist()]) == list(range(len(self._keys)))

    @property
    def _has_unread(self) -> bool:
        """Whether a prefetch brought anything that nobody has got yet."""
        count = self.prefetched
        return count.blocks > count.useful_blocks + count.useless_blocks

    def _unread(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        unread: NDArray[np.int64] = rows[self._order.uses[rows] == 0]
        return unread

    def _leave(self, rows: NDArray[np.int64]) -> None:
        """Forget the keys of rows, which are free then."""
        self._table.remove(rows)
        self._free[self._free_rows : self._free_rows + len(rows)] = rows
        self._free_rows += len(rows)
        self.left += len(rows)

    def _enter(self, keys: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Give a row to each of *keys* that has none yet; says which got one."""
        if self._free_rows < len(keys):
            self._grow(len(keys))
        first = self._free_rows - len(keys)
        rows = self._free[first : self._free_rows].copy()
        self._keys[rows] = keys
        is_new = self._table.enter(rows)
        if not is_new.all():
            left_over = rows[~is_new]
            self._free[first : first + len(left_over)] = left_over
            rows = rows[is_new]
        self._free_rows -= len(rows)
        return rows, is_new

    def _grow(self, wanted: int) -> None:
        """Make room for *wanted* more rows at least: the double, so that it costs little for each."""
        old = len(self._keys)
        new = max(2 * old, old + wanted)
        added = new - old
        self._keys = np.concatenate((self._keys, np.zeros((added, KEY_BYTES), np.uint8)))
        self._tags = np.concatenate((self._tags, np.zeros(added, _TAG)))
        self.lengths = np.concatenate((self.lengths, np.zeros(added, np.uint32)))
        self.offsets = np.concatenate((self.offsets, np.zeros(added, np.int64)))
        free = np.concatenate((self._free[: self._free_rows], np.arange(old, new)))
        self._free, self._free_rows = np.zeros(new, np.int64), len(free)
        self._free[: len(free)] = free
        self._order.grow(new)
        self._table = KeyTable(self._keys)
        self._table.enter(self._order.entered)
