"""Delivery of blocks to the worker of a get, and the answer that follows.

The news of a stream goes to ``Delivery.tell`` in the stream's thread, which tells the worker of delivered
blocks. Other news goes to ``Delivery.note``. The event loop alone decides outcomes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.admission import GetAdmission
from ostraca_dpu_agent.datapath.location.routing import NO_POSITIONS
from ostraca_dpu_agent.datapath.requests.context import Deadline
from ostraca_dpu_agent.datapath.requests.worker import WorkerConnection
from ostraca_fabric.model.outcome import BlockState, Reason
from ostraca_fabric.ports.transport import TransferEnd, WaveNews
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.messages import GetDone, GetProgress


@dataclass(slots=True, eq=False)
class GetAnswer:
    """Answer of a get, while blocks are decided."""

    request: int
    worker: WorkerConnection
    deadline: Deadline
    admission: GetAdmission
    outcomes: Outcomes
    hits_on: Counter[str]
    undecided: int
    """Blocks without a final outcome."""

    last_waves: list[GetProgress] = field(default_factory=list)
    """Blocks that the worker hears of by the answer."""

    def decide(
        self, positions: NDArray[np.intp], state: BlockState, reasons: Reason | NDArray[np.uint8]
    ) -> None:
        """Set the final outcome of blocks."""
        self.outcomes.set(positions, state, reasons)
        self.undecided -= len(positions)

    def message(self, unsettled: NDArray[np.intp]) -> GetDone:
        """Return the answer; transfers of *unsettled* blocks may still arrive."""
        return GetDone(
            self.request,
            *self.outcomes.encode(),
            unsettled.astype(codec.U32).tobytes(),
            b"".join(wave.positions for wave in self.last_waves),
            b"".join(wave.tags for wave in self.last_waves),
            b"".join(wave.places for wave in self.last_waves),
        )


@dataclass(slots=True, eq=False)
class Delivery:
    """Blocks of one stream."""

    answer: GetAnswer
    positions: NDArray[np.intp]
    """Positions in the request."""

    tags: NDArray[np.uint8]
    """Shape (n, 16)."""

    source: str
    """Where the blocks were found, as in ``hits_on``."""

    told: list[NDArray[np.intp]] = field(default_factory=list)
    """Rows of delivered blocks known to the worker, and not yet decided."""

    def tell(self, news: Sequence[WaveNews]) -> bool:
        """Report delivered blocks to the worker, in any thread; return whether the worker knows."""
        rows = _rows(news, TransferEnd.DONE)
        if len(rows) and not self.answer.worker.send_here(self._progress(rows)):
            return False
        self._measure(news)
        self.told.append(rows)
        return True

    def note(self, news: Sequence[WaveNews]) -> None:
        """Note news of waves, and report delivered blocks to the worker."""
        self._measure(news)
        if not self.answer.deadline.is_over():
            self.decide(news)

    def decide(self, news: Sequence[WaveNews], *, is_last: bool = False) -> None:
        """Decide the blocks of settled waves, and report those not told: by the answer if *is_last*."""
        answer = self.answer
        lost, rows = _rows(news, TransferEnd.FAILED), _rows(news, TransferEnd.DONE)
        if len(lost):
            answer.decide(self.positions[lost], BlockState.MISS, Reason.TRANSFER_FAILED)
        delivered = self.positions[np.concatenate((*self.told, rows))]
        self.told.clear()
        if len(delivered):
            answer.decide(delivered, BlockState.HIT, Reason.NONE)
            answer.hits_on[self.source] += len(delivered)
        if len(rows):
            report = answer.last_waves.append if is_last or not answer.undecided else answer.worker.send
            report(self._progress(rows))

    def _progress(self, rows: NDArray[np.intp]) -> GetProgress:
        positions = self.positions[rows].astype(codec.U32).tobytes()
        return GetProgress(self.answer.request, positions, self.tags[rows].tobytes())

    def _measure(self, news: Sequence[WaveNews]) -> None:
        """Count all waves of the news as one move: each costs the caller as much as many."""
        begun, settled = _rows(news, None), _rows(news, TransferEnd.DONE, TransferEnd.FAILED)
        if len(begun):
            self.answer.admission.start_move(news[0].at_s, self.positions[begun])
        if len(settled):
            self.answer.admission.end_move(news[-1].at_s, self.positions[settled])


def _rows(news: Sequence[WaveNews], *ends: TransferEnd | None) -> NDArray[np.intp]:
    """Return the rows of the waves with one of these ends."""
    if not news:
        return NO_POSITIONS
    found = [rows for _, rows, end in news if end in ends]
    return found[0] if len(found) == 1 else np.concatenate((NO_POSITIONS, *found))
