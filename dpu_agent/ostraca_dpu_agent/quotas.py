"""What tenants may get and put in a second at this agent.

A tenant beyond its rate is declined at once, so that it can recompute, and nobody waits for it: its puts
first, when less than half a second of its rate is left, then its prefetches, and its gets when none is.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.outcome import BlockState, PutState
from ostraca_fabric.policies.rate import RateLimit
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import (
    Get,
    GetDone,
    Lookup,
    Prefetch,
    PrefetchDone,
    PrefetchFor,
    Put,
    PutDone,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from enum import IntEnum

    from numpy.typing import NDArray

    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.ids import AgentId, TenantId
    from ostraca_fabric.rulings import Rulings
    from ostraca_fabric.wire.messages import LookupDone

    Request = Get | Put | Lookup | Prefetch | PrefetchFor
    Answer = GetDone | PutDone | LookupDone | PrefetchDone

_LEAST_LEFT = {Put: 0.5, Prefetch: 0.25, PrefetchFor: 0.25, Get: 0.0}
_USED: dict[type, tuple[IntEnum, ...]] = {
    GetDone: (BlockState.HIT, BlockState.LATE),
    PutDone: (PutState.STAGED, PutState.COMMITTED, PutState.LATE),
    PrefetchDone: (BlockState.HIT, BlockState.LATE),
}
"""States of blocks that may have crossed."""


class Quotas:
    """Each tenant's rate. Lives on the event loop's thread."""

    def __init__(self, agent: AgentId, rulings: Callable[[], Rulings], clock: Callable[[], float]) -> None:
        """Go by the newest *rulings*; *clock* is monotonic, in seconds."""
        self._agent = agent
        self._rulings = rulings
        self._clock = clock
        self._rates: defaultdict[TenantId, RateLimit] = defaultdict(lambda: RateLimit(clock()))

    def admit(self, volume: ServedVolume, request: Request) -> int | None:
        """Take what a request may move from its tenant's rate; return it for ``settle``. None where the
        request is to be declined. Raises MalformedError.
        """
        tenant = volume.record.tenant
        bytes_per_s = self._rulings().tenant(tenant).agent_bytes_per_s
        if not bytes_per_s:
            self._rates.pop(tenant, None)
            return 0
        if isinstance(request, Lookup):
            return 0  # it moves none
        if isinstance(request, Prefetch) and request.at not in ("", self._agent):
            return 0  # that agent counts it
        rate = self._rates[tenant]
        if rate.fullness(self._clock(), bytes_per_s) <= _LEAST_LEFT[type(request)]:
            return None
        asked_bytes = int(_lengths(volume, request).sum())
        rate.take(asked_bytes)
        return asked_bytes

    def settle(self, volume: ServedVolume, request: Request, taken_bytes: int, answer: Answer | None) -> None:
        """Give back what was taken and not used; all of it where the request came to nothing."""
        rate = self._rates.get(volume.record.tenant)
        if rate is None or not taken_bytes:
            return
        used_bytes = 0
        if answer is not None:
            is_used = np.isin(np.frombuffer(answer.states, np.uint8), _USED[type(answer)])
            used_bytes = int(_lengths(volume, request)[is_used].sum())
        rate.take(used_bytes - taken_bytes)


def _lengths(volume: ServedVolume, request: Request) -> NDArray[np.uint32]:
    """Return the bytes of each block, as far as the request knows: of a prefetch the most they can be."""
    count = sum(map(len, request.spans))
    if isinstance(request, Get | Put):
        return columns.u32(request.lengths, count)
    return np.full(count, volume.record.block_bytes, np.uint32)
