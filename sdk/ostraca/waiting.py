"""Waiting: callers that wait for mail read the connection themselves, one of them at a time.

The one that reads delivers to all, and hands on to another when it stops.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from ostraca.core.events import Event, Ticked

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca.pump import Pump

Mail = SimpleQueue[tuple[int, Event]]
"""What happened to requests: the mailbox of a caller that waits."""

_LOOK_AGAIN = (0, Ticked())
"""Of no request: who finds it in its mailbox waits again, and then reads."""


class Waiting:
    """The callers that wait on one connection. Thread-safe."""

    def __init__(self, pump: Pump, has_others: Callable[[Mail], bool]) -> None:
        """Wait for none yet; *has_others* tells whether mail is owed to anybody but this mailbox's."""
        self._pump = pump
        self._has_others = has_others
        self._mails: deque[Mail] = deque()

    def wait(self, mail: Mail, *, until_s: float) -> tuple[int, Event] | None:
        """Return what comes to a caller's mailbox by *until_s*, on the monotonic clock; None if nothing does.

        The caller reads from the connection itself meanwhile, unless another one does.
        """
        self._mails.append(mail)
        try:
            while mail.empty() and self._pump.lead(lambda: not mail.empty(), until_s=until_s):
                if time.monotonic() >= until_s:
                    return None
            with suppress(Empty):
                return mail.get(timeout=max(0.0, until_s - time.monotonic()))
            return None
        finally:
            self._mails.remove(mail)
            self._hand_on(mail)

    def _hand_on(self, mail: Mail) -> None:
        """See to it that somebody reads who waits, if anybody does; *mail*'s caller has stopped."""
        if self._pump.is_led:
            return
        with suppress(IndexError):
            self._mails[0].put(_LOOK_AGAIN)
            return
        if self._has_others(mail):
            self._pump.resume()
