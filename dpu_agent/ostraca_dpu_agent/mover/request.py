"""What get, put and prefetch have in common: one request of one worker, under one deadline.

A request is *over* when it is answered; its waves may go on after that, because neither an I/O nor a
transfer can be called back. A wave looks at ``is_over`` before it starts anything new, and gives its memory
back when the last thing it started has ended.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ostraca_dpu_agent.mover.cache import Offer
from ostraca_fabric.errors import UsageError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.keys import derive_keys
from ostraca_fabric.tags import tag_seeds
from ostraca_fabric.wire import columns

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.chain import Span
    from ostraca_fabric.ids import DriveId, TenantId
    from ostraca_fabric.ports.transport import Peer
    from ostraca_fabric.wire.messages import GetProgress, Settled


Queue = tuple["DriveId", "deque[NDArray[np.intp]]"]
"""Waves of one request that are to come from one drive, or go there."""


class Holder(Protocol):
    """Who holds the staging of a request: a worker, or all guests of a tenant."""

    def __hash__(self) -> int:
        """Tell holders apart."""

    @property
    def tenant(self) -> TenantId:
        """Whose share it uses."""


class Worker(Holder, Protocol):
    """The worker a request came from, as the mover sees it. It is the holder of its requests' staging."""

    @property
    def peer(self) -> Peer:
        """The worker's arena. Raises RefusedError when it offered none."""

    def stopped(self, request: int) -> asyncio.Future[None]:
        """Return the future that is done when the worker no longer waits for this request."""

    def send(self, message: GetProgress | Settled) -> None:
        """Send a message; lost when the connection is."""


class Blocks:
    """The blocks of one request, as columns."""

    def __init__(self, volume: ServedVolume, spans: Sequence[Span], lengths: NDArray[np.uint32]) -> None:
        """Derive the keys; *lengths* has one value per block."""
        self.spans = spans
        self.lengths = lengths
        self.keys = derive_keys(volume.secret, spans)
        """Shape (n, 16)."""
        self.tenant = volume.record.tenant
        self._identity = volume.identity

    @classmethod
    def of(cls, volume: ServedVolume, spans: Sequence[Span], lengths: bytes) -> Blocks:
        """Take a request's columns; raises MalformedError when they don't fit each other."""
        return cls(volume, spans, columns.u32(lengths, sum(len(span) for span in spans)))

    @cached_property
    def seeds(self) -> NDArray[np.uint64]:
        """The blocks' tag seeds. Made when first asked for: blocks of the DRAM cache need none here."""
        return tag_seeds(self._identity, self.spans, self.lengths)

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self.keys)


class Clocked:
    """A request's deadline and its end."""

    def __init__(self, clock: Callable[[], float], *, until_s: float, stopped: asyncio.Future[None]) -> None:
        """Run until *until_s* on *clock*, or until *stopped* is done: nobody wants the answer then."""
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

    async def wait(self, tasks: Collection[asyncio.Future[None]]) -> None:
        """Wait for all tasks, the deadline or ``stopped``, and then be over. A task's exception is raised."""
        waiting = set(tasks)
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ended(task: asyncio.Future[None]) -> None:
            waiting.discard(task)
            has_crashed = not task.cancelled() and task.exception() is not None
            if not over.done() and (not waiting or has_crashed or task is self.stopped):
                over.set_result(None)

        for task in (*waiting, self.stopped):
            task.add_done_callback(ended)
        try:
            if waiting:
                await asyncio.wait((over,), timeout=self.left_s)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            self._is_over = True
            self.stopped.remove_done_callback(ended)


def check_spans(volume: ServedVolume, spans: Sequence[Span], *, blocks_max: int) -> None:
    """Refuse more blocks than one request may have, and hashes that are not the volume's; raises
    UsageError.
    """
    blocks = sum(map(len, spans))
    if max(blocks, len(spans)) > blocks_max:
        message = (
            f"{blocks} blocks in {len(spans)} spans in one request: ask for at most {blocks_max} at once"
        )
        raise UsageError(message)
    wanted = volume.record.layout.hash_bytes
    if any(span.hash_bytes != wanted for span in spans):
        message = f"engine hashes of volume {volume.record.name!r} have {wanted} bytes"
        raise UsageError(message)


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
    is_kept: NDArray[np.bool_],
    *,
    uses: int = 1,
) -> Offer:
    """Offer the blocks of a wave to the DRAM cache, for ``Staging.release``.

    *positions* are the wave's blocks in the request, and *tags* (n, 16) those of the whole request;
    *is_kept* says it for each block of the wave and is looked at only at the release.
    """
    lengths = blocks.lengths[positions]
    return Offer(blocks.keys[positions], tags[positions], lengths, is_kept, uses, blocks.tenant)


def cut(positions: NDArray[np.intp], blocks_per_wave: int) -> list[NDArray[np.intp]]:
    """Cut positions into waves, in order."""
    return [positions[at : at + blocks_per_wave] for at in range(0, len(positions), max(1, blocks_per_wave))]


def in_turns(queues: Sequence[Queue], *, lanes: int) -> list[Queue]:
    """Return each drive's queue once for every lane that may carry waves of it, so that drives take turns.

    They share *lanes* evenly, and each has one at least: a drive that hangs holds its own lanes up, and no
    other's.
    """
    share = max(1, lanes // max(1, len(queues)))
    return [queue for turn in range(share) for queue in queues if turn < len(queue[1])]


def of_one_size(slot_bytes: NDArray[np.int64], per_wave: Callable[[int], int]) -> list[NDArray[np.intp]]:
    """Cut blocks, at least one, into waves whose slots have one size; *per_wave* says how many of a size make
    one. Each wave is indexes into *slot_bytes*.
    """
    everything, size = np.arange(len(slot_bytes)), int(slot_bytes[0])
    if len(everything) == 1:
        return [everything]
    if (slot_bytes == size).all():
        return cut(everything, per_wave(size))
    sizes = np.unique(slot_bytes).tolist()
    return [wave for size in sizes for wave in cut(everything[slot_bytes == size], per_wave(size))]
