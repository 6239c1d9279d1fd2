"""The thread that owns a NIXL agent.

The thread never spins for long. With transfers under way, the thread polls a few times in a row.
Then it sleeps between polls for a sixteenth of the time since the last event, 50 µs to 5 ms. Waits grow by a
few per cent, and a stopped peer costs almost no time. Without transfers, the thread waits for jobs and makes
progress on a slow tick, for the sake of connections.

A transfer whose end NIXL can't tell is kept forever, unpolled and unreleased: its memory stays in
quarantine.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from ostraca_fabric.nixl.runtime import NixlAgent, Transfer, TransferState
from ostraca_fabric.runtime.threads import show_name

T = TypeVar("T")

POLLS_IN_A_ROW = 20
PAUSE_S_MIN = 50e-6
PAUSE_S_MAX = 5e-3
PAUSE_SHARE = 16
IDLE_TICK_S = 0.05
LOOK_S = 5e-4
"""Between two looks for blocks that streams wait for: a look costs the event loop its interpreter."""

STEPS_AT_ONCE = 8
"""Streams that the thread looks at between two polls: their number must not delay transfers."""
STUCK_S = 5.0
"""Limit for a NIXL call at shutdown. A longer call is abandoned, since it may never return."""


class NixlThread:
    """Exclusive owner of *agent*: no other thread may call the agent."""

    def __init__(self, agent: NixlAgent) -> None:
        self.agent = agent
        self._jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._inflight: list[tuple[Transfer, Callable[[TransferState], None]]] = []
        self._steps: deque[Callable[[], bool]] = deque()
        self._unknown: list[Transfer] = []
        self._stop_at_s: float | None = None
        self._last_event_s = 0.0
        self._polls_left = 0
        # A daemon thread lets a process end without closing the transport.
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], object]) -> None:
        """Run *job* in the thread, after earlier jobs.

        The job must not raise, nor block for long.
        """
        self._jobs.put(job)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run *function* in the thread; the future has the result or exception."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 (raised where the result is awaited)
                future.set_exception(error)

        self.submit(job)
        return future

    def post(
        self, transfer: Transfer, ended: Callable[[TransferState], None], *, spin_s: float = 0.0
    ) -> bool:
        """Start a transfer; call only from a job.

        *ended* is called once, in the thread, never with PENDING. After UNKNOWN, the transfer counts as
        under way forever. After any other state, the transfer has ended and is released. The call spins up
        to *spin_s* (a fraction of a millisecond) for the end; returns whether the end came in this time.
        """
        self._note_event()
        state = self.agent.post(transfer)
        until_s = time.monotonic() + spin_s
        while state is TransferState.PENDING and time.monotonic() < until_s:
            state = self.agent.poll(transfer)
        if self._settle(transfer, state, ended):
            return True
        self._inflight.append((transfer, ended))
        return False

    def repeat(self, step: Callable[[], bool]) -> None:
        """Run *step* in the thread again and again, as often as the thread polls, until False.

        The step must not raise, nor block for longer than the start of a transfer.
        """
        self.submit(partial(self._steps.append, step))

    def stop(self, *, wait_s: float) -> bool:
        """Run submitted jobs, then end the thread. Blocks.

        Transfers under way get up to *wait_s*. Returns whether every transfer has ended. Only then may the
        agent be released and its memory reused. A thread blocked in NIXL for ``STUCK_S`` longer is
        abandoned.
        """

        def job() -> None:
            self._stop_at_s = time.monotonic() + wait_s

        self.submit(job)
        self._thread.join(wait_s + STUCK_S)
        return not self._thread.is_alive() and not self._inflight and not self._unknown

    def _run(self) -> None:
        show_name("nixl")
        while True:
            job = self._next_job()
            if job is not None:
                job()
            self._run_steps()
            if self._inflight:
                self._poll()
            elif job is None:
                self.agent.progress()
            is_busy = self._inflight or self._steps
            if self._stop_at_s is not None and (not is_busy or time.monotonic() >= self._stop_at_s):
                return

    def _next_job(self) -> Callable[[], object] | None:
        try:
            if not self._inflight and not self._steps:
                return self._jobs.get(timeout=0.0 if self._stop_at_s is not None else IDLE_TICK_S)
            if not self._inflight:
                has_begun, self._polls_left = self._polls_left > 0, 0
                return self._jobs.get_nowait() if has_begun else self._jobs.get(timeout=LOOK_S)
            if self._polls_left > 0:
                self._polls_left -= 1
                return self._jobs.get_nowait()
            quiet_s = time.monotonic() - self._last_event_s
            return self._jobs.get(timeout=min(max(quiet_s / PAUSE_SHARE, PAUSE_S_MIN), PAUSE_S_MAX))
        except Empty:
            return None

    def _run_steps(self) -> None:
        for _ in range(min(len(self._steps), STEPS_AT_ONCE)):
            step = self._steps.popleft()
            if step():
                self._steps.append(step)

    def _poll(self) -> None:
        inflight, self._inflight = self._inflight, []
        for transfer, ended in inflight:
            if not self._settle(transfer, self.agent.poll(transfer), ended):
                self._inflight.append((transfer, ended))
        if len(self._inflight) < len(inflight):
            self._note_event()

    def _settle(
        self, transfer: Transfer, state: TransferState, ended: Callable[[TransferState], None]
    ) -> bool:
        """Handle a transfer's state; return whether polling is finished."""
        if state is TransferState.PENDING:
            return False
        if state is TransferState.UNKNOWN:
            self._unknown.append(transfer)
        else:
            self.agent.release(transfer)
            if state is TransferState.FAILED:
                # The endpoint is closed now; let earlier received data be processed.
                self.agent.progress()
        ended(state)
        return True

    def _note_event(self) -> None:
        self._last_event_s = time.monotonic()
        self._polls_left = POLLS_IN_A_ROW


def soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """Call a function in the loop's thread, after earlier calls."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
        loop.call_soon_threadsafe(function, *arguments)
