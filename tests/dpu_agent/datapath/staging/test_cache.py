from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.invariants import check_cache, evict_all

from ostraca_dpu_agent.datapath.staging.cache import BlockCache, CacheOffer
from ostraca_fabric.telemetry.status import PrefetchCounters

PAGE = 4096


def cache_of(pages: int) -> BlockCache:
    return BlockCache(pages * PAGE, protected_share=0.5)


def keys(*numbers: int) -> NDArray[np.uint8]:
    column = np.zeros((len(numbers), 16), np.uint8)
    column[:, 15] = numbers
    return column


def offered(*numbers: int, length: int = PAGE) -> CacheOffer:
    count = len(numbers)
    return CacheOffer(
        keys(*numbers), keys(*numbers), np.full(count, length, np.uint32), np.ones(count, np.bool_)
    )


def put(cache: BlockCache, number: int, *, at: int | None = None) -> list[int]:
    """Put one block of a page; returns what is freed."""
    offset = number * PAGE if at is None else at
    freed: list[int] = cache.put(offered(number), np.array([offset]), PAGE).tolist()
    return freed


def found(cache: BlockCache, *numbers: int, length: int = PAGE) -> NDArray[np.int64]:
    return cache.find(keys(*numbers), np.full(len(numbers), length, np.uint32))[1]


def test_the_block_that_was_not_used_for_longest_makes_room() -> None:
    cache = cache_of(2)
    assert put(cache, 1) == put(cache, 2) == []
    rows = found(cache, 1)
    cache.hold(rows)
    cache.release(rows)
    assert put(cache, 3) == [2 * PAGE]
    assert cache.contains(keys(1, 2, 3)).tolist() == [True, False, True]


def test_a_block_under_a_transfer_is_never_dropped() -> None:
    cache = cache_of(1)
    put(cache, 1)
    rows = found(cache, 1)
    cache.hold(rows)
    assert put(cache, 2) == [2 * PAGE], "the newcomer does not fit while the old one is in use"
    assert evict_all(cache).tolist() == []
    cache.release(rows)
    assert evict_all(cache).tolist() == [PAGE]
    check_cache(cache)


def test_a_block_that_is_there_already_is_not_kept_twice() -> None:
    cache = cache_of(2)
    put(cache, 1)
    put(cache, 2)
    assert put(cache, 1, at=5 * PAGE) == [5 * PAGE]
    twice = cache.put(offered(3, 3), np.array([6, 7]) * PAGE, PAGE).tolist()
    assert twice == [PAGE, 7 * PAGE]
    check_cache(cache)


def test_a_block_of_another_length_is_not_found_and_says_so_by_its_absence() -> None:
    cache = cache_of(4)
    cache.put(offered(1, 2, length=100), np.array([0, PAGE]), PAGE)
    positions, rows = cache.find(keys(2, 3, 1), np.array([100, 100, 99], np.uint32))
    assert positions.tolist() == [0]
    assert cache.offsets[rows].tolist() == [PAGE]
    assert cache.tags(rows).tobytes() == keys(2).tobytes()


def test_of_more_than_fits_as_much_is_kept_as_fits() -> None:
    cache = cache_of(3)
    offer = offered(*range(1, 6))
    offer.is_kept[0] = False
    assert sorted(cache.put(offer, np.arange(5) * PAGE, PAGE).tolist()) == [0, 4 * PAGE]
    assert cache.contains(keys(1, 2, 3, 4, 5)).tolist() == [False, True, True, True, False]
    assert cache.put(offered(9), np.array([9 * PAGE]), 4 * PAGE).tolist() == [9 * PAGE], "larger than it all"
    assert len(cache) == 3


def test_it_grows_with_its_blocks_and_finds_them_all() -> None:
    cache = BlockCache(5000 * PAGE, protected_share=0.3)
    column = np.random.default_rng(1).integers(0, 256, (5000, 16)).astype(np.uint8)
    lengths = np.full(5000, PAGE, np.uint32)
    for first in range(0, 5000, 700):
        part = slice(first, first + 700)
        kept = np.ones(len(column[part]), np.bool_)
        offsets = np.arange(5000)[part] * PAGE
        assert (
            cache.put(CacheOffer(column[part], column[part], lengths[part], kept), offsets, PAGE).tolist()
            == []
        )
        check_cache(cache)
    _, rows = cache.find(column, lengths)
    assert cache.offsets[rows].tolist() == (np.arange(5000) * PAGE).tolist()
    assert cache.tags(rows).tobytes() == column.tobytes()


def test_what_a_prefetch_brought_is_counted_as_got_or_as_dropped_unread() -> None:
    cache = cache_of(4)
    brought = replace(offered(1, 2, 3, length=100), uses=0)
    cache.put(brought, np.arange(3) * PAGE, PAGE)
    put(cache, 4)
    count = cache.prefetched
    assert count == PrefetchCounters(blocks=3, bytes=300)
    for _ in range(2):
        rows = found(cache, 2, 2, length=100)
        cache.hold(rows)
        cache.release(rows)
    assert count == PrefetchCounters(blocks=3, bytes=300, useful_blocks=1, useful_bytes=100)
    evict_all(cache)
    assert count == PrefetchCounters(3, 300, 1, 100, 2, 200)
    check_cache(cache)


blocks = st.lists(st.integers(0, 9), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.sampled_from("ptgs"), blocks, st.integers(1, 3)), max_size=60))
@settings(deadline=None, max_examples=200)
def test_every_slot_is_in_the_cache_or_given_back_exactly_once(
    steps: list[tuple[str, list[int], int]],
) -> None:
    cache = cache_of(6)
    inside: dict[int, int] = {}
    """Bytes by offset."""
    held: list[NDArray[np.int64]] = []
    serial = 0
    for step, named, pages in steps:
        freed: list[int] = []
        if step == "p":
            offsets = [(serial + at) * 3 * PAGE for at in range(len(named))]
            serial += len(named)
            inside |= dict.fromkeys(offsets, pages * PAGE)
            offer = replace(offered(*named), uses=serial % 2)
            freed = cache.put(offer, np.array(offsets), pages * PAGE).tolist()
        elif step == "t":
            rows = found(cache, *named)
            cache.hold(rows)
            held.append(rows)
        elif step == "g" and held:
            cache.release(held.pop(0))
        elif step == "s":
            freed = cache.make_room(
                cache.used_bytes - named[0] * 1000, None, beside={}, equal_bytes=1
            ).tolist()
        in_use = {offset for rows in held for offset in cache.offsets[rows].tolist()}
        assert max(Counter(freed).values(), default=1) == 1
        for offset in freed:
            assert offset not in in_use
            del inside[offset]
        check_cache(cache)
        assert len(cache._order.held) == len(in_use)
        assert cache.used_bytes == sum(inside.values())
        assert sorted(cache.offsets[cache._order.entered].tolist()) == sorted(inside)
