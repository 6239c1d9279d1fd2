"""One soak of flash: outages at random moments, and after each the ledger held against flash and fabric."""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.scenarios.soak_flash.disk import PowerCutDisk
from tests.scenarios.soak_flash.flash import FlashReader
from tests.scenarios.soak_flash.ledger import Ledger
from tests.scenarios.soak_flash.life import START_S, Lives, StartError
from tests.scenarios.soak_flash.worker import LAYOUT, VOLUME, Worker

MIB = 1 << 20
PROGRESS_S = 10.0
GET_AFTER_START = 96
"""So many blocks are got after each start: the newest that flash lists, and as many others."""

TWICE = 0.15
"""How often an outage is followed by another, before the fabric is ready."""

KILLED = 0.3
"""How often, before a power cut, the process alone is killed and started again. What it had not flushed is
there still, and its successor must not vouch for it before it is flushed."""

FORMATTING = 0.1
"""How often, beside it, a new fabric is ended while it makes its drives, and started again."""

NEW_SHAPE = ("--drives", "2", "--capacity", "18MiB", "--dram", "0", "--transport", "inline")
"""Of those new fabrics."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to do."""

    directory: Path
    kills: int = 200
    seed: int = 0
    capacity_bytes: int = 242 * MIB
    """Two drives of 15 segments by default: small enough to go round often, and more than one life fills."""

    drives: int = 2
    life_s: float = 1.0
    """The longest time between a start and its end."""

    power_cut: str | None = None
    """How the disk is mounted whose power is cut; None for SIGKILL alone."""

    flushes: bool = True
    """Whether the fabric flushes its drives, where power is cut."""

    is_strict: bool = True
    """Whether what was committed must outlive each outage."""

    tamper: Callable[[Path], None] | None = None
    """Does something to the fabric's directory after an outage: what a drive that lied would look like."""


