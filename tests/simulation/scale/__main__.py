"""Plays every scenario on a pod of 64 agents and 1152 drives, and says what it took: minutes each.

``make scale`` (SCALE_ARGS: [--agents N] [--enclosures N] [--drives N] [--seed N] [SCENARIO ...])
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.simulation.scale.played import play
from tests.simulation.scale.pod import Size
from tests.simulation.scale.scenarios import SCENARIOS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.simulation.scale")
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--enclosures", type=int, default=36)
    parser.add_argument("--drives", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("scenario", nargs="*", default=[each.__name__ for each in SCENARIOS])
    asked = parser.parse_args()
    size = Size(asked.agents, asked.enclosures, asked.drives)
    known = {each.__name__: each for each in SCENARIOS}
    if unknown := [each for each in asked.scenario if each not in known]:
        parser.error(f"no scenario is called {unknown[0]!r}: there are {', '.join(known)}")
    # Each in a process of its own: a pod is gigabytes.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        for name in asked.scenario:
            processes.submit(play, known[name], size, asked.seed).result()


if __name__ == "__main__":
    main()
