"""What is done and not yet taken, with a descriptor that an event loop can watch."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from ostraca.results import GetResult, LookupResult, PrefetchResult, PutResult
    from ostraca.views import BlockViews


Ticket = NewType("Ticket", int)
"""Names a submitted operation; never used twice by one client."""


@dataclass(frozen=True, slots=True)
class Done:
    """A submitted operation has ended: with what the blocking call would return, or would raise."""

    ticket: Ticket
    result: LookupResult | GetResult | PutResult | PrefetchResult | BlockViews | None
    error: BaseException | None = None


class DoneQueue:
    """Thread-safe. The descriptor is readable while something is here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: deque[Done] = deque()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __len__(self) -> int:
        """Count what was not taken."""
        return len(self._done)

    def put(self, done: Done) -> None:
        """Add one."""
        with self._lock:
            self._done.append(done)
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def take(self) -> list[Done]:
        """Take all there are, oldest first."""
        with self._lock:
            taken = list(self._done)
            self._done.clear()
            if self._descriptor >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._descriptor)
        return taken

    def fileno(self) -> int:
        """Return the descriptor; -1 after ``close``."""
        return self._descriptor

    def close(self) -> None:
        """Let the descriptor go. What is here can still be taken."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