class Soak:
    """One run; ``run`` it in a ``with`` block."""

    def __init__(self, options: Options) -> None:
        """Plan it."""
        self.ledger = Ledger(is_strict=options.is_strict)
        self.is_enough = False
        self.kills = 0
        self.counts: Counter[str] = Counter()
        self.whole_s: list[float] = []
        """From a ready line to an answer for every block that flash listed."""

        self._options = options
        self._dice = random.Random(options.seed)
        self._begun_s = self._told_s = time.monotonic()
        self._stack = ExitStack()
        self._outcomes: Counter[str] = Counter()

    def __enter__(self) -> Self:
        """Make the disk and plan the fabric. Raises DiskError."""
        options = self._options
        disk, home = None, options.directory
        if options.power_cut is not None:
            size_bytes = options.capacity_bytes + 320 * MIB
            disk = PowerCutDisk(options.directory, size_bytes=size_bytes, mode=options.power_cut)
            home = self._stack.enter_context(disk).mount_point
        sizes = ("--drives", str(options.drives), "--capacity", str(options.capacity_bytes), "--dram", "0")
        flush = ("--flush",) if disk is not None and options.flushes else ()
        shape = (*sizes, "--transport", "inline", *flush)
        self._home, self._disk = home, disk
        self._lives = Lives(home / "fabric", options.directory / "fabric.log", shape, disk)
        self._stack.callback(self._lives.leave)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave no process and no mount behind."""
        self._stack.close()

    def run(self) -> None:
        """Go on until there were enough outages, something is wrong, or it is enough."""
        try:
            self._run()
        except StartError as error:
            self.ledger.violations.append(f"DOES NOT START: {error}")
        self.ledger.violations += [f"the fabric's log: {line}" for line in self._lives.crashes()]

    def _run(self) -> None:
        self._lives.start()
        with Worker([self._lives.address], self.ledger, seed=self._options.seed) as worker:
            reader = FlashReader(
                self._lives.directory,
                tenant=worker.volume.tenant,
                volume=VOLUME,
                incarnation=worker.volume._spec.record.incarnation,
            )
            assert worker.volume._spec.record.layout == LAYOUT
            while self.kills < self._options.kills and not (self.is_enough or self.ledger.violations):
                if self._disk is not None and self._dice.random() < KILLED:
                    self._live(worker, self._lives.kill)
                    self._lives.start()
                    worker.come_back(is_seen=False)
                self._live(worker, self._end)
                self._look(worker, reader)
                if self._dice.random() < TWICE:
                    self._end_early()
                    self._look(worker, reader)
                if self._dice.random() < FORMATTING:
                    self._end_in_formatting()
                self._lives.start()
                self._check(worker)
                self._tell(worker)
            self._outcomes = worker.outcomes
        if not self.ledger.violations and (code := self._lives.stop()):
            self.ledger.violations.append(f"the fabric stopped with {code}")

    def _live(self, worker: Worker, end: Callable[[], None]) -> None:
        """Use the fabric until its end."""
        worker.go()
        try:
            time.sleep(self._dice.uniform(0.0, self._options.life_s))
            self._await_commit()
            if (code := self._lives.died_of()) is not None:
                self.ledger.violations.append(f"the fabric ended by itself, with {code}")
            self.counts["with puts under way"] += worker.puts_under_way > 0
            end()
        finally:
            worker.rest()
        self.kills += 1

    def _await_commit(self) -> None:
        """Wait for the first commit of all: an earlier outage has nothing to lose."""
        until_s = time.monotonic() + START_S
        while not self.ledger.counts["committed"] and time.monotonic() < until_s:
            time.sleep(0.01)

    def _end(self) -> None:
        self._lives.end(cut_to_kill_s=self._dice.choice((0.0, 0.05)))

    def _end_early(self) -> None:
        """End it once more, while it starts."""
        usual_s = statistics.median(self._lives.starts_s)
        self._lives.start_and_end(after_s=self._dice.uniform(0.3 * usual_s, usual_s))
        self.kills += 1
        self.counts["before it was ready"] += 1

    def _end_in_formatting(self) -> None:
        """End a new fabric in formatting; it must start all the same."""
        new = self._home / "new"
        lives = Lives(new, self._options.directory / "new.log", NEW_SHAPE, self._disk)
        try:
            self.counts["in formatting"] += lives.start_and_end_in_formatting(
                after_s=self._dice.uniform(0.0, 0.01)
            )
            self.kills += 1
            lives.start()
        finally:
            lives.leave()
        shutil.rmtree(new)

    def _look(self, worker: Worker, reader: FlashReader) -> None:
        """See what flash lists, and what that means."""
        if self._options.tamper is not None:
            self._options.tamper(self._lives.directory)
        reader.know(worker.put_ever)
        seen, wrong = reader.look()
        before = self.ledger.counts["listed, and never acknowledged"]
        self.ledger.see(seen)
        after = self.ledger.counts["listed, and never acknowledged"]
        self.counts["between a summary and its answer"] += after > before
        if self._options.is_strict:
            self.ledger.violations += [f"LISTED BEFORE ITS BYTES: {words}" for words in wrong[:8]]

    def _check(self, worker: Worker) -> None:
        """Hold a fabric that has just started to what flash listed."""
        self.whole_s.append(worker.come_back())
        listed = sorted(self.ledger.listed)
        others = self._dice.sample(listed, min(len(listed), GET_AFTER_START))
        worker.get_all(sorted({*listed[-GET_AFTER_START:], *others}))

    def _tell(self, worker: Worker) -> None:
        self._outcomes = worker.outcomes
        if time.monotonic() > self._told_s + PROGRESS_S:
            self._told_s = time.monotonic()
            print(self.progress(), flush=True)

    def progress(self) -> str:
        """Say how it stands."""
        counts = self.ledger.counts
        return (
            f"{time.monotonic() - self._begun_s:5.0f} s: {self.kills} outages, "
            f"{counts['committed']:,} blocks committed, {counts['evicted']:,} evicted, "
            f"{len(self.ledger.listed):,} on flash, {len(self.ledger.violations)} violations"
        )

    def summary(self) -> str:
        """Say what was done and seen."""
        lines = [self.progress(), "outages:"]
        lines += [f"  {count:9,} {name}" for name, count in sorted(self.counts.items())]
        lines.append("blocks:")
        lines += [f"  {count:9,} {name}" for name, count in sorted(self.ledger.counts.items())]
        lines.append("answers:")
        lines += [f"  {count:9,} {name}" for name, count in self._outcomes.most_common()]
        for name, times in (("ready line", self._lives.starts_s), ("answer for every block", self.whole_s)):
            if times:
                lines.append(
                    f"to the {name}: median {statistics.median(times):.3f} s, longest {max(times):.3f} s"
                )
        return "\n".join(lines)
