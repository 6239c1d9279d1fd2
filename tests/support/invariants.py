"""Invariants of arrays and state machines, asserted by tests after calls: each check visits everything."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ostraca._protocol.ledger import Ledger
from ostraca_dpu_agent.datapath.staging.cache import BlockCache, CacheParts
from ostraca_fabric.drives.drive_health import DriveCondition, DriveHealth
from ostraca_fabric.flash.index import _NO_CHUNK, BlockIndex
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.tables.digests import KEY_BYTES
from ostraca_fabric.tables.keyed_rows import KeyedRows
from ostraca_fabric.tables.segmented_lru import OUTSIDE, PROBATION, PROTECTED, SegmentedLru
from ostraca_fabric.tables.slots import _FREE, _QUARANTINE, SlotPool

_MIX_FIRST = np.uint64(0x9E3779B97F4A7C15)
_MIX_SECOND = np.uint64(0xC2B2AE3D27D4EB4F)


def check_index(index: BlockIndex) -> None:
    """Assert the consistency of all arrays. Visits every block."""
    assert (index._segment_rows[index._segment_chunk == _NO_CHUNK] == 0).all(), "rows lie in chunks"
    rows, _ = index.all_rows()
    assert len(rows) == index._used <= index.blocks_max, "rows taken are counted"
    assert len(np.unique(rows)) == len(rows), "no row belongs to two segments"
    live = rows[index._lengths[rows] > 0]
    assert len(live) == index._blocks, "blocks are counted"
    assert int(index.lengths(live).sum(dtype=np.uint64)) == index.block_bytes, "their bytes are counted"
    assert (index._prints > 0).sum() == index._blocks, "each block has one slot"
    keys = index._keys[live].view(np.uint8).reshape(-1, KEY_BYTES)
    assert (index.find(keys) == live).all(), "each block is found by its key"
    passed = np.zeros_like(index._passed)
    where = np.zeros(len(index._keys), np.intp)
    full_bucket, full_slot = np.nonzero(index._prints)
    where[index._slots[full_bucket, full_slot]] = full_bucket
    home, _ = first_buckets(index, index._keys[live])
    for row, bucket in zip(live.tolist(), home.tolist(), strict=True):
        while bucket != where[row]:
            passed[bucket] += 1
            bucket = (bucket + 1) % len(index._passed)  # noqa: PLW2901 - it walks to where the row is
    assert (passed == index._passed).all(), "each bucket counts the keys that passed it by"


def first_buckets(index: BlockIndex, words: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.uint8]]:
    """Return each key's first bucket, and the key's slot byte, 1 to 255, as the C code does."""
    mixed = (words[:, 0] ^ (words[:, 1] * _MIX_SECOND)) * _MIX_FIRST
    high = mixed >> np.uint64(32)
    buckets = ((high * np.uint64(len(index._passed))) >> np.uint64(32)).astype(np.intp)
    return buckets, np.maximum((mixed >> np.uint64(24)).astype(np.uint8), np.uint8(1))


def check_slots(pool: SlotPool) -> None:
    """Assert that all counters and arrays agree."""
    state, pages = pool._state.ravel(), pool._pages.ravel()
    begins = np.flatnonzero(pages)
    covered = np.concatenate([np.empty(0, np.int64), *(first + np.arange(pages[first]) for first in begins)])
    assert np.array_equal(covered, np.flatnonzero(state)), "each page in use is one slot's"
    assert np.array_equal(np.repeat(state[begins], pages[begins]), state[covered])
    width = pool._state.shape[1]
    assert not (begins % width % pages[begins]).any()
    assert (begins % width + pages[begins] <= width).all()
    assert np.array_equal((pool._state != _FREE).sum(axis=1), pool._used)
    assert np.array_equal(pool._cut_for > 0, pool._used > 0)
    counted = np.bincount(state, minlength=_QUARANTINE + 1) * PAGE_BYTES
    assert counted.tolist() == [
        pool.free_bytes,
        pool.kept_bytes,
        pool.taken_bytes,
        pool.quarantined_bytes,
    ]
    held = [offsets for parts in pool._held.values() for offsets in parts]
    quarantined = begins[state[begins] == _QUARANTINE] * PAGE_BYTES
    assert np.array_equal(np.sort(np.concatenate([np.empty(0, np.int64), *held])), quarantined)


def check_order(order: SegmentedLru) -> None:
    """Assert that queues and rows agree."""
    for part in range(len(order._states)):
        _check_part(order, part)
    rows = order._rows
    assert order.entered_bytes == rows["bytes"][order.entered].sum()
    assert (rows["users"][order.held] > 0).all()
    assert (rows["part"] < len(order._states)).all()


def _check_part(order: SegmentedLru, part: int) -> None:
    rows, state = order._rows, order._states[part]
    is_its = rows["part"] == part
    for queue, where in (("probation", PROBATION), ("protected", PROTECTED)):
        seen, row, previous = [], int(state[f"{queue}_first"]), -1
        while row >= 0:
            assert rows[row]["where"] == where
            assert rows[row]["users"] == 0
            assert rows[row]["part"] == part
            assert rows[row]["previous"] == previous
            seen.append(row)
            row, previous = int(rows[row]["next"]), row
        assert state[f"{queue}_last"] == previous
        assert len(set(seen)) == len(seen) == np.count_nonzero(is_its & (rows["where"] == where))
        assert state[f"{queue}_bytes"] == rows["bytes"][seen].sum()
    assert state["protected_bytes"] <= state["protected_max_bytes"]
    assert order.part_bytes[part] == rows["bytes"][is_its & (rows["where"] != OUTSIDE)].sum()


def check_health(health: DriveHealth) -> None:
    """Assert the invariants that hold after every call."""
    under_way = {**health._watched, **health._given_up}
    assert len(under_way) == len(health._watched) + len(health._given_up), "an operation is under way once"
    for kind, breaker in health._breakers.items():
        trials = [each for each in under_way.values() if each.is_trial and each.kind is kind]
        assert len(trials) == int(breaker.has_trial), "a breaker's trial is under way"
        assert not (breaker.is_shut and trials), "nothing is tried through a shut breaker"
    assert health._ended_heard_s <= health._heard_s, "silence is never negative"
    is_failed = len(health._faults) >= health._settings.failed_faults
    assert health.condition is DriveCondition.FAILED or not is_failed, (
        "so many faults are a drive that failed"
    )


def evict_all(cache: BlockCache) -> NDArray[np.int64]:
    """Evict all blocks that nobody reads; return the offsets of their slots."""
    return cache.make_room(1 << 30, None, beside={}, equal_bytes=1)


def check_cache(cache: BlockCache) -> None:
    """Assert the invariants of every call."""
    check_order(cache._order)
    _check_parts(cache._parts)
    rows = cache._order.entered
    assert cache.used_bytes <= cache.limit_bytes
    check_keyed_rows(cache._rows, rows)
    count = cache.prefetched
    unread = count.blocks - count.useful_blocks - count.useless_blocks
    assert unread == len(cache._unread(rows))
    unread_bytes = count.bytes - count.useful_bytes - count.useless_bytes
    assert unread_bytes == cache.lengths[cache._unread(rows)].sum()
    assert len(set(cache.offsets[rows].tolist())) == len(rows)


def check_keyed_rows(keyed: KeyedRows, rows: NDArray[np.int64]) -> None:
    """Assert the invariants of every call; *rows* have the keys."""
    assert keyed.find(keyed.keys(rows)).tolist() == rows.tolist()
    assert len(keyed) == len(rows)
    free = keyed._free[: keyed._free_rows].tolist()
    assert sorted([*free, *rows.tolist()]) == list(range(len(keyed._keys)))


def _check_parts(parts: CacheParts) -> None:
    """Assert that every part with blocks has a tenant."""
    taken = sorted(parts._numbers.values())
    assert len(set(taken)) == len(taken)
    assert sorted([*taken, *parts._free]) == list(range(len(parts._order.part_bytes)))
    assert sum(parts.bytes_of.values()) == parts._order.entered_bytes


def check_ledger(ledger: Ledger) -> None:
    """Assert the invariants between calls."""
    check_slots(ledger._pool)
    for request, entry in ledger._entries.items():
        assert entry.is_held or not entry.is_answered or not entry.is_settled, (
            f"request {request} is over, yet listed"
        )
