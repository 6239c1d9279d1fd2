"""One worker process of a soak: random verified operations through one of the front ends.

What it saw goes to a file, line by line, so that nothing is lost when it is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path

import msgspec
from tests.scenarios.soak.traffic import BLOCK_BYTES, LAYOUT, RegionTraffic, Tally, Traffic
from tests.sdk.front_ends import FRONT_ENDS, Taker, submitting
from tests.support.stalls import stalls

import ostraca
from ostraca.settings import ClientSettings

MIB = 1 << 20
VOLUMES = ("a", "b")
THREADS = 2
"""Of each worker, over one client."""

STEPS_PER_CLIENT = 400
"""After so many operations of a thread the client is closed, and another connects; but not while slots are in
quarantine: the arena of such a client stays mapped for good, and the process would rightly grow."""

REPORT_S = 0.5
_QUARANTINE_BYTES_MAX = 8 * MIB
_WITHHELD_MAX = 2 * _QUARANTINE_BYTES_MAX // BLOCK_BYTES
"""Rows: each withheld row has a slot in quarantine, and operations under way may pass the limit."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is to do."""

    addresses: tuple[str, ...]
    transports: tuple[str, ...]
    tenant: str
    front_end: str
    seed: tuple[int, ...]
    blocks: int
    report: Path
    rest_s: float = 0.0
    """After each operation of a thread."""

    enters: Callable[[], None] | None = None
    """Takes the process to the host that it is to be on, before it does anything."""


@dataclass(frozen=True, slots=True)
class Told:
    """A line of a worker's file: everything it has seen by then."""

    tally: Tally
    is_last: bool
    quarantined_bytes: int | None


def work(task: Task, is_over: Event) -> None:
    """Work until told that it is over; then wait until nothing is in quarantine, and say so.

    SIGUSR1 has it write down where its threads are.
    """
    if task.enters is not None:
        task.enters()
    stacks = task.report.with_suffix(".stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    # A Ctrl-C at the terminal is for the soak, which ends its workers in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = _Report(task.report)
    turn = 0
    while not is_over.is_set():
        turn += 1
        with _connected(task, is_over) as client:
            if client is None:
                break
            _use(client, task, turn, is_over, report)
            if is_over.is_set():
                report.quarantined(_quarantined_bytes_at_last(client, task))
    report.write(is_last=True)


def _use(client: ostraca.Client, task: Task, turn: int, is_over: Event, report: _Report) -> None:
    front_end = FRONT_ENDS[task.front_end]
    if task.front_end == "submitting":
        front_end = partial(submitting, taker=Taker(client))
    with contextlib.ExitStack() as stack:
        volumes = [stack.enter_context(front_end(client, _volume(client, name))) for name in VOLUMES]
        has_regions = sum(task.seed) % 3 == 0
        make = partial(RegionTraffic, client, withheld_max=_WITHHELD_MAX) if has_regions else Traffic
        traffics = [
            make(volumes, seed=(*task.seed, turn, number), blocks=task.blocks, stalls=stalls)
            for number in range(THREADS)
        ]
        report.watch([traffic.tally for traffic in traffics])
        with ThreadPoolExecutor(THREADS) as threads:
            for _ in threads.map(lambda traffic: _step(client, task, traffic, is_over, report), traffics):
                pass


def _step(client: ostraca.Client, task: Task, traffic: Traffic, is_over: Event, report: _Report) -> None:
    steps = 0
    while not is_over.is_set() and (steps < STEPS_PER_CLIENT or client.quarantined_bytes):
        steps += 1
        traffic.step()
        report.write()
        if task.rest_s:
            is_over.wait(task.rest_s)


@contextlib.contextmanager
def _connected(task: Task, is_over: Event) -> Iterator[ostraca.Client | None]:
    """Yield a client with its volumes open; None when it is over before an agent answers."""
    settings = ClientSettings(
        arena_bytes=16 * MIB,
        chunk_bytes=4 * MIB,
        quarantine_bytes_max=_QUARANTINE_BYTES_MAX,
        transports=task.transports,
        direct_memory=sum(task.seed) % 2 == 0,
    )
    while not is_over.is_set():
        try:
            client = ostraca.connect(task.addresses, tenant=task.tenant, settings=settings)
        except ostraca.ConnectError:
            is_over.wait(0.05)
            continue
        with client:
            try:
                for name in VOLUMES:
                    _volume(client, name)
            except ostraca.ConnectError:
                continue
            yield client
        return
    yield None


def _volume(client: ostraca.Client, name: str) -> ostraca.Volume:
    return client.volume(name, LAYOUT, block_bytes=BLOCK_BYTES, create=True)


def _quarantined_bytes_at_last(client: ostraca.Client, task: Task) -> int:
    """Let whatever still moves end; return what is in quarantine after that."""
    until_s = time.monotonic() + 10
    while client.quarantined_bytes and time.monotonic() < until_s:
        with contextlib.suppress(ostraca.ConnectError):
            client.status(timeout_s=0.5)
    return client.quarantined_bytes


class _Report:
    """The file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._past = Tally()
        self._watched: list[Tally] = []
        self._written_s = 0.0
        self._quarantined_bytes: int | None = None

    def watch(self, tallies: list[Tally]) -> None:
        """Count these from now on, and keep what those before them counted."""
        with self._lock:
            for tally in self._watched:
                self._past.add(tally)
            self._watched = tallies

    def quarantined(self, quarantined_bytes: int) -> None:
        self._quarantined_bytes = quarantined_bytes

    def write(self, *, is_last: bool = False) -> None:
        """Say how it stands, if it is time to."""
        with self._lock:
            if not is_last and time.monotonic() < self._written_s + REPORT_S:
                return
            self._written_s = time.monotonic()
            whole = Tally()
            for tally in (self._past, *self._watched):
                whole.add(tally)
            told = Told(whole, is_last, self._quarantined_bytes)
            # In place of the last: what a run of an hour has told would take longer to read than to do.
            newest = self._path.with_suffix(".newest")
            newest.write_bytes(msgspec.json.encode(told))
            newest.replace(self._path)
