"""What get, put and prefetch have in common: one request of one worker, under one deadline.

A request is *over* when it is answered; its waves may go on after that, because neither an I/O nor a
transfer can be called back. A wave looks at ``is_over`` before it starts anything new, and gives its memory
back when the last thing it started has ended.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ostraca_dpu_agent.mover.cache import CachedBlock
from ostraca_fabric.errors import UsageError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.keys import derive_keys
from ostraca_fabric.tags import tag_seeds
from ostraca_fabric.wire import columns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from ostraca_dpu_agent.mover.staging import Lease
    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.chain import Span
    from ostraca_fabric.ports.transport import Peer
    from ostraca_fabric.wire.messages import GetProgress, Settled


class Worker(Protocol):
    """The worker a request came from, as the mover sees it. It is the holder of its requests' staging."""

    def __hash__(self) -> int:
        """Tell workers apart."""

    @property
    def peer(self) -> Peer:
        """The worker's arena. Raises RefusedError when it offered none."""

    def stopped(self, request: int) -> asyncio.Event:
        """Return the event that is set when the worker no longer waits for this request."""

    def send(self, message: GetProgress | Settled) -> None:
        """Send a message; lost when the connection is."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one request, as columns."""

    spans: Sequence[Span]
    keys: NDArray[np.uint8]
    """Shape (n, 16)."""

    lengths: NDArray[np.uint32]
    seeds: NDArray[np.uint64]

    @classmethod
    def of(cls, volume: ServedVolume, spans: Sequence[Span], lengths: bytes) -> Blocks:
        """Derive keys and tag seeds; raises MalformedError when the columns don't fit."""
        count = sum(len(span) for span in spans)
        column = columns.u32(lengths, count)
        return cls(
            spans, derive_keys(volume.secret, spans), column, tag_seeds(volume.identity, spans, column)
        )

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self.keys)


class Clocked:
    """A request's deadline and its end."""

    def __init__(self, clock: Callable[[], float], *, until_s: float, stopped: asyncio.Event) -> None:
        """Run until *until_s* on *clock*, or until *stopped* is set: nobody wants the answer then."""
        self._clock = clock
        self._until_s = until_s
        self.stopped = stopped
        self._is_over = False

    def is_over(self) -> bool:
        """Whether the request has been answered, or is about to be."""
        return self._is_over

    @property
    def left_s(self) -> float:
        """The time that remains; never negative."""
        return max(0.0, self._until_s - self._clock())

    async def wait(self, tasks: Iterable[asyncio.Future[None]]) -> None:
        """Wait for all tasks, the deadline or ``stopped``, and then be over. A task's exception is raised."""
        everything: asyncio.Future[list[None]] = asyncio.gather(*tasks)
        # Waves that go on after the end have their crashes logged where they were spawned.
        everything.add_done_callback(asyncio.Future.exception)
        stop: asyncio.Future[Any] = asyncio.ensure_future(self.stopped.wait())
        try:
            await asyncio.wait({everything, stop}, timeout=self.left_s, return_when=asyncio.FIRST_COMPLETED)
            if everything.done():
                everything.result()
        finally:
            self._is_over = True
            stop.cancel()


def check_sizes(volume: ServedVolume, lengths: NDArray[np.uint32], slot_bytes: int) -> None:
    """Refuse blocks and slots of sizes that the volume can't have; raises UsageError."""
    if not len(lengths):
        return
    record = volume.record
    if not 0 < slot_bytes <= record.slot_bytes or slot_bytes % PAGE_BYTES:
        message = (
            f"slots of {slot_bytes} bytes: those of volume {record.name!r} have whole pages of {PAGE_BYTES} "
            f"bytes, and at most {record.slot_bytes}"
        )
        raise UsageError(message)
    longest_bytes = min(record.block_bytes, slot_bytes)
    for length in (int(lengths.min()), int(lengths.max())):
        if not 0 < length <= longest_bytes:
            message = (
                f"a block of {length} bytes in a slot of {slot_bytes}: blocks of volume {record.name!r} have "
                f"1 to {record.block_bytes} bytes and fit their slots"
            )
            raise UsageError(message)


async def all_ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait until every one of these has ended; then raise what one of them raised, if any did."""
    for end in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(end, BaseException):
            raise end


def keeper(
    blocks: Blocks,
    tags: NDArray[np.uint8],
    positions: NDArray[np.intp],
    lease: Lease,
    is_kept: NDArray[np.bool_],
) -> Callable[[int], CachedBlock | None]:
    """Say which slots of a wave's lease stay in the DRAM cache, for ``Staging.release``.

    *positions* are the wave's blocks in the request, and *tags* (n, 16) those of the whole request;
    *is_kept* says it for each block of the wave and is looked at only at the release.
    """
    offsets = lease.offsets

    def keep(row: int) -> CachedBlock | None:
        if not is_kept[row]:
            return None
        position = positions[row]
        return CachedBlock(
            key=blocks.keys[position].tobytes(),
            tag=tags[position].tobytes(),
            length=int(blocks.lengths[position]),
            offset=int(offsets[row]),
            slot_bytes=lease.slot_bytes,
        )

    return keep


def cut(positions: NDArray[np.intp], blocks_per_wave: int) -> list[NDArray[np.intp]]:
    """Cut positions into waves, in order."""
    return [positions[at : at + blocks_per_wave] for at in range(0, len(positions), max(1, blocks_per_wave))]
