"""Transfers by NIXL: the thread that owns a NIXL agent, memory as lists, and a worker's arena.

The thread never spins for long. With transfers under way, the thread polls a few times in a row.
Then it sleeps between polls for a sixteenth of the time since the last event, 50 µs to 5 ms. Waits grow by a
few per cent, and a stopped peer costs almost no time. Without transfers, the thread waits for jobs and makes
progress on a slow tick, for the sake of connections.

A stream costs the event loop no turn per wave. The thread looks for ready blocks itself, every ``LOOK_S``,
begins their waves, and gathers the news. The worker is told in the thread: about the first wave at once, so
that checks begin, then about each quarter of the blocks, and less at the end: half of the rest, at least a
sixteenth of all. News of slow waves is told sooner, after pauses of at least four milliseconds and half of
the stream's time so far. The loop hears of the end alone. Blocks from a worker go straight to their receiver.

A transfer whose end NIXL can't tell is kept forever, unpolled and unreleased: its memory stays in
quarantine.

Slots of equal length are selected from a list prepared once for this length and slot size. The list has a
row per chunk. Any slot size is thus numbered as in ``ostraca_fabric.tables.slots``, even without
dividing the chunk. Other streams (mixed lengths, offsets off the grid, regions) are listed piece by piece, at
an extra cost of 0.05 µs per block.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import TransportError
from ostraca_fabric.nixl.runtime import NixlAgent, Prepared, Transfer, TransferState
from ostraca_fabric.ports.transport import BulkChannel, Direction, TransferEnd, WaveNews
from ostraca_fabric.runtime.threads import show_name
from ostraca_fabric.tables.slots import Wave, WaveQueue, slot_numbers

T = TypeVar("T")

Report = Callable[[Sequence[WaveNews]], object]
Tell = Callable[[Sequence[WaveNews]], bool]
Arrived = Callable[[int, int], None]

POLLS_IN_A_ROW = 20
PAUSE_S_MIN = 50e-6
PAUSE_S_MAX = 5e-3
PAUSE_SHARE = 16
IDLE_TICK_S = 0.05
LOOK_S = 5e-4
"""Between two looks for blocks that streams wait for: a look costs the event loop its interpreter."""

STEPS_AT_ONCE = 8
"""Streams that the thread looks at between two polls: their number must not delay transfers."""

LATER_WAVE_SHARE = 2
"""Longest later wave of a stream whose blocks are all ready, as a multiple of the first wave."""

NEWS_PER_STREAM, NEWS_MAX = 4, 16
NEWS_S = 4e-3
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


LISTS_MAX = 16
"""Prepared lists kept per memory; the least recently used is dropped first. A list costs microseconds to
make.
"""


ADDRESSES = 1 << 63
"""Bound of the addresses of a process."""


class NixlSlots:
    """Memory at *address* of *remote* (a worker's arena), or of this agent if *remote* is empty.

    Without chunks (0 bytes), the memory has no slots, and pieces lie anywhere. Use on the thread that owns
    the agent.
    """

    def __init__(
        self, agent: NixlAgent, *, address: int, size_bytes: int, chunk_bytes: int, remote: str = ""
    ) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.chunk_bytes = chunk_bytes
        self.remote = remote
        self._agent = agent
        self._lists: OrderedDict[tuple[int, int], Prepared] = OrderedDict()

    def numbers(self, offsets: NDArray[np.int64], slot_bytes: int) -> NDArray[np.int32] | None:
        """Return the numbers of slots for a list of ``prepared``; None if a slot is off the grid."""
        if not self.chunk_bytes:
            return None
        numbers, is_grid = slot_numbers(offsets, chunk_bytes=self.chunk_bytes, slot_bytes=slot_bytes)
        return numbers if is_grid else None

    def prepared(self, length: int, slot_bytes: int) -> Prepared:
        """Return a list of all slots; valid until the next call. Raises TransportError."""
        found = self._lists.pop((length, slot_bytes), None)
        if found is None:
            found = self._agent.prepare(self.remote, self._rows(length, slot_bytes))
            if len(self._lists) == LISTS_MAX:
                self._agent.release_prepared(self._lists.popitem(last=False)[1])
        self._lists[length, slot_bytes] = found
        return found

    def spell_out(self, offsets: NDArray[np.int64], lengths: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """Return (address, length, 0) per piece."""
        pieces = np.zeros((len(offsets), 3), np.uint64)
        pieces[:, 0] = offsets + self.address
        pieces[:, 1] = lengths
        return pieces

    def release(self) -> None:
        """Release every list."""
        while self._lists:
            self._agent.release_prepared(self._lists.popitem()[1])

    def _rows(self, length: int, slot_bytes: int) -> NDArray[np.uint64]:
        chunks = self.size_bytes // self.chunk_bytes
        rows = np.zeros((chunks, 5), np.uint64)
        rows[:, 0] = np.arange(chunks) * self.chunk_bytes + self.address
        rows[:, 1] = length
        rows[:, 3] = slot_bytes
        rows[:, 4] = self.chunk_bytes // slot_bytes
        return rows


class NixlMoves:
    """Transfers of some blocks between *own* memory and a worker's arena.

    Use on the thread that owns the agent. Blocks of equal length, in slots on the grid, are numbered once.
    """

    def __init__(
        self, agent: NixlAgent, direction: Direction, own: NixlSlots, arena: NixlSlots, blocks: Wave
    ) -> None:
        self._agent = agent
        self._operation = "WRITE" if direction is Direction.TO_WORKER else "READ"
        self._own = own
        self._arena = arena
        self._blocks = blocks
        self._numbers: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
        self._length = 0
        """Bytes of each numbered block; -1 if the blocks can't be numbered, 0 before the first transfer."""

    def transfer(self, rows: NDArray[np.intp]) -> Transfer:
        """Make the transfer of these *rows* of the blocks. Raises TransportError."""
        if not self._length:
            self._number()
        blocks = self._blocks
        if self._numbers is not None:
            mine, theirs = self._numbers
            return self._agent.pick(
                self._operation,
                (self._own.prepared(self._length, blocks.staging_slot_bytes), mine[rows]),
                (self._arena.prepared(self._length, blocks.arena_slot_bytes), theirs[rows]),
            )
        wave = blocks.some(rows)
        return self._agent.spell_out(
            self._operation,
            self._own.spell_out(wave.staging, wave.lengths),
            self._arena.spell_out(wave.arena, wave.lengths),
            self._arena.remote,
        )

    def _number(self) -> None:
        blocks, self._length = self._blocks, -1
        length = int(blocks.lengths[0])
        if bool((blocks.lengths == length).all()):
            mine = self._own.numbers(blocks.staging, blocks.staging_slot_bytes)
            theirs = self._arena.numbers(blocks.arena, blocks.arena_slot_bytes)
            if mine is not None and theirs is not None:
                self._length, self._numbers = length, (mine, theirs)


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


def _ignore(_news: Sequence[WaveNews]) -> bool:
    """Report nothing."""
    return True


@dataclass(slots=True, eq=False)
class NixlRemote:
    """NIXL agent of a worker process. Use on the owning thread only."""

    name: str
    metadata: bytes
    peers: int = 1
    under_way: int = 0
    is_broken: bool = False


class NixlPeer:
    """A worker's arena, from ``NixlTransport.attach``."""

    polls = True

    def __init__(
        self,
        thread: NixlThread,
        remote: NixlRemote,
        arena: NixlSlots,
        own: NixlSlots,
        channel: BulkChannel,
        forget: Callable[[NixlRemote], None],
        reload: Callable[[NixlRemote, bytes], bool],
    ) -> None:
        """Move waves between *own* memory and *arena*.

        *forget* is called on *thread* for an idle remote, and *reload* to load more metadata of the remote:
        it must not raise.
        """
        self.remote = remote
        self.arena = arena
        self._regions = NixlSlots(
            thread.agent, address=0, size_bytes=ADDRESSES, chunk_bytes=0, remote=remote.name
        )
        self._thread = thread
        self._own = own
        self._channel = channel
        self._forget = forget
        self._reload = reload
        self._loop = asyncio.get_running_loop()
        self._streams: set[NixlStream] = set()
        self._is_closed = False

    def stream(
        self,
        blocks: Wave,
        states: NDArray[np.uint8] | None,
        *,
        per_wave: int,
        clock: Callable[[], float],
        report: Report,
        tell: Tell,
    ) -> NixlStream:
        """Start moving blocks, as the port specifies."""
        queue = _wave_queue(blocks, states, per_wave)
        return self._begun(Direction.TO_WORKER, blocks, queue, clock, report, tell, None)

    def fetch(self, blocks: Wave, *, per_wave: int, arrived: Arrived) -> NixlStream:
        """Start moving blocks from the worker, as the port specifies."""
        queue = _wave_queue(blocks, None, per_wave)
        return self._begun(Direction.FROM_WORKER, blocks, queue, time.monotonic, _ignore, _ignore, arrived)

    def _begun(
        self,
        direction: Direction,
        blocks: Wave,
        queue: WaveQueue,
        clock: Callable[[], float],
        report: Report,
        tell: Tell,
        arrived: Arrived | None,
    ) -> NixlStream:
        begin = partial(self.begin, self._moves(direction, self._own, blocks))
        stream = NixlStream(self._thread, begin, queue, clock, report, tell, arrived)
        if self._is_closed or not self._fits(blocks):
            stream.fail()
        self._streams.add(stream)
        stream.ended.add_done_callback(lambda _: self._streams.discard(stream))
        self._thread.repeat(stream.step)
        return stream

    def prepare(
        self, direction: Direction, own: NixlSlots, wave: Wave, *, spin_s: float = 0.0
    ) -> tuple[asyncio.Future[TransferEnd], Callable[[], bool]]:
        """Return a wave's future, and the job that begins the wave.

        The job spins up to *spin_s* for the end, and returns whether the end came.
        """
        future: asyncio.Future[TransferEnd] = self._loop.create_future()

        def settled(end: TransferEnd | None) -> None:
            if end is not None:
                soon(self._loop, _resolve, future, end)

        rows = np.arange(len(wave.lengths))
        return future, partial(self.begin, self._moves(direction, own, wave), rows, settled, spin_s=spin_s)

    def _moves(self, direction: Direction, own: NixlSlots, blocks: Wave) -> NixlMoves:
        arena = self._regions if blocks.in_regions else self.arena
        return NixlMoves(self._thread.agent, direction, own, arena, blocks)

    def begin(
        self,
        moves: NixlMoves,
        rows: NDArray[np.intp],
        settled: Callable[[TransferEnd | None], None],
        *,
        spin_s: float = 0.0,
    ) -> bool:
        """Begin a wave; call only in the thread, which calls *settled* once.

        None means that NIXL can't tell the end. The call spins up to *spin_s* for the end; returns whether
        the end came.
        """
        remote = self.remote

        def ended(state: TransferState) -> None:
            is_done, is_known = state is TransferState.DONE, state is not TransferState.UNKNOWN
            remote.under_way -= is_known
            if not remote.peers:
                self._forget(remote)
            if not is_done:
                remote.is_broken = True
                soon(self._loop, self.break_off)
            settled((TransferEnd.DONE if is_done else TransferEnd.FAILED) if is_known else None)

        remote.under_way += 1
        try:
            transfer = moves.transfer(rows)
        except TransportError:
            ended(TransferState.FAILED)
            return True
        return self._thread.post(transfer, ended, spin_s=spin_s)

    def offer_regions(self, metadata: bytes) -> None:
        """Let later blocks lie in regions, as the port specifies; NIXL refuses addresses outside of them."""
        if not self._is_closed:
            self._thread.submit(partial(self._add_regions, metadata))

    def _add_regions(self, metadata: bytes) -> None:
        if self.remote.is_broken or self._reload(self.remote, metadata):
            return
        self.remote.is_broken = True
        why = "the memory of regions is not reachable: reconnect, and offer none"
        soon(self._loop, partial(self._channel.break_off, why, code="regions"))

    def break_off(self) -> None:
        """Close the control connection: transfers with this worker no longer work."""
        self._channel.break_off("a transfer failed, so the worker's memory is no longer reachable: reconnect")

    def close(self) -> None:
        """Close as the port specifies.

        The worker is forgotten when its last transfer has ended.
        """
        if not self._is_closed:
            self._is_closed = True
            for stream in self._streams:
                stream.fail()
            self._thread.submit(self._leave)

    def _fits(self, wave: Wave) -> bool:
        arena = self._regions if wave.in_regions else self.arena
        return wave.fits(staging_bytes=self._own.size_bytes, arena_bytes=arena.size_bytes)

    def _leave(self) -> None:
        with contextlib.suppress(TransportError):
            self.arena.release()
        self.remote.peers -= 1
        self._forget(self.remote)


def _wave_queue(blocks: Wave, states: NDArray[np.uint8] | None, per_wave: int) -> WaveQueue:
    """Cut blocks into waves. The bytes move while a wave begins, so fewer waves leave more time to move."""
    return WaveQueue(
        len(blocks.lengths), states, per_wave=per_wave, per_later_wave=LATER_WAVE_SHARE * per_wave
    )


def _resolve(future: asyncio.Future[TransferEnd], end: TransferEnd) -> None:
    if not future.done():
        future.set_result(end)


def soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """Call a function in the loop's thread, after earlier calls."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
        loop.call_soon_threadsafe(function, *arguments)
