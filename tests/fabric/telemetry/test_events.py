"""The ring of events: what it remembers of a block, and what it forgets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.telemetry.explain import EVENTS_MAX, BlockEvent, EventKind
from ostraca_fabric.telemetry.requests import EventRing, labelled


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def keys_of(*numbers: int) -> NDArray[np.uint8]:
    return np.array([list(number.to_bytes(16, "big")) for number in numbers], np.uint8).reshape(-1, 16)


def key_of(number: int) -> bytes:
    return keys_of(number).tobytes()


def ages(ring: EventRing, number: int) -> list[float]:
    return [event.age_s for event in ring.of(key_of(number))]


def test_events_of_a_block_are_told_oldest_first_with_their_label_state_and_reason() -> None:
    clock = Clock()
    ring = EventRing("agent-0", 8, clock)
    with labelled("5eed1234/7"):
        ring.record(
            EventKind.PUT,
            keys_of(1, 2),
            np.array([PutState.COMMITTED, PutState.DECLINED], np.uint8),
            np.array([Reason.NONE, Reason.NO_SPACE], np.uint8),
        )
    clock.now_s += 2
    with labelled("5eed1234/8"):
        ring.record(EventKind.EVICTED, keys_of(1), label="")
        ring.record(EventKind.GOT, keys_of(2, 1), BlockState.MISS, Reason.NOT_FOUND)
    clock.now_s += 1
    assert ring.of(key_of(1)) == (
        BlockEvent("agent-0", 3.0, "5eed1234/7", "PUT", "COMMITTED", ""),
        BlockEvent("agent-0", 1.0, "", "EVICTED", "", ""),
        BlockEvent("agent-0", 1.0, "5eed1234/8", "GOT", "MISS", "NOT_FOUND"),
    )
    assert ring.of(key_of(2))[0].reason == "NO_SPACE"
    assert ring.of(key_of(3)) == ()


def test_states_and_reasons_of_a_newer_release_are_told_as_numbers() -> None:
    ring = EventRing("agent-0", 4, Clock())
    ring.record(EventKind.PUT, keys_of(1), np.array([99], np.uint8), np.array([250], np.uint8))
    assert ring.of(key_of(1)) == (BlockEvent("agent-0", 0.0, "", "PUT", "99", "250"),)


def test_new_events_overwrite_the_oldest_and_the_ring_says_how_far_it_reaches_back() -> None:
    clock = Clock()
    ring = EventRing("agent-0", 4, clock)
    for _ in range(3):
        clock.now_s += 1
        ring.record(EventKind.GOT, keys_of(1, 2), BlockState.HIT)
    assert ages(ring, 1) == ages(ring, 2) == [1.0, 0.0]
    assert ring.reaches_back_s == 1.0


def test_before_the_ring_is_full_it_reaches_back_to_its_beginning() -> None:
    clock = Clock()
    ring = EventRing("agent-0", 4, clock)
    clock.now_s += 5
    ring.record(EventKind.GOT, keys_of(1), BlockState.HIT)
    assert ring.reaches_back_s == 5.0


def test_a_batch_that_wraps_around_is_whole() -> None:
    ring = EventRing("agent-0", 5, Clock())
    ring.record(EventKind.GOT, keys_of(1, 2, 3), BlockState.HIT)
    states = np.array([BlockState.HIT, BlockState.MISS, BlockState.LATE, BlockState.HIT], np.uint8)
    ring.record(EventKind.GOT, keys_of(4, 5, 6, 7), states)
    found = {number: [event.state for event in ring.of(key_of(number))] for number in range(1, 8)}
    assert found == {1: [], 2: [], 3: ["HIT"], 4: ["HIT"], 5: ["MISS"], 6: ["LATE"], 7: ["HIT"]}


def test_of_a_batch_larger_than_the_ring_the_last_blocks_are_remembered() -> None:
    ring = EventRing("agent-0", 3, Clock())
    reasons = np.arange(5, dtype=np.uint8)
    ring.record(EventKind.GOT, keys_of(*range(1, 6)), BlockState.MISS, reasons)
    assert [len(ring.of(key_of(number))) for number in range(1, 6)] == [0, 0, 1, 1, 1]
    assert ring.of(key_of(5))[0].reason == Reason(4).name


def test_an_empty_batch_is_nothing() -> None:
    ring = EventRing("agent-0", 3, Clock())
    ring.record(EventKind.GOT, keys_of(), BlockState.MISS)
    assert ring.of(bytes(16)) == ()


def test_of_a_block_that_every_request_reads_only_the_newest_events_are_told() -> None:
    clock = Clock()
    ring = EventRing("agent-0", 2 * EVENTS_MAX, clock)
    for _ in range(EVENTS_MAX + 10):
        clock.now_s += 1
        ring.record(EventKind.GOT, keys_of(1), BlockState.HIT)
    found = ages(ring, 1)
    assert len(found) == EVENTS_MAX
    assert found[-1] == 0.0


def test_events_that_were_written_together_keep_their_order_and_overwrite_the_oldest() -> None:
    clock = Clock()
    ring = EventRing("agent-0", 50, clock)
    for number in range(60):
        clock.now_s += 1
        ring.record(EventKind.GOT, keys_of(number, 1000 + number), BlockState.HIT, label=f"r/{number}")
    assert ages(ring, 34) == []
    assert [ages(ring, number) for number in range(35, 60)] == [[59.0 - number] for number in range(35, 60)]
    assert [event.label for event in ring.of(key_of(1040))] == ["r/40"]
    assert ring.reaches_back_s == 24.0


def test_later_changes_of_the_columns_of_an_event_change_no_event() -> None:
    ring = EventRing("agent-0", 8, Clock())
    keys, states, reasons = keys_of(1), np.array([BlockState.HIT], np.uint8), np.zeros(1, np.uint8)
    ring.record(EventKind.GOT, keys, states, reasons)
    keys[:], states[:], reasons[:] = 9, BlockState.LATE, Reason.DEADLINE
    (event,) = ring.of(key_of(1))
    assert (event.state, event.reason) == ("HIT", "")
