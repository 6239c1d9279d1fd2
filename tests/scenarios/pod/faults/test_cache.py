"""Agents that keep blocks in DRAM, one of which is killed. Real processes."""

from __future__ import annotations

import pytest
from tests.support.pod.meanwhile import Meanwhile
from tests.support.pod.processes import SHORT, AgentProcess, Pod, await_hits
from tests.support.pod.work import BLOCKS, CHAINS, await_puts, missing, put

import ostraca

pytestmark = pytest.mark.slow

CACHED = (*(each for each in SHORT if not each.startswith("memory.cache_bytes")), "memory.cache_bytes=32MiB")
UNSEEN = range(100, 100 + len(CHAINS))
"""Chains that only the agent had in DRAM that is killed."""


class Reading(Meanwhile):
    """A worker that gets all chains over and over, whether they are there or not."""

    def __init__(self, client: ostraca.Client) -> None:
        super().__init__()
        self._client = client

    def work(self) -> None:
        while self.goes_on():
            missing(self._client, (*CHAINS, *UNSEEN), deadline_s=0.3)


def cached_hits(agent: AgentProcess) -> int:
    look = agent.status()
    assert look is not None
    return look.counters.get_hits_from_cache


def test_an_agent_that_is_killed_takes_its_cache_along_and_no_block(own: Pod) -> None:
    with Pod(own.folder, own.etcd, prefix=own.prefix, settings=CACHED) as pod:
        pod.create()
        dying, other = (pod.agent(f"agent-{number}") for number in range(2))
        pod.start()
        with pod.connect(dying) as bereft, other.connect() as near, other.connect() as beside:
            await_puts(bereft)
            assert put(bereft, (*CHAINS, *UNSEEN)) == [*CHAINS, *UNSEEN]
            assert missing(near) == missing(bereft) == []
            before = cached_hits(other)
            assert missing(near) == []
            assert cached_hits(other) == before + BLOCKS * len(CHAINS)
            with Reading(bereft), Reading(beside):
                dying.kill()
                assert missing(near, deadline_s=0.5) == [], "what is in DRAM takes no owner"
                await_hits(near, UNSEEN)
                await_hits(bereft, (*CHAINS, *UNSEEN))
                await_puts(near)
                pod.start()
            assert cached_hits(dying) == 0
            with dying.connect() as anew:
                for client in (anew, near, bereft):
                    assert missing(client, (*CHAINS, *UNSEEN)) == []
        pod.check_logs()
