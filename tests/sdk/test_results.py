"""Results read well and count right."""

from __future__ import annotations

import threading
import time

from ostraca.results import BlockOutcomes, GetResult, LateWrite, LookupResult, PutResult, WithheldRows
from ostraca_fabric.model.outcome import BlockState, PutState, Reason

HIT, MISS, LATE = BlockState.HIT, BlockState.MISS, BlockState.LATE


def test_a_get_names_its_prefix_its_holes_and_why() -> None:
    result = GetResult(bytes([HIT, HIT, MISS, HIT, LATE]), bytes([0, 0, Reason.DAMAGED, 0, Reason.DEADLINE]))
    assert (result.prefix, result.holes, result.hits, len(result)) == (2, (2, 4), 3, 5)
    assert result.states == (HIT, HIT, MISS, HIT, LATE)
    assert result.reasons == (Reason.NONE, Reason.NONE, Reason.DAMAGED, Reason.NONE, Reason.DEADLINE)
    assert repr(result) == "<GetResult: 3 HIT, 1 MISS (1 DAMAGED), 1 LATE (1 DEADLINE); prefix 2>"


def test_an_empty_result_has_nothing() -> None:
    result = GetResult(b"", b"")
    assert (result.prefix, result.holes, result.hits, result.states) == (0, (), 0, ())
    assert repr(result) == "<GetResult: no blocks; prefix 0>"


def test_a_lookups_prefix_is_common_to_all_chains() -> None:
    first = BlockOutcomes(bytes([HIT, HIT, HIT]), bytes(3))
    second = BlockOutcomes(bytes([HIT, MISS, HIT]), bytes([0, Reason.NOT_FOUND, 0]))
    result = LookupResult((first, second))
    assert (result.prefix, result.holes, result.hits) == (1, (1,), 5)
    assert result.states == (HIT, HIT, HIT, HIT, MISS, HIT)
    assert result.reasons[4] is Reason.NOT_FOUND
    assert LookupResult(()).prefix == 0


def test_a_put_counts_what_the_fabric_has() -> None:
    states = [PutState.STAGED, PutState.EXISTS, PutState.DECLINED, PutState.LATE, PutState.COMMITTED]
    result = PutResult(bytes(states), bytes([0, 0, Reason.NO_SPACE, Reason.DEADLINE, 0]), "a note")
    assert (result.accepted, result.holes, len(result)) == (3, (2, 3), 5)
    assert "1 DECLINED (1 NO_SPACE)" in repr(result)
    assert repr(result).endswith("; a note>")


def test_a_reason_that_only_newer_agents_know_reads_as_none() -> None:
    assert GetResult(bytes([MISS]), bytes([250])).reasons == (Reason.NONE,)


def test_results_are_values() -> None:
    assert GetResult(b"\1", b"\0") == GetResult(b"\1", b"\0")
    assert GetResult(b"\1", b"\0") != GetResult(b"\0", b"\1")


def test_withheld_rows_become_free_read_by_read() -> None:
    first, second = LateWrite([4, 0]), LateWrite([2])
    withheld = WithheldRows([first, second])
    assert (withheld.positions, len(withheld)) == ((0, 2, 4), 3)
    first.end()
    assert withheld.positions == (2,)
    assert not withheld.wait(0)
    second.end()
    assert withheld.wait(0)
    assert not withheld
    assert repr(withheld) == "<WithheldRows: 0 now>"


def test_all_waiters_for_a_withheld_row_see_its_end() -> None:
    read, found = LateWrite([0]), list[bool]()
    withheld = WithheldRows([read])
    begun_s = time.monotonic()
    assert not withheld.wait(0.02)
    assert time.monotonic() - begun_s >= 0.02
    waiters = [threading.Thread(target=lambda: found.append(withheld.wait())) for _ in range(3)]
    for each in waiters:
        each.start()
    read.end()
    for each in waiters:
        each.join(30.0)
    assert found == [True] * 3


def test_results_are_equal_whatever_is_withheld() -> None:
    assert GetResult(b"\1", b"\0") == GetResult(b"\1", b"\0", withheld=WithheldRows([LateWrite([0])]))
    assert not GetResult(b"\1", b"\0").withheld
