"""Regions offered to peers of a NIXL agent, beside the arena.

Registration may take long, as it pins memory, and runs in a thread of its own. A region leaves when it ends.
Peers know its place even then, and no request names it. Another region there is not offered, since peers
could use worthless descriptors of that place.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from concurrent.futures import Future
from functools import partial

from ostraca_fabric.errors import TransportError
from ostraca_fabric.nixl.runtime import RegisteredMemory
from ostraca_fabric.ports.transport import RegionPlace
from ostraca_fabric.runtime.threads import run_in_background
from ostraca_fabric.wire.messages import REGION_OFFERS_MAX

log = logging.getLogger("ostraca")


class OfferedRegions:
    """Regions for the peers of *registered*. For one thread."""

    def __init__(self, registered: RegisteredMemory) -> None:
        self._registered = registered
        self._offers: weakref.WeakKeyDictionary[RegionPlace, Future[bytes]] = weakref.WeakKeyDictionary()
        self._left: deque[tuple[int, int]] = deque()
        """Places of regions that left, address and size."""

        self._begun = 0

    def offer(self, region: RegionPlace) -> Future[bytes]:
        """Return the metadata for peers to reach a region, or the error, once known."""
        offer = self._offers.get(region)
        if offer is None:
            offer = self._offers[region] = self._begin(region)
        return offer

    def _begin(self, region: RegionPlace) -> Future[bytes]:
        place = first, size_bytes = region.address, region.size_bytes
        if any(left < first + size_bytes and first < left + size for left, size in list(self._left)):
            return _refused("the place of a region that left")
        if self._begun == REGION_OFFERS_MAX:
            return _refused(f"{REGION_OFFERS_MAX} regions were offered before")
        self._begun += 1
        region.when_ended(partial(self._left.append, place))
        region.when_ended(partial(self._registered.shrink, *place))
        offer = run_in_background("regions", partial(self._registered.extend, *place))
        offer.add_done_callback(_tell)
        return offer


def _refused(why: str) -> Future[bytes]:
    refused: Future[bytes] = Future()
    refused.set_exception(TransportError(why))
    _tell(refused)
    return refused


def _tell(offer: Future[bytes]) -> None:
    error = offer.exception()
    if isinstance(error, TransportError):
        log.warning("Blocks of a region are copied through the arena: %s", error)
