"""Admission of block requests: volume served, rate limit of the tenant.

Refused blocks are declined at once, so that the caller recomputes and nothing waits. Beyond the rate limit,
puts are declined first, when less than half a second of the rate is left; then prefetches, and gets when
nothing is left.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.request import DataPathCounters
from ostraca_dpu_agent.volumes import Incarnations, ServedVolume
from ostraca_fabric.model.fabric_map import FabricMap
from ostraca_fabric.model.ids import AgentId, TenantId
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.model.overrides import Overrides, Switch
from ostraca_fabric.policies.rate_limit import RateLimit
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import (
    Get,
    GetDone,
    Lookup,
    LookupDone,
    Prefetch,
    PrefetchDone,
    PrefetchFor,
    Put,
    PutDone,
)

Request = Get | Put | Lookup | Prefetch | PrefetchFor
Answer = GetDone | PutDone | LookupDone | PrefetchDone


_Request = TypeVar("_Request", Get, Put, Lookup, Prefetch, PrefetchFor)

_Answer = TypeVar("_Answer", GetDone, PutDone, LookupDone, PrefetchDone)

_OPERATIONS = {Get: "get", Put: "put", Lookup: "lookup", Prefetch: "prefetch", PrefetchFor: "prefetch"}

_DONE = {Get: GetDone, Put: PutDone, Lookup: LookupDone, Prefetch: PrefetchDone, PrefetchFor: PrefetchDone}

_LEAST_LEFT = {Put: 0.5, Prefetch: 0.25, PrefetchFor: 0.25, Get: 0.0}

_USED: dict[type, tuple[IntEnum, ...]] = {
    GetDone: (BlockState.HIT, BlockState.LATE),
    PutDone: (PutState.STAGED, PutState.COMMITTED, PutState.LATE),
    PrefetchDone: (BlockState.HIT, BlockState.LATE),
}
"""States of blocks with possibly transferred bytes."""


class RequestAdmission:
    """Admission of an agent's block requests. Use on the event loop's thread only."""

    def __init__(
        self,
        agent: AgentId,
        membership: Membership,
        incarnations: Incarnations,
        counters: DataPathCounters,
        clock: Callable[[], float],
    ) -> None:
        """Apply the newest overrides of *membership*; count declines in *counters*.

        *clock* is monotonic, in seconds.
        """
        self._agent = agent
        self._membership = membership
        self._incarnations = incarnations
        self._counters = counters
        self._clock = clock
        self._rates: defaultdict[TenantId, RateLimit] = defaultdict(lambda: RateLimit(clock()))

    async def serve(
        self,
        volume: ServedVolume,
        request: _Request,
        run: Callable[[ServedVolume, _Request], Awaitable[_Answer]],
    ) -> _Answer:
        """Serve a request, or decline all of its blocks.

        Raises as *run* does, and MalformedError.
        """
        if (
            self._membership.overrides.switches.get((volume.record.tenant, volume.record.name), Switch.ON)
            is Switch.OFF
        ):
            return await run(volume, request)  # declines all blocks, with the reason
        if not self._incarnations.is_served(volume.record):
            return self._decline(request, Reason.STALE_VOLUME)  # type: ignore[no-any-return]  # as ``_DONE`` says
        charged_bytes = self._charge(volume, request)
        if charged_bytes is None:
            return self._decline(request, Reason.QUOTA)  # type: ignore[no-any-return]  # as ``_DONE`` says
        answer: _Answer | None = None
        self._incarnations.begin_use(volume.record)
        try:
            answer = await run(volume, request)
            return answer
        finally:
            self._incarnations.end_use(volume.record)
            self._settle(volume, request, charged_bytes, answer)

    def _decline(self, request: Request, reason: Reason) -> Any:  # noqa: ANN401 (the answer to it)
        operation, blocks = _OPERATIONS[type(request)], sum(map(len, request.spans))
        outcomes = self._counters.decline(operation, blocks, reason)
        return _DONE[type(request)](request.request, *outcomes.encode())

    def _charge(self, volume: ServedVolume, request: Request) -> int | None:
        """Charge a request's possible bytes to its tenant's rate limit.

        Returns the bytes for ``_settle``, or None to decline. Raises MalformedError.
        """
        tenant = volume.record.tenant
        bytes_per_s = self._membership.overrides.tenant(tenant).agent_bytes_per_s
        if not bytes_per_s:
            self._rates.pop(tenant, None)
            return 0
        if isinstance(request, Lookup):
            return 0  # the request moves no bytes
        if isinstance(request, Prefetch) and request.at not in ("", self._agent):
            return 0  # the other agent counts the request
        rate = self._rates[tenant]
        if rate.fullness(self._clock(), bytes_per_s) <= _LEAST_LEFT[type(request)]:
            return None
        request_bytes = int(_lengths(volume, request).sum())
        rate.take(request_bytes)
        return request_bytes

    def _settle(
        self, volume: ServedVolume, request: Request, charged_bytes: int, answer: Answer | None
    ) -> None:
        """Refund unused bytes; all of them if the request failed."""
        rate = self._rates.get(volume.record.tenant)
        if rate is None or not charged_bytes:
            return
        used_bytes = 0
        if answer is not None:
            is_used = np.isin(np.frombuffer(answer.states, np.uint8), _USED[type(answer)])
            used_bytes = int(_lengths(volume, request)[is_used].sum())
        rate.take(used_bytes - charged_bytes)


def _lengths(volume: ServedVolume, request: Request) -> NDArray[np.uint32]:
    """Return the bytes of each block, as far as known.

    For a prefetch, the largest possible length.
    """
    count = sum(map(len, request.spans))
    if isinstance(request, Get | Put):
        return codec.u32(request.lengths, count)
    return np.full(count, volume.record.block_bytes, np.uint32)


def flash_shares(overrides: Overrides, fabric_map: FabricMap) -> dict[int, float]:
    """Return each pool's share of flash: its tenant's quota of usable flash.

    Every shard has the same share, since placement fills shards alike.
    """
    usable_bytes = sum(shard.weight for shard in fabric_map.shards())
    quotas: Counter[int] = Counter()
    for tenant in overrides.tenants.values():
        if tenant.flash_bytes:
            quotas[tenant.pool] += tenant.flash_bytes
    return {pool: quota / usable_bytes for pool, quota in quotas.items()} if usable_bytes else {}
