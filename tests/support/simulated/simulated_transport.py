"""A data plane in one process: bytes cross between staging memory and arenas, late, in part, or not at all.

``SimulatedPlane`` is what all ends share. An agent's process has a ``SimulatedTransport`` on it, a worker's a
``SimulatedArenaEnd``; both work on the clock of the loop that they are used on, virtual or real, and what is
under way belongs to no process (``virtual_hosts``). Each block of a wave lands by itself, at a time of its
own, as what is under it then says; its wave has ended when the last has landed.

A process that dies leaves transfers under way, as a network card does: they land or not, up to ``late_s``
later, and nobody is told. They are over for certain once ``over`` was called, as whoever starts a successor
must.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from tests.support.simulated.futures import resolve
from tests.support.simulated.virtual_hosts import outside

from ostraca_dpu_agent.adapters.transports.submitted_stream import SubmittedStreams
from ostraca_fabric.errors import TransportError
from ostraca_fabric.ports.transport import Direction, TransferEnd, check_offer
from ostraca_fabric.wire.messages import ArenaOffer

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ostraca._memory.regions import RegionMemory
    from ostraca_fabric.ports.transport import BulkChannel
    from ostraca_fabric.tables.slots import Wave

NAME = "simulated"


@dataclass(frozen=True, slots=True)
class TransferFaults:
    """What can befall transfers. Chances are from 0 to 1, for each wave. As it is made: well."""

    time_s: tuple[float, float] = (20e-6, 300e-6)
    """How long a block is under way: drawn between the two."""

    failures: float = 0.0
    """A wave ends FAILED, with none, some or parts of its blocks moved."""

    stalls: float = 0.0
    """A wave takes longer, by up to ``stall_s``."""

    stall_s: float = 1.0
    late: float = 0.5
    """Of waves under way when their submitter dies: land later, by up to ``late_s``. The others land in part
    at once, or not at all."""

    late_s: float = 5.0


class SimulatedPlane:
    """The wires between all ends. Every delay and fate comes from *dice*."""

    def __init__(self, dice: random.Random, faults: TransferFaults | None = None) -> None:
        """Begin with no end."""
        self.dice = dice
        self.faults = faults or TransferFaults()
        self.arenas: dict[bytes, SimulatedArenaEnd] = {}
        self.regions: dict[bytes, SimulatedRegion] = {}
        """What peers may reach beside arenas, by the metadata of its offer."""

        self._keys = 0

    def new_key(self) -> bytes:
        """Return what no arena was offered by before."""
        self._keys += 1
        return self._keys.to_bytes(8, "little")


@dataclass(frozen=True, slots=True)
class SimulatedRegion:
    """Memory of a worker at an address."""

    address: int
    array: NDArray[np.uint8]


class SimulatedArenaEnd:
    """Implements ``ports.transport.ArenaEnd`` for memory of this process."""

    name = NAME
    needs_progress = False

    def __init__(self, plane: SimulatedPlane, memory: memoryview, *, chunk_bytes: int) -> None:
        """Offer *memory*."""
        self.array = np.frombuffer(memory, np.uint8)
        self.on_submitted: Callable[[int], object] = lambda _: None
        """Asked, for each block that is to come here, what its slot stands for just then."""

        self.on_landing: Callable[[int, object], None] = lambda _, __: None
        """Told before each block lands, and what its slot stood for when it was submitted."""

        self._plane = plane
        self._chunk_bytes = chunk_bytes
        self.is_closed = False
        """Nothing lands any more."""

        self._key = b""
        self.renew()

    def offer(self) -> ArenaOffer:
        """As in the port."""
        return ArenaOffer(NAME, len(self.array), self._chunk_bytes, 0, self._key)

    def offer_region(self, region: RegionMemory) -> bytes:
        """As in the port, at once; forever, so that what is late has somewhere to land."""
        metadata = region.address.to_bytes(8, "little")
        self._plane.regions[metadata] = SimulatedRegion(region.address, region.array)
        return metadata

    def progress(self) -> None:
        """As in the port: nothing here waits for it."""

    def prepare_renewal(self) -> None:
        """As in the port: there is nothing to prepare."""

    def renew(self) -> None:
        """As in the port. What is under way lands all the same, as it does through shared memory."""
        self._plane.arenas.pop(self._key, None)
        self._key = self._plane.new_key()
        self._plane.arenas[self._key] = self

    def successor(self) -> SimulatedArenaEnd:
        """As in the port. Landings there are told to who is told of them here."""
        made = SimulatedArenaEnd(self._plane, self.array.data, chunk_bytes=self._chunk_bytes)
        made.on_submitted, made.on_landing = self.on_submitted, self.on_landing
        return made

    def cut_off(self) -> None:
        """As in the port."""
        self._plane.arenas.pop(self._key, None)

    def close(self) -> None:
        """As in the port."""
        self.cut_off()
        self.is_closed = True


class SimulatedTransport:
    """Implements ``ports.transport.Transport`` for one process."""

    name = NAME

    def __init__(self, plane: SimulatedPlane) -> None:
        """Begin with nothing under way."""
        self.plane = plane
        self.is_dead = False
        self.under_way: dict[Transfer, None] = {}

    def register(self, staging: memoryview, *, chunk_bytes: int = 0) -> None:
        """As in the port: any memory will do."""

    async def attach(
        self,
        offer: ArenaOffer,
        staging: memoryview,
        channel: BulkChannel,
    ) -> SimulatedPeer:
        """As in the port."""
        check_offer(offer, NAME)
        arena = self.plane.arenas.get(offer.metadata)
        if arena is None or offer.arena_bytes > len(arena.array):
            message = f"no arena of {offer.arena_bytes} bytes is offered by {offer.metadata.hex()}"
            raise TransportError(message)
        return SimulatedPeer(self, offer, np.frombuffer(staging, np.uint8))

    async def close(self) -> None:
        """As in the port."""
        while self.under_way:
            await asyncio.wait([transfer.end for transfer in self.under_way])

    def crash(self) -> None:
        """Kill the process; some of its transfers land, now or later."""
        self.is_dead = True
        for transfer in list(self.under_way):
            transfer.orphan()

    def over(self) -> None:
        """Nothing that a dead process had under way lands from here on."""
        for transfer in list(self.under_way):
            transfer.stop()


class SimulatedPeer(SubmittedStreams):
    """One worker's arena; from ``SimulatedTransport.attach``."""

    def __init__(self, transport: SimulatedTransport, offer: ArenaOffer, staging: NDArray[np.uint8]) -> None:
        self._transport = transport
        self._offer = offer
        self._staging = staging
        self._region: SimulatedRegion | None = None
        """The last that was offered."""

        self._is_closed = False

    def offer_regions(self, metadata: bytes) -> None:
        """As in the port."""
        self._region = self._transport.plane.regions[metadata]

    def submit(self, direction: Direction, wave: Wave) -> asyncio.Future[TransferEnd]:
        """As in the port."""
        end: asyncio.Future[TransferEnd] = asyncio.get_running_loop().create_future()
        region = self._region if wave.in_regions else None
        reach, size_bytes = wave, self._offer.arena_bytes
        if region is not None:
            reach, size_bytes = replace(wave, arena=wave.arena - region.address), len(region.array)
        fits = reach.fits(staging_bytes=len(self._staging), arena_bytes=size_bytes)
        if self._is_closed or not fits or (wave.in_regions and region is None):
            end.set_result(TransferEnd.FAILED)
        else:
            key = self._offer.metadata
            outside(Transfer(self._transport, key, region, self._staging, direction, wave, end).begin)
        return end

    def close(self) -> None:
        """As in the port."""
        self._is_closed = True


