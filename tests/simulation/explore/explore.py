"""Explores every order of events around the change of a shard's owner, at small scope: ``make explore``.

Depth first, each state once. A state is copied for every event that may follow; the owners in it are the real
pure core.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.explore.explore_scene import Scene
from tests.simulation.explore.explore_scope import Action, Scope

BOUNDED = (
    Scope(puts=2, keys=1, ticks=3, claim_until=0, is_full=True, is_apart=True),
    Scope(puts=1, keys=2, ticks=4, claim_until=0, is_full=True, is_apart=True),
    Scope(puts=2, keys=1, ticks=1, claim_until=0),
    Scope(puts=1, keys=1, ticks=4, claim_until=0),
)
"""What the test suite explores: 12,000 states."""

WHOLE = (
    Scope(puts=2, keys=2, ticks=4, claim_until=0, is_full=True, is_apart=True),
    Scope(puts=2, keys=1, ticks=4, claim_until=1),
)
"""What ``make explore`` does: 68,000 states."""

DEEP = (Scope(puts=2, keys=2, ticks=4, claim_until=0),)
"""As many again, and half."""


@dataclass
class Explored:
    """What was seen."""

    states: int = 0
    events: Counter[str] = field(default_factory=Counter)
    wrong: str = ""
    """What must never be, empty where it was not found; and how it came about."""

    path: tuple[Action, ...] = ()

    def __str__(self) -> str:
        """Say it in a line, and the way to what is wrong in more."""
        if self.wrong:
            steps = "\n".join(f"  {' '.join(str(each) for each in action)}" for action in self.path)
            return f"after {self.states} states: {self.wrong}\n{steps}"
        return f"{self.states} states and {self.events.total()} events: nothing is wrong"


def explore(scope: Scope, *, states_max: int = 1 << 30, checks_every: int = 16) -> Explored:
    """Let everything happen that may, until something is wrong; owners check themselves now and then."""
    explored, begun = Explored(), Scene.begun(scope)
    seen = {begun.digest()}
    stack: list[tuple[Scene, tuple[Action, ...]]] = [(begun, ())]
    while stack and explored.states < states_max:
        before, path = stack.pop()
        explored.states += 1
        for action in before.actions():
            explored.events[action[0]] += 1
            try:
                scene = before.after(action)
                digest = scene.digest()
                if digest in seen:
                    continue
                if len(seen) % checks_every == 0:
                    scene.check()
            except AssertionError as error:
                explored.wrong, explored.path = str(error) or "an assertion failed", (*path, action)
                return explored
            seen.add(digest)
            stack.append((scene, (*path, action)))
    return explored


def main() -> int:
    """Explore all of it, or what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.explore.explore", description=__doc__)
    parser.add_argument("--deep", action="store_true", help="twice as long")
    arguments = parser.parse_args()
    total = 0
    for scope in (*WHOLE, *DEEP) if arguments.deep else WHOLE:
        begun_s = time.monotonic()
        explored = explore(scope)
        print(f"{scope}\n{explored}, in {time.monotonic() - begun_s:.0f} s", flush=True)
        total += explored.states
        if explored.wrong:
            return 1
    print(f"{total} states in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
