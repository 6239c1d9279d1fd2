"""How block bytes cross between an agent's staging memory and a worker's arena.

The agent moves the bytes, in both directions; a worker never holds a handle to agent memory. A transfer is
*settled* when it is known to have ended, well or badly: only then may memory at either end be used for
something else. A transfer that is not settled stays so, for as long as it takes: no time-out ever settles
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

    import numpy as np
    from numpy.typing import NDArray

    from ostraca_fabric.wire.messages import ArenaOffer, Message


INLINE = "inline"
"""The transport that needs no more than the control connection. Its name is said here, as its two ends share
nothing else: a worker loads no part of an agent."""


class Direction(Enum):
    """Which way the bytes go, seen from the agent."""

    TO_WORKER = auto()
    FROM_WORKER = auto()


class TransferEnd(Enum):
    """How a settled transfer ended."""

    DONE = auto()
    """Every byte is where it should be."""

    FAILED = auto()
    """It has ended, and what the destination holds is not to be used."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Blocks that cross together.

    ``staging`` and ``arena`` are offsets (int64, shape (n,)) of slots in the agent's staging memory and in
    the worker's arena; ``lengths`` (uint32, shape (n,)) the bytes of each block. Slots of the two sides have
    the sizes given.
    """

    staging: NDArray[np.int64]
    arena: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    staging_slot_bytes: int
    arena_slot_bytes: int


class BulkChannel(Protocol):
    """What a transport may ask of the worker's control connection. Only the inline transport sends by it."""

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

        The future ends when they are gone: messages sent from then on arrive behind them. It raises
        ConnectionError when the connection closed first. Until either, the memory is in use.
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

        The future ends when all have landed, or raises ConnectionError when the connection closed, after
        which nothing more lands.
        """

    def break_off(self, why: str) -> None:
        """End the connection, because blocks can't cross on it any more: the worker is to make a new one."""


class Peer(Protocol):
    """One worker's arena, as its agent sees it."""

    def submit(self, direction: Direction, wave: Wave) -> asyncio.Future[TransferEnd]:
        """Start moving *wave*. The future resolves when the transfer is settled, and never raises.

        Never cancel the future; stop waiting for it instead, and keep the memory of both ends in quarantine
        until it resolves. A wave that the arena does not hold (offsets out of range) resolves to FAILED
        without touching a byte.
        """

    def close(self) -> None:
        """Start no more transfers. Those under way settle when they do."""


class Transport(Protocol):
    """The agent's end of one kind of data plane. One per process."""

    name: str
    """As in ``ArenaOffer.transport``: ``nixl`` or ``inline``."""

    def register(self, staging: memoryview, *, chunk_bytes: int = 0) -> None:
        """Make this memory a source and target of transfers. Call before the first attach; it stays mapped
        for good.

        ``chunk_bytes`` is that of the memory's SlotPool, when it has one: waves of its slots are then
        prepared once and cost less. May block for as long as registering takes.
        """

    async def attach(self, offer: ArenaOffer, staging: memoryview, channel: BulkChannel) -> Peer:
        """Make a worker's arena reachable. Raises TransportError when the offer can't be used."""

    async def close(self) -> None:
        """Stop progress after the transfers under way, or give them up with their memory left mapped."""


class ArenaEnd(Protocol):
    """The worker's end: it offers its arena and makes progress while others move bytes."""

    name: str

    def offer(self) -> ArenaOffer:
        """What to say in the handshake."""

    def progress(self) -> None:
        """Let transfers under way go on; cheap (microseconds). Call it about every 0.5 ms while a request is
        out.
        """

    @property
    def needs_progress(self) -> bool:
        """Whether ``progress`` does anything."""

    def prepare_renewal(self) -> None:
        """Make ready what the next ``renew`` takes, so that it is quick. From any thread.

        Nothing of it is offered, or can be reached, before. May block for some 50 ms, in which the end can be
        used all the same; ``renew`` and ``close`` wait for it. Never raises: ``renew`` does then.
        """

    def renew(self) -> None:
        """Cut off whoever was offered this end before, and make an offer of its own for the next connection.

        Afterwards nothing lands that this end had received and not yet dealt with; what others write by
        themselves (through shared memory) still may. Only between connections. May block for some 50 ms;
        raises TransportError, and can be called again.
        """

    def successor(self) -> ArenaEnd:
        """Return another end of the same arena, with an offer of its own: for a connection that begins while
        one with this offer goes on. Close it, too.

        It takes what was prepared, else it may block for some 50 ms. Raises TransportError.
        """

    def cut_off(self) -> None:
        """Cut off whoever was offered this end, as ``renew`` does, and offer it to nobody any more."""

    def close(self) -> None:
        """Stop offering. The arena's memory stays mapped while any of its slots is in quarantine."""
