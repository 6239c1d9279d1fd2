"""Check of a put's blocks on arrival in staging.

A transport reports each wave to ``Arrivals``, in the transport's thread. Threads of the data path check the
tags. The event loop hears once, after the last check. So a group of a put costs the loop the same for a
single wave and for many.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import Executor

from ostraca_fabric.tables.digests import TagCheck

log = logging.getLogger(__name__)

_SMALL_BYTES = 2 << 20
"""Fewer bytes are checked where they arrive: passing them to another thread takes longer than the check."""


class Arrivals:
    """Blocks on their way into slots of staging."""

    def __init__(self, check: TagCheck, checkers: Executor) -> None:
        """Expect the blocks of *check*, on the running loop; *checkers* run the checks.

        The columns and their memory must not change until ``checked`` is done.
        """
        self.check = check
        """States: PENDING before the check, then GOOD or DAMAGED."""

        self.checked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once no block will arrive, and all arrived blocks are checked. Never raises."""

        self._checkers = checkers
        self._is_small = int(check.lengths.sum()) <= _SMALL_BYTES
        self._loop = asyncio.get_running_loop()
        self._counting = threading.Lock()
        self._unchecked = 1
        """Waves to check, plus one while waves may arrive."""

    def arrive(self, first: int, last: int) -> None:
        """Check the blocks from *first* to before *last* in staging. Call in any thread.

        After a shutdown of the checkers, the blocks stay unchecked.
        """
        with self._counting:
            self._unchecked += 1
        rows = slice(first, last)
        if self._is_small:
            self._run(rows)
            return
        try:
            if asyncio._get_running_loop() is self._loop:  # noqa: SLF001 (the public function raises elsewhere)
                self._loop.run_in_executor(self._checkers, self._run, rows)
            else:
                self._checkers.submit(self._run, rows)
        except RuntimeError:  # the agent has stopped: no check will run
            self.end()

    def end(self) -> None:
        """Expect no other block. Call once, in any thread."""
        with self._counting:
            self._unchecked -= 1
            is_over = not self._unchecked
        if is_over and asyncio._get_running_loop() is self._loop:  # noqa: SLF001 (as above)
            self._note_checked()
        elif is_over:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                self._loop.call_soon_threadsafe(self._note_checked)

    def _run(self, rows: slice) -> None:
        try:
            self.check.receive(rows)
        except Exception:
            log.exception("a check of blocks crashed; this is a bug in Ostraca")
        finally:
            self.end()

    def _note_checked(self) -> None:
        if not self.checked.done():
            self.checked.set_result(None)
