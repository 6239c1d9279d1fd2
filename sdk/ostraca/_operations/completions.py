"""Tickets of submitted operations, and the queue of ended tickets."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import dataclass
from typing import NewType

from ostraca._memory.views import BlockViews
from ostraca.results import GetResult, LookupResult, PrefetchResult, PutResult
from ostraca_fabric.runtime.events import clear_event, set_event

Ticket = NewType("Ticket", int)
"""Names a submitted operation; never used twice by one client."""


@dataclass(frozen=True, slots=True)
class Completion:
    """An ended ticket: the result or the error of the blocking call."""

    ticket: Ticket
    result: LookupResult | GetResult | PutResult | PrefetchResult | BlockViews | None
    error: BaseException | None = None


class CompletionQueue:
    """Ended tickets, with a descriptor readable while the queue is not empty.

    The client's driver adds, and any thread takes, without a lock: an exception of a signal handler inside
    ``take`` loses no ticket. The descriptor counts additions, and each taken ticket is counted off. So the
    count is never below the length of the queue.
    """

    descriptor = -1  # as long as none was made, which may fail

    def __init__(self) -> None:
        self._completions: deque[Completion] = deque()
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)

    def __len__(self) -> int:
        """Count the tickets not taken."""
        return len(self._completions)

    def put(self, completion: Completion) -> None:
        """Add a ticket. In the driver's thread only."""
        self._completions.append(completion)
        set_event(self.descriptor)

    def take(self) -> list[Completion]:
        """Take all tickets, oldest first."""
        taken: list[Completion] = []
        # A single call into C, ended by the IndexError of an empty queue: no ticket is lost halfway.
        with contextlib.suppress(IndexError):
            taken.extend(iter(self._completions.popleft, None))
        # An interrupted call before may have left a taken ticket counted.
        for _ in taken or (None,):
            clear_event(self.descriptor)
        if not taken and self._completions:  # a new ticket may have been counted off already
            set_event(self.descriptor)
        return taken

    def __del__(self) -> None:
        """Close the descriptor: a thread in ``take`` may have used it until now."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
