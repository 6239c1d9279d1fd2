"""Many histories in many processes: what ``make simulate`` and ``make soak-sim`` run.

Each is drawn from a seed of its own: --seed and those that follow. Ends with 1, and the way to see it again,
when one of them found something that must never be.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.simulation.shard.many import Tally, begin

_AT_ONCE = 10
_TOLD_EVERY_S = 5.0


def _arguments(program: str, what: str, histories: int, steps: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=f"{what}\n\n{__doc__}")
    parser.add_argument("--histories", type=int, default=histories, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the first (default: a new one, printed)")
    parser.add_argument("--steps", type=int, default=steps, help="of each (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each processor)"
    )
    return parser.parse_args()


def _tell(name: str, counted: Counter[str]) -> None:
    print(f"{name}: " + ", ".join(f"{count:,} {what}" for what, count in counted.most_common()))


def campaign(
    program: str, what: str | None, played: Callable[[list[int], int], Tally], *, histories: int, steps: int
) -> int:
    """Run what was asked for by the command line of *program*; *played* plays some histories."""
    chosen = _arguments(program, what or "", histories, steps)
    first = secrets.randbelow(1 << 31) if chosen.seed is None else chosen.seed
    print(f"{chosen.histories:,} histories of {chosen.steps} steps from seed {first}", flush=True)

    def again(seed: int) -> str:
        asked = "" if chosen.steps == steps else f" --steps {chosen.steps}"
        return f"python -m {program} --histories 1 --jobs 1 --seed {seed}{asked}"

    seeds = list(range(first, first + chosen.histories))
    batches = [seeds[begin : begin + _AT_ONCE] for begin in range(0, len(seeds), _AT_ONCE)]
    began_s = told_s = time.monotonic()
    tally = Tally()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(chosen.jobs, mp_context=spawn, initializer=begin) as pool:
        for done in as_completed([pool.submit(played, batch, chosen.steps) for batch in batches]):
            part = done.result()
            tally.add(part)
            for seed, failure in part.failures:
                print(f"{failure}history {seed} failed; see it again with\n  {again(seed)}")
            if time.monotonic() > told_s + _TOLD_EVERY_S or tally.histories == chosen.histories:
                told_s = time.monotonic()
                rate = tally.histories / (told_s - began_s)
                failed = len(tally.failures)
                print(
                    f"{tally.histories:,} of {chosen.histories:,}, {failed} failed, {rate:.1f}/s", flush=True
                )
    _tell("happened", tally.happened)
    _tell("faults", tally.mishaps)
    _tell("excused", tally.excused)
    for seed, _ in tally.failures:
        print(f"failed: {again(seed)}")
    return 1 if tally.failures else 0
