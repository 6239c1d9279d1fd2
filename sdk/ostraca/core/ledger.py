"""The ledger: whose each slot of the arena is, and when it is free again.

A slot that was named in a request has up to two users: the caller, until it has *left*, and the agent, until
it has *answered* (and, for slots it called unsettled, until it has *settled* them). It is free when both are
done. Slots that only the agent still uses are in quarantine. No time ever ends a quarantine; these do:

- the agent's final answer, or ``Settled``;
- the loss of a connection that carried the bytes itself (inline): nothing can land after it;
- a later handshake with the same agent under another start id: that process holds the lock of the agent's
  state directory, so the one before is gone;
- the word of the same start of that agent, over a new connection, that nothing of earlier ones is under way.

For the last two, whoever dials must have renewed the arena's ends before (``is_stranded``), or cut off those
that the lost connection had offered: what they had received and not dealt with could land still.

Requests are known by ids that are never used twice in a client's life, and belong to the connection that they
were sent on, which may be any object. Not thread-safe: the arena holds the lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ostraca_fabric.slots import SlotPool


_NO_SLOTS = np.empty(0, np.int64)


@dataclass(slots=True)
class _Entry:
    """One request's slots.

    ``mine``: those the caller gives back when it leaves (all of them until the answer came).
    """

    mine: NDArray[np.int64]
    agent: str
    start_id: bytes
    connection: object
    is_held: bool = True
    is_answered: bool = False
    is_settled: bool = True
    is_stranded: bool = False

    @property
    def is_awaited(self) -> bool:
        """Whether its agent has yet to say that it is done with it."""
        return not (self.is_answered and self.is_settled)


class Ledger:
    """Bookkeeping over a pool of slots."""

    def __init__(self, pool: SlotPool, *, quarantine_bytes_max: int) -> None:
        self._pool = pool
        self._quarantine_bytes_max = quarantine_bytes_max
        self._entries: dict[int, _Entry] = {}

    @property
    def is_open(self) -> bool:
        """Whether operations may take slots: False at the quarantine limit."""
        return self._pool.quarantined_bytes < self._quarantine_bytes_max

    @property
    def quarantined_bytes(self) -> int:
        """Bytes under transfers that are not known to have ended."""
        return self._pool.quarantined_bytes

    def is_due(self, connection: object = None) -> bool:
        """Tell whether the agent at the other end of a live connection owes word about slots."""
        return any(
            entry.connection is connection and not entry.is_stranded and entry.is_awaited
            for entry in self._entries.values()
        )

    @property
    def owing(self) -> frozenset[str]:
        """The agents whose word alone brings slots back, and who can give it over a new connection only."""
        return frozenset(
            entry.agent for entry in self._entries.values() if entry.is_stranded and entry.is_awaited
        )

    @property
    def is_stranded(self) -> bool:
        """Whether slots are in quarantine of which only a new connection can bring word."""
        return bool(self.owing)

    def take(self, count: int, slot_bytes: int) -> NDArray[np.int64] | None:
        """Take slots for a request that is about to be sent; None when so many are not free."""
        return self._pool.take(count, slot_bytes)

    def give(self, offsets: NDArray[np.int64]) -> None:
        """Give back slots that no request ever named."""
        self._pool.give(offsets)

    def sent(
        self,
        request: int,
        offsets: NDArray[np.int64],
        *,
        agent: str,
        start_id: bytes,
        connection: object = None,
    ) -> None:
        """A request naming these slots is about to be sent.

        The caller must say ``left`` when it no longer looks at them.
        """
        self._entries[request] = _Entry(offsets, agent, start_id, connection)

    def slots(self, request: int) -> NDArray[np.int64]:
        """Return the slots that a request's answer may name; none once it came, or without slots."""
        entry = self._entries.get(request)
        return entry.mine if entry and not entry.is_answered else _NO_SLOTS

    def answered(self, request: int, unsettled: NDArray[np.uint32]) -> None:
        """The agent's final answer came; transfers at positions *unsettled* may still be under way."""
        entry = self._entries.get(request)
        if entry is None or entry.is_answered:
            return
        entry.is_answered = True
        entry.is_settled = not len(unsettled)
        if entry.is_held:
            if len(unsettled):
                is_unsettled = np.zeros(len(entry.mine), np.bool_)
                is_unsettled[unsettled] = True
                self._pool.quarantine(request, entry.mine[is_unsettled])
                entry.mine = entry.mine[~is_unsettled]
        elif entry.is_settled:
            # All slots went to quarantine together when the caller left, and they come back together: with
            # unsettled ones among them, that is when those are settled.
            self._pool.settle(request)
            del self._entries[request]

    def settled(self, request: int) -> None:
        """No transfer of an answered request is under way any more."""
        entry = self._entries.get(request)
        if entry is None or not entry.is_answered or entry.is_settled:
            return
        entry.is_settled = True
        self._pool.settle(request)
        if not entry.is_held:
            del self._entries[request]

    def left(self, request: int) -> None:
        """The caller no longer looks at the request's slots, whether or not it has ended."""
        entry = self._entries.get(request)
        if entry is None or not entry.is_held:
            return
        entry.is_held = False
        if not entry.is_answered:
            self._pool.quarantine(request, entry.mine)
            return
        self._pool.give(entry.mine)
        if entry.is_settled:
            del self._entries[request]

    def lost(self, *, is_drained: bool, connection: object = None) -> None:
        """A connection is gone. With *is_drained*, nothing can land any more that was asked for on it."""
        for request, entry in list(self._entries.items()):
            if entry.connection is not connection or entry.is_stranded:
                continue
            entry.is_stranded = True
            if is_drained:
                self._ended(request)

    def met(self, agent: str, start_id: bytes) -> tuple[int, ...]:
        """A handshake told who is there now. Return the requests to ask it about: tell ``past_settled``."""
        stranded = [
            (request, entry)
            for request, entry in self._entries.items()
            if entry.is_stranded and entry.is_awaited and entry.agent == agent
        ]
        for request, entry in stranded:
            if entry.start_id != start_id:
                self._ended(request)
        return tuple(request for request, entry in stranded if entry.start_id == start_id)

    def past_settled(self, requests: Iterable[int]) -> None:
        """The agent said that no transfer is under way that connections before this one asked for."""
        for request in requests:
            self._ended(request)

    def _ended(self, request: int) -> None:
        self.answered(request, np.empty(0, np.uint32))
        self.settled(request)

    def check(self) -> None:
        """Assert what must hold between calls."""
        self._pool.check()
        for request, entry in self._entries.items():
            assert entry.is_held or not entry.is_answered or not entry.is_settled, (
                f"request {request} is over, yet listed"
            )
