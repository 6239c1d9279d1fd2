"""The agent's end without a data plane: block bytes cross in bulk frames of the worker's control connection.

To the worker: the frames go out before any later message, so a wave is DONE when its last frame has been
handed to the connection; what the agent says next arrives after the bytes. From the worker: the agent sends a
Fetch, and the worker answers with one bulk frame per block, which land straight in staging memory. Settling
is simple here: nothing moves on a closed connection.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ostraca_fabric.adapters.waves import check_offer, wave_fits
from ostraca_fabric.errors import FrameTooLongError
from ostraca_fabric.ports.transport import INLINE, Direction, TransferEnd
from ostraca_fabric.wire.columns import U32, U64
from ostraca_fabric.wire.messages import Fetch

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from ostraca_fabric.ports.transport import BulkChannel, Wave
    from ostraca_fabric.wire.messages import ArenaOffer


class InlineTransport:
    """The agent's end. Needs nothing but the worker's connection."""

    name = INLINE

    def register(self, staging: memoryview, *, chunk_bytes: int = 0) -> None:
        """As in the port: any memory will do."""

    async def attach(self, offer: ArenaOffer, staging: memoryview, channel: BulkChannel) -> InlinePeer:
        """As in the port."""
        check_offer(offer, INLINE)
        return InlinePeer(offer.arena_bytes, staging, channel)

    async def close(self) -> None:
        """As in the port: transfers end with their connections."""


class InlinePeer:
    """One worker's arena; from ``InlineTransport.attach``."""

    def __init__(self, arena_bytes: int, staging: memoryview, channel: BulkChannel) -> None:
        self._arena_bytes = arena_bytes
        self._staging = staging
        self._channel = channel
        self._transfers = 0
        self._under_way: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def submit(self, direction: Direction, wave: Wave) -> asyncio.Future[TransferEnd]:
        """As in the port. The wave's arrays must not change until the future resolves."""
        future: asyncio.Future[TransferEnd] = asyncio.get_running_loop().create_future()
        if self._is_closed or not wave_fits(
            wave, staging_bytes=self._staging.nbytes, arena_bytes=self._arena_bytes
        ):
            future.set_result(TransferEnd.FAILED)
            return future
        self._transfers += 1
        move = self._send if direction is Direction.TO_WORKER else self._fetch
        task = asyncio.get_running_loop().create_task(_end(future, move(self._transfers, wave)))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return future

    def close(self) -> None:
        """As in the port."""
        self._is_closed = True

    async def _send(self, transfer: int, wave: Wave) -> None:
        for staging, arena, length in _blocks(wave):
            await self._channel.drained()
            self._channel.send_bulk(transfer, arena, self._staging[staging : staging + length])

    async def _fetch(self, transfer: int, wave: Wave) -> None:
        if not len(wave.lengths):
            return
        parts = [self._staging[staging : staging + length] for staging, _, length in _blocks(wave)]
        # In this order and without a pause: parts are open to the worker only once it has been asked for
        # them.
        self._channel.send(
            Fetch(
                transfer, slots=wave.arena.astype(U64).tobytes(), lengths=wave.lengths.astype(U32).tobytes()
            )
        )
        await self._channel.expect_bulk(transfer, parts)


def _blocks(wave: Wave) -> Iterator[tuple[int, int, int]]:
    """Yield (staging offset, arena offset, length) per block."""
    return zip(wave.staging.tolist(), wave.arena.tolist(), wave.lengths.tolist(), strict=True)


async def _end(future: asyncio.Future[TransferEnd], moved: Coroutine[None, None, None]) -> None:
    """Resolve *future* as *moved* ends."""
    try:
        await moved
    except (ConnectionError, FrameTooLongError):
        end = TransferEnd.FAILED
    else:
        end = TransferEnd.DONE
    if not future.done():
        future.set_result(end)
