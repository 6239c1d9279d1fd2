"""Agents that are restarted in order, with the waits of a pod: nothing is waited for. Real processes."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from tests.sdk.failover.test_connection_manager import await_agent
from tests.sdk.front_ends import FRONT_ENDS
from tests.support.pod.meanwhile import Meanwhile
from tests.support.pod.processes import SHORT, Pod
from tests.support.pod.work import (
    CHAINS,
    SMALL,
    content,
    declined,
    empty,
    hashes,
    missing,
    put,
    put_all,
    volume_of,
)

import ostraca
from ostraca import BlockState, Reason
from ostraca_dpu_agent.settings import OwnerSettings

pytestmark = pytest.mark.slow

_WAITS = ("owner.hold_s", "owner.late_write_s", "owner.pause_max_s")
AS_IN_A_POD = tuple(each for each in SHORT if not each.startswith(_WAITS))
RESTARTS = 4


def test_agents_that_are_restarted_in_order_leave_nothing_that_puts_wait_for(own: Pod) -> None:
    """Shards have 15 segments, of which four grants would hold all."""
    assert OwnerSettings().late_write_s >= 60
    pod = Pod(own.folder, own.etcd, prefix=own.prefix, settings=AS_IN_A_POD)
    with pod:
        pod.create(enclosures=2, drives=2, capacity="68MiB")
        for number in range(3):
            pod.agent(f"agent-{number}")
        pod.start()
        reasons: Counter[Reason | None] = Counter()
        written = list(CHAINS)
        with pod.connect() as client:
            assert put(client) == written
            for number in range(RESTARTS):
                pod.agents[number % len(pod.agents)].stop()
                pod.start()
                new = range(100 + 10 * number, 110 + 10 * number)
                reasons += declined(client, new)
                assert missing(client) == [], "what was there at first"
            looks = [agent.status() for agent in pod.agents]
            withheld = [each.ownership.withheld_segments for look in looks if look for each in look.shards]
            assert withheld == [0] * pod.shards()
        pod.check_logs()
    assert reasons[Reason.NO_SPACE] == reasons[Reason.FENCED] == 0, reasons
    assert reasons[None] >= 0.9 * reasons.total(), reasons


class Getting(Meanwhile):
    """A worker that knows every agent and gets all chains over and over, through one of the front ends."""

    def __init__(self, client: ostraca.Client, front_end: str) -> None:
        super().__init__()
        self.reasons: Counter[Reason] = Counter()
        self.gets = 0
        self._client = client
        self._front_end = front_end

    def work(self) -> None:
        with FRONT_ENDS[self._front_end](self._client, volume_of(self._client)) as volume:
            while self.goes_on():
                for seed in CHAINS:
                    into = empty()
                    got = volume.get(volume.chain(hashes(seed)), into=into, deadline_s=2.0)
                    self.gets += 1
                    self.reasons.update(got.reasons)
                    expected = content(seed)
                    assert all(
                        np.array_equal(into[block], expected[block])
                        for block, state in enumerate(got.states)
                        if state is BlockState.HIT
                    )


@pytest.mark.parametrize("transport", ["inline", pytest.param("nixl", marks=pytest.mark.nixl)])
def test_workers_that_know_every_agent_miss_no_get_when_agents_are_restarted_in_turn_and_come_back(
    own: Pod, transport: str
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    own.create()
    agents = [own.agent(f"agent-{number}", transport=transport) for number in range(3)]
    own.start()
    settings = replace(SMALL, transports=(transport,), failback_after_s=0.2)
    with ExitStack() as stack:
        with own.connect(settings=settings) as client:
            put_all(client)
        clients = [stack.enter_context(own.connect(first, settings=settings)) for first in agents]
        workers = [
            stack.enter_context(Getting(client, front_end))
            for client, front_end in zip(clients, sorted(FRONT_ENDS), strict=True)
        ]
        for agent in agents:
            before = [worker.gets for worker in workers]
            agent.stop()
            own.start()
            for client, first in zip(clients, agents, strict=True):
                await_agent(client, first.name)
            assert all(worker.gets > gets for worker, gets in zip(workers, before, strict=True))
    reasons = sum((worker.reasons for worker in workers), Counter[Reason]())
    assert reasons[Reason.NONE] >= 1000
    assert reasons[Reason.DISCONNECTED] == 0, reasons
    own.check_logs()
