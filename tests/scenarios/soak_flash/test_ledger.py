"""What the ledger of a soak of flash calls lost, and what it does not."""

from __future__ import annotations

from tests.scenarios.soak_flash.ledger import Ledger, Place, Seen, ShardSeen

SHARD = "shard"
SEGMENTS = 9
EPOCH = 1 << 32


def seen(listed: dict[int, int], *, segments: dict[int, int] | None = None) -> Seen:
    """Return a view of flash: blocks in numbered segments; *segments* are counts, oldest first."""
    counts = segments or {number: number + 1 for number in range(SEGMENTS)}
    generations = {number: EPOCH + count for number, count in counts.items()}
    places = {block: Place(SHARD, segment, generations[segment]) for block, segment in listed.items()}
    return Seen({SHARD: ShardSeen(SEGMENTS, generations)}, places)


def ledger_of(blocks: dict[int, int]) -> Ledger:
    """Return a ledger with these blocks committed and seen on flash."""
    ledger = Ledger()
    ledger.trying(blocks)
    for block in blocks:
        ledger.committed(block)
    ledger.see(seen(blocks))
    assert ledger.violations == []
    return ledger


def lost(ledger: Ledger) -> bool:
    return any(words.startswith("LOST") for words in ledger.violations)


def test_a_block_that_stays_is_not_lost() -> None:
    ledger = ledger_of({1: 0, 2: 8})
    ledger.see(seen({1: 0, 2: 8}))
    assert ledger.violations == []


def test_a_block_whose_segment_was_used_again_was_evicted() -> None:
    ledger = ledger_of({1: 0, 2: 8})
    ledger.see(seen({2: 8}, segments={0: 10, **{number: number + 1 for number in range(1, SEGMENTS)}}))
    assert ledger.violations == []
    assert ledger.counts["evicted"] == 1


def test_a_block_that_leaves_its_segment_without_the_segment_is_lost() -> None:
    ledger = ledger_of({1: 0, 2: 8})
    ledger.see(seen({1: 0}))
    assert lost(ledger)


def test_a_segment_that_goes_back_to_an_older_generation_lost_its_blocks() -> None:
    ledger = ledger_of({2: 8})
    ledger.see(seen({}, segments={8: 3}))
    assert lost(ledger)


def test_what_was_acknowledged_must_be_in_a_segment_begun_since() -> None:
    for listed, is_lost in (({7: 0}, False), ({7: 8}, True), ({}, True)):
        ledger = ledger_of({1: 1})
        ledger.trying([7])
        ledger.committed(7)
        counts = {0: 10, **{number: number + 1 for number in range(1, SEGMENTS)}}
        ledger.see(seen({1: 1, **listed}, segments=counts))
        assert lost(ledger) == is_lost


def test_what_exists_is_as_good_as_committed() -> None:
    ledger = ledger_of({1: 1})
    ledger.trying([7])
    ledger.existed(7)
    ledger.see(seen({1: 1}))
    assert lost(ledger)


def test_what_is_found_may_only_be_staged_unless_it_was_committed() -> None:
    for is_committed in (False, True):
        ledger = ledger_of({1: 1})
        ledger.trying([7])
        if is_committed:
            ledger.committed(7)
        ledger.found(7)
        ledger.see(seen({1: 1}))
        assert lost(ledger) == is_committed
    ledger.found(8)
    assert ledger.violations[-1] == "block 8 was never put, and was found"


def test_where_the_ring_went_round_since_nobody_can_tell_and_it_is_counted() -> None:
    ledger = ledger_of({})
    ledger.trying([7])
    ledger.committed(7)
    ledger.see(seen({}, segments={number: number + 12 for number in range(SEGMENTS)}))
    assert ledger.violations == []
    assert ledger.counts["acknowledged, and the ring went round"] == 1


def test_what_nobody_put_must_not_be_found() -> None:
    ledger = Ledger(is_strict=False)
    ledger.existed(7)
    assert ledger.violations == ["block 7 was never put, and was found"]


def test_a_fabric_that_has_started_may_miss_the_oldest_segments_alone() -> None:
    for segment, is_lost in ((0, False), (3, False), (4, True), (8, True)):
        ledger = ledger_of({1: segment})
        ledger.missed_after_start(1, "NOT_FOUND")
        assert lost(ledger) == is_lost, segment


def test_a_ring_that_never_was_full_has_evicted_nothing() -> None:
    ledger = Ledger()
    ledger.trying([1])
    ledger.committed(1)
    ledger.see(seen({1: 0}, segments={0: 1, 1: 2}))
    ledger.missed_after_start(1, "NOT_FOUND")
    assert lost(ledger)


def test_segments_never_written_are_of_no_use_while_they_are_withheld() -> None:
    for withheld, is_lost in ((frozenset[int](), True), (frozenset({2, 3, 4, 5, 6, 7, 8}), False)):
        ledger = Ledger()
        ledger.trying([1])
        ledger.committed(1)
        ledger.see(seen({1: 0}, segments={0: 1, 1: 2}))
        ledger.withhold({SHARD: withheld})
        ledger.missed_after_start(1, "NOT_FOUND")
        assert lost(ledger) == is_lost, withheld


def test_a_miss_of_a_block_that_flash_lists_in_a_young_segment_is_a_loss() -> None:
    ledger = ledger_of({1: 8})
    ledger.missed(1, "NOT_FOUND", before=ledger.sure([1]))
    ledger.see(seen({1: 8}))
    assert lost(ledger)


