"""Plays every scenario on a pod of 64 agents and 1152 drives, and says what it took: minutes each.

``make scale`` (SCALE_ARGS: [--agents N] [--enclosures N] [--drives N] [--seed N] [SCENARIO ...])
"""

from __future__ import annotations

import argparse
import gc
import resource
import time

from tests.simulation.scale.pod import Pod, Size
from tests.simulation.scale.scenarios import SCENARIOS, Scenario

from ostraca_dpu_agent.steward.plan import plan
from ostraca_fabric.testing.virtual_hosts import HostsLoop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.simulation.scale")
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--enclosures", type=int, default=36)
    parser.add_argument("--drives", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("scenario", nargs="*", default=[each.__name__ for each in SCENARIOS])
    asked = parser.parse_args()
    size = Size(asked.agents, asked.enclosures, asked.drives)
    for scenario in SCENARIOS:
        if scenario.__name__ in asked.scenario:
            loop = HostsLoop()
            loop.run_until_complete(_played(scenario, size, asked.seed))
            loop.close()
            gc.collect()  # a pod is gigabytes, and in circles


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
    steward = next(iter(pod.agents.values())).steward
    rounds, begun_s = 20, time.process_time()
    for _ in range(rounds):
        plan(steward.observe())
    return (time.process_time() - begun_s) / rounds


if __name__ == "__main__":
    main()
