"""A fabric of agents that are processes of their own, while all is well."""

from __future__ import annotations

import pytest
from tests.support.pod.processes import Pod
from tests.support.pod.work import CHAINS, missing, put

pytestmark = pytest.mark.slow


def test_a_worker_at_one_agent_reads_what_a_worker_at_another_wrote(pod: Pod) -> None:
    first, second, third = pod.agents
    with first.connect() as writer:
        assert put(writer) == list(CHAINS)
    assert len(set(pod.claims().values())) > 1, "several agents own shards"
    for agent in (second, third):
        with agent.connect() as reader:
            assert missing(reader) == []
