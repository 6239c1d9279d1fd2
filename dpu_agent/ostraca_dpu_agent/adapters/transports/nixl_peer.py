"""A worker's arena over NIXL: memory as lists, transfers and streams.

Slots of equal length are selected from a list prepared once for this length and slot size. The list has a
row per chunk. Any slot size is thus numbered as in ``ostraca_fabric.tables.slots``, even without
dividing the chunk. Other streams (mixed lengths, offsets off the grid, regions) are listed piece by piece, at
an extra cost of 0.05 µs per block.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.adapters.transports.nixl_thread import (
    Arrived,
    NixlStream,
    NixlThread,
    Report,
    Tell,
    soon,
)
from ostraca_fabric.errors import TransportError
from ostraca_fabric.nixl.runtime import NixlAgent, Prepared, Transfer, TransferState
from ostraca_fabric.ports.transport import BulkChannel, Direction, TransferEnd, WaveNews
from ostraca_fabric.tables.slots import Wave, WaveQueue, slot_numbers

LISTS_MAX = 16
"""Prepared lists kept per memory; the least recently used is dropped first. A list costs microseconds to
make.
"""

LATER_WAVE_SHARE = 2
"""Longest later wave of a stream whose blocks are all ready, as a multiple of the first wave. The bytes move
while a wave begins, so fewer waves leave more time to move.
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
        return self._begun(Direction.TO_WORKER, blocks, states, per_wave, clock, report, tell, None)

    def fetch(self, blocks: Wave, *, per_wave: int, arrived: Arrived) -> NixlStream:
        """Start moving blocks from the worker, as the port specifies."""
        clock = time.monotonic
        return self._begun(Direction.FROM_WORKER, blocks, None, per_wave, clock, _ignore, _ignore, arrived)

    def _begun(
        self,
        direction: Direction,
        blocks: Wave,
        states: NDArray[np.uint8] | None,
        per_wave: int,
        clock: Callable[[], float],
        report: Report,
        tell: Tell,
        arrived: Arrived | None,
    ) -> NixlStream:
        queue = WaveQueue(
            len(blocks.lengths), states, per_wave=per_wave, per_later_wave=LATER_WAVE_SHARE * per_wave
        )
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


def _ignore(_news: Sequence[WaveNews]) -> bool:
    """Report nothing."""
    return True


def _resolve(future: asyncio.Future[TransferEnd], end: TransferEnd) -> None:
    if not future.done():
        future.set_result(end)
