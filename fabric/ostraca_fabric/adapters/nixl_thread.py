"""The one thread that owns a NIXL agent: it runs what others hand it, posts transfers and polls them.

It never spins for long. While transfers are out it polls a few times in a row, then sleeps between polls for
a sixteenth of the time since anything last happened, 50 µs to 5 ms: a wait is lengthened by a few per cent,
and a peer that has stopped for good costs next to nothing. When nothing is out it waits for work and makes
progress on a slow tick, for the sake of connections.

A transfer whose end NIXL can't tell is kept for ever, unpolled and unreleased: its memory stays in
quarantine.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from ostraca_fabric.adapters.nixl_runtime import State
from ostraca_fabric.threads import show_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_fabric.adapters.nixl_runtime import NixlAgent, Transfer

T = TypeVar("T")

POLLS_IN_A_ROW = 20
PAUSE_S_MIN = 50e-6
PAUSE_S_MAX = 5e-3
PAUSE_SHARE = 16
IDLE_TICK_S = 0.05
STUCK_S = 5.0
"""A call to NIXL that takes so long when all is to end is not waited for: it may never come back."""


class NixlThread:
    """Owns *agent* from here on: nobody else calls it."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._flying: list[tuple[Transfer, Callable[[State], None]]] = []
        self._unknown: list[Transfer] = []
        self._stop_at_s: float | None = None
        self._last_event_s = 0.0
        self._polls_left = 0
        # A daemon, so that a process that forgets to close its transport still ends.
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], object]) -> None:
        """Run *job* in the thread, after those submitted before. It must not raise, nor block for long."""
        self._jobs.put(job)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run *function* in the thread; the future gives its result or its exception."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 (it is raised where the result is awaited)
                future.set_exception(error)

        self.submit(job)
        return future

    def post(self, transfer: Transfer, ended: Callable[[State], None], *, spin_s: float = 0.0) -> bool:
        """Start a transfer; only from a job. *ended* is called once, in the thread, never with PENDING.

        When it is UNKNOWN the transfer is as good as under way for ever. Otherwise it has ended and is
        released. Spins up to *spin_s* (a fraction of a millisecond) for the end, and tells whether it came
        in that time.
        """
        self._something_happened()
        state = self._agent.post(transfer)
        until_s = time.monotonic() + spin_s
        while state is State.PENDING and time.monotonic() < until_s:
            state = self._agent.poll(transfer)
        if self._settle(transfer, state, ended):
            return True
        self._flying.append((transfer, ended))
        return False

    def stop(self, *, wait_s: float) -> bool:
        """Run what is submitted, give transfers under way up to *wait_s*, then end the thread. Blocks.

        Tells whether every transfer has ended. Only then may the agent be let go and its memory be used anew.
        A thread that NIXL keeps for ``STUCK_S`` longer is left to itself.
        """

        def job() -> None:
            self._stop_at_s = time.monotonic() + wait_s

        self.submit(job)
        self._thread.join(wait_s + STUCK_S)
        return not self._thread.is_alive() and not self._flying and not self._unknown

    def _run(self) -> None:
        show_name("nixl")
        while True:
            job = self._next_job()
            if job is not None:
                job()
            if self._flying:
                self._poll()
            elif job is None:
                self._agent.progress()
            if self._stop_at_s is not None and (not self._flying or time.monotonic() >= self._stop_at_s):
                return

    def _next_job(self) -> Callable[[], object] | None:
        try:
            if not self._flying:
                return self._jobs.get(timeout=0.0 if self._stop_at_s is not None else IDLE_TICK_S)
            if self._polls_left > 0:
                self._polls_left -= 1
                return self._jobs.get_nowait()
            quiet_s = time.monotonic() - self._last_event_s
            return self._jobs.get(timeout=min(max(quiet_s / PAUSE_SHARE, PAUSE_S_MIN), PAUSE_S_MAX))
        except Empty:
            return None

    def _poll(self) -> None:
        flying, self._flying = self._flying, []
        for transfer, ended in flying:
            if not self._settle(transfer, self._agent.poll(transfer), ended):
                self._flying.append((transfer, ended))
        if len(self._flying) < len(flying):
            self._something_happened()

    def _settle(self, transfer: Transfer, state: State, ended: Callable[[State], None]) -> bool:
        """Deal with a transfer's state; tell whether there is nothing more to poll."""
        if state is State.PENDING:
            return False
        if state is State.UNKNOWN:
            self._unknown.append(transfer)
        else:
            self._agent.release(transfer)
            if state is State.FAILED:
                # The endpoint is closed by now; let what had been received before be done with.
                self._agent.progress()
        ended(state)
        return True

    def _something_happened(self) -> None:
        self._last_event_s = time.monotonic()
        self._polls_left = POLLS_IN_A_ROW
