"""Signal handlers of a daemon.

The first SIGTERM or SIGINT requests a graceful shutdown, the second ends the process at once. Before the
event loop runs, either signal ends the process at once, because no work has begun (``ostraca_cli``). SIGHUP
reloads the files of secrets of a daemon with such files. In other daemons, SIGHUP means a closed terminal and
requests a graceful shutdown, unless ignored from the start, as by ``nohup``.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from ostraca_fabric.runtime.garbage import keep_present_objects

_LEFT_AT_ONCE = 130


def stop_on_signals(on_hangup: Callable[[], None] | None = None) -> asyncio.Event:
    """Return the event set by the first SIGINT or SIGTERM.

    Call the function on the running loop of the main thread. SIGINT counts even if ignored at the start, as
    in the background of a script: a daemon keeps data of others, so every request to stop ends in a graceful
    shutdown.
    """
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(_LEFT_AT_ONCE)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    if on_hangup is not None or signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        # Shell and kernel may both send SIGHUP for a terminal: a second hangup must not end the process at
        # once.
        loop.add_signal_handler(signal.SIGHUP, on_hangup or stop.set)
    return stop


async def start_or_stop(
    start: Coroutine[Any, Any, None], stop: asyncio.Event, failed: asyncio.Future[None] | None = None
) -> bool:
    """Start a daemon; return whether the start finished before a signal.

    Garbage collections then pass over the objects of the start. Raises errors of the start and of *failed*,
    the fatal error of a daemon that works during its start.
    """
    starting = asyncio.ensure_future(start)
    await first_of(stop, starting, *([failed] if failed is not None else []))
    has_started = starting.done()
    if not has_started:
        starting.cancel()
        await asyncio.wait([starting])
    if failed is not None and failed.done():
        failed.result()
    if has_started:
        starting.result()
        keep_present_objects()
    return has_started


async def first_of(*ends: asyncio.Event | asyncio.Future[None]) -> None:
    """Wait for the first of *ends*."""
    waits: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(each.wait()) for each in ends if isinstance(each, asyncio.Event)
    ]
    futures = (each for each in ends if isinstance(each, asyncio.Future))
    await asyncio.wait([*waits, *futures], return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()
