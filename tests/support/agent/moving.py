"""A wave by itself, over the streams of an arena."""

from __future__ import annotations

import asyncio
import time

from ostraca_fabric.ports.transport import BlockStream, Direction, RemoteArena, TransferEnd, WaveNews
from ostraca_fabric.tables.slots import Wave


def move(arena: RemoteArena, direction: Direction, blocks: Wave) -> asyncio.Future[TransferEnd]:
    """Move all blocks in one wave; the future tells its end."""
    count, news = len(blocks.lengths), list[WaveNews]()
    arrived: list[int] = []
    stream: BlockStream
    if direction is Direction.TO_WORKER:
        stream = arena.stream(
            blocks,
            None,
            per_wave=max(1, count),
            clock=time.monotonic,
            report=news.extend,
            tell=lambda _: False,
        )
    else:
        stream = arena.fetch(
            blocks, per_wave=max(1, count), arrived=lambda first, last: arrived.append(last - first)
        )
    end: asyncio.Future[TransferEnd] = asyncio.get_running_loop().create_future()

    def ended(_: asyncio.Future[None]) -> None:
        is_done = (
            sum(arrived) == count
            if direction is Direction.FROM_WORKER
            else TransferEnd.FAILED not in [each.end for each in news]
        )
        end.set_result(TransferEnd.DONE if is_done else TransferEnd.FAILED)

    stream.ended.add_done_callback(ended)
    return end
