"""Tenants in a fabric of processes: erased on all agents at once, and for good where an agent is cut off."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.pod.admin import Admin
from tests.support.pod.processes import AgentProcess, Pod, until
from tests.support.pod.work import BLOCK_BYTES, BLOCKS, LAYOUT, SMALL, content, hashes

import ostraca
from ostraca import Ack, BlockState, PutState, Reason

pytestmark = pytest.mark.slow

CHAIN = 7
KEY_TTL_S = 6.0


class Worker:
    """A worker of a tenant, of one agent, with a volume open."""

    def __init__(self, agent: AgentProcess, tenant: str) -> None:
        self.client = ostraca.connect(agent.address, tenant=tenant, settings=SMALL)
        self._volume = self.client.volume("v", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        self._chain = self._volume.chain(hashes(CHAIN))

    def put(self, seed: int) -> set[PutState]:
        result = self._volume.put(self._chain, source=content(seed), deadline_s=5.0, ack=Ack.COMMITTED)
        return set(result.states)

    def got(self, seed: int) -> bool:
        """Whether the chain was there, with the bytes of this number."""
        into = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        result = self._volume.get(self._chain, into=into, deadline_s=5.0)
        return set(result.states) == {BlockState.HIT} and bool((into == content(seed)).all())

    def reasons(self) -> set[Reason]:
        into = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        return set(self._volume.get(self._chain, into=into, deadline_s=5.0).reasons)


@pytest.fixture
def admin(pod: Pod) -> Iterator[Admin]:
    with Admin(pod) as admin:
        assert admin.ask("PUT", "/v1/settings", {"key_ttl_s": KEY_TTL_S}).status == 200
        yield admin
        assert admin.ask("PUT", "/v1/settings", {}).status == 200
        admin.stop()
    admin.check_log()


def test_what_a_tenant_has_is_erased_on_every_agent_and_nothing_of_another(pod: Pod, admin: Admin) -> None:
    assert admin.ask("PUT", "/v1/tenants/acme", {"is_erasable": True}).status == 201
    here, there = (Worker(agent, "acme") for agent in pod.agents[:2])
    other = Worker(pod.agents[1], "other")
    assert here.put(1) == other.put(2) == {PutState.COMMITTED}
    assert here.got(1)
    assert there.got(1)
    assert other.got(2)
    begun = admin.ask("POST", "/v1/tenants/acme:erase", {})

    def is_purged() -> bool:
        states = [step["state"] for step in admin.operation(begun.body["id"])["steps"]]
        return states[:2] == ["done", "done"]

    until(is_purged, "each agent serves nothing of it")
    for worker in (here, there):
        assert worker.reasons() == {Reason.NOT_FOUND}
    assert other.got(2)
    assert there.put(3) == {PutState.COMMITTED}, "nothing of it exists"
    assert here.got(3)
    for agent in pod.agents[:2]:
        agent.kill()
    pod.start()
    again = Worker(pod.agents[0], "acme")
    assert again.got(3), "an agent that starts anew serves what was put since, and that alone"
    for worker in (here, there, other, again):
        worker.client.close()


def test_an_agent_that_can_not_ask_whether_a_volume_was_erased_stops_serving_it(
    pod: Pod, admin: Admin
) -> None:
    assert admin.ask("PUT", "/v1/tenants/brief", {"is_erasable": True}).status == 201
    brief, lasting = Worker(pod.agents[0], "brief"), Worker(pod.agents[0], "lasting")
    assert brief.put(1) == lasting.put(1) == {PutState.COMMITTED}
    pod.etcd.kill()
    try:
        assert brief.got(1), "it asked not long ago"
        until(lambda: brief.reasons() == {Reason.STALE_VOLUME}, "it may have been erased")
        assert lasting.got(1), "what can't be erased is served under the last map"
    finally:
        pod.etcd.start()
    until(lambda: brief.got(1), "it was not erased")
    for worker in (brief, lasting):
        worker.client.close()


def test_a_tenant_keeps_to_the_rate_that_it_was_given_while_it_is_at_work(pod: Pod, admin: Admin) -> None:
    worker, other = Worker(pod.agents[0], "eager"), Worker(pod.agents[0], "calm")
    for each in (worker, other):
        each.put(1)
        assert each.got(1)
    assert admin.ask("PUT", "/v1/tenants/eager", {"agent_bytes_per_s": 1}).status == 201
    until(lambda: worker.reasons() == {Reason.QUOTA}, "it is beyond its rate")
    assert other.got(1)
    assert admin.ask("DELETE", "/v1/tenants/eager").status == 200
    until(lambda: worker.got(1), "it has no rate any more")
    for each in (worker, other):
        each.client.close()
