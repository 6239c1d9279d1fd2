from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ostraca_dpu_agent.mover.cache import BlockCache, CachedBlock


def block(number: int, slot_bytes: int = 4096) -> CachedBlock:
    return CachedBlock(number.to_bytes(16, "big"), b"t" * 16, slot_bytes, number * slot_bytes, slot_bytes)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_the_least_recently_used_block_makes_room() -> None:
    cache = BlockCache(2 * 4096)
    assert cache.put(block(1)) == []
    assert cache.put(block(2)) == []
    used = cache.take(key(1))
    assert used is not None
    cache.give_back([used])
    assert cache.put(block(3)) == [(2 * 4096, 4096)]
    assert key(1) in cache
    assert key(2) not in cache


def test_a_block_under_a_transfer_is_never_dropped() -> None:
    cache = BlockCache(4096)
    cache.put(block(1))
    held = cache.take(key(1))
    assert held is not None
    assert cache.put(block(2)) == [(2 * 4096, 4096)], "the newcomer does not fit while the old one is in use"
    assert cache.shrink(0) == []
    cache.give_back([held])
    assert cache.shrink(0) == [(1 * 4096, 4096)]


def test_a_block_that_is_there_already_is_not_kept_twice() -> None:
    cache = BlockCache(10 * 4096)
    cache.put(block(1))
    again = CachedBlock(key(1), b"t" * 16, 4096, 5 * 4096, 4096)
    assert cache.put(again) == [(5 * 4096, 4096)]


@given(st.lists(st.tuples(st.sampled_from("ptgs"), st.integers(0, 9)), max_size=60))
def test_every_slot_is_in_the_cache_or_given_back_exactly_once(steps: list[tuple[str, int]]) -> None:
    cache = BlockCache(4 * 4096)
    inside: set[int] = set()
    held: list[CachedBlock] = []
    for serial, (step, number) in enumerate(steps):
        if step == "p":
            new = CachedBlock(key(number), b"t" * 16, 4096, serial * 4096, 4096)
            freed = cache.put(new)
            inside.add(new.offset)
        elif step == "t":
            taken = cache.take(key(number))
            held += [taken] if taken is not None else []
            freed = []
        elif step == "g":
            cache.give_back([held.pop()] if held else [])
            freed = []
        else:
            freed = cache.shrink(number * 1024)
        for offset, _ in freed:
            assert offset not in {block.offset for block in held}
            inside.remove(offset)
        cache.check()
        assert len(inside) == len(cache)
