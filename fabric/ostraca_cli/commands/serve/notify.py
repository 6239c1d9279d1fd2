"""Notifications to the service manager, as by ``sd_notify``.

Without ``NOTIFY_SOCKET`` the daemon sends nothing. An unreachable socket does not stop the daemon; the log
reports the problem once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

from ostraca_fabric.runtime.tasks import meanwhile

log = logging.getLogger(__name__)

_PINGS_IN_TIME = 2
"""Pings within the watchdog time of the manager."""

_REPEAT_S = 1.0
_EXTENSION_S = 30.0
"""Extension of the manager's time limit, requested while a daemon starts or stops."""


class Notifier:
    """Connection of a daemon to the service manager."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Read the manager's variables from *environment*."""
        where = environment.get("NOTIFY_SOCKET", "")
        self._where = f"\0{where[1:]}" if where.startswith("@") else where
        self._is_reachable = bool(where)
        self.watchdog_s = _watchdog_s(environment)
        """Watchdog time of the manager, in seconds; 0 without a watchdog."""

    def ready(self, status: str) -> None:
        """Report readiness after the start."""
        self._tell(f"READY=1\nSTATUS={status}")

    def stopping(self, status: str) -> None:
        """Report a graceful shutdown."""
        self._tell(f"STOPPING=1\nSTATUS={status}")

    def busy(
        self, doing: Callable[[], str], *, within_s: float = math.inf
    ) -> AbstractAsyncContextManager[None]:
        """Report the present work meanwhile, and extend the manager's time limit.

        The manager does not abort a start or stop while the event loop runs, for at most *within_s*. *doing*
        returns a description of the work.
        """
        return meanwhile("the service manager's time limit", self._extend_timeout(doing, within_s))

    def watched(self) -> AbstractAsyncContextManager[None]:
        """Ping the manager's watchdog from the running loop meanwhile, if enabled."""
        return meanwhile("the service manager's watchdog", self._ping())

    async def _ping(self) -> None:
        while self._where and self.watchdog_s:
            self._tell("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / _PINGS_IN_TIME)

    async def _extend_timeout(self, doing: Callable[[], str], within_s: float) -> None:
        until_s = time.monotonic() + within_s
        while self._where and (left_s := until_s - time.monotonic()) > 0:
            extension_us = round(min(left_s, _EXTENSION_S) * 1e6)
            self._tell(f"STATUS={' '.join(doing().split())}\nEXTEND_TIMEOUT_USEC={extension_us}")
            await asyncio.sleep(_REPEAT_S)

    def _tell(self, words: str) -> None:
        if not self._is_reachable:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
                line.settimeout(0)  # never block on a manager that does not read
                line.sendto(words.encode(), self._where)
        except BlockingIOError:
            pass  # the queue is full; the manager reads the next message
        except OSError as error:
            self._is_reachable = False
            log.warning("The service manager is unreachable and gets no notifications: %s", error)


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """Return the manager's watchdog time in seconds, 0 if for another process."""
    try:
        watchdog_us = int(environment.get("WATCHDOG_USEC", "0"))
        pid = int(environment.get("WATCHDOG_PID", os.getpid()))
    except ValueError:
        return 0.0
    return watchdog_us / 1e6 if watchdog_us > 0 and pid == os.getpid() else 0.0
