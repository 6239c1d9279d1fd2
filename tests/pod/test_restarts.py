"""Agents that are restarted in order, with the waits of a pod: nothing is waited for. Real processes."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.pod.processes import SHORT, Pod
from tests.pod.work import CHAINS, declined, missing, put

from ostraca import Reason
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
