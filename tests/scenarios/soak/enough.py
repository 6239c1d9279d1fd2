"""Ctrl-C for programs that run until somebody has seen enough."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Protocol


class Endable(Protocol):
    """A run that looks now and then whether it is enough."""

    is_enough: bool


@contextlib.contextmanager
def ended_by_ctrl_c(run: Endable) -> Iterator[None]:
    """Have one Ctrl-C end the run early, with its verdict; another one leaves at once."""

    def enough(*_: object) -> None:
        print("enough: what is under way ends, then the verdict", flush=True)
        run.is_enough = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, enough)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
