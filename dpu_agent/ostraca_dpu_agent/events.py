"""Recent events of blocks, in a ring that overwrites the oldest.

Events are recorded per batch into flat arrays and searched by block key. A key is derived under the
volume's secret, so a query finds only events of the caller's own tenant. An event possibly caused by
another tenant's request, such as an eviction, carries no label.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.telemetry.explain import EVENTS_MAX, BlockEvent, EventKind
from ostraca_fabric.telemetry.requests import LABEL_CHARS_MAX, current_label

_NO_STATE = 255
_STATES = {
    EventKind.LOOKED_UP: BlockState,
    EventKind.GOT: BlockState,
    EventKind.PREFETCHED: BlockState,
    EventKind.SHADOWED: BlockState,
    EventKind.PUT: PutState,
    EventKind.RESERVED: PutState,
    EventKind.COMMITTED: PutState,
}


class EventRing:
    """The newest events of one agent. Use on the event loop's thread only."""

    def __init__(self, agent: str, rows: int, clock: Callable[[], float]) -> None:
        """Keep *rows* events of 59 bytes each."""
        assert rows > 0, "a ring has room for an event"
        self.agent = agent
        self._clock = clock
        self._since_s = clock()
        self._keys = np.zeros((rows, 2), np.uint64)
        self._at_s = np.zeros(rows, np.float64)
        self._labels = np.zeros(rows, np.dtype(f"S{LABEL_CHARS_MAX}"))
        self._kinds = np.zeros(rows, np.uint8)
        self._states = np.zeros(rows, np.uint8)
        self._reasons = np.zeros(rows, np.uint8)
        self._written = 0

    def record(
        self,
        kind: EventKind,
        keys: NDArray[np.uint8],
        states: NDArray[np.uint8] | int = _NO_STATE,
        reasons: NDArray[np.uint8] | int = Reason.NONE,
        *,
        label: str | None = None,
    ) -> None:
        """Record an event of blocks, now. *keys*: shape (n, 16).

        *label* defaults to the label of the current request.
        """
        count, rows = len(keys), len(self._kinds)
        if count > rows:
            skipped = count - rows
            states = states if isinstance(states, int) else states[skipped:]
            reasons = reasons if isinstance(reasons, int) else reasons[skipped:]
            keys, count = keys[skipped:], rows
        first = self._written % rows
        before_wrap = min(count, rows - first)
        words = np.ascontiguousarray(keys).view(np.uint64)
        named = (current_label() if label is None else label).encode("ascii", "replace")
        now_s = self._clock()
        for begin, source in ((first, slice(0, before_wrap)), (0, slice(before_wrap, count))):
            if source.start == source.stop:
                continue
            where = slice(begin, begin + source.stop - source.start)
            self._keys[where] = words[source]
            self._at_s[where] = now_s
            self._labels[where] = named
            self._kinds[where] = int(kind)
            self._states[where] = states if isinstance(states, int) else states[source]
            self._reasons[where] = reasons if isinstance(reasons, int) else reasons[source]
        self._written += count

    @property
    def reaches_back_s(self) -> float:
        """Age of the oldest kept event, or of the ring if nothing was overwritten."""
        rows = len(self._kinds)
        oldest_s = self._since_s if self._written <= rows else float(self._at_s[self._written % rows])
        return self._clock() - oldest_s

    def of(self, key: bytes) -> tuple[BlockEvent, ...]:
        """Return the newest ``EVENTS_MAX`` events of a block, oldest first."""
        first, second = np.frombuffer(key, np.uint64).tolist()
        is_its = (self._keys[:, 0] == first) & (self._keys[:, 1] == second) & (self._kinds > 0)
        found = np.flatnonzero(is_its)
        in_order = found[np.argsort((found - self._written) % len(self._kinds))]
        now_s = self._clock()
        return tuple(self._event(row, now_s) for row in in_order[-EVENTS_MAX:].tolist())

    def _event(self, row: int, now_s: float) -> BlockEvent:
        kind, state = EventKind(int(self._kinds[row])), int(self._states[row])
        reason = Reason(int(self._reasons[row]))
        return BlockEvent(
            agent=self.agent,
            age_s=now_s - float(self._at_s[row]),
            label=self._labels[row].decode(),
            kind=kind.name,
            state="" if state == _NO_STATE else _STATES[kind](state).name,
            reason=reason.name if reason else "",
        )
