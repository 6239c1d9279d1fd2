"""An agent that comes and goes all the time, under load. Real processes."""

from __future__ import annotations

import itertools
import time

import pytest
from tests.support.pod.meanwhile import Meanwhile
from tests.support.pod.processes import GRANT_S, HOLD_S, LATE_WRITE_S, Pod, until
from tests.support.pod.work import CHAINS, await_puts, missing, put, put_all

pytestmark = pytest.mark.slow

FLAPS_S = 5.0
TURNS_LEAST = 4
BACK_WITHIN_S = GRANT_S + HOLD_S + LATE_WRITE_S + 10.0
"""What all grants of before are waited for, and some time to claim, on a machine that does other things."""


class Load(Meanwhile):
    """A worker that puts new chains all the time."""

    def __init__(self, pod: Pod) -> None:
        super().__init__()
        self.committed: list[int] = []
        self._pod = pod

    def work(self) -> None:
        with self._pod.connect(self._pod.agents[1]) as client:
            for chain in itertools.count(10_000):
                if not self.goes_on():
                    break
                self.committed += put(client, [chain], deadline_s=0.5)


def test_an_agent_that_comes_and_goes_all_the_time_costs_no_block_and_puts_come_back(own: Pod) -> None:
    own.create()
    for number in range(3):
        own.agent(f"agent-{number}")
    own.start()
    flapping = own.agents[2]
    with own.connect(own.agents[0]) as client:
        put_all(client)
        turns, began_s = 0, time.monotonic()
        with Load(own) as load:
            while turns < TURNS_LEAST or time.monotonic() - began_s < FLAPS_S:
                if turns % 2:
                    flapping.kill()
                else:
                    flapping.stop()
                flapping.launch()
                flapping.await_ready()
                until(lambda: not missing(client, deadline_s=0.5), "what others have is got all along")
                turns += 1
        assert load.committed, "others took puts meanwhile"
        own.await_settled()
        await_puts(client, within_s=BACK_WITHIN_S)
        assert missing(client, (*CHAINS, *load.committed)) == []
    own.check_logs()
