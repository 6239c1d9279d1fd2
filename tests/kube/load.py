"""Load of workers during a scenario: new chains, and gets of chains that are known to be committed."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Self

from tests.kube.workers import PodWorker

_CHAINS_PER_TURN = 4
_PAUSE_S = 0.25
_JOIN_S = 60.0
_FIRST_CHAIN = 1000
_CHAINS_PER_WORKER = 100_000


class Load:
    """One thread per worker, from the begin to the end of a ``with`` block."""

    def __init__(self, workers: Sequence[PodWorker]) -> None:
        """Prepare load by workers; nothing else may use these workers meanwhile."""
        self.committed: list[int] = []
        """Chains that are whole and committed."""

        self.gets = 0
        self.puts = 0
        self.declined = 0
        self.missed = 0
        self._ends = threading.Event()
        self._workers = workers
        self._errors: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number, worker), name=f"load-{number}")
            for number, worker in enumerate(workers)
        ]

    def __enter__(self) -> Self:
        """Start all threads."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End all threads; raise the first error of a worker."""
        self._ends.set()
        for thread in self._threads:
            thread.join(_JOIN_S)
        if self._errors:
            raise self._errors[0]

    @property
    def reasons(self) -> Counter[str]:
        """Reasons of all misses."""
        return sum((worker.reasons for worker in self._workers), Counter())

    def __str__(self) -> str:
        text = f"{self.puts} puts ({self.declined} declined), {self.gets} gets ({self.missed} missed)"
        reasons = ", ".join(f"{name} {count}" for name, count in self.reasons.most_common())
        return f"{text}: {reasons}" if reasons else text

    def _run(self, number: int, worker: PodWorker) -> None:
        dice = random.Random(number)
        chain = _FIRST_CHAIN + number * _CHAINS_PER_WORKER
        try:
            while not self._ends.wait(_PAUSE_S):
                new = range(chain, chain + _CHAINS_PER_TURN)
                chain = new.stop
                done = worker.put(new)
                self.committed += done
                self.puts += len(new)
                self.declined += len(new) - len(done)
                known = dice.sample(self.committed, min(_CHAINS_PER_TURN, len(self.committed)))
                self.gets += len(known)
                self.missed += len(worker.missing(known))
        except Exception as error:  # noqa: BLE001 - the thread's end hands the error to the scenario
            self._errors.append(error)
