"""The ``ostraca`` command: handle signals first, then import the rest.

This package is the only place that may combine all components. A command process installs its signal handlers
before importing the rest of the command, so this module imports little. The kernel drops signals without a
handler in process 1 of a container, so an earlier signal would be lost.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

_DAEMONS = ("up", "serve")
_FIRST_PROCESS = 1
_INTERRUPTED = 130
"""Exit code after an interrupt, equal to the code in ``program``, which is not imported yet."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named by *argv* and return the exit code.

    Never raises. None for *argv* means that this process is the command: the function then uses the process
    arguments, installs signal handlers and repairs the standard streams.
    """
    if argv is None:
        _hear_signals(is_daemon=any(word in _DAEMONS for word in sys.argv[1:2]))
        from ostraca_cli.terminal.streams import repair_streams

        repair_streams()
    try:
        from ostraca_cli.program import main as run
    except KeyboardInterrupt:
        return _INTERRUPTED
    return run(argv)


def _hear_signals(*, is_daemon: bool) -> None:
    """Let SIGTERM and SIGINT end this process before any work has begun.

    A daemon installs its own handlers once its event loop runs (``serve.signals``).
    """

    def leave(number: int, _: FrameType | None) -> None:
        os._exit(0 if is_daemon else 128 + number)

    if is_daemon:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, leave)
    elif os.getpid() == _FIRST_PROCESS:
        signal.signal(signal.SIGTERM, leave)


__all__ = ["main"]