class Transfer:
    """A wave under way."""

    def __init__(
        self,
        transport: SimulatedTransport,
        arena: bytes,
        region: SimulatedRegion | None,
        staging: NDArray[np.uint8],
        direction: Direction,
        wave: Wave,
        end: asyncio.Future[TransferEnd],
    ) -> None:
        self.end = end
        self._transport = transport
        self._plane = transport.plane
        self._key = arena
        self._region = region
        self._staging = staging
        self._is_sent = direction is Direction.TO_WORKER
        self._blocks = list(
            zip(wave.staging.tolist(), wave.arena.tolist(), wave.lengths.tolist(), strict=True)
        )
        self._arena: SimulatedArenaEnd | None = None
        self._slots: list[object] = []
        self._left = len(self._blocks)
        self._fails = False
        self._copies: list[NDArray[np.uint8]] | None = None
        self._timers: list[asyncio.TimerHandle] = []

    def begin(self) -> None:
        """Be under way."""
        dice, faults = self._plane.dice, self._plane.faults
        self._transport.under_way[self] = None
        self._arena = self._plane.arenas.get(self._key)
        if self._arena is not None and self._is_sent:
            self._slots = [self._arena.on_submitted(at) for _, at, _ in self._blocks]
        stall_s = dice.uniform(0, faults.stall_s) if _chance(dice, faults.stalls) else 0.0
        self._fails = _chance(dice, faults.failures)
        loop = asyncio.get_running_loop()
        self._timers = [
            loop.call_later(stall_s + dice.uniform(*faults.time_s), self._arrive, row)
            for row in range(len(self._blocks))
        ]
        if not self._blocks:
            self._ended()

    def orphan(self) -> None:
        """Its submitter is dead, and its memory gone: what lands is what was in it then."""
        dice, faults = self._plane.dice, self._plane.faults
        self.stop()
        if not self._is_sent:
            return
        self._copies = [self._staging[at : at + length].copy() for at, _, length in self._blocks]
        loop = asyncio.get_running_loop()
        if _chance(dice, faults.late):
            self._transport.under_way[self] = None
            self._timers = [
                loop.call_later(dice.uniform(0, faults.late_s), self._arrive, row)
                for row in range(len(self._blocks))
            ]
        else:
            for row in range(len(self._blocks)):
                self._land(row, dice.random())

    def stop(self) -> None:
        """Land nothing more."""
        for timer in self._timers:
            timer.cancel()
        self._transport.under_way.pop(self, None)

    def _arrive(self, row: int) -> None:
        part = self._plane.dice.random() if self._fails else 1.0
        self._fails = not self._land(row, part) or self._fails
        self._left -= 1
        if not self._left:
            self._ended()

    def _land(self, row: int, part: float) -> bool:
        """Move a block, or the first part of it; say whether there is still an arena."""
        arena = self._arena
        if arena is None or arena.is_closed:
            return False
        from_at, to_at, length = self._blocks[row]
        length = int(length * part)
        theirs, first = arena.array, to_at
        if self._region is not None:
            theirs, first = self._region.array, to_at - self._region.address
        if not self._is_sent:
            self._staging[from_at : from_at + length] = theirs[first : first + length]
        elif length:
            arena.on_landing(to_at, self._slots[row])
            source = self._staging[from_at:] if self._copies is None else self._copies[row]
            theirs[first : first + length] = source[:length]
        return True

    def _ended(self) -> None:
        self._transport.under_way.pop(self, None)
        if not self._transport.is_dead:
            resolve(self.end, TransferEnd.FAILED if self._fails else TransferEnd.DONE)


def _chance(dice: random.Random, of: float) -> bool:
    return of > 0 and dice.random() < of
