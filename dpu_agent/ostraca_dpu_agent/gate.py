"""What requests for blocks pass before they are served: whether the volume may be served now, and whether the
tenant may use more. What does not pass is declined at once, block by block, so that its caller recomputes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ostraca_fabric.outcome import BlockState, PutState, Reason
from ostraca_fabric.rulings import Switch
from ostraca_fabric.wire import columns
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

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ostraca_dpu_agent.incarnations import Incarnations
    from ostraca_dpu_agent.mover.counters import Counters
    from ostraca_dpu_agent.quotas import Quotas
    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.rulings import Rulings

    BlockRequest = Get | Put | Lookup | Prefetch | PrefetchFor

_Request = TypeVar("_Request", Get, Put, Lookup, Prefetch, PrefetchFor)
_Answer = TypeVar("_Answer", GetDone, PutDone, LookupDone, PrefetchDone)

_OPERATIONS = {Get: "get", Put: "put", Lookup: "lookup", Prefetch: "prefetch", PrefetchFor: "prefetch"}
_DONE = {Get: GetDone, Put: PutDone, Lookup: LookupDone, Prefetch: PrefetchDone, PrefetchFor: PrefetchDone}


class Gate:
    """One agent's."""

    def __init__(
        self,
        rulings: Callable[[], Rulings],
        incarnations: Incarnations,
        quotas: Quotas,
        counters: Counters,
    ) -> None:
        """Go by these, and count what is declined among *counters*."""
        self._rulings = rulings
        self._incarnations = incarnations
        self._quotas = quotas
        self._counters = counters

    async def passed(
        self,
        volume: ServedVolume,
        request: _Request,
        serve: Callable[[ServedVolume, _Request], Awaitable[_Answer]],
    ) -> _Answer:
        """Have a request served, or decline all of its blocks. Raises as *serve*, and MalformedError."""
        if self._rulings().switch(volume.record.tenant, volume.record.name) is Switch.OFF:
            return await serve(volume, request)  # which declines all of it, and says so
        if not self._incarnations.is_served(volume.record):
            return self._declined(request, Reason.UNHEARD)  # type: ignore[no-any-return]  # as ``_DONE`` says
        taken_bytes = self._quotas.admit(volume, request)
        if taken_bytes is None:
            return self._declined(request, Reason.QUOTA)  # type: ignore[no-any-return]  # as ``_DONE`` says
        answer: _Answer | None = None
        try:
            with self._incarnations.using(volume.record):
                answer = await serve(volume, request)
            return answer
        finally:
            self._quotas.settle(volume, request, taken_bytes, answer)

    def _declined(self, request: BlockRequest, reason: Reason) -> Any:  # noqa: ANN401 (the answer to it)
        count = sum(map(len, request.spans))
        is_put = isinstance(request, Put)
        states = columns.filled(count, PutState.DECLINED if is_put else BlockState.DECLINED)
        reasons = np.full(count, reason, np.uint8)
        self._counters.count(_OPERATIONS[type(request)], states, reasons)
        return _DONE[type(request)](request.request, states.tobytes(), reasons.tobytes())
