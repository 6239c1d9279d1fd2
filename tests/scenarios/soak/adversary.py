"""What befalls the processes and the flash of a soak, drawn from a seed."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable

import pytest
from tests.contract.network.sockets import cut_connection_to, cut_internet
from tests.scenarios.soak.crew import Fabric, Worker
from tests.support.fabric.fabric_host import drive_files, overwrite

MIB = 1 << 20
FIRST_BYTE = 1 * MIB
"""What lies before is the drive's own label, without which it would not be the same drive."""


class Adversary:
    """Does one thing at a time."""

    def __init__(self, fabric: Fabric, workers: list[Worker], *, seed: int) -> None:
        self.done: Counter[str] = Counter()
        self._fabric = fabric
        self._workers = workers
        self._dice = random.Random(seed)
        self._deeds: list[tuple[int, Callable[[], None]]] = [
            (4, self.stop_agents),
            (1, self.kill_agents),
            (4, self.stop_worker),
            (2, self.kill_worker),
            (4, self.cut_worker_off),
            (2, self.cut_data_plane),
            (3, self.flip_bits),
            (1, self.truncate_drive),
            (1, self.fill_disk),
        ]

    def act(self) -> None:
        """Do something, and wait for a while."""
        weights = [weight for weight, _ in self._deeds]
        _, deed = self._dice.choices(self._deeds, weights)[0]
        self.done[deed.__name__] += 1
        with contextlib.suppress(pytest.skip.Exception):  # this machine does not let us
            deed()
        time.sleep(self._dice.uniform(0.1, 1.5))

    def stop_agents(self) -> None:
        self._fabric.process.signal(signal.SIGSTOP)
        time.sleep(self._dice.choice((0.02, 0.2, 1.0)))
        self._fabric.process.signal(signal.SIGCONT)

    def kill_agents(self) -> None:
        self._fabric.process.kill()
        time.sleep(self._dice.choice((0.0, 0.5)))
        self._fabric.restart()

    def stop_worker(self) -> None:
        self._worker().stop_for(self._dice.choice((0.02, 0.2, 1.0, 3.0)))

    def kill_worker(self) -> None:
        self._worker().kill()

    def cut_worker_off(self) -> None:
        worker = self._worker()
        for address in self._fabric.addresses:
            cut_connection_to(worker.pid, address.removeprefix("unix://"))

    def cut_data_plane(self) -> None:
        cut_internet(self._dice.choice((self._worker().pid, self._fabric.pid)))

    def flip_bits(self) -> None:
        for path in drive_files(self._fabric.directory):
            for _ in range(self._dice.randrange(40)):
                place = self._dice.randrange(FIRST_BYTE, path.stat().st_size)
                with path.open("rb") as file:
                    file.seek(place)
                    byte = file.read(1)[0]
                overwrite(path, place, bytes([byte ^ 1 << self._dice.randrange(8)]))

    def truncate_drive(self) -> None:
        path = self._dice.choice(drive_files(self._fabric.directory))
        size = path.stat().st_size
        os.truncate(path, self._dice.randrange(FIRST_BYTE, size))
        time.sleep(self._dice.choice((0.1, 1.0)))
        os.truncate(path, size)

    def fill_disk(self) -> None:
        _, hard = resource.prlimit(self._fabric.pid, resource.RLIMIT_FSIZE)
        with contextlib.suppress(ProcessLookupError):
            limit = self._dice.randrange(FIRST_BYTE, 64 * MIB)
            resource.prlimit(self._fabric.pid, resource.RLIMIT_FSIZE, (limit, hard))
            time.sleep(self._dice.choice((0.2, 1.0)))
            resource.prlimit(self._fabric.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))

    def _worker(self) -> Worker:
        return self._dice.choice(self._workers)
