"""Streams of blocks whose waves begin in the thread of NIXL.

A stream costs the event loop no turn per wave. The thread looks for ready blocks itself, every ``LOOK_S``,
begins their waves, and gathers the news. The worker is told in the thread: about the first wave at once, so
that checks begin, then about each quarter of the blocks, and less at the end: half of the rest, at least a
sixteenth of all. News of slow waves is told sooner, after pauses of at least four milliseconds and half of
the stream's time so far. The loop hears of the end alone. Blocks from a worker go straight to their receiver.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.adapters.transports.nixl_thread import NixlThread, soon
from ostraca_fabric.ports.transport import TransferEnd, WaveNews
from ostraca_fabric.tables.slots import WaveQueue

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
