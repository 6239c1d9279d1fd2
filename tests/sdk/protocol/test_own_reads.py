"""Gets with blocks that the worker reads from drives itself, by transcript."""

from __future__ import annotations

import pytest
from tests.sdk.protocol.test_operations import (
    DAMAGED,
    GOOD,
    HIT,
    LATE,
    MISS,
    UNSEEN,
    UNTIL_S,
    finished,
    get,
    tags,
    u32,
)

from ostraca._protocol.operations import (
    ExtentsEnded,
    GetOperation,
    ReadExtents,
    Send,
    Ticked,
    Verified,
    Verify,
)
from ostraca._protocol.own_reads import OwnRead
from ostraca_fabric.errors import MalformedError
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.wire.messages import Cancel, ExtentsRead, GetDone, GetExtents, GetProgress

READ, FAILED, LOST = OwnRead.READING, OwnRead.FAILED, OwnRead.LOST


def extents(*positions: int) -> GetExtents:
    count = len(positions)
    return GetExtents(7, u32(*positions), u32(*[0] * count), bytes(8 * count), tags(*positions))


def reading(*positions: int) -> GetOperation:
    operation = GetOperation(get(), until_s=UNTIL_S)
    operation.start(0.0)
    assert operation.on(extents(*positions), 0.1) == [ReadExtents(extents(*positions))]
    return operation


def test_blocks_read_here_are_verified_by_the_agents_tags_and_reported_once() -> None:
    operation = reading(2, 0, 1)
    assert operation.on(ExtentsEnded(u32(2, 0), READ), 0.2) == [Verify(u32(2, 0), tags(2, 0))]
    assert operation.on(Verified(u32(2, 0), GOOD + GOOD), 0.2) == []
    assert operation.on(ExtentsEnded(u32(1), READ), 0.3) == [Verify(u32(1), tags(1))]
    assert operation.on(Verified(u32(1), GOOD), 0.3) == [Send(ExtentsRead(7, u32(0, 1, 2), b""))]
    assert operation.on(GetDone(7, bytes([HIT] * 3), bytes(3)), 0.4) == [finished([HIT] * 3, [0] * 3)]


def test_failed_and_damaged_reads_are_left_to_the_agent_which_delivers_them() -> None:
    operation = reading(0, 1, 2)
    assert operation.on(ExtentsEnded(u32(1), FAILED), 0.2) == []
    operation.on(ExtentsEnded(u32(0, 2), READ), 0.2)
    report = Send(ExtentsRead(7, u32(0), u32(1, 2)))
    assert operation.on(Verified(u32(0, 2), GOOD + DAMAGED), 0.2) == [report]
    landed = GetProgress(7, u32(1, 2), tags(1, 2))
    assert operation.on(landed, 0.3) == [Verify(u32(1, 2), tags(1, 2))]
    assert operation.on(Verified(u32(1, 2), GOOD + GOOD), 0.3) == []
    assert operation.on(GetDone(7, bytes([HIT] * 3), bytes(3)), 0.4) == [finished([HIT] * 3, [0] * 3)]


def test_the_agent_may_not_deliver_what_is_read_here() -> None:
    operation = reading(0, 1)
    assert operation.on(GetProgress(7, u32(0, 2), tags(9, 2)), 0.2) == [Verify(u32(2), tags(2))]
    operation.on(Verified(u32(2), GOOD), 0.2)
    operation.on(ExtentsEnded(u32(0, 1), READ), 0.3)
    operation.on(Verified(u32(0, 1), GOOD + GOOD), 0.3)
    assert operation.on(GetProgress(7, u32(0), tags(9)), 0.4) == []


def test_a_lost_read_is_reported_as_neither_and_ends_as_the_agent_says() -> None:
    operation = reading(0, 1)
    operation.on(ExtentsEnded(u32(0), READ), 0.2)
    operation.on(Verified(u32(0), GOOD), 0.2)
    assert operation.on(ExtentsEnded(u32(1), LOST), 2.0) == [Send(ExtentsRead(7, u32(0), b""))]
    reasons = [0, Reason.DRIVE_SUSPECT, Reason.NOT_FOUND]
    done = GetDone(7, bytes([HIT, MISS, MISS]), bytes(reasons))
    assert operation.on(done, 2.1) == [finished([HIT, MISS, MISS], reasons)]


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


def test_the_agents_deadline_ends_it_too() -> None:
    operation = reading(0, 1, 2)
    states, reasons = bytes([LATE] * 3), bytes([Reason.DEADLINE] * 3)
    assert operation.on(GetDone(7, states, reasons), 0.4) == [finished([LATE] * 3, [Reason.DEADLINE] * 3)]


def test_blocks_nobody_verified_in_time_are_left_to_the_agent() -> None:
    operation = reading(0)
    operation.on(ExtentsEnded(u32(0), READ), 0.2)
    assert operation.on(Verified(u32(0), UNSEEN), UNTIL_S) == [Send(ExtentsRead(7, b"", u32(0)))]


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


def test_extents_of_landed_blocks_and_a_second_offer_are_refused() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    operation.on(GetProgress(7, u32(0), tags(0)), 0.1)
    with pytest.raises(MalformedError, match="named before"):
        operation.on(extents(0, 1), 0.2)
    with pytest.raises(MalformedError, match="second"):
        reading(0).on(extents(1), 0.2)
