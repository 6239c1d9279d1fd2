"""Gets with blocks that the worker reads from drives, or from memory, itself, by transcript."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.sdk.protocol.test_operations import (
    DAMAGED,
    GOOD,
    HIT,
    LATE,
    MISS,
    PENDING,
    UNTIL_S,
    finished,
    get,
    tags,
    u32,
)

from ostraca._protocol.operations import (
    Disconnected,
    ExtentsEnded,
    Finish,
    GetOperation,
    Progress,
    ReadExtents,
    Send,
    Ticked,
    Verified,
    Verify,
)
from ostraca_fabric.errors import MalformedError
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import Cancel, ExtentsRead, GetDone, GetExtents, GetProgress

READ, FAILED, LOST = Progress.READING, Progress.FAILED, Progress.LOST


def extents(*positions: int) -> GetExtents:
    count = len(positions)
    return GetExtents(7, u32(*positions), u32(*[0] * count), bytes(8 * count), tags(*positions))


def reading(*positions: int) -> GetOperation:
    operation = GetOperation(get(), until_s=UNTIL_S)
    operation.start(0.0)
    assert operation.on(extents(*positions), 0.1) == [ReadExtents(extents(*positions))]
    return operation


DONE = GetDone(7, bytes([HIT] * 3), bytes(3))
"""The agent's answer to a get of which it leaves the rest to the worker."""


def again(*positions: int) -> Finish:
    """Return the end of a get whose other blocks are hits, and whose blocks at *positions* failed."""
    states = [LATE if position in positions else HIT for position in range(3)]
    reasons = [Reason.DEADLINE if position in positions else 0 for position in range(3)]
    return replace(finished(states, reasons), again=u32(*positions))


@pytest.mark.parametrize("is_early", [True, False])
def test_blocks_read_here_are_verified_by_the_agents_tags_and_reported_once(*, is_early: bool) -> None:
    operation = reading(2, 0, 1)
    if is_early:
        assert operation.on(DONE, 0.1) == [], "the end of the reads is waited for"
    assert operation.on(ExtentsEnded(u32(2, 0), READ), 0.2) == [Verify(u32(2, 0), tags(2, 0))]
    assert operation.on(Verified(u32(2, 0), GOOD + GOOD), 0.2) == []
    assert operation.on(ExtentsEnded(u32(1), READ), 0.3) == [Verify(u32(1), tags(1))]
    report, end = Send(ExtentsRead(7, u32(0, 1, 2), b"")), finished([HIT] * 3, [0] * 3)
    if is_early:
        assert operation.on(Verified(u32(1), GOOD), 0.3) == [report, end]
    else:
        assert operation.on(Verified(u32(1), GOOD), 0.3) == [report]
        assert operation.on(DONE, 0.4) == [end]


def test_failed_and_damaged_reads_are_to_be_requested_again() -> None:
    operation = reading(0, 1, 2)
    operation.on(DONE, 0.1)
    assert operation.on(ExtentsEnded(u32(1), FAILED), 0.2) == []
    operation.on(ExtentsEnded(u32(0, 2), READ), 0.2)
    report = Send(ExtentsRead(7, u32(0), u32(1, 2)))
    assert operation.on(Verified(u32(0, 2), GOOD + DAMAGED), 0.2) == [report, again(1, 2)]


def test_reads_that_all_fail_end_a_get_that_the_agent_has_answered() -> None:
    operation = reading(0, 2)
    operation.on(GetProgress(7, u32(1), tags(1)), 0.1)
    operation.on(Verified(u32(1), GOOD), 0.1)
    operation.on(DONE, 0.1)
    report = Send(ExtentsRead(7, b"", u32(0, 2)))
    assert operation.on(ExtentsEnded(u32(0, 2), FAILED), 0.2) == [report, again(0, 2)]


def test_an_answer_with_the_last_landed_blocks_ends_no_reads() -> None:
    operation = reading(0, 1)
    last = GetDone(7, bytes([HIT] * 3), bytes(3), positions=u32(2), tags=tags(2))
    assert operation.on(last, 0.1) == [Verify(u32(2), tags(2))]
    assert operation.on(Verified(u32(2), GOOD), 0.1) == []
    operation.on(ExtentsEnded(u32(0, 1), READ), 0.2)
    report = Send(ExtentsRead(7, u32(0, 1), b""))
    assert operation.on(Verified(u32(0, 1), GOOD + GOOD), 0.2) == [report, finished([HIT] * 3, [0] * 3)]


