"""Streams of arenas without a thread of their own: the event loop begins each wave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.ports.transport import BlockStream, Direction, TransferEnd, WaveNews, WaveStream
from ostraca_fabric.tables.slots import Wave, WaveQueue


class SubmittedStream:
    """Stream whose waves are submitted to an arena: implements ``ports.transport.WaveStream``."""

    def __init__(
        self,
        submit: Callable[[Wave], asyncio.Future[TransferEnd]],
        blocks: Wave,
        queue: WaveQueue,
        clock: Callable[[], float],
        report: Callable[[Sequence[WaveNews]], None],
    ) -> None:
        """Begin the first waves."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._submit = submit
        self._blocks = blocks
        self._queue = queue
        self._clock = clock
        self._report = report
        self._news: list[WaveNews] = []
        self.look()

    def look(self) -> None:
        """Begin waves of ready blocks; report soon."""
        while (taken := self._queue.take()) is not None:
            number, rows = taken
            self._news.append(WaveNews(self._clock(), rows, None))
            self._submit(self._blocks.some(rows)).add_done_callback(partial(self._settle, number))
        if self._news or self._queue.is_over:
            asyncio.get_running_loop().call_soon(self._give_news)

    def freeze(self) -> NDArray[np.uint8]:
        """Let no further block become ready, as the port specifies."""
        states = self._queue.freeze()
        self.look()
        return states

    def stop(self) -> NDArray[np.intp]:
        """Begin no further wave, as the port specifies."""
        rows = self._queue.stop()
        self.look()
        return rows

    def take_news(self) -> Sequence[WaveNews]:
        """Return the news not reported so far."""
        news, self._news = self._news, []
        return news

    def _settle(self, number: int, end: asyncio.Future[TransferEnd]) -> None:
        self._news.append(WaveNews(self._clock(), self._queue.settle(number), end.result()))
        self.look()

    def _give_news(self) -> None:
        try:
            if news := self.take_news():
                self._report(news)
        finally:
            if self._queue.is_over and not self._news and not self.ended.done():
                self.ended.set_result(None)


class SubmittedStreams:
    """Part of an arena without a thread of its own: streams by ``submit``."""

    polls = False

    def submit(self, direction: Direction, wave: Wave) -> asyncio.Future[TransferEnd]:
        """Start moving *wave*; the future resolves once settled, and never raises. Never cancel it.

        A wave of a closed arena, or with an offset outside, resolves to FAILED without touching a byte.
        """
        raise NotImplementedError

    def offer_regions(self, metadata: bytes) -> None:
        """Ignore regions: waves there end as FAILED."""

    def stream(
        self,
        blocks: Wave,
        states: NDArray[np.uint8] | None,
        *,
        per_wave: int,
        clock: Callable[[], float],
        report: Callable[[Sequence[WaveNews]], None],
        tell: Callable[[Sequence[WaveNews]], bool],  # noqa: ARG002 (news arise on the event loop)
    ) -> WaveStream:
        """Start moving blocks, as the port specifies."""
        queue = WaveQueue(len(blocks.lengths), states, per_wave=per_wave)
        return SubmittedStream(partial(self.submit, Direction.TO_WORKER), blocks, queue, clock, report)

    def fetch(self, blocks: Wave, *, per_wave: int, arrived: Callable[[int, int], None]) -> BlockStream:
        """Start moving blocks from the worker, as the port specifies."""
        queue = WaveQueue(len(blocks.lengths), None, per_wave=per_wave)

        def report(news: Sequence[WaveNews]) -> None:
            for _, rows, end in news:
                if end is TransferEnd.DONE:
                    arrived(int(rows[0]), int(rows[-1]) + 1)

        submit = partial(self.submit, Direction.FROM_WORKER)
        return SubmittedStream(submit, blocks, queue, time.monotonic, report)
