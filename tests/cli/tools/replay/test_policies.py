"""Caches of the literature: small sequences worked by hand, and common properties."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.tools.replay.small_traces import trace_of, traces

from ostraca_cli.tools.replay.research.belady import Belady
from ostraca_cli.tools.replay.research.policy import Lru, Policy
from ostraca_cli.tools.replay.research.s3_fifo import S3Fifo
from ostraca_cli.tools.replay.research.sieve import Sieve
from ostraca_cli.tools.replay.suite import PolicyStore, replay_hits
from ostraca_cli.tools.replay.trace import Trace

ONLINE: tuple[Callable[[int], Policy], ...] = (Lru, S3Fifo, Sieve)


def hits(policy: Policy, blocks: Sequence[int]) -> list[int]:
    """Request blocks in turn; return the positions of hits."""
    found = []
    for place, block in enumerate(blocks):
        if policy.read(block):
            found.append(place)
        else:
            policy.insert(block)
        policy.end_request()
    return found


def test_lru_evicts_what_was_not_asked_for_the_longest() -> None:
    # 1 is read before 4 comes, so 2 goes, and is a miss.
    assert hits(Lru(3), [1, 2, 3, 1, 4, 1, 2, 3]) == [3, 5]


def test_sieve_keeps_what_was_read_at_its_place_and_the_hand_goes_on() -> None:
    # 4 evicts 2: 1 was read, and the hand stands at 3. 5 evicts 3. 1 stayed, its bit was cleared; 6 evicts 4,
    # where the hand stands, not 1, which is older.
    assert hits(Sieve(3), [1, 2, 3, 1, 4, 5, 1, 6, 1, 5]) == [3, 6, 8, 9]


def test_sieve_walks_round_when_everything_was_read() -> None:
    assert hits(Sieve(2), [1, 2, 1, 2, 3, 2, 1]) == [2, 3, 5]


def test_s3_fifo_lets_what_was_not_read_twice_go_first_and_knows_it_when_it_comes_again() -> None:
    # Room for 10, 1 of it small. 0 to 9 fill the cache, all in small. 10 evicts 0, whose ghost stays. 0 comes
    # again: 1 goes, 0 enters main, where a scan of new blocks does not touch it.
    assert hits(S3Fifo(10), [*range(10), 10, 0, *range(100, 120), 0]) == [32]


def test_s3_fifo_moves_what_was_read_twice_to_main_when_its_time_in_small_is_over() -> None:
    assert hits(S3Fifo(4), [1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1]) == [1, 2, 11]
    assert hits(S3Fifo(4), [1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1]) == [1]


def test_belady_keeps_what_is_asked_for_soonest_and_does_not_write_what_is_never_asked_for() -> None:
    trace = trace_of([1], [2], [3], [1], [2], [3], [1])
    store = PolicyStore(Belady(2, trace), block_bytes=10)
    # 3 comes after 1 and 2, and is not kept; nor the second time, when it is never asked for again.
    counted = replay_hits(trace, store)
    assert counted.hits == 3
    assert (store.written.blocks, store.written.block_bytes) == (2, 20)


def test_a_request_is_looked_up_whole_before_any_of_it_is_put() -> None:
    trace = trace_of([1, 2], [3, 1, 2])
    store = PolicyStore(Lru(2), block_bytes=1)
    counted = replay_hits(trace, store)
    assert (counted.hits, counted.prefix_hits) == (2, 0)  # block 3 is a hole at the beginning
    assert store.written.blocks == 3


@given(traces(), st.integers(1, 20))
def test_no_policy_ever_holds_more_than_its_capacity(trace: Trace, capacity: int) -> None:
    for policy in (*(make(capacity) for make in ONLINE), Belady(capacity, trace)):
        store = PolicyStore(policy, block_bytes=1)
        for request, now_s in enumerate(trace.times_s.tolist()):
            store.request(now_s, trace.chain(request))
            assert len(policy) <= capacity


@given(traces(), st.integers(1, 20))
def test_no_policy_hits_more_than_belady(trace: Trace, capacity: int) -> None:
    best = replay_hits(trace, PolicyStore(Belady(capacity, trace), 1)).hits
    assert all(replay_hits(trace, PolicyStore(make(capacity), 1)).hits <= best for make in ONLINE)


@given(traces())
def test_with_room_for_everything_all_find_what_was_asked_for_before(trace: Trace) -> None:
    seen: set[int] = set()
    expected = 0
    for request in range(len(trace)):
        chain = trace.chain(request).tolist()
        expected += sum(block in seen for block in chain)
        seen.update(chain)
    # S3-FIFO's small queue is a part of the whole: it evicts only when all is full, as the others.
    for policy in (*(make(31) for make in ONLINE), Belady(31, trace)):
        store = PolicyStore(policy, 1)
        assert replay_hits(trace, store).hits == expected


@pytest.mark.parametrize(
    ("make", "expected"), [(Lru, 0.278), (S3Fifo, 0.244), (Sieve, 0.195)], ids=["lru", "s3-fifo", "sieve"]
)
def test_the_public_trace_gives_what_was_measured_before(
    make: Callable[[int], Policy], expected: float, public_trace: Trace
) -> None:
    store = PolicyStore(make(public_trace.unique_blocks // 10), 1)
    found = replay_hits(public_trace, store)
    assert found.prefix_hits / len(public_trace.blocks) == pytest.approx(expected, abs=0.001)
