"""Troubles that last, as a log tells them: a line when one begins, a reminder now and then while it lasts,
and a line when it is over. What is found between those is for the log's debug level.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

REMIND_S = 60.0


class Spell:
    """One trouble, which is found again and again for as long as it lasts."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without it; *clock* is in seconds, and never falls."""
        self._log = log
        self._clock = clock
        self._since_s: float | None = None
        self._said_s, self._said = 0.0, ""

    @property
    def lasts_s(self) -> float:
        """For how long it has lasted, 0 while there is none."""
        return 0.0 if self._since_s is None else self._clock() - self._since_s

    def goes_on(self, message: str, *args: object, since_s: float | None = None) -> None:
        """Say that it was found (again): as a warning when it begins, when it is another *message* than was
        said last, and once in ``REMIND_S``; else at the debug level. *since_s*: when it began, where that is
        before it was found.
        """
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s if since_s is None else since_s
            self._log.warning(message, *args)
        elif message == self._said and now_s - self._said_s < REMIND_S:
            self._log.debug(message, *args)
            return
        else:
            self._log.warning(f"{message}; so for %.0f s now", *args, now_s - self._since_s)
        self._said_s, self._said = now_s, message

    def over(self, message: str, *args: object) -> None:
        """Say that it is over, and how long it was; nothing where there was none."""
        if self._since_s is not None:
            self._log.info(f"{message}, after %.1f s", *args, self.lasts_s)
            self._since_s = None
