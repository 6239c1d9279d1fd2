"""Tells the service manager how a daemon is, as ``sd_notify`` does.

Where ``NOTIFY_SOCKET`` is not set nothing is told. A socket that can't be reached is no reason to stop
serving, so it is said once in the log, and no more.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
    from typing import Any

log = logging.getLogger(__name__)

_PINGS_IN_TIME = 2
"""The manager waits for this many pings before it loses patience."""

_TOLD_EVERY_S = 1.0
_PATIENCE_S = 30.0
"""How long the manager is asked to wait for word from a daemon that starts or stops."""


class Notifier:
    """One daemon's line to the service manager."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Take what the manager set for this process."""
        where = environment.get("NOTIFY_SOCKET", "")
        self._where = f"\0{where[1:]}" if where.startswith("@") else where
        self._is_reachable = bool(where)
        self.watchdog_s = _watchdog_s(environment)
        """How often the manager wants to hear that the daemon's loop runs; 0 for never."""

    def ready(self, status: str) -> None:
        """Say that work can come, once, or again after ``reloading``."""
        self._tell(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """Say that files are being read again; ``ready`` must follow."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        """Say that the daemon ends in order."""
        self._tell(f"STOPPING=1\nSTATUS={status}")

    @asynccontextmanager
    async def busy(self, doing: Callable[[], str], *, within_s: float = math.inf) -> AsyncIterator[None]:
        """Say meanwhile what the daemon is *doing*, and ask for patience: its start, or its end, is not to be
        cut short while its loop runs. For *within_s* at most.
        """
        async with self._meanwhile(self._ask_for_patience(doing, within_s)):
            yield

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Ping the manager's watchdog from the running loop meanwhile, if it has one."""
        if self.watchdog_s:
            async with self._meanwhile(self._ping()):
                yield
        else:
            yield

    @asynccontextmanager
    async def _meanwhile(self, telling: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        if not self._where:
            telling.close()
            yield
            return
        told = asyncio.get_running_loop().create_task(telling)
        try:
            yield
        finally:
            told.cancel()
            await asyncio.wait([told])

    async def _ping(self) -> None:
        while True:
            self._tell("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / _PINGS_IN_TIME)

    async def _ask_for_patience(self, doing: Callable[[], str], within_s: float) -> None:
        until_s = time.monotonic() + within_s
        while (left_s := until_s - time.monotonic()) > 0:
            patience_us = round(min(left_s, _PATIENCE_S) * 1e6)
            self._tell(f"STATUS={' '.join(doing().split())}\nEXTEND_TIMEOUT_USEC={patience_us}")
            await asyncio.sleep(_TOLD_EVERY_S)

    def _tell(self, words: str) -> None:
        if not self._is_reachable:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
                line.settimeout(0)  # never wait for a manager that does not read
                line.sendto(words.encode(), self._where)
        except BlockingIOError:
            pass  # it has enough to read, and will hear the next
        except OSError as error:
            self._is_reachable = False
            log.warning("The service manager is not told how this daemon is: %s", error)


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """Return the manager's patience, unless it means another process."""
    try:
        patience_us = int(environment.get("WATCHDOG_USEC", "0"))
        pid = int(environment.get("WATCHDOG_PID", os.getpid()))
    except ValueError:
        return 0.0
    return patience_us / 1e6 if patience_us > 0 and pid == os.getpid() else 0.0
