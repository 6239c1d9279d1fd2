"""Transfer of block bytes between an agent's staging memory and a worker's arena.

The agent moves the bytes in both directions; the transport gives workers no handle to agent memory. On the
same host, the kernel may copy instead (``ostraca_fabric.runtime.process_memory``). A transfer is *settled*
when known to have ended, well or badly. Only then may memory at either end be reused. No timeout ever settles
a transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import TransportError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.tables.slots import Wave
from ostraca_fabric.wire.messages import ArenaOffer, Message

if TYPE_CHECKING:
    import asyncio  # workers load no asyncio

INLINE = "inline"
"""Transport over the control connection alone. The name is defined here, because a worker loads no agent
code."""

ARENA_BYTES_MAX = 1 << 43
"""8 TiB: slot numbers fit 32 bits, and sums of address, offset and length fit 64 bits."""


class Direction(Enum):
    """Direction of the bytes, seen from the agent."""

    TO_WORKER = auto()
    FROM_WORKER = auto()


class TransferEnd(Enum):
    """Outcome of a settled transfer."""

    DONE = auto()
    """Every byte arrived."""

    FAILED = auto()
    """The transfer has ended; the destination's content must not be used."""


def check_offer(offer: ArenaOffer, transport: str) -> None:
    """Check the transport and sizes of an offer, which is not trusted. Raises TransportError."""
    if offer.transport != transport:
        raise TransportError(f"an arena offered over {offer.transport!r} can't be reached over {transport!r}")
    if not 0 < offer.chunk_bytes <= offer.arena_bytes <= ARENA_BYTES_MAX:
        raise TransportError(f"an arena of {offer.arena_bytes} bytes in chunks of {offer.chunk_bytes}")
    if offer.chunk_bytes % PAGE_BYTES or offer.arena_bytes % offer.chunk_bytes:
        raise TransportError(
            f"an arena of {offer.arena_bytes} bytes is not whole chunks of {offer.chunk_bytes} or pages"
        )
    if not 0 <= offer.base < 1 << 63:
        raise TransportError(f"an arena at address {offer.base}")


class BulkChannel(Protocol):
    """Worker's control connection as used by transports.

    Only the inline transport sends blocks there.
    """

    def send_bulk(
        self,
        transfer: int,
        memory: NDArray[np.uint8],
        *,
        places: NDArray[np.uint64],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.uint32],
    ) -> asyncio.Future[None]:
        """Send blocks at *offsets* of *memory* to *places* of the worker's arena.

        The future resolves when the blocks are sent: later messages arrive behind the blocks. The future
        raises ConnectionError if the connection closes first. The memory is in use until either.
        """

    def send(self, message: Message) -> None:
        """Send a message. Raises ConnectionError when the connection is closed."""

    def expect_bulk(
        self,
        transfer: int,
        memory: NDArray[np.uint8],
        *,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.uint32],
    ) -> asyncio.Future[None]:
        """Let the parts of a transfer announced by a ``Fetch`` land at *offsets* of *memory*.

        The future resolves when all parts have landed. The future raises ConnectionError if the connection
        closes; nothing lands afterwards.
        """

    def break_off(self, why: str, *, code: str = "transport") -> None:
        """End a connection that can carry no more blocks; the worker must reconnect.

        *code*: ``regions`` if the worker must offer none then.
        """


class WaveNews(NamedTuple):
    """Begin or end of a wave of a stream."""

    at_s: float
    """Time of the event, on the stream's clock."""

    rows: NDArray[np.intp]
    """Blocks of the wave."""

    end: TransferEnd | None
    """None at the begin."""


class BlockStream(Protocol):
    """Blocks on their way, in waves."""

    ended: asyncio.Future[None]
    """Done once all begun waves have settled, all news is reported, and no other wave will begin. The future
    never raises. Never cancel it."""

    def stop(self) -> NDArray[np.intp]:
        """Begin no further wave, and tell nothing more; return the rows of waves that have not settled."""


class WaveStream(BlockStream, Protocol):
    """Blocks on their way to a worker. A wave begins as soon as its blocks are ready."""

    def look(self) -> None:
        """Begin waves of blocks that have become ready. Not needed if the arena ``polls``."""

    def freeze(self) -> NDArray[np.uint8]:
        """Let no further block become ready; return a copy of the states that count from now on."""

    def take_news(self) -> Sequence[WaveNews]:
        """Return the news neither told nor reported so far, which will not be reported."""


