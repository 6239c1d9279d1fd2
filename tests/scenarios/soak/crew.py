"""The processes of a soak: a fabric, its workers, and what is known of each.

Whoever stops, kills or cuts them does it here, so that what follows is not held against them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import msgspec
from tests.scenarios.soak.worker import Task, Told, work
from tests.support.fabric.fabric_host import FabricProcess

_spawn = multiprocessing.get_context("spawn")

GROWTH_SHARE, GROWTH_BYTES = 1.3, 64 << 20
"""A process may grow by so much after its first minute."""

WARM_S = 60.0

_decode = msgspec.json.Decoder(Told, dec_hook=lambda kind, value: kind(value)).decode
"""Counters travel as the objects they are."""


@dataclass
class Growth:
    """How large a process is."""

    begun_s: float = field(default_factory=time.monotonic)
    warm_bytes: int = 0
    now_bytes: int = 0

    def look(self, pid: int) -> None:
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return
        self.now_bytes = pages * os.sysconf("SC_PAGE_SIZE")
        if not self.warm_bytes and time.monotonic() - self.begun_s > WARM_S:
            self.warm_bytes = self.now_bytes

    @property
    def is_too_much(self) -> bool:
        limit = self.warm_bytes * GROWTH_SHARE + GROWTH_BYTES
        return bool(self.warm_bytes) and self.now_bytes > limit


class Watched(Protocol):
    """A process of the soak."""

    name: str
    growth: Growth

    @property
    def pid(self) -> int:
        """The process."""

    def died_of(self) -> str | None:
        """Return how it ended, when nobody ended it."""


class Fabric:
    """The agents, all in one process."""

    def __init__(self, directory: Path, *, agents: int, transport: str) -> None:
        self.name = "the fabric"
        self.directory = directory
        shape = ("--agents", str(agents), "--drives", "2", "--capacity", "520MiB", "--dram", "48MiB")
        only = ("--transport", transport) if transport == "inline" else ()
        self.process = FabricProcess(directory, *shape, *only)
        self.addresses = tuple(f"unix://{directory}/agent-{number}.sock" for number in range(agents))
        self.growth = Growth()
        self.restarts = 0

    @property
    def pid(self) -> int:
        assert self.process.process is not None
        return self.process.process.pid

    def start(self) -> None:
        self.process.start()
        self.growth = Growth()

    def restart(self) -> None:
        self.process.start()
        self.growth = Growth()
        self.restarts += 1

    def died_of(self) -> str | None:
        """Return how it ended, when nobody ended it."""
        assert self.process.process is not None
        code = self.process.process.poll()
        return None if code is None else f"{self.name} ended with {code}"

    def crashes(self) -> list[str]:
        """Return the lines of its log that tell of a bug."""
        words = self.process.log.read_text().splitlines()
        return [line for line in words if "Traceback" in line or " bug" in line or "rror:" in line]


class Worker:
    """One place of a worker; its process is replaced when it was killed."""

    def __init__(self, number: int, task: Task) -> None:
        self.name = f"worker {number}"
        self.number = number
        self.restarts = -1
        self.growth = Growth()
        self.stopped: list[tuple[float, float]] = []
        """When it was stopped, and when it went on, on the monotonic clock."""
        self._task = task
        self._reports: list[Path] = []
        self.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self) -> None:
        self.restarts += 1
        report = self._task.report.with_name(f"worker-{self.number}-{self.restarts}.json")
        report.touch()
        self._reports.append(report)
        self._is_over = _spawn.Event()
        task = replace(self._task, report=report, seed=(*self._task.seed, self.restarts))
        self._process = _spawn.Process(target=work, args=(task, self._is_over), daemon=True)
        self._process.start()
        self.growth = Growth()

    def stop_for(self, seconds: float) -> None:
        begun_s = time.monotonic()
        os.kill(self.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.pid, signal.SIGCONT)
        self.stopped.append((begun_s, time.monotonic()))

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.start()

    def died_of(self) -> str | None:
        """Return how it ended, when nobody ended it."""
        code = self._process.exitcode
        return None if code is None else f"{self.name} ended with {code}"

    def silent_s(self) -> float:
        """Return since when it has told nothing."""
        return time.time() - self._reports[-1].stat().st_mtime

    def where(self) -> str:
        """Return where its threads are now."""
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self._reports[-1].with_suffix(".stacks").read_text()

    def finish(self, within_s: float) -> str | None:
        """Have it end in good order; return what is wrong with how it did."""
        self._is_over.set()
        self._process.join(within_s)
        code = self._process.exitcode
        if code is None:
            where = self.where()
            self._process.kill()
            return f"{self.name} does not end:\n{where}"
        if code:
            return f"{self.name} ended with {code}"
        last = self.told()[-1]
        if not last.is_last or last.quarantined_bytes:
            return f"{self.name} keeps {last.quarantined_bytes} bytes in quarantine"
        return None

    def leave(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self._process.join()

    def told(self) -> list[Told]:
        """Return the last that each of its processes told."""
        return [_decode(said) for report in self._reports if (said := report.read_bytes())]

    def kept_waiting_s(self, begun_s: float, took_s: float) -> float:
        """Return how long of that time it was stopped."""
        ended_s = begun_s + took_s
        return sum(max(0.0, min(ended_s, until_s) - max(begun_s, from_s)) for from_s, until_s in self.stopped)
