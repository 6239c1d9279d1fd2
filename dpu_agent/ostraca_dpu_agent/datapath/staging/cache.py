"""The DRAM cache: blocks kept in staging memory after use.

Keys are derived under a volume's secret, so an entry answers only its own tenant. Blocks are immutable, so
no entry is stale. An entry used by a transfer stays until the transfer's end, however full the cache is. This
module only does bookkeeping: it owns slots and does not access memory.

A block is a row of a few columns, and calls handle many blocks. ``segmented_lru`` selects the blocks to evict
within a tenant. A tenant's new blocks evict its own blocks, or those of a tenant with more:
``policies.fair_sharing`` selects the tenant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.policies.fair_sharing import plan_evictions
from ostraca_fabric.tables.digests import TAG_BYTES
from ostraca_fabric.tables.keyed_rows import KeyedRows
from ostraca_fabric.tables.segmented_lru import PARTS_MAX, SegmentedLru
from ostraca_fabric.telemetry.status import PrefetchCounters

_ROWS_AT_FIRST = 1024

_TAG = np.dtype((np.void, TAG_BYTES))


@dataclass(frozen=True, slots=True)
class CacheOffer:
    """Blocks in slots of one size, offered to the cache: a row per block."""

    keys: NDArray[np.uint8]
    """Shape (n, 16)."""

    tags: NDArray[np.uint8]
    """Shape (n, 16)."""

    lengths: NDArray[np.uint32]
    is_kept: NDArray[np.bool_]
    """Blocks that may be kept; read only when the offer is taken."""

    uses: int = 1
    """Uses so far: 1 for a get or put, 0 for a prefetch, whose use is not known yet."""

    tenant: Hashable = None
    """Owner of the blocks."""


class BlockCache:
    """Blocks by key, bounded in bytes of slots.

    ``put`` and ``shrink`` return the offsets of slots for the caller to free.
    """

    def __init__(
        self, limit_bytes: int, *, protected_share: float, members: Collection[Hashable] = ()
    ) -> None:
        """Begin empty; a limit of 0 keeps no block.

        *protected_share* is the protected segment's part of the limit. *members* is a live view of the
        connected tenants.
        """
        self.limit_bytes = limit_bytes
        self.on_evicted: Callable[[NDArray[np.uint8]], None] = lambda _keys: None
        """Receives the keys of evicted blocks, shape (n, 16)."""
        rows = max(1, min(_ROWS_AT_FIRST, limit_bytes // PAGE_BYTES))
        self._order = SegmentedLru(rows, protected_max_bytes=int(protected_share * limit_bytes))
        self._parts = CacheParts(
            self._order, limit_bytes=limit_bytes, protected_share=protected_share, members=members
        )
        self._rows = KeyedRows(rows, self._grow)
        self._tags = np.zeros(rows, _TAG)
        self.lengths = np.zeros(rows, np.uint32)
        """Per row; read only."""
        self.offsets = np.zeros(rows, np.int64)
        """Offset of each row's slot; read only."""
        self.prefetched = PrefetchCounters()
        self.removed = 0
        """Number of removed blocks since the start. While it is unchanged, rows stay valid."""

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._rows)

    @property
    def slot_bytes(self) -> NDArray[np.int64]:
        """Slot size per row; read only."""
        return self._order.bytes

    def contains(self, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return which of *keys*, shape (n, 16), are cached; not counted as a use."""
        if not len(self):
            return np.zeros(len(keys), np.bool_)
        is_here: NDArray[np.bool_] = self._rows.find(keys) >= 0
        return is_here

    def find(
        self, keys: NDArray[np.uint8], lengths: NDArray[np.uint32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find blocks of the given lengths; return positions in *keys*, and rows.

        Rows are valid while ``removed`` is unchanged. Rows passed to ``hold`` are valid until given back.
        """
        return self._rows.match(keys, self.lengths, lengths)

    def tags(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the tags of these blocks, shape (n, 16)."""
        return self._tags[rows].view(np.uint8).reshape(-1, TAG_BYTES)

    def hold(self, rows: NDArray[np.int64]) -> None:
        """Use blocks and hold them until ``release``."""
        if self._has_unread:
            unread = np.unique(self._unread(rows))
            self.prefetched.useful_blocks += len(unread)
            self.prefetched.useful_bytes += int(self.lengths[unread].sum())
        self._order.hold(rows)

    def use(self, rows: NDArray[np.int64]) -> None:
        """Use blocks without holding them."""
        self.hold(rows)
        self.release(rows)

    def release(self, rows: NDArray[np.int64]) -> None:
        """End a use of each of these blocks."""
        self._order.let_go(rows)

    def demote(self, keys: NDArray[np.uint8]) -> None:
        """Evict these blocks before blocks that were used again."""
        rows = self._rows.find(keys)
        self._order.demote(rows[rows >= 0])

    def put(self, offer: CacheOffer, offsets: NDArray[np.int64], slot_bytes: int) -> NDArray[np.int64]:
        """Keep offered blocks at *offsets*, as far as room can be made.

        Blocks in use or with precedence are not evicted. Returns the slots to free: those of evicted
        blocks and of blocks not kept.
        """
        chosen = offer.is_kept.nonzero()[0][: self.limit_bytes // slot_bytes]
        part = self._parts.number(offer.tenant) if len(chosen) else None
        if part is None:
            return offsets
        rows, is_new = self._rows.add(offer.keys[chosen])
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
            self._remove_rows(rows[room:])
            rows, chosen = rows[:room], chosen[:room]
        self._tags[rows] = offer.tags[chosen].view(_TAG)[:, 0]
        self.lengths[rows] = offer.lengths[chosen]
        self.offsets[rows] = offsets[chosen]
        self._order.enter(rows, slot_bytes, uses=offer.uses, part=part)
        self._parts.update_protection()
        if not offer.uses:
            self.prefetched.blocks += len(rows)
            self.prefetched.bytes += int(self.lengths[rows].sum())
        if len(rows) == len(offsets):
            return freed
        is_left = np.ones(len(offsets), np.bool_)
        is_left[chosen] = False
        return np.concatenate((freed, offsets[is_left]))

    def make_room(
        self,
        wanted_bytes: int,
        asker: Hashable,
        *,
        beside: Mapping[Hashable, int],
        equal_bytes: float,
    ) -> NDArray[np.int64]:
        """Evict blocks for memory that *asker*, a tenant, needs; return their slots.

        *beside* is the tenants' memory outside the cache, including the asker's current need.
        *equal_bytes* is each tenant's guaranteed total of both.
        """
        freed = self._evict(wanted_bytes, asker, beside, equal_bytes)
        self._parts.update_protection()
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
            self._remove_rows(rows)
            self.on_evicted(self._rows.keys(rows))
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
    def _has_unread(self) -> bool:
        """Whether a prefetched block has not been read yet."""
        count = self.prefetched
        return count.blocks > count.useful_blocks + count.useless_blocks

    def _unread(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        unread: NDArray[np.int64] = rows[self._order.uses[rows] == 0]
        return unread

    def _remove_rows(self, rows: NDArray[np.int64]) -> None:
        self._rows.remove(rows)
        self.removed += len(rows)

    def _grow(self, rows: int) -> None:
        added = rows - len(self.lengths)
        self._tags = np.concatenate((self._tags, np.zeros(added, _TAG)))
        self.lengths = np.concatenate((self.lengths, np.zeros(added, np.uint32)))
        self.offsets = np.concatenate((self.offsets, np.zeros(added, np.int64)))
        self._order.grow(rows)


class CacheParts:
    """Tenants' parts of an order."""

    def __init__(
        self,
        order: SegmentedLru,
        *,
        limit_bytes: int,
        protected_share: float,
        members: Collection[Hashable],
    ) -> None:
        """Begin without parts; *members* is a live view of the connected tenants."""
        self._order = order
        self._limit_bytes = limit_bytes
        self._protected_share = protected_share
        self._members = members
        self._numbers: dict[Hashable, int] = {}
        self._free = [0]
        self._are_several = False
        """Whether several parts existed at the last call of ``update_protection``."""

    @property
    def bytes_of(self) -> dict[Hashable, int]:
        """Bytes of each tenant."""
        sizes = self._order.part_bytes
        return {tenant: int(sizes[number]) for tenant, number in self._numbers.items()}

    def number(self, tenant: Hashable) -> int | None:
        """Return the number of a tenant's part, made on first use.

        None at the limit of parts.
        """
        number = self._numbers.get(tenant)
        if number is None and (self._free or len(self._order.part_bytes) < PARTS_MAX):
            number = self._free.pop() if self._free else self._order.add_part(protected_max_bytes=0)
            self._numbers[tenant] = number
        return number

    def evict(
        self,
        wanted_bytes: int,
        asker: Hashable,
        *,
        beside: Mapping[Hashable, int],
        equal_bytes: float | None = None,
    ) -> NDArray[np.int64]:
        """Remove *wanted_bytes* of rows, as far as rows are free and tenants give way.

        *asker*, *beside* and *equal_bytes*, by default that of the cache, are as for ``plan_evictions``.
        """
        numbers = self._numbers
        if len(numbers) == (asker in numbers):
            return self._order.evict(wanted_bytes, part=numbers.get(asker, 0))
        if equal_bytes is None:
            equal_bytes = self._limit_bytes / max(1, len(self._members))
        parts, beside = self.bytes_of, dict(beside)
        gone = [np.empty(0, np.int64)]
        while wanted_bytes > 0:
            asks = plan_evictions(
                parts,
                beside,
                self._members,
                asker=asker,
                wanted_bytes=wanted_bytes,
                equal_bytes=equal_bytes,
            )
            if not asks:
                break
            for tenant, ask in asks:
                rows = self._order.evict(min(ask, wanted_bytes), part=self._numbers[tenant])
                got_bytes = int(self._order.bytes[rows].sum())
                gone.append(rows)
                wanted_bytes -= got_bytes
                parts[tenant] -= got_bytes
                if got_bytes < ask:  # the other rows are held
                    beside[tenant] = beside.get(tenant, 0) + parts.pop(tenant)
                if wanted_bytes <= 0:
                    break
        return np.concatenate(gone)

    def update_protection(self) -> None:
        """Update the protected share of each part, after any change of blocks."""
        if len(self._numbers) <= 1 and not self._are_several:
            return
        sizes = self._order.part_bytes
        for tenant, number in list(self._numbers.items()):
            if not sizes[number]:
                del self._numbers[tenant]
                self._free.append(number)
        equal_bytes = self._limit_bytes / max(1, len(self._numbers))
        most = self._protected_share * np.maximum(equal_bytes, sizes)
        self._order.protect(most.astype(np.int64))
        self._are_several = len(self._numbers) > 1
