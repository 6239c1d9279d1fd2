"""Decisions of the vLLM tier: placement and states of chunks."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from ostraca.connectors.kv_identity.chains import Run
from ostraca.connectors.transfers.failed_loads import FailedLoads
from ostraca.connectors.vllm.core.lookup_table import ChunkState, LookupTable
from ostraca.connectors.vllm.core.prefix import Prefix, engine_hash
from ostraca_fabric.model.chain import STRIPE_UNIT_BLOCKS, Chain

TOKENS = {0: 16, 1: 32}


def key(number: int, group: int = 0) -> bytes:
    return hashlib.sha256(f"{group} {number}".encode()).digest() + group.to_bytes(4, "big")


def positions(chunks: int, *groups: int) -> dict[bytes, int]:
    """Return the engine's record of a prompt: each group's chunks and their ends."""
    return {
        key(number, group): (number + 1) * TOKENS[group]
        for group in groups or (0,)
        for number in range(chunks)
    }


def placement(runs: list[Run]) -> dict[bytes, bytes]:
    """Return the placement hash of each key."""
    found: dict[bytes, bytes] = {}
    for run in runs:
        span = run.chain.span()
        units = [
            span.units[n * span.hash_bytes : (n + 1) * span.hash_bytes]
            for n, blocks in enumerate(span.unit_blocks)
            for _ in range(blocks)
        ]
        assert span.hashes == b"".join(map(engine_hash, run.keys))
        found.update(zip(run.keys, units, strict=True))
    return found


def test_a_chunk_is_placed_by_its_stripe_units_first_chunk_even_if_that_is_never_asked_for() -> None:
    prefix = Prefix(TOKENS, positions(100))
    runs, strays = prefix.runs([key(40), key(41), key(70)])
    assert strays == []
    assert placement(runs) == {
        key(40): engine_hash(key(32)),
        key(41): engine_hash(key(32)),
        key(70): engine_hash(key(64)),
    }


@given(st.sets(st.integers(0, 150), min_size=1), st.randoms(use_true_random=False))
def test_however_keys_are_asked_for_they_are_placed_as_the_whole_chain_places_them(
    asked: set[int], shuffle: object
) -> None:
    listed = [key(number) for number in asked]
    shuffle.shuffle(listed)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    runs, strays = Prefix(TOKENS, positions(151)).runs(listed)
    whole = Chain.of([engine_hash(key(number)) for number in range(151)], hash_bytes=32)
    by_whole = placement([Run(whole, tuple(key(number) for number in range(151)))])
    assert strays == []
    assert placement(runs) == {each: by_whole[each] for each in listed}


def test_groups_are_chains_of_their_own() -> None:
    runs, strays = Prefix(TOKENS, positions(3, 0, 1)).runs([key(1, 1), key(0, 0), key(0, 1)])
    assert strays == []
    assert [(run.chain.group, run.keys) for run in runs] == [(0, (key(0, 0),)), (1, (key(0, 1), key(1, 1)))]


def test_a_key_whose_position_is_not_known_is_not_placed() -> None:
    runs, strays = Prefix(TOKENS, positions(2)).runs([key(0), key(7)])
    assert [run.keys for run in runs] == [(key(0),)]
    assert strays == [key(7)]


def test_a_record_that_grows_is_taken_in() -> None:
    record = positions(2)
    prefix = Prefix(TOKENS, record)
    prefix.runs([key(0)])
    record.update(positions(40))
    runs, strays = prefix.runs([key(39)])
    assert strays == []
    assert placement(runs) == {key(39): engine_hash(key(32))}


def test_a_partly_filled_chunk_is_placed_with_its_stripe_unit_and_ends_its_run() -> None:
    record = positions(34)
    tail = b"t" * 32 + bytes(4)
    record[tail] = 33 * 16 + 5
    runs, strays = Prefix(TOKENS, record).runs([key(32), key(33), tail])
    assert strays == []
    assert placement(runs) == {
        key(32): engine_hash(key(32)),
        key(33): engine_hash(key(32)),
        tail: engine_hash(key(32)),
    }


def test_without_positions_each_chunk_is_placed_by_its_own_hash() -> None:
    listed = [key(5), key(3, 1), key(4)]
    runs, strays = Prefix(TOKENS, None).runs(listed)
    assert strays == []
    assert placement(runs) == {each: engine_hash(each) for each in listed}


def table(*, entries_max: int = 100) -> LookupTable:
    return LookupTable(FailedLoads(entries_max=100, hold_s=10.0), entries_max=entries_max)


def ask(lookups: LookupTable, number: int, request: str = "r", now_s: float = 0.0) -> ChunkState:
    return lookups.state_of(request, key(number), now_s=now_s, until_s=now_s + 1.0)


def test_a_chunk_is_asked_for_once_and_then_known() -> None:
    lookups = table()
    assert [ask(lookups, 0), ask(lookups, 0), ask(lookups, 1)] == [ChunkState.PENDING] * 3
    assert lookups.take_pending(10) == [("r", [key(0), key(1)])]
    lookups.record_answers([(key(0), True), (key(1), False)])
    assert [ask(lookups, 0), ask(lookups, 1)] == [ChunkState.PRESENT, ChunkState.MISSING]
    assert lookups.take_pending(10) == []


def test_two_requests_share_a_question() -> None:
    lookups = table()
    ask(lookups, 0, "a")
    ask(lookups, 0, "b")
    assert lookups.take_pending(10) == [("a", [key(0)])]
    lookups.record_answers([(key(0), True)])
    assert ask(lookups, 0, "a") is ask(lookups, 0, "b") is ChunkState.PRESENT


def test_a_question_outlives_the_request_that_asked_first() -> None:
    lookups = table()
    ask(lookups, 0, "a")
    ask(lookups, 0, "b")
    lookups.forget("a")
    assert lookups.take_pending(10) == [("b", [key(0)])]
    lookups.record_answers([(key(0), True)])
    assert ask(lookups, 0, "b") is ChunkState.PRESENT


def test_questions_beyond_the_limit_wait_for_the_next_step() -> None:
    lookups = table()
    for number in range(5):
        ask(lookups, number)
    assert lookups.take_pending(3) == [("r", [key(0), key(1), key(2)])]
    assert lookups.take_pending(3) == [("r", [key(3), key(4)])]


def test_an_answer_that_never_comes_is_a_miss() -> None:
    lookups = table()
    assert ask(lookups, 0, now_s=0.0) is ChunkState.PENDING
    assert ask(lookups, 0, now_s=0.9) is ChunkState.PENDING
    assert ask(lookups, 0, now_s=1.0) is ChunkState.MISSING


def test_a_chunk_whose_load_failed_is_a_miss_for_its_request_as_long_as_that_lives() -> None:
    lookups = table()
    ask(lookups, 0)
    lookups.record_answers([(key(0), True)])
    lookups.record_failed_loads("r", [key(0)])
    assert ask(lookups, 0, now_s=1e6) is ChunkState.MISSING
    assert ask(lookups, 0, "another") is ChunkState.PENDING


def test_a_chunk_with_a_failed_load_is_a_miss_for_everybody_for_a_while() -> None:
    failed = FailedLoads(entries_max=100, hold_s=10.0)
    lookups = LookupTable(failed, entries_max=100)
    failed.add([key(0)], 0.0)
    assert ask(lookups, 0, "a", now_s=9.9) is ChunkState.MISSING
    assert ask(lookups, 0, "b", now_s=10.0) is ChunkState.PENDING


def test_the_table_is_bounded() -> None:
    lookups = table(entries_max=2)
    assert [ask(lookups, n) for n in range(3)] == [
        ChunkState.PENDING,
        ChunkState.PENDING,
        ChunkState.TABLE_FULL,
    ]
    lookups.forget("r")
    assert len(lookups) == 0


def test_a_stripe_unit_is_what_the_fabric_takes_for_one() -> None:
    runs, _ = Prefix(TOKENS, positions(STRIPE_UNIT_BLOCKS + 1)).runs(
        [key(n) for n in range(STRIPE_UNIT_BLOCKS + 1)]
    )
    assert [run.chain.span().unit_blocks for run in runs] == [(STRIPE_UNIT_BLOCKS, 1)]
