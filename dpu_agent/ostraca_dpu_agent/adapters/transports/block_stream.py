"""Streams of blocks to a worker: which blocks form the next wave, and news of waves.

A stream has two sides. The event loop opens the stream, freezes or stops it, and gets news. The *mover*
begins and settles waves: the event loop as well (``SubmittedStream``), or a thread of the transport. The
flash I/O engine writes the states of blocks meanwhile. They are read without a lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.ports.transport import Direction, TransferEnd, WaveNews, WaveStream
from ostraca_fabric.tables.digests import PieceState
from ostraca_fabric.tables.slots import Wave

_MOVES_AHEAD = 2
"""Waves of a stream under way at once."""

_GOOD = int(PieceState.GOOD)  # an enum's member costs microseconds

_NO_ROWS = np.empty(0, np.intp)

Report = Callable[[Sequence[WaveNews]], None]


class BlockStream:
    """State of a stream: implements ``ports.transport.WaveStream`` but for ``look``."""

    def __init__(
        self,
        blocks: Wave,
        states: NDArray[np.uint8] | None,
        *,
        per_wave: int,
        clock: Callable[[], float],
        report: Report,
    ) -> None:
        """Begin without a wave; the arguments are those of ``RemoteArena.stream``."""
        count = len(blocks.lengths)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._blocks = blocks
        self._states = np.full(count, _GOOD, np.uint8) if states is None else states
        self._is_frozen = states is None
        self._is_stopped = False
        self._per_wave = per_wave
        self._clock = clock
        self._report = report
        self._lock = threading.Lock()
        self._is_begun = np.zeros(count, np.bool_)
        self._begun = 0
        self._waves = 0
        self._under_way: dict[int, NDArray[np.intp]] = {}
        self._news: list[WaveNews] = []

    def look(self) -> None:
        """Have the mover look for ready blocks, and for the end."""
        raise NotImplementedError

    def freeze(self) -> NDArray[np.uint8]:
        """Let no further block become ready, as the port specifies."""
        with self._lock:
            self._states = self._states.copy()
            self._is_frozen = True
        self.look()
        return self._states

    def stop(self) -> NDArray[np.intp]:
        """Begin no further wave, as the port specifies."""
        with self._lock:
            self._is_stopped = True
            rows = np.concatenate((_NO_ROWS, *self._under_way.values()))
        self.look()
        return rows

    def _next_wave(self) -> tuple[int, Wave] | None:
        """Take the next wave, if it may begin now; return its number and blocks. Call by the mover."""
        with self._lock:
            if self._is_stopped or len(self._under_way) >= _MOVES_AHEAD:
                return None
            ready = self._ready()
            if not ready or (self._under_way and not self._is_frozen and ready < self._per_wave // 2):
                return None  # more blocks will be there before the wave under way has settled
            rows = np.nonzero((self._states == _GOOD) & ~self._is_begun)[0][: self._per_wave]
            self._is_begun[rows] = True
            self._begun += len(rows)
            self._waves += 1
            self._under_way[self._waves] = rows
            self._news.append(WaveNews(self._clock(), rows, None))
            return self._waves, self._blocks.some(rows)

    def _settle(self, wave: int, end: TransferEnd) -> None:
        """Note the end of a wave. Call by the mover."""
        with self._lock:
            self._news.append(WaveNews(self._clock(), self._under_way.pop(wave), end))

    def _is_over(self) -> bool:
        """Return whether all begun waves have settled, and no other will begin."""
        with self._lock:
            return not self._under_way and (self._is_stopped or (self._is_frozen and not self._ready()))

    def _give_news(self) -> None:
        """Report the news, on the event loop; then end if over."""
        is_over = self._is_over()  # before: later news belongs to no ended stream
        with self._lock:
            news, self._news = self._news, []
        try:
            if news:
                self._report(news)
        finally:
            if is_over and not self.ended.done():
                self.ended.set_result(None)

    def _ready(self) -> int:
        return self._states.tobytes().count(_GOOD) - self._begun


class SubmittedStream(BlockStream):
    """A stream whose waves the event loop begins, with the arena's ``submit``."""

    def __init__(
        self,
        submit: Callable[[Direction, Wave], asyncio.Future[TransferEnd]],
        blocks: Wave,
        states: NDArray[np.uint8] | None,
        *,
        per_wave: int,
        clock: Callable[[], float],
        report: Report,
    ) -> None:
        """Begin the first waves."""
        super().__init__(blocks, states, per_wave=per_wave, clock=clock, report=report)
        self._submit = submit
        self.look()

    def look(self) -> None:
        """Begin waves of ready blocks; report soon."""
        while (taken := self._next_wave()) is not None:
            number, wave = taken
            self._submit(Direction.TO_WORKER, wave).add_done_callback(partial(self._wave_ended, number))
        if self._news or self._is_over():
            asyncio.get_running_loop().call_soon(self._give_news)

    def _wave_ended(self, number: int, end: asyncio.Future[TransferEnd]) -> None:
        self._settle(number, end.result())
        self.look()


class SubmittedStreams:
    """Part of an arena without a thread of its own: streams by ``submit``."""

    polls = False

    def submit(self, direction: Direction, wave: Wave) -> asyncio.Future[TransferEnd]:
        """Start moving a wave, as the port specifies."""
        raise NotImplementedError

    def stream(
        self,
        blocks: Wave,
        states: NDArray[np.uint8] | None,
        *,
        per_wave: int,
        clock: Callable[[], float],
        report: Report,
    ) -> WaveStream:
        """Start moving blocks, as the port specifies."""
        return SubmittedStream(self.submit, blocks, states, per_wave=per_wave, clock=clock, report=report)
