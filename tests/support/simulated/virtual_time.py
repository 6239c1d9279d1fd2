"""An event loop on virtual time: its clock jumps to whatever is due next, and nothing ever waits.

What runs on it is as deterministic as the code is: the order of events follows from delays alone. Threads
have no part in it: what the code hands to an executor is done at once, on the loop's own thread.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


class StandstillError(Exception):
    """What is awaited can never happen: nothing is scheduled any more."""


class _Jumping(selectors.SelectSelector):
    """Hears of no file, and lets time pass instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StandstillError("nothing is scheduled any more, and something is awaited")
        if timeout > 0.0:
            self.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs on virtual time from 0; close it as any other loop. For ``asyncio.Runner(loop_factory=...)``.

    It can't wait for sockets, processes, signals or threads. Raises StandstillError where it would wait for
    ever.
    """

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._jumping.now_s

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[*_Arguments], _Result],
        *args: *_Arguments,
    ) -> asyncio.Future[_Result]:
        """Do it now, on this thread."""
        done: asyncio.Future[_Result] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 (handed on to whoever awaits)
            done.set_exception(error)
        return done
