"""One scenario, played, with what it took."""

from __future__ import annotations

import resource
import time

from tests.simulation.scale.pod import Pod, Size
from tests.simulation.scale.scenarios import Scenario
from tests.support.simulated.virtual_hosts import HostsLoop

from ostraca_dpu_agent.controller.plan import plan


def play(scenario: Scenario, size: Size, seed: int) -> None:
    """Play a scenario, and print a line about it. Raises AssertionError."""
    loop = HostsLoop()
    loop.run_until_complete(_played(scenario, size, seed))
    loop.close()


async def _played(scenario: Scenario, size: Size, seed: int) -> None:
    begun_s = time.process_time()
    pod = Pod(size, seed)
    await scenario(pod)
    owned = sorted(pod.owned().values())
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"{scenario.__name__}: {pod.loop.now_s:.1f} s of the pod in {time.process_time() - begun_s:.0f} s; "
        f"an agent owns {owned[0]} to {owned[-1]}; "
        f"without an owner for {max(pod.unowned_s.values(), default=0.0):.1f} s at most; "
        f"a shard is claimed {max(pod.claims_asked.values())} times at most; "
        f"the store is asked {pod.calls_per_s(0)} times in a second at most; "
        f"a turn takes {_turn_s(pod) * 1e3:.2f} ms; {memory_mib} MiB in all",
        flush=True,
    )
    pod.end()


def _turn_s(pod: Pod) -> float:
    """Measure what it costs one agent to look and find nothing to do."""
    controller = next(iter(pod.agents.values())).controller
    rounds, begun_s = 20, time.process_time()
    for _ in range(rounds):
        plan(controller.observe())
    return (time.process_time() - begun_s) / rounds