def test_a_miss_while_a_put_was_under_way_says_nothing() -> None:
    ledger = ledger_of({1: 8})
    before = ledger.sure([1])
    ledger.trying([1])
    ledger.missed(1, "NOT_FOUND", before=before)
    ledger.see(seen({1: 8}))
    assert ledger.violations == []


def test_a_miss_of_a_block_whose_shard_was_handed_over_says_something_when_all_is_calm() -> None:
    for is_calm, shards, is_lost in (
        (False, frozenset({SHARD}), False),
        (True, frozenset({SHARD}), True),
        (False, frozenset[str](), True),
    ):
        ledger = ledger_of({1: 8})
        ledger.is_calm = is_calm
        ledger.missed(1, "NOT_FOUND", before=ledger.sure([1]))
        ledger.see(seen({1: 8}), handed_over=shards)
        assert lost(ledger) == is_lost, (is_calm, shards)


def test_an_owner_may_list_what_is_written_over_only_around_a_hand_over() -> None:
    for is_calm, shards, is_lost in (
        (False, frozenset({SHARD}), False),
        (False, frozenset({"another"}), True),
        (False, frozenset[str](), True),
        (True, frozenset({SHARD}), True),
    ):
        ledger = ledger_of({1: 8})
        ledger.is_calm = is_calm
        ledger.dropped(1)
        ledger.see(seen({1: 8}), handed_over=shards)
        assert lost(ledger) == is_lost, (is_calm, shards)


def test_nor_is_that_an_excuse_for_a_block_that_nobody_has_after_it() -> None:
    ledger = ledger_of({1: 8})
    ledger.is_calm = False
    ledger.dropped(1)
    ledger.see(seen({}), handed_over=frozenset({SHARD}))
    assert lost(ledger)


def test_what_was_damaged_by_somebody_may_be_found_to_be_so() -> None:
    ledger = ledger_of({1: 8})
    ledger.see_damaged(seen({1: 8}).places, by_us=True)
    ledger.dropped(1)
    ledger.is_strict = True
    ledger.see(seen({}, segments={8: 10}))
    assert not lost(ledger)


def test_a_block_that_is_there_must_not_be_committed_again() -> None:
    for segment, is_calm, shards, is_wrong in (
        (8, True, frozenset({SHARD}), True),
        (8, False, frozenset[str](), True),
        (8, False, frozenset({SHARD}), False),  # two owners may each have taken one
        (1, True, frozenset[str](), False),  # it may have been evicted
    ):
        ledger = ledger_of({1: segment})
        ledger.is_calm = is_calm
        ledger.trying([1])
        ledger.committed(1)
        segments = {**{number: number + 1 for number in range(1, SEGMENTS)}, 0: 10}
        ledger.see(seen({1: 0}, segments=segments), handed_over=shards)
        assert ledger.violations[:1] == [words for words in ledger.violations if "WRITTEN TWICE" in words]
        assert bool(ledger.violations) == is_wrong, (segment, is_calm, shards)


def test_nothing_is_asked_of_a_block_that_was_damaged_until_it_is_put_again() -> None:
    ledger = ledger_of({1: 8})
    ledger.damaged.add(1)
    ledger.see(Seen(seen({}).shards, {}))
    ledger.violations.clear()
    ledger.existed(1)
    ledger.see(seen({1: 8}))
    assert ledger.violations == []
    ledger.trying([1])
    ledger.committed(1)
    ledger.see(seen({}))
    assert lost(ledger)


def test_a_block_is_damaged_without_a_cause_unless_it_was_damaged_where_it_is_listed() -> None:
    ledger = ledger_of({1: 8, 2: 8})
    damaged = seen({1: 8}).places
    assert ledger.see_damaged(damaged, by_us=False) == {1}
    assert ledger.see_damaged(damaged, by_us=True) == set()
    assert ledger.damaged == {1}
    ledger.trying([1])
    ledger.committed(1)
    assert ledger.see_damaged(seen({1: 7}).places, by_us=False) == {1}, "its newer bytes"
    assert ledger.see_damaged({}, by_us=False) == ledger.damaged == set()
    assert ledger.see_damaged(damaged, by_us=False) == set(), "those of before, as the newer ones are gone"
    assert ledger.damaged == {1}
    assert ledger.see_damaged(seen({1: 8, 2: 8}).places, by_us=False) == {2}


def test_nor_is_it_where_a_newer_place_made_up_for_it_when_flash_was_damaged() -> None:
    ledger = ledger_of({1: 8})
    older, other = seen({1: 7}).places, seen({1: 6}).places
    assert ledger.see_damaged({}, older.items(), by_us=True) == set()
    assert ledger.damaged == set()
    assert ledger.see_damaged({}, other.items(), by_us=False) == set()
    assert ledger.see_damaged(older, by_us=False) == set()
    assert ledger.damaged == {1}
    ledger.damaged.clear()
    assert ledger.see_damaged(other, by_us=False) == {1}, "nobody had damaged flash"


def test_without_a_promise_nothing_is_lost() -> None:
    ledger = Ledger(is_strict=False)
    ledger.trying([1])
    ledger.committed(1)
    ledger.see(seen({}))
    ledger.see(seen({}))
    assert ledger.violations == []
