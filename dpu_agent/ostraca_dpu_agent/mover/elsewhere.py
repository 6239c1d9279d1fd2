"""A prefetch that names another agent: that one is asked to bring the blocks into its own DRAM cache.

A router that has chosen a host for a request has its blocks brought there before the request arrives. What
the other agent answers is the answer; that it can't be reached, or does not answer in time, is an outcome of
every block and no error. A worker that no longer waits is answered at once; the other agent then goes on
until the deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_fabric.errors import ConnectError, MalformedError
from ostraca_fabric.ids import AgentId
from ostraca_fabric.outcome import BlockState, Reason
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import Failed, PrefetchDone, PrefetchFor

if TYPE_CHECKING:
    import asyncio

    from ostraca_dpu_agent.mover.mover import Mover
    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.wire.messages import Prefetch

_REASONS = {
    "overloaded": Reason.OVERLOADED,
    "usage": Reason.OVERLOADED,
    "unknown_volume": Reason.UNKNOWN_VOLUME,
    "membership": Reason.UNKNOWN_VOLUME,
}
"""What a ``Failed`` with these codes says of each block. A request that this agent took and the other one
finds too large (``usage``) is over a limit there."""


class PrefetchElsewhere:
    """One prefetch for another agent."""

    def __init__(
        self, mover: Mover, volume: ServedVolume, request: Prefetch, stopped: asyncio.Future[None]
    ) -> None:
        """Begin the request's clock."""
        blocks = sum(map(len, request.spans))
        self._mover = mover
        self._volume = volume
        self._request = request
        self._states = columns.filled(blocks, BlockState.LATE)
        self._reasons = columns.filled(blocks, Reason.DEADLINE)
        self._clocked = mover.clocked(request.deadline_s, stopped)

    async def run(self) -> PrefetchDone:
        """Answer with what the other agent says by the deadline."""
        mover = self._mover
        if self._clocked.left_s > 0:
            asking = mover.tasks.spawn(self._ask())
            try:
                await self._clocked.wait([asking])
            finally:
                asking.cancel()
        mover.counters.count("prefetch", self._states, self._reasons)
        return PrefetchDone(self._request.request, self._states.tobytes(), self._reasons.tobytes())

    async def _ask(self) -> None:
        request, record = self._request, self._volume.record
        handed_on = PrefetchFor(
            0, self._clocked.left_s, record.tenant, record.name, record.incarnation, request.spans
        )
        try:
            answer = await self._mover.owners.ask(AgentId(request.at), handed_on)
        except TimeoutError:
            return
        except ConnectError:
            self._decline(Reason.NO_AGENT)
            return
        match answer:
            case PrefetchDone():
                self._take(answer)
            case Failed(code=code):
                self._decline(_REASONS.get(code, Reason.NO_AGENT))
            case _:
                self._decline(Reason.NO_AGENT)

    def _take(self, answer: PrefetchDone) -> None:
        try:
            states = columns.u8(answer.states, len(self._states))
            reasons = columns.u8(answer.reasons, len(self._states))
        except MalformedError:
            self._decline(Reason.NO_AGENT)
        else:
            self._states[:], self._reasons[:] = states, reasons

    def _decline(self, reason: Reason) -> None:
        self._states[:], self._reasons[:] = BlockState.DECLINED, reason
