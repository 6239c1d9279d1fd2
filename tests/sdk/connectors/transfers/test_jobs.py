"""Jobs of an engine, and chunks with failed loads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ostraca.connectors.transfers.failed_loads import FailedLoads
from ostraca.connectors.transfers.jobs import TransferJob, Transfers


def key(number: int) -> bytes:
    return number.to_bytes(36, "big")


def test_a_job_is_over_when_all_its_pieces_are_and_tells_each_chunks_fate() -> None:
    transfers = Transfers()
    transfers.begin(7, request="r", is_load=True, now_s=1.0)
    transfers.refuse(7, [key(0)])
    transfers.add(7, "one", [key(1), key(2)])
    transfers.add(7, "two", [key(3)])
    assert transfers.seal(7, 1.0) is None
    assert (transfers.loading, transfers.storing) == (3, 0)
    assert transfers.end("two", [True], 2.0) is None
    assert transfers.end("one", [True, False], 3.0) == TransferJob(
        7,
        "r",
        is_load=True,
        began_s=1.0,
        pieces=0,
        succeeded=(key(3), key(1)),
        failed=(key(0), key(2)),
        seconds=2.0,
    )
    assert (transfers.loading, transfers.storing, len(transfers)) == (0, 0, 0)


def test_a_job_of_which_nothing_was_sent_is_over_at_once() -> None:
    transfers = Transfers()
    transfers.begin(7, request="r", is_load=False, now_s=1.0)
    transfers.refuse(7, [key(0)])
    assert transfers.seal(7, 1.0) == TransferJob(
        7, "r", is_load=False, began_s=1.0, pieces=0, succeeded=(), failed=(key(0),), seconds=0.0
    )


@given(st.lists(st.integers(0, 20)), st.integers(1, 8))
def test_failed_loads_are_bounded_and_the_newest_stay(added: list[int], entries_max: int) -> None:
    failed = FailedLoads(entries_max=entries_max, hold_s=10.0)
    for number in added:
        failed.add([key(number)], 0.0)
    newest = list(dict.fromkeys(reversed(added)))[:entries_max]
    held = {number for number in range(21) if failed.holds(key(number), 9.9)}
    assert held == set(newest)
    assert not any(failed.holds(key(number), 10.0) for number in held)
