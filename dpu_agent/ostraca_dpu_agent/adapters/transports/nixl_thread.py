"""The thread that owns a NIXL agent.

The thread never spins for long. With transfers under way, the thread polls a few times in a row.
Then it sleeps between polls for a sixteenth of the time since the last event, 50 µs to 5 ms. Waits grow by a
few per cent, and a stopped peer costs almost no time. Without transfers, the thread waits for jobs and makes
progress on a slow tick, for the sake of connections.

A transfer whose end NIXL can't tell is kept forever, unpolled and unreleased: its memory stays in
quarantine.

Waves of streams begin in the thread.
A stream costs the event loop no turn per wave. The thread looks for ready blocks itself, every ``LOOK_S``,
begins their waves, and gathers the news. The worker is told in the thread: about the first wave at once, so
that checks begin, then about each quarter of the blocks, and less at the end: half of the rest, at least a
sixteenth of all. News of slow waves is told sooner, after pauses of at least four milliseconds and half of
the stream's time so far. The loop hears of the end alone. Blocks from a worker go straight to their receiver.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.nixl.runtime import NixlAgent, Transfer, TransferState
from ostraca_fabric.ports.transport import TransferEnd, WaveNews
from ostraca_fabric.runtime.threads import show_name
from ostraca_fabric.tables.slots import WaveQueue

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


Report = Callable[[Sequence[WaveNews]], object]
Tell = Callable[[Sequence[WaveNews]], bool]
Arrived = Callable[[int, int], None]

NEWS_PER_STREAM, NEWS_MAX = 4, 16
NEWS_S = 4e-3


class NixlStream:
    """Stream whose waves begin in the thread of NIXL: implements ``ports.transport.WaveStream``."""

    def __init__(
        self,
        thread: NixlThread,
        begin: Callable[[NDArray[np.intp], Callable[[TransferEnd | None], None]], bool],
        queue: WaveQueue,
        clock: Callable[[], float],
        report: Report,
        tell: Tell,
        arrived: Arrived | None,
    ) -> None:
        """Begin no wave yet. *begin* is ``NixlPeer.begin``. With *arrived*, nothing is told nor reported."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._thread = thread
        self._begin = begin
        self._queue = queue
        self._clock = clock
        self._report = report
        self._tell = tell
        self._arrived = arrived
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._news: list[WaveNews] = []
        self._fails = False
        self._is_known = True
        self._is_stopped = self._is_reporting = False
        """Whether the loop is about to take the news."""

        self._told_s = self._begun_s = time.monotonic()
        self._told = self._untold = 0
        """Settled blocks before and since the last news."""

    def look(self) -> None:
        """Wake the thread."""
        self._thread.submit(_nothing)

    def freeze(self) -> NDArray[np.uint8]:
        """Let no further block become ready, as the port specifies."""
        with self._lock:
            was_over, states = self._queue.is_over, self._queue.freeze()
        if not was_over:
            self.look()
        return states

    def stop(self) -> NDArray[np.intp]:
        """Begin no further wave, as the port specifies."""
        with self._lock:
            rows, self._is_stopped = self._queue.stop(), True
        self.look()
        return rows

    def take_news(self) -> Sequence[WaveNews]:
        """Return the news neither told nor reported so far."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def fail(self) -> None:
        """Let all further waves fail."""
        self._fails = True

    def step(self) -> bool:
        """Begin a wave, if one is ready, and have news told; return whether to go on. Runs in the thread."""
        with self._lock:
            taken = self._queue.take()
            if taken is not None and self._arrived is None:
                self._news.append(WaveNews(self._clock(), taken[1], None))
        if taken is not None:
            number, rows = taken
            if self._fails:
                self._settle(number, TransferEnd.FAILED)
            else:
                self._begin(rows, partial(self._settle, number))
        is_last = self._is_over() or not self._is_known
        if is_last and self._told and self._news:
            self._has_told()
        if is_last or (self._is_due() and not self._has_told()):
            self._is_reporting = True
            soon(self._loop, self._give_news)
        return not is_last

    def _settle(self, number: int, end: TransferEnd | None) -> None:
        if end is None:
            self._is_known = False
            return
        with self._lock:
            rows = self._queue.settle(number)
            if self._arrived is None:
                self._news.append(WaveNews(self._clock(), rows, end))
        if self._arrived is None:
            self._untold += len(rows)
        elif end is TransferEnd.DONE:
            self._arrived(int(rows[0]), int(rows[-1]) + 1)

    def _is_over(self) -> bool:
        with self._lock:
            return self._queue.is_over

    def _is_due(self) -> bool:
        """Return whether to tell the news now; if so, begin to gather the next."""
        now_s = time.monotonic()
        if not self._news or self._is_reporting:
            self._told_s = now_s
            return False
        blocks = len(self._queue)
        wanted = 1.0
        if self._told:
            wanted = max(blocks / NEWS_MAX, min(blocks / NEWS_PER_STREAM, (blocks - self._told) / 2))
        pause_s = max(NEWS_S, (now_s - self._begun_s) / 2)
        if self._untold < wanted and now_s - self._told_s <= pause_s:
            return False
        self._told += self._untold
        self._untold, self._told_s = 0, now_s
        return True

    def _has_told(self) -> bool:
        """Tell the news in this thread, unless the stream has been stopped; return whether told."""
        with self._lock:
            if self._is_stopped or not self._tell(self._news):
                return False
            self._news = []
            return True

    def _give_news(self) -> None:
        """Report the news, on the event loop; then end if over."""
        self._is_reporting = False
        is_over = self._is_over()  # before: later news belongs to no ended stream
        try:
            if news := self.take_news():
                self._report(news)
        finally:
            if is_over and not self.ended.done():
                self.ended.set_result(None)


def _nothing() -> None:
    """Do nothing but wake the thread."""
