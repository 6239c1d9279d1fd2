"""The controllers of a small pod; ``make scale`` looks at one of 64 agents and 1152 drives."""

from __future__ import annotations

import pytest
from tests.simulation.scale.pod import Pod, Size
from tests.simulation.scale.scenarios import SCENARIOS, Scenario
from tests.support.simulated.virtual_hosts import HostsLoop

SMALL = Size(agents=8, enclosures=6, drives=8)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_a_pod_shares_its_shards_evenly_and_soon_when(scenario: Scenario) -> None:
    loop = HostsLoop()

    async def played() -> None:
        pod = Pod(SMALL, seed=1)
        await scenario(pod)
        pod.end()

    try:
        loop.run_until_complete(played())
    finally:
        loop.close()
