"""``make soak``: real processes under traffic, while an adversary stops and cuts them and damages flash.

Ends with a line for each thing that must not be: wrong bytes, operations that end more than 100 ms after
their deadline without the machine's doing, processes that crash, hang or grow, memory that does not come
back.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.scenarios.soak.adversary import Adversary
from tests.scenarios.soak.crew import Fabric, Worker
from tests.scenarios.soak.enough import ended_by_ctrl_c
from tests.scenarios.soak.watch import Watch
from tests.scenarios.soak.worker import Task
from tests.sdk.front_ends import FRONT_ENDS

import ostraca
from ostraca.settings import ClientSettings

PROGRESS_S = 10.0
QUIET_S = 5.0
"""For traffic without faults in the end, before all is counted."""

TRANSPORTS = {"inline": ("inline",), "nixl": ("nixl", "inline")}


class Soak:
    """One run."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.violations: list[str] = []
        self.is_enough = False
        self._options = options
        self._begun_s = time.monotonic()
        self._fabric = Fabric(directory / "fabric", agents=options.agents, transport=options.transport)
        self._fabric.start()
        self._workers = [self._worker(directory, number) for number in range(options.workers)]
        self._watch = Watch(self._workers)
        self._adversary = Adversary(self._fabric, self._workers, seed=options.seed)

    def _worker(self, directory: Path, number: int) -> Worker:
        front_ends, addresses = sorted(FRONT_ENDS), self._fabric.addresses
        turn = number % len(addresses)
        task = Task(
            addresses=addresses[turn:] + addresses[:turn],
            transports=TRANSPORTS[self._options.transport],
            tenant=f"tenant-{number % 2}",
            front_end=front_ends[number % len(front_ends)],
            seed=(self._options.seed, number),
            blocks=self._options.blocks,
            report=directory / "worker.json",
        )
        return Worker(number, task)

    def run(self) -> None:
        """Let it go on until the time is over, it is enough, or something is dead."""
        until_s = self._begun_s + 60 * self._options.minutes
        told_s = self._begun_s
        while time.monotonic() < until_s and not (self.is_enough or self.violations):
            self._adversary.act()
            self._look()
            if time.monotonic() > told_s + PROGRESS_S:
                told_s = time.monotonic()
                print(self.progress(), flush=True)
        if not self.violations:
            self._rest()
        self._end()

    def _look(self) -> None:
        self.violations += self._watch.look([self._fabric])

    def _rest(self) -> None:
        """Leave them in peace for a while: everything must work then, and all memory come back."""
        before = self._watch.seen().verified
        until_s = time.monotonic() + QUIET_S
        while time.monotonic() < until_s:
            self._look()
            threading.Event().wait(0.5)
        if self._watch.seen().verified <= before:
            self.violations.append("nothing is got any more")
        self.violations += self._watch.finish()
        asking = ClientSettings(arena_bytes=4 << 20, chunk_bytes=4 << 20, transports=("inline",))
        for address in self._fabric.addresses:
            with ostraca.connect(address, settings=asking) as client:
                status = client.status()
            left = status.staging_used_bytes + status.quarantined_bytes + status.quarantined_cached_bytes
            if left:
                self.violations.append(f"{status.agent} keeps {left} bytes on their way to nobody")

    def _end(self) -> None:
        code = self._fabric.process.stop() if self._fabric.died_of() is None else None
        if code:
            self.violations.append(f"the fabric stopped with {code}")
        self.violations += [f"the fabric's log: {line}" for line in self._fabric.crashes()]
        self.violations += self._watch.late()
        self.violations += self._watch.errors()

    def leave(self) -> None:
        """Leave no process behind, whatever happened."""
        if self._fabric.died_of() is None:
            self._fabric.process.kill()
        for worker in self._workers:
            worker.leave()

    def progress(self) -> str:
        """Say how it stands."""
        minutes = (time.monotonic() - self._begun_s) / 60
        restarts = sum(worker.restarts for worker in self._workers)
        seen = self._watch.seen()
        late, late_anyhow = len(self._watch.late()), self._watch.late_anyhow()
        return (
            f"{minutes:5.1f} min: {sum(seen.operations.values()):,} operations, {seen.verified:,} blocks "
            f"verified, {len(seen.wrong)} wrong, {late} late ({late_anyhow} with the "
            f"machine's stalls); {sum(self._adversary.done.values())} faults, fabric restarted "
            f"{self._fabric.restarts} times, workers {restarts} times"
        )

    def summary(self) -> str:
        """Say what became of everything."""
        lines = [self.progress(), "faults:"]
        deeds = self._adversary.done.most_common()
        lines += [f"  {count:9,} {name.replace('_', ' ')}" for name, count in deeds]
        lines.append("blocks:")
        lines += [f"  {count:9,} {name}" for name, count in self._watch.seen().outcomes.most_common()]
        return "\n".join(lines)


def main() -> int:
    """Run one soak."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="of operations and faults (default: any)")
    parser.add_argument("--transport", choices=sorted(TRANSPORTS), default="nixl")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=300, help="different blocks of each volume")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = secrets.randbelow(1 << 31)
    print(f"soak: {options.minutes} minutes over {options.transport}, --seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="ostraca-soak-") as directory:
        soak = Soak(Path(directory), options)
        try:
            with ended_by_ctrl_c(soak):
                soak.run()
            print(soak.summary())
        finally:
            soak.leave()
    for violation in soak.violations:
        print(f"VIOLATION: {violation}")
    print("nothing was wrong" if not soak.violations else f"{len(soak.violations)} violations")
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
