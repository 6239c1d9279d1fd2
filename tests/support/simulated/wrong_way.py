"""A transport that does wrong: put it around any other, and see that nothing wrong is handed over.

Each wave meets a *harm* or none, drawn from a seed. Some are honest: the wave is late, or fails. Others lie
about what was moved: it is cut short, changed, mixed up, or not there at all, and yet DONE. The worst lie
about time: a block of a wave that was said to have ended lands once more, or for the first time, when another
wave is at work in its slot: before that one's bytes, or over them. All of that is over before the other
wave's end is told, so that whoever checks bytes before using them can notice; what lands *while* they are
used is what quarantine is for, and no transport may do.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
from tests.support.agent.moving import move

from ostraca_dpu_agent.adapters.transports.submitted_stream import SubmittedStreams
from ostraca_fabric.ports.transport import Direction, TransferEnd
from ostraca_fabric.runtime.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from ostraca_fabric.ports.transport import BulkChannel, RemoteArena, Transport
    from ostraca_fabric.tables.slots import Wave
    from ostraca_fabric.wire.messages import ArenaOffer


_OWED_MAX = 64
"""Waves that wait for their destination to be used again."""


class Harm(Enum):
    """What befalls a wave."""

    DELAYED = auto()
    """It moves some milliseconds late, after waves that were submitted later."""

    FAILED = auto()
    """It does not move, and says so."""

    STUCK = auto()
    """It does not end before ``relent``."""

    TRUNCATED = auto()
    """The end of each block does not move."""

    CORRUPTED = auto()
    """A bit of each block changes on the way."""

    MIXED_UP = auto()
    """Its blocks arrive in each other's slots."""

    ELSEWHERE = auto()
    """Its bytes come from other slots than they should."""

    LOST = auto()
    """It is DONE and has not moved; it lands when its destination is used again."""

    DUPLICATED = auto()
    """It moves, and lands again when its destination is used again."""


@dataclass(frozen=True, slots=True)
class _Owed:
    """A wave that has ended, and lands late."""

    peer: WrongWayPeer
    direction: Direction
    wave: Wave
    is_over_others: bool
    """Whether it lands over the bytes of the wave it meets, or before them."""


