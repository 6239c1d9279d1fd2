"""Operations by transcript: what came in, what went out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ostraca._protocol.operations import (
    BlockOperation,
    Disconnected,
    Event,
    Finish,
    GetOperation,
    Send,
    Ticked,
    Verified,
    Verify,
)
from ostraca._protocol.specs import GetSpec, PutSpec, VolumeSpec
from ostraca.settings import ClientSettings
from ostraca_fabric.errors import LayoutMismatchError, MalformedError, UnknownVolumeError
from ostraca_fabric.model.chain import Chain
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.outcome import Ack, BlockState, PutState, Reason
from ostraca_fabric.model.volume import Layout, VolumeRecord
from ostraca_fabric.tables.digests import CheckState
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.messages import (
    Cancel,
    Failure,
    Get,
    GetDone,
    GetProgress,
    Lookup,
    LookupDone,
    Prefetch,
    PrefetchDone,
    Put,
    PutDone,
)

CHAIN = Chain.of([bytes([number]) * 32 for number in range(3)], hash_bytes=32)
SPANS = (CHAIN.span(),)
RECORD = VolumeRecord(TenantId("default"), "kv", Layout(model="m", dtype="bf16", page_tokens=16), 4096)
VOLUME = VolumeSpec(RECORD, ClientSettings(), create=False, break_even_tokens=0)
LENGTHS = np.array([10, 20, 30], np.uint32)
SLOTS = np.array([0, 4096, 8192], np.int64)
UNTIL_S = 10.0
HIT, MISS, LATE, DECLINED = BlockState.HIT, BlockState.MISS, BlockState.LATE, BlockState.DECLINED
PENDING, GOOD, DAMAGED = (bytes([state]) for state in CheckState)


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def get() -> Get:
    spec = GetSpec(volume=VOLUME, chain=CHAIN, deadline_s=1.0)
    return spec.message(7, 1, 0.5, SPANS, lengths=LENGTHS, slots=SLOTS, queued=3)


def put() -> Put:
    spec = PutSpec(volume=VOLUME, chain=CHAIN, deadline_s=1.0, ack=Ack.COMMITTED, ttl_s=60.0)
    return spec.message(7, 1, 0.5, SPANS, lengths=LENGTHS, slots=SLOTS, tags=bytes(48))


def finished(states: Sequence[int], reasons: Sequence[int], note: str = "") -> Finish:
    return Finish(Outcomes(np.array(states, np.uint8), np.array(reasons, np.uint8), note))


def tags(*values: int) -> bytes:
    return b"".join(bytes([value]) * 16 for value in values)


def test_a_get_verifies_each_wave_and_ends_with_what_was_verified() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    assert operation.start(0.0) == [Send(get())]
    assert operation.on(GetProgress(7, u32(2, 0), tags(2, 0)), 0.1) == [Verify(u32(2, 0), tags(2, 0))]
    assert operation.on(Verified(u32(2, 0), GOOD + GOOD), 0.2) == []
    assert operation.on(GetProgress(7, u32(1), tags(1)), 0.3) == [Verify(u32(1), tags(1))]
    assert operation.on(Verified(u32(1), GOOD), 0.4) == []
    assert operation.on(GetDone(7, bytes([HIT] * 3), bytes(3)), 0.5) == [finished([HIT] * 3, [0] * 3)]


def test_what_landed_last_comes_with_the_answer_and_is_verified_before_it_ends() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    operation.on(GetProgress(7, u32(0), tags(0)), 0.1)
    operation.on(Verified(u32(0), GOOD), 0.2)
    done = GetDone(7, bytes([HIT] * 3), bytes(3), b"", u32(1, 2), tags(1, 2))
    assert operation.on(done, 0.3) == [Verify(u32(1, 2), tags(1, 2))]
    damaged = [HIT, HIT, MISS], [0, 0, Reason.DAMAGED]
    assert operation.on(Verified(u32(1, 2), GOOD + DAMAGED), 0.4) == [finished(*damaged)]


def test_what_nobody_looked_at_in_time_is_late_between_blocks_that_were_handed_over() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    operation.on(GetProgress(7, u32(2, 0, 1), tags(2, 0, 1)), 0.1)
    operation.on(Verified(u32(2, 0, 1), GOOD + DAMAGED + PENDING), 0.2)
    done = GetDone(7, bytes([HIT] * 3), bytes(3))
    expected = [MISS, LATE, HIT], [Reason.DAMAGED, Reason.DEADLINE, Reason.NONE]
    assert operation.on(done, 0.3) == [finished(*expected)]


def test_what_landed_after_the_deadline_is_not_verified_any_more() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    done = GetDone(7, bytes([HIT] * 3), bytes(3), b"", u32(0, 1, 2), tags(0, 1, 2))
    late = [LATE] * 3, [Reason.DEADLINE] * 3
    assert operation.on(done, UNTIL_S) == [finished(*late)]


def test_a_block_that_failed_its_tag_is_a_miss_whatever_the_agent_says() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    operation.on(GetProgress(7, u32(0, 1), tags(0, 1)), 0.1)
    operation.on(Verified(u32(0, 1), GOOD + DAMAGED), 0.1)
    done = GetDone(7, bytes([HIT, HIT, MISS]), bytes([0, 0, Reason.NOT_FOUND]))
    expected = finished([HIT, MISS, MISS], [Reason.NONE, Reason.DAMAGED, Reason.NOT_FOUND])
    assert operation.on(done, 0.2) == [expected]


def test_a_hit_that_never_landed_is_a_miss() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    done = GetDone(7, bytes([HIT, MISS, MISS]), bytes([0, Reason.NOT_FOUND, Reason.NOT_FOUND]))
    expected = finished([MISS] * 3, [Reason.TRANSFER_FAILED, Reason.NOT_FOUND, Reason.NOT_FOUND])
    assert operation.on(done, 0.2) == [expected]


def test_a_block_that_is_named_twice_is_verified_once() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    operation.on(GetProgress(7, u32(0), tags(0)), 0.1)
    assert operation.on(GetProgress(7, u32(0, 1), tags(9, 1)), 0.2) == [Verify(u32(1), tags(1))]
    assert operation.on(GetProgress(7, u32(0), tags(9)), 0.2) == []


def test_nothing_is_verified_after_the_deadline() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    assert operation.on(GetProgress(7, u32(0), tags(0)), UNTIL_S) == []
    done = GetDone(7, bytes([HIT, MISS, MISS]), bytes([0, 1, 1]))
    assert operation.on(done, UNTIL_S) == [finished([LATE, MISS, MISS], [Reason.DEADLINE, 1, 1])]


def test_a_late_get_is_cancelled_and_keeps_what_was_handed_over() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    operation.on(GetProgress(7, u32(1, 2), tags(1, 2)), 0.1)
    operation.on(Verified(u32(1, 2), GOOD + DAMAGED), 0.1)
    assert operation.on(Ticked(), 9.9) == []
    expected = finished([LATE, HIT, MISS], [Reason.DEADLINE, Reason.NONE, Reason.DAMAGED])
    assert operation.on(Ticked(), UNTIL_S) == [Send(Cancel(7)), expected]


def test_a_get_whose_agent_went_away_keeps_what_was_handed_over() -> None:
    operation = GetOperation(get(), until_s=UNTIL_S)
    operation.on(GetProgress(7, u32(1), tags(1)), 0.1)
    operation.on(Verified(u32(1), GOOD), 0.1)
    lost = Reason.DISCONNECTED
    assert operation.on(Disconnected(), 0.2) == [finished([MISS, HIT, MISS], [lost, Reason.NONE, lost])]


def test_a_deadline_that_has_passed_sends_nothing() -> None:
    late = [Reason.DEADLINE] * 3
    assert GetOperation(get(), until_s=UNTIL_S).start(UNTIL_S) == [finished([LATE] * 3, late)]
    assert BlockOperation(put(), until_s=UNTIL_S).start(UNTIL_S) == [finished([PutState.LATE] * 3, late)]


def test_a_put_ends_with_the_agents_word() -> None:
    operation = BlockOperation(put(), until_s=UNTIL_S)
    assert operation.start(0.0) == [Send(put())]
    states = [PutState.COMMITTED, PutState.EXISTS, PutState.DECLINED]
    done = PutDone(7, bytes(states), bytes([0, 0, Reason.NO_SPACE]))
    assert operation.on(done, 0.1) == [finished(list(states), [0, 0, Reason.NO_SPACE])]


def test_a_put_whose_agent_went_away_may_yet_be_committed_and_says_so() -> None:
    expected = finished([PutState.LATE] * 3, [Reason.DISCONNECTED] * 3)
    assert BlockOperation(put(), until_s=UNTIL_S).on(Disconnected(), 0.1) == [expected]


def test_lookup_and_prefetch_end_with_the_agents_word() -> None:
    lookup, prefetch = Lookup(7, 1, 0.5, SPANS), Prefetch(7, 1, 0.5, SPANS)
    states, reasons = bytes([HIT, HIT, MISS]), bytes([0, 0, 1])
    asking = BlockOperation(lookup, until_s=UNTIL_S)
    assert asking.start(0.0) == [Send(lookup)]
    assert asking.on(LookupDone(7, states, reasons), 0.1) == [finished(list(states), list(reasons))]
    fetching = BlockOperation(prefetch, until_s=UNTIL_S)
    assert fetching.start(0.0) == [Send(prefetch)]
    assert fetching.on(PrefetchDone(7, states, reasons), 0.1) == [finished(list(states), list(reasons))]


def test_an_overloaded_agent_declines() -> None:
    failed = Failure(7, "overloaded", "64 requests are under way")
    note = "overloaded: 64 requests are under way"
    expected = finished([DECLINED] * 3, [Reason.OVERLOADED] * 3, note)
    assert GetOperation(get(), until_s=UNTIL_S).on(failed, 0.1) == [expected]


@pytest.mark.parametrize(
    ("code", "error"), [("unknown_volume", UnknownVolumeError), ("layout_mismatch", LayoutMismatchError)]
)
def test_a_request_that_can_never_be_served_is_an_error(code: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        GetOperation(get(), until_s=UNTIL_S).on(Failure(7, code, "no"), 0.1)


@pytest.mark.parametrize(
    "answer",
    [
        GetDone(7, bytes(2), bytes(3)),
        GetDone(7, bytes(3), bytes(2)),
        GetDone(7, bytes([9, 0, 0]), bytes(3)),
        GetDone(7, bytes(3), bytes(3), u32(3)),
        GetProgress(7, u32(3), tags(3)),
        GetProgress(7, u32(1, 2), tags(1)),
        LookupDone(7, bytes(3), bytes(3)),
    ],
)
def test_an_answer_that_does_not_fit_the_request_is_malformed(answer: Event) -> None:
    with pytest.raises(MalformedError):
        GetOperation(get(), until_s=UNTIL_S).on(answer, 0.1)
