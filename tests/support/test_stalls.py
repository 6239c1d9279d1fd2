"""What is not held against us."""

from __future__ import annotations

from tests.support.stalls import TICKS_PER_S, stalls, stolen_s


def test_what_the_host_of_a_virtual_machine_took_is_the_eighth_of_the_processors_times() -> None:
    ticks = 250
    stat = f"cpu  1 2 3 4 5 6 7 {ticks} 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n"
    assert stolen_s(stat) == ticks / TICKS_PER_S


def test_it_counts_among_what_threads_waited_for() -> None:
    before = stalls()
    assert before["stolen"] <= stalls()["stolen"]