def test_the_agent_may_not_deliver_what_is_read_here() -> None:
    operation = reading(0, 1)
    assert operation.on(GetProgress(7, u32(0, 2), tags(9, 2)), 0.2) == [Verify(u32(2), tags(2))]
    operation.on(Verified(u32(2), GOOD), 0.2)
    operation.on(ExtentsEnded(u32(0), READ), 0.3)
    operation.on(ExtentsEnded(u32(1), FAILED), 0.3)
    operation.on(Verified(u32(0), GOOD), 0.3)
    assert operation.on(GetProgress(7, u32(0, 1), tags(9, 9)), 0.4) == []


def test_a_lost_read_is_reported_as_neither_and_is_a_miss() -> None:
    operation = reading(0, 1)
    operation.on(GetDone(7, bytes([HIT, HIT, MISS]), bytes([0, 0, Reason.NOT_FOUND])), 0.1)
    operation.on(ExtentsEnded(u32(0), READ), 0.2)
    operation.on(Verified(u32(0), GOOD), 0.2)
    end = finished([HIT, MISS, MISS], [0, Reason.DRIVE_SUSPECT, Reason.NOT_FOUND])
    assert operation.on(ExtentsEnded(u32(1), LOST), 2.0) == [Send(ExtentsRead(7, u32(0), b"")), end]


def test_a_lost_block_is_not_taken_from_the_agent_either() -> None:
    operation = reading(0)
    operation.on(ExtentsEnded(u32(0), LOST), 2.0)
    assert operation.on(GetProgress(7, u32(0), tags(0)), 2.1) == []


def test_the_deadline_ends_a_get_whose_reads_are_under_way() -> None:
    operation = reading(0, 1, 2)
    operation.on(ExtentsEnded(u32(0), READ), 0.2)
    operation.on(Verified(u32(0), GOOD), 0.2)
    late = finished([HIT, LATE, LATE], [0, Reason.DEADLINE, Reason.DEADLINE])
    assert operation.on(Ticked(), UNTIL_S) == [Send(Cancel(7)), late]


@pytest.mark.parametrize("is_early", [True, False])
def test_the_loss_of_the_agent_ends_a_get_whose_reads_are_under_way(*, is_early: bool) -> None:
    operation = reading(0, 1, 2)
    if is_early:
        operation.on(DONE, 0.1)
    operation.on(ExtentsEnded(u32(0), READ), 0.2)
    operation.on(Verified(u32(0), GOOD), 0.2)
    lost = [0, Reason.DISCONNECTED, Reason.DISCONNECTED]
    assert operation.on(Disconnected(), 0.3) == [finished([HIT, MISS, MISS], lost)]


def test_the_agents_deadline_does_not_end_reads() -> None:
    operation = reading(0, 1)
    late = GetDone(7, bytes([HIT, HIT, LATE]), bytes([0, 0, Reason.DEADLINE]))
    assert operation.on(late, 0.4) == []
    operation.on(ExtentsEnded(u32(0, 1), READ), 0.5)
    end = finished([HIT, HIT, LATE], [0, 0, Reason.DEADLINE])
    assert operation.on(Verified(u32(0, 1), GOOD + GOOD), 0.5)[1:] == [end]


def test_blocks_nobody_verified_in_time_are_to_be_requested_again() -> None:
    operation = reading(0)
    operation.on(ExtentsEnded(u32(0), READ), 0.2)
    assert operation.on(Verified(u32(0), PENDING), UNTIL_S) == [Send(ExtentsRead(7, b"", u32(0)))]


def test_nothing_is_read_after_the_deadline() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    assert operation.on(extents(0), UNTIL_S) == []


@pytest.mark.parametrize(
    "bad",
    [
        extents(3),
        extents(),
        extents(0, 0),
        GetExtents(7, u32(0), u32(0), bytes(8), tags(0, 1)),
        GetExtents(7, u32(0), u32(), bytes(8), tags(0)),
        GetExtents(7, u32(0), u32(0), bytes(9), tags(0)),
    ],
)
def test_senseless_extents_are_refused(bad: GetExtents) -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    operation.start(0.0)
    with pytest.raises(MalformedError):
        operation.on(bad, 0.1)


