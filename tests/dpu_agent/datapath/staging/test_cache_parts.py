"""Whose blocks leave the cache when several tenants have some there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.invariants import check_cache, evict_all

from ostraca_dpu_agent.datapath.staging.cache import BlockCache, CacheOffer

PAGE = 4096
PAGES = 24


class Shared:
    """A cache of a few pages, whose blocks of one page belong to tenants."""

    def __init__(self, *members: str, pages: int = PAGES) -> None:
        self.members = set(members)
        self.cache = BlockCache(pages * PAGE, protected_share=0.5, members=self.members)
        self.serial = 0

    def put(self, tenant: str, blocks: int = 1) -> list[int]:
        """Put new blocks; returns their numbers."""
        numbers = list(range(self.serial, self.serial + blocks))
        self.serial += blocks
        column, lengths = keys(*numbers), np.full(blocks, PAGE, np.uint32)
        offer = CacheOffer(column, column, lengths, np.ones(blocks, np.bool_), tenant=tenant)
        self.cache.put(offer, np.array(numbers) * PAGE, PAGE)
        check_cache(self.cache)
        return numbers

    def rows(self, *numbers: int) -> NDArray[np.int64]:
        return self.cache.find(keys(*numbers), np.full(len(numbers), PAGE, np.uint32))[1]

    def use(self, numbers: list[int]) -> None:
        rows = self.rows(*numbers)
        self.cache.hold(rows)
        self.cache.release(rows)
        check_cache(self.cache)

    @property
    def pages(self) -> dict[str, int]:
        return {str(tenant): size // PAGE for tenant, size in self.cache.bytes_of.items()}


def keys(*numbers: int) -> NDArray[np.uint8]:
    column = np.zeros((len(numbers), 16), np.uint8)
    column[:, 8:] = np.array(numbers, np.uint64)[:, None].view(np.uint8)
    return column


def test_a_flood_pushes_out_nothing_of_a_tenant_within_its_part() -> None:
    shared = Shared("a", "b")
    of_b = shared.put("b", PAGES // 2)
    for _ in range(5 * PAGES):
        shared.put("a")
    assert len(shared.rows(*of_b)) == len(of_b)
    assert shared.pages == {"a": PAGES // 2, "b": PAGES // 2}


def test_a_tenant_uses_everything_until_another_wants_its_part() -> None:
    shared = Shared("a", "b", "c")
    shared.put("a", PAGES)
    assert shared.pages == {"a": PAGES}
    shared.put("b", 6)
    assert shared.pages == {"a": PAGES - 6, "b": 6}
    for tenant in "bcbcbcabc" * 8:
        shared.put(tenant)
    assert shared.pages == dict.fromkeys("abc", PAGES // 3)


def test_blocks_of_tenants_that_are_gone_go_first() -> None:
    shared = Shared("a", "b")
    shared.put("b", PAGES // 2)
    of_a = shared.put("a", PAGES // 2)
    shared.members.remove("b")
    shared.put("a", PAGES // 2 - 1)
    assert shared.pages == {"a": PAGES - 1, "b": 1}
    assert len(shared.rows(*of_a)) == len(of_a)
    shared.put("a", 2)
    assert shared.pages == {"a": PAGES}


def test_who_is_gone_pushes_out_nothing_of_those_who_are_here() -> None:
    shared = Shared("a")
    shared.put("a", PAGES - 2)
    shared.put("gone", 2)
    last = shared.put("gone", 4)
    assert shared.pages == {"a": PAGES - 2, "gone": 2}
    assert len(shared.rows(*last)) == 2


def test_each_part_lets_its_own_go_in_their_order() -> None:
    shared = Shared("a", "b")
    used, passing = shared.put("a", 4), shared.put("a", PAGES // 2 - 4)
    shared.put("b", PAGES // 2)
    shared.use(used)
    shared.put("a", PAGES // 2 - 4)
    assert len(shared.rows(*used)) == 4
    assert len(shared.rows(*passing)) == 0


def test_protected_has_its_share_of_each_part() -> None:
    shared = Shared("a", "b")
    used = shared.put("a", PAGES // 2)
    shared.use(used)
    assert shared.cache._order._states["protected_bytes"][0] == PAGES // 2 * PAGE, (
        "half of it all, while alone"
    )
    shared.put("b", PAGES // 2)
    assert shared.cache._order._states["protected_bytes"][0] == PAGES // 4 * PAGE
    check_cache(shared.cache)


def test_what_is_held_stays_and_nobody_else_gives_way_for_it() -> None:
    shared = Shared("a", "b")
    of_b = shared.put("b", PAGES // 2)
    of_a = shared.put("a", PAGES // 2)
    rows = shared.rows(*of_a)
    shared.cache.hold(rows)
    assert len(shared.rows(*shared.put("a", 3))) == 0
    assert len(shared.rows(*of_b)) == len(of_b)
    shared.cache.release(rows)
    assert len(shared.rows(*shared.put("a", 3))) == 3


def test_parts_without_blocks_are_used_again() -> None:
    shared = Shared("a")
    for number in range(50):
        shared.put(f"tenant-{number}", 2)
        shared.put("a", PAGES)
    assert shared.pages == {"a": PAGES}
    assert len(shared.cache._order.part_bytes) == 2


def test_what_staging_needs_comes_from_those_who_have_most_memory() -> None:
    shared = Shared("a", "b")
    shared.put("b", PAGES // 2)
    shared.put("a", PAGES // 2)
    beside: dict[Hashable, int] = {"a": (PAGES + 2) * PAGE}
    freed = shared.cache.make_room(20 * PAGE, "a", beside=beside, equal_bytes=PAGES * PAGE)
    assert len(freed) == PAGES // 2
    assert shared.pages == {"b": PAGES // 2}, "what is left is none of what a may need for itself"
    assert len(shared.cache.make_room(2 * PAGE, "b", beside=beside, equal_bytes=PAGES * PAGE)) == 2
    assert len(evict_all(shared.cache)) == PAGES // 2 - 2


def check_losses(shared: Shared, tenant: str, before: Counter[str]) -> None:
    """Check who has lost what by a put of *tenant*."""
    after, equal = Counter(shared.pages), PAGES / max(1, len(shared.members))
    for each in shared.members - {tenant}:
        if after[each] < before[each]:
            assert tenant in shared.members
        if after[each] < min(before[each], equal):
            assert max(after[other] for other in shared.members) <= equal, (each, before, after)


tenants = st.sampled_from("abc")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "put", "use", "hold", "let go", "come", "go"]),
            tenants,
            st.integers(1, 6),
        ),
        max_size=80,
    )
)
@settings(deadline=None, max_examples=200)
def test_nobody_loses_what_is_within_an_equal_part_while_another_has_more(
    steps: list[tuple[str, str, int]],
) -> None:
    shared, of = Shared("a", "b"), {tenant: list[int]() for tenant in "abc"}
    held: list[NDArray[np.int64]] = []
    for step, tenant, number in steps:
        before = Counter(shared.pages)
        if step == "put":
            of[tenant] += shared.put(tenant, number)
            check_losses(shared, tenant, before)
        elif step == "use":
            shared.use(of[tenant][-number:])
        elif step == "hold":
            held.append(shared.rows(*of[tenant][-number:]))
            shared.cache.hold(held[-1])
        elif step == "let go" and held:
            shared.cache.release(held.pop(0))
        elif step == "come":
            shared.members.add(tenant)
        elif step == "go":
            shared.members.discard(tenant)
        check_cache(shared.cache)


@pytest.mark.parametrize("members", [(), ("a",)])
def test_alone_a_tenant_has_what_a_cache_without_tenants_has(members: tuple[str, ...]) -> None:
    """The same blocks stay and go, in the same order, whoever they belong to."""
    dice = np.random.default_rng(5)
    shared, plain = Shared(*members), BlockCache(PAGES * PAGE, protected_share=0.5)
    for serial in range(300):
        number = int(dice.integers(0, 60))
        column, offset = keys(number), np.array([serial * PAGE])
        freed = []
        for cache, tenant in ((shared.cache, "a"), (plain, None)):
            _, rows = cache.find(column, np.array([PAGE], np.uint32))
            cache.hold(rows)
            cache.release(rows)
            offer = CacheOffer(
                column, column, np.array([PAGE], np.uint32), np.ones(1, np.bool_), tenant=tenant
            )
            freed.append(cache.put(offer, offset, PAGE).tolist())
        assert freed[0] == freed[1]
