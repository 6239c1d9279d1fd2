"""What a daemon does when it is told something by a signal.

The first SIGTERM or SIGINT asks it to stop in order, the second ends the process at once. SIGHUP asks it to
read its files of secrets again, where it has any; else it does what it does anyway.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

_LEFT_AT_ONCE = 130


def stop_on_signals(on_hangup: Callable[[], None] | None = None) -> asyncio.Event:
    """Return what the first SIGINT or SIGTERM sets. Call it on the running loop of the main thread.

    SIGINT counts also where it is ignored at the start, as in the background of a script: what keeps others'
    data is to stop in order however it is asked, and who sends a daemon SIGINT means it.
    """
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(_LEFT_AT_ONCE)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    if on_hangup is not None:
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
    return stop


async def started(start: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Start a daemon; say whether that was done before a signal came."""
    starting = asyncio.ensure_future(start)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
        return False
    starting.result()
    return True