def test_extents_of_blocks_requested_again_are_refused() -> None:
    operation = GetOperation(msgspec.structs.replace(get(), is_again=True), until_s=UNTIL_S)
    with pytest.raises(MalformedError, match="second"):
        operation.on(extents(0), 0.1)


def test_extents_of_landed_blocks_and_a_second_offer_are_refused() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    operation.on(GetProgress(7, u32(0), tags(0)), 0.1)
    with pytest.raises(MalformedError, match="named before"):
        operation.on(extents(0, 1), 0.2)
    with pytest.raises(MalformedError, match="second"):
        reading(0).on(extents(1), 0.2)


def places(*positions: int) -> bytes:
    return np.array([1000 + position for position in positions], codec.U64).tobytes()


def told(*positions: int) -> GetProgress:
    return GetProgress(7, u32(*positions), tags(*positions), places(*positions))


def test_blocks_in_memory_are_copied_at_the_answer_and_end_the_get() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    last = told(1, 0, 2)
    done = GetDone(7, bytes([HIT] * 3), bytes(3), b"", last.positions, last.tags, last.places)
    assert operation.on(done, 0.1) == [Verify(u32(1, 0, 2), tags(1, 0, 2), places(1, 0, 2))]
    assert operation.on(Verified(u32(1, 0, 2), GOOD * 3), 0.1) == [finished([HIT] * 3, [0] * 3)]


@pytest.mark.parametrize("bad", [DAMAGED, PENDING])
def test_copies_that_are_not_good_are_to_be_requested_again(bad: bytes) -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    assert operation.on(told(0, 2), 0.1) == [Verify(u32(0, 2), tags(0, 2), places(0, 2))]
    assert operation.on(Verified(u32(0, 2), GOOD + bad), 0.1) == []
    operation.on(GetProgress(7, u32(1), tags(1)), 0.2)
    assert operation.on(Verified(u32(1), GOOD), 0.2) == []
    assert operation.on(DONE, 0.3) == [again(2)]


def test_a_damaged_block_of_the_agent_is_a_miss_beside_copies() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    operation.on(told(0), 0.1)
    operation.on(Verified(u32(0), DAMAGED), 0.1)
    operation.on(GetProgress(7, u32(1, 2), tags(1, 2)), 0.2)
    operation.on(Verified(u32(1, 2), DAMAGED + GOOD), 0.2)
    states, reasons = [LATE, MISS, HIT], [Reason.DEADLINE, Reason.DAMAGED, 0]
    assert operation.on(DONE, 0.3) == [replace(finished(states, reasons), again=u32(0))]


def test_blocks_of_memory_and_of_drives_are_requested_again_together() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    operation.on(told(2), 0.1)
    operation.on(extents(0, 1), 0.1)
    operation.on(Verified(u32(2), DAMAGED), 0.1)
    operation.on(ExtentsEnded(u32(0), READ), 0.2)
    operation.on(Verified(u32(0), GOOD), 0.2)
    assert operation.on(DONE, 0.2) == []
    report = Send(ExtentsRead(7, u32(0), u32(1)))
    assert operation.on(ExtentsEnded(u32(1), FAILED), 0.3) == [report, again(1, 2)]


def test_nothing_is_copied_after_the_deadline_or_twice() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    operation.on(told(0), 0.1)
    assert operation.on(told(0), 0.1) == []
    assert operation.on(told(1), UNTIL_S) == []


@pytest.mark.parametrize(
    "bad",
    [
        GetProgress(7, u32(0), tags(0), places(0, 1)),
        GetProgress(7, u32(0), tags(0), places(0)[:4]),
        GetProgress(7, b"", b"", places(0)),
        GetProgress(7, u32(3), tags(0), places(0)),
    ],
)
def test_senseless_places_are_refused(bad: GetProgress) -> None:
    with pytest.raises(MalformedError):
        GetOperation(get(), until_s=UNTIL_S).on(bad, 0.1)


def test_places_of_blocks_requested_again_are_refused() -> None:
    operation = GetOperation(msgspec.structs.replace(get(), is_again=True), until_s=UNTIL_S)
    with pytest.raises(MalformedError, match="must deliver"):
        operation.on(told(0), 0.1)
