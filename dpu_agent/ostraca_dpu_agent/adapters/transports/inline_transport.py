"""Agent's end without a data plane: bytes cross the control connection.

Block bytes travel in bulk frames of the worker's control connection. To the worker: a wave is DONE when
its last byte has been handed to the connection; later messages arrive after the bytes. From the worker:
the agent sends a Fetch, and the worker answers with bulk frames, read directly into staging memory. On a
closed connection no transfer moves, so settling is trivial.
"""

from __future__ import annotations

import asyncio
import functools

import numpy as np

from ostraca_dpu_agent.adapters.transports.submitted_stream import SubmittedStreams
from ostraca_fabric.errors import FrameTooLongError
from ostraca_fabric.ports.transport import INLINE, BulkChannel, Direction, TransferEnd, check_offer
from ostraca_fabric.tables.slots import Wave
from ostraca_fabric.wire.codec import U32, U64
from ostraca_fabric.wire.messages import ArenaOffer, Fetch


class InlineTransport:
    """Agent's end over the worker's connection alone."""

    name = INLINE

    def register(self, staging: memoryview, *, chunk_bytes: int = 0) -> None:
        """Accept any memory, as the port specifies."""

    async def attach(self, offer: ArenaOffer, staging: memoryview, channel: BulkChannel) -> InlinePeer:
        """Attach an arena as the port specifies."""
        check_offer(offer, INLINE)
        return InlinePeer(offer.arena_bytes, staging, channel)

    async def close(self) -> None:
        """Close as the port specifies: transfers end with their connections."""


class InlinePeer(SubmittedStreams):
    """A worker's arena, from ``InlineTransport.attach``."""

    def __init__(self, arena_bytes: int, staging: memoryview, channel: BulkChannel) -> None:
        self._arena_bytes = arena_bytes
        self._staging = np.frombuffer(staging, np.uint8)
        self._channel = channel
        self._transfers = 0
        self._is_closed = False

    def submit(self, direction: Direction, wave: Wave) -> asyncio.Future[TransferEnd]:
        """Submit a wave as the port specifies.

        The wave's arrays must not change until the future resolves.
        """
        future: asyncio.Future[TransferEnd] = asyncio.get_running_loop().create_future()
        fits = wave.fits(staging_bytes=self._staging.nbytes, arena_bytes=self._arena_bytes)
        if self._is_closed or wave.in_regions or not fits:
            future.set_result(TransferEnd.FAILED)
            return future
        self._transfers += 1
        try:
            moved = self._send(wave) if direction is Direction.TO_WORKER else self._fetch(wave)
        except (ConnectionError, FrameTooLongError):
            future.set_result(TransferEnd.FAILED)
        else:
            if moved.done():
                _settle(future, moved)
            else:
                moved.add_done_callback(functools.partial(_settle, future))
        return future

    def close(self) -> None:
        """Close as the port specifies."""
        self._is_closed = True

    def _send(self, wave: Wave) -> asyncio.Future[None]:
        return self._channel.send_bulk(
            self._transfers,
            self._staging,
            places=wave.arena.astype(U64),
            offsets=wave.staging,
            lengths=wave.lengths,
        )

    def _fetch(self, wave: Wave) -> asyncio.Future[None]:
        # Send and open the parts without a pause: the worker may use them only after the Fetch.
        if len(wave.lengths):
            slots, lengths = wave.arena.astype(U64).tobytes(), wave.lengths.astype(U32).tobytes()
            self._channel.send(Fetch(self._transfers, slots=slots, lengths=lengths))
        return self._channel.expect_bulk(
            self._transfers, self._staging, offsets=wave.staging, lengths=wave.lengths
        )


def _settle(future: asyncio.Future[TransferEnd], moved: asyncio.Future[None]) -> None:
    """Resolve *future* with the outcome of *moved*."""
    if not future.done():
        future.set_result(TransferEnd.DONE if moved.exception() is None else TransferEnd.FAILED)
