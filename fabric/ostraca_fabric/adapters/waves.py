"""What both transports check before they touch a byte.

Everything in an ArenaOffer comes from a worker, and offsets come from its requests: none is trusted. A wave
is held against the sizes agreed at attach, so what lies outside the arena or the staging memory is refused
here, on every transport alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.errors import TransportError
from ostraca_fabric.extent import PAGE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca_fabric.ports.transport import Wave
    from ostraca_fabric.wire.messages import ArenaOffer

ARENA_BYTES_MAX = 1 << 43
"""8 TiB: slot numbers then fit 32 bits, and no sum of address, offset and length leaves 64."""


def check_offer(offer: ArenaOffer, transport: str) -> None:
    """Raise TransportError unless the offer is for *transport* and its sizes make sense."""
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


def wave_fits(wave: Wave, *, staging_bytes: int, arena_bytes: int) -> bool:
    """Tell whether every block of the wave lies in its slot, and every slot's used part in its memory."""
    count = len(wave.lengths)
    if not len(wave.staging) == len(wave.arena) == count:
        return False
    if count == 0:
        return True
    if int(wave.lengths.min()) < 1:
        return False
    if int(wave.lengths.max()) > min(wave.staging_slot_bytes, wave.arena_slot_bytes):
        return False
    lengths = wave.lengths.astype(np.int64)
    return _are_within(wave.staging, lengths, staging_bytes) and _are_within(wave.arena, lengths, arena_bytes)


def _are_within(offsets: NDArray[np.int64], lengths: NDArray[np.int64], size_bytes: int) -> bool:
    return int(offsets.min()) >= 0 and bool((offsets <= size_bytes - lengths).all())
