"""Ledger: users of each slot of the arena, and release of free slots.

A slot named in a request has up to two users. The caller uses a slot until ``leave``. The agent uses a slot
until ``answer``, and an unsettled slot until ``settle``. A slot is free when both are done. Slots used
only by the agent are in quarantine. No timeout ends a quarantine; these events do:

- the agent's final answer, or ``Settled``;
- the loss of a connection that carried the bytes itself (inline): nothing can land afterwards;
- a later handshake with the same agent under another start id: the new process holds the lock of the agent's
  state directory, so the previous process is gone;
- a report of the same start of the agent, over a new connection, that no transfer of earlier connections is
  under way.

For the last two, the arena's ends must be renewed before the dial (``owing_agents``), or the ends offered by
the lost connection cut off. Data received by an old end and not yet processed could still land otherwise.

Request ids are never reused in a client's life. Each request belongs to the connection that sent it; a
connection may be any object. Not thread-safe: the arena holds the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.tables.slots import SlotPool

_NO_SLOTS = np.empty(0, np.int64)


@dataclass(slots=True)
class _Entry:
    """Slots of one request.

    ``mine`` holds the slots for the caller to give back on ``leave``: all slots until the answer.
    """

    mine: NDArray[np.int64]
    agent: str
    start_id: bytes
    connection: object
    is_held: bool = True
    is_answered: bool = False
    is_settled: bool = True
    is_stranded: bool = False
    acts: list[Callable[[], object]] = field(default_factory=list)
    """Called when the agent owes nothing more."""

    @property
    def is_awaited(self) -> bool:
        """Whether the agent still owes the end of its use."""
        return not (self.is_answered and self.is_settled)


class Ledger:
    """Bookkeeping over a pool of slots."""

    def __init__(self, pool: SlotPool, *, quarantine_bytes_max: int) -> None:
        self._pool = pool
        self._quarantine_bytes_max = quarantine_bytes_max
        self._entries: dict[int, _Entry] = {}
        self.listeners: list[Callable[[], None]] = []
        """Called by ``tell_changed``; must not block."""

    def tell_changed(self) -> None:
        """Tell waiters that slots or requests may be free."""
        for tell in self.listeners:
            tell()

    def slots_of(self, slot_bytes: int) -> int:
        """Return the number of slots of this size in the whole arena."""
        chunk_bytes = self._pool.chunk_bytes
        return self._pool.memory_bytes // chunk_bytes * (chunk_bytes // slot_bytes)

    @property
    def is_open(self) -> bool:
        """Whether operations may take slots: False at the quarantine limit."""
        return self._pool.quarantined_bytes < self._quarantine_bytes_max

    @property
    def quarantined_bytes(self) -> int:
        """Bytes under transfers not known to have ended."""
        return self._pool.quarantined_bytes

    def is_due(self, connection: object = None) -> bool:
        """Tell whether the agent of a live connection owes a report on slots."""
        return any(
            entry.connection is connection and not entry.is_stranded and entry.is_awaited
            for entry in self._entries.values()
        )

    @property
    def owing_agents(self) -> frozenset[str]:
        """Agents with stranded slots, able to report on a new connection only."""
        return frozenset(
            entry.agent for entry in self._entries.values() if entry.is_stranded and entry.is_awaited
        )

    @property
    def has_waiters(self) -> bool:
        """Whether an act waits for the end of a transfer (``when_settled``)."""
        return any(entry.acts for entry in self._entries.values())

    def take(self, count: int, slot_bytes: int) -> NDArray[np.int64] | None:
        """Take slots for the next request; None if too few are free."""
        return self._pool.take(count, slot_bytes)

    def take_up_to(self, count: int, slot_bytes: int) -> NDArray[np.int64] | None:
        """Take *count* slots, or half as many, and so on; None if not a single slot is free."""
        while count:
            offsets = self.take(count, slot_bytes)
            if offsets is not None:
                return offsets
            count //= 2
        return None

    def give(self, offsets: NDArray[np.int64]) -> None:
        """Give back slots never named in a request."""
        self._pool.give(offsets)

    def add(
        self,
        request: int,
        offsets: NDArray[np.int64],
        *,
        agent: str,
        start_id: bytes,
        connection: object = None,
    ) -> None:
        """Register a request with these slots, just before sending.

        The caller must call ``leave`` after its last access to the slots.
        """
        self._entries[request] = _Entry(offsets, agent, start_id, connection)

    def has(self, request: int) -> bool:
        """Tell whether a request has, or had, slots that are not all free."""
        return request in self._entries

    def slots(self, request: int) -> NDArray[np.int64]:
        """Return the slots for a request's answer to name.

        Empty after the answer, or without slots.
        """
        entry = self._entries.get(request)
        return entry.mine if entry and not entry.is_answered else _NO_SLOTS

    def answer(self, request: int, unsettled: NDArray[np.uint32]) -> None:
        """Note the final answer of a request.

        Transfers at positions *unsettled* may still be under way.
        """
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
            # All slots went to quarantine together when the caller left, and come back together: if some are
            # unsettled, all wait until those are settled.
            self._pool.settle(request)
            del self._entries[request]
        _act(entry)

    def settle(self, request: int) -> None:
        """Note the end of all transfers of an answered request."""
        entry = self._entries.get(request)
        if entry is None or not entry.is_answered or entry.is_settled:
            return
        entry.is_settled = True
        self._pool.settle(request)
        if not entry.is_held:
            del self._entries[request]
        _act(entry)

    def are_settled(self, request: int, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell for slots of a request, before ``leave``, whether no transfer may be under way."""
        entry = self._entries.get(request)
        if entry is None or not entry.is_awaited:
            return np.ones(len(offsets), np.bool_)
        return np.isin(offsets, entry.mine) & entry.is_answered

    def when_settled(self, request: int, act: Callable[[], object]) -> bool:
        """Call *act* in the call that ends the last transfer of a request that may be under way.

        Returns False if there is none. *act* must neither block nor use the ledger.
        """
        entry = self._entries.get(request)
        if entry is None or not entry.is_awaited:
            return False
        entry.acts.append(act)
        return True

    def leave(self, request: int) -> None:
        """Note the caller's last access to the slots, during or after the request."""
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

    def take_back(self, request: int, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Take settled slots back from an answered request for another request, before ``leave``.

        Returns for each slot whether it was taken.
        """
        entry = self._entries.get(request)
        if entry is None or not (entry.is_held and entry.is_answered):
            return np.zeros(len(offsets), np.bool_)
        is_taken = np.isin(offsets, entry.mine)
        entry.mine = entry.mine[~np.isin(entry.mine, offsets)]
        return is_taken

    def lose_connection(self, *, is_drained: bool, connection: object = None) -> None:
        """Note the loss of a connection.

        With *is_drained*, nothing requested on the connection can land any more.
        """
        for request, entry in list(self._entries.items()):
            if entry.connection is not connection or entry.is_stranded:
                continue
            entry.is_stranded = True
            if is_drained:
                self._end(request)

    def meet_agent(self, agent: str, start_id: bytes) -> tuple[int, ...]:
        """Note an agent's start id from a handshake; return requests to ask about.

        Call ``settle_past`` with them after the agent's answer.
        """
        stranded = [
            (request, entry)
            for request, entry in self._entries.items()
            if entry.is_stranded and entry.is_awaited and entry.agent == agent
        ]
        for request, entry in stranded:
            if entry.start_id != start_id:
                self._end(request)
        return tuple(request for request, entry in stranded if entry.start_id == start_id)

    def settle_past(self, requests: Iterable[int]) -> None:
        """Note the agent's report: no transfers of earlier connections are under way."""
        for request in requests:
            self._end(request)

    def _end(self, request: int) -> None:
        self.answer(request, np.empty(0, np.uint32))
        self.settle(request)


def _act(entry: _Entry) -> None:
    if not entry.is_awaited:
        acts, entry.acts = entry.acts, []
        for act in acts:
            act()