class RemoteArena(Protocol):
    """Worker's arena as seen by the agent."""

    polls: bool
    """Whether streams look for ready blocks by themselves."""

    def stream(
        self,
        blocks: Wave,
        states: NDArray[np.uint8] | None,
        *,
        per_wave: int,
        clock: Callable[[], float],
        report: Callable[[Sequence[WaveNews]], None],
        tell: Callable[[Sequence[WaveNews]], bool],
    ) -> WaveStream:
        """Start moving *blocks* to the worker, in waves of about *per_wave* blocks, a few at once.

        *states* has a ``CheckState`` per block, which others change until ``freeze``: only GOOD blocks move.
        None: all blocks are ready. *report* is called on the event loop with news in order, soon but not at
        once. News may go to *tell* instead, in any thread, one call at a time. *report* gets the news if
        *tell* returns False.

        Waves of a closed arena, or with an offset outside, end as FAILED without touching a byte. To stop
        waiting, ``stop`` the stream, and keep the memory of both ends in quarantine until its end.
        """

    def fetch(self, blocks: Wave, *, per_wave: int, arrived: Callable[[int, int], None]) -> BlockStream:
        """Start moving *blocks* from the worker, in waves of about *per_wave* blocks, in order.

        *arrived* is called once for each wave that is DONE, with the first row and the row behind the last,
        in any thread. All calls come before the stream has ended.
        """

    def offer_regions(self, metadata: bytes) -> None:
        """Let later blocks lie in regions of the worker, as *metadata* of its transport says.

        Nothing is known of the outcome: blocks out of reach end as FAILED.
        """

    def close(self) -> None:
        """Start no more transfers; those under way settle in their own time."""


class Transport(Protocol):
    """Agent's end of one kind of data plane. A process has a single instance."""

    name: str
    """Value of ``ArenaOffer.transport``: ``nixl`` or ``inline``."""

    def register(self, staging: memoryview, *, chunk_bytes: int = 0) -> None:
        """Make memory a source and target of transfers, permanently mapped.

        Call before the first attach. ``chunk_bytes`` is the chunk size of the memory's SlotPool, if any:
        waves of its slots are then prepared once and cost less. May block for the whole registration.
        """

    async def attach(self, offer: ArenaOffer, staging: memoryview, channel: BulkChannel) -> RemoteArena:
        """Make a worker's arena reachable. Raises TransportError for an unusable offer."""

    async def close(self) -> None:
        """Stop progress after the transfers under way.

        Abandoned transfers leave their memory mapped.
        """


class RegionPlace(Protocol):
    """Memory of a worker beside the arena, known by identity."""

    address: int
    size_bytes: int

    def when_ended(self, act: Callable[[], object]) -> None:
        """Call *act* at the end of the region, in any thread. It must neither block nor know the region."""


class ArenaEnd(Protocol):
    """Worker's end: offers the arena, and makes progress while agents move bytes."""

    name: str

    def offer(self) -> ArenaOffer:
        """Return the offer for the handshake. Requires ``has_offer``."""

    def offer_region(self, region: RegionPlace) -> bytes | None:
        """Return the metadata of a ``RegionsOffer`` for the peers of ``offer``, with *region*.

        None while that is not known: the first call may begin a long registration. None forever where peers
        do not reach regions. The offer ends with the region. For one thread.
        """

    @property
    def has_offer(self) -> bool:
        """Whether this end may be offered on the next connection.

        False after a failed ``renew`` that revoked the previous offer and made no new offer.
        """

    def progress(self) -> None:
        """Advance transfers under way; takes microseconds.

        Call about every 0.5 ms while a request is outstanding.
        """

    @property
    def needs_progress(self) -> bool:
        """Whether ``progress`` has any effect."""

    def prepare_renewal(self) -> None:
        """Prepare resources for the next ``renew``, to make it quick. From any thread.

        The prepared resources are neither offered nor reachable before ``renew``. May block for about 50 ms
        while the end stays usable; ``renew`` and ``close`` wait for completion. Never raises: ``renew``
        raises instead.
        """

    def renew(self) -> None:
        """Revoke the previous offer, and make a new offer for the next connection.

        Afterwards nothing lands that this end had received but not processed. Writes by the peer itself,
        through shared memory, may still land. Call only between connections. May block for about 50 ms.
        Raises TransportError, and can be repeated.
        """

    def successor(self) -> ArenaEnd:
        """Return another end of the same arena with an offer of its own.

        For a connection that begins while a connection with this offer continues. Close the new end as well.
        Uses prepared resources, or may block for about 50 ms. Raises TransportError.
        """

    def cut_off(self) -> None:
        """Revoke the offer as ``renew`` does, without a new offer."""

    def close(self) -> None:
        """Stop offering. The arena's memory stays mapped while any slot is in quarantine."""