class WrongWayTransport:
    """Implements ``ports.transport.Transport`` around *inner*.

    ``share`` of the waves meet one of *harms*; it may be changed. ``counts`` says how many met which.
    Belongs to one event loop.
    """

    def __init__(self, inner: Transport, harms: Collection[Harm], *, seed: int, share: float) -> None:
        self.name = inner.name
        self.share = share
        self.counts: Counter[Harm] = Counter()
        self.landed_late = 0
        self._inner = inner
        self._harms = tuple(harms)
        self._dice = random.Random(seed)
        self._owed: list[_Owed] = []
        self._tasks = Tasks("a transport that does wrong")
        self._relented = asyncio.Event()

    def relent(self) -> None:
        """Do right from here on: what is stuck moves, and nothing lands late any more."""
        self._relented.set()
        self._owed.clear()

    def register(self, staging: memoryview, *, chunk_bytes: int = 0) -> None:
        """As in the port."""
        self._inner.register(staging, chunk_bytes=chunk_bytes)

    async def attach(self, offer: ArenaOffer, staging: memoryview, channel: BulkChannel) -> WrongWayPeer:
        """As in the port."""
        return WrongWayPeer(self, await self._inner.attach(offer, staging, channel), staging)

    async def close(self) -> None:
        """As in the port. Relents."""
        self.relent()
        await self._tasks.finish()
        await self._inner.close()

    # For its peers.

    def begin(self, peer: WrongWayPeer, direction: Direction, wave: Wave) -> asyncio.Future[TransferEnd]:
        """Move a wave, wrong or right."""
        end: asyncio.Future[TransferEnd] = asyncio.get_running_loop().create_future()
        harm = None
        if len(wave.lengths) and not self._relented.is_set() and self._dice.random() < self.share:
            harm = self._dice.choice(self._harms)
            self.counts[harm] += 1
        self._tasks.spawn(self._move(end, peer, direction, wave, harm))
        return end

    async def _move(
        self,
        end: asyncio.Future[TransferEnd],
        peer: WrongWayPeer,
        direction: Direction,
        wave: Wave,
        harm: Harm | None,
    ) -> None:
        late = self._take_owed(peer, wave)
        await self._land([owed for owed in late if not owed.is_over_others])
        result = await self._harmed(peer, direction, wave, harm)
        await self._land([owed for owed in late if owed.is_over_others])
        if harm in (Harm.LOST, Harm.DUPLICATED):
            self._owed.append(_Owed(peer, direction, wave, self._dice.random() < 0.5))
        end.set_result(result)

    async def _harmed(
        self, peer: WrongWayPeer, direction: Direction, wave: Wave, harm: Harm | None
    ) -> TransferEnd:
        match harm:
            case Harm.FAILED:
                return TransferEnd.FAILED
            case Harm.LOST:
                return TransferEnd.DONE
            case Harm.DELAYED:
                await asyncio.sleep(self._dice.uniform(0.0, 0.02))
            case Harm.STUCK:
                await self._relented.wait()
            case Harm.TRUNCATED:
                wave = replace(wave, lengths=np.maximum(wave.lengths // 2, 1).astype(np.uint32))
            case Harm.MIXED_UP:
                wave = replace(wave, arena=np.roll(wave.arena, 1), lengths=_least(wave.lengths))
            case Harm.ELSEWHERE:
                wave = peer.elsewhere(wave, self._dice)
            case Harm.CORRUPTED:
                return await peer.corrupted(direction, wave, self._dice)
            case Harm.DUPLICATED | None:
                pass
        return await move(peer.inner, direction, wave)

    def _take_owed(self, peer: WrongWayPeer, wave: Wave) -> list[_Owed]:
        """Take the blocks that land late in slots in which *wave* is at work; their neighbours never land."""
        taken, left = [], []
        for owed in self._owed:
            is_met = owed.peer.meets(owed.direction, owed.wave, peer, wave)
            if is_met.any():
                taken.append(replace(owed, wave=_some(owed.wave, is_met)))
            else:
                left.append(owed)
        self._owed = left[-_OWED_MAX:]
        return taken

    async def _land(self, late: list[_Owed]) -> None:
        for owed in late:
            await move(owed.peer.inner, owed.direction, owed.wave)
            self.landed_late += 1


class WrongWayPeer(SubmittedStreams):
    """One worker's arena; from ``WrongWayTransport.attach``."""

    def __init__(self, transport: WrongWayTransport, inner: RemoteArena, staging: memoryview) -> None:
        self.inner = inner
        self.staging = staging
        self._transport = transport

    def submit(self, direction: Direction, wave: Wave) -> asyncio.Future[TransferEnd]:
        """As in the port, but for the harm."""
        return self._transport.begin(self, direction, wave)

    def offer_regions(self, metadata: bytes) -> None:
        """As in the port."""
        self.inner.offer_regions(metadata)

    def close(self) -> None:
        """As in the port."""
        self.inner.close()

    def meets(self, direction: Direction, owed: Wave, peer: WrongWayPeer, wave: Wave) -> NDArray[np.bool_]:
        """Tell which blocks of a wave owed to this peer belong in slots of *wave*, which is *peer*'s."""
        if direction is Direction.TO_WORKER:
            is_same, ours, theirs, slot_bytes = peer is self, owed.arena, wave.arena, wave.arena_slot_bytes
        else:
            is_same = peer.staging.obj is self.staging.obj
            ours, theirs, slot_bytes = owed.staging, wave.staging, wave.staging_slot_bytes
        is_same = is_same and owed.in_regions == wave.in_regions
        begins_in = ours[:, None] >= theirs[None, :]
        ends_in = (ours + owed.lengths)[:, None] <= (theirs + slot_bytes)[None, :]
        met: NDArray[np.bool_] = is_same & np.logical_or.reduce(begins_in & ends_in, axis=1)
        return met

    def elsewhere(self, wave: Wave, dice: random.Random) -> Wave:
        """Return the wave with other staging slots: what lies or belongs there is another request's."""
        slots = len(self.staging) // wave.staging_slot_bytes
        shift = dice.randrange(1, max(2, slots)) * wave.staging_slot_bytes
        staging = (wave.staging + shift) % (slots * wave.staging_slot_bytes)
        room = np.minimum(wave.lengths, len(self.staging) - staging)
        return replace(wave, staging=staging, lengths=np.maximum(room, 1).astype(np.uint32))

    async def corrupted(self, direction: Direction, wave: Wave, dice: random.Random) -> TransferEnd:
        """Move a wave with one bit of each block changed; staging is as it was when its bytes were sent."""
        places = [int(at + dice.randrange(n)) for at, n in zip(wave.staging, wave.lengths, strict=True)]
        bit = 1 << dice.randrange(8)
        is_sent = direction is Direction.TO_WORKER
        if is_sent:
            self._flip(places, bit)
        end = await move(self.inner, direction, wave)
        self._flip(places, bit)
        return end

    def _flip(self, places: list[int], bit: int) -> None:
        for place in places:
            self.staging[place] ^= bit


def _least(lengths: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return as many lengths, each the shortest: blocks of one fit any other's slot then."""
    return np.full_like(lengths, lengths.min())


def _some(wave: Wave, chosen: NDArray[np.bool_]) -> Wave:
    return replace(wave, staging=wave.staging[chosen], arena=wave.arena[chosen], lengths=wave.lengths[chosen])
