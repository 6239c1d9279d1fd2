"""Blocks of a put that arrive in staging, checked as they arrive.

A transport gives each wave to ``Arrivals``, in the transport's thread. Threads of the data path check the
tags. The event loop hears once, of the last check. So a group of a put costs the loop the same for one wave
and for many.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import Executor

from ostraca_fabric.tables.digests import TagCheck, blank_rests

log = logging.getLogger(__name__)


class Arrivals:
    """Blocks that arrive in their slots."""

    def __init__(self, check: TagCheck, checkers: Executor) -> None:
        """Expect the blocks of *check*, on the running loop. *checkers* run the checks.

        The columns and their memory must not change until ``checked``.
        """
        self.check = check
        """States: PENDING before the check, then GOOD or DAMAGED."""

        self.checked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once no block will arrive, and all that have arrived are checked. Never raises."""

        self._checkers = checkers
        self._loop = asyncio.get_running_loop()
        self._counting = threading.Lock()
        self._unchecked = 1
        """Waves to check, plus one while waves may arrive."""

    def arrive(self, first: int, last: int) -> None:
        """Take the blocks from *first* to before *last*, which lie in their slots. Call in any thread."""
        with self._counting:
            self._unchecked += 1
        rows = slice(first, last)
        if asyncio._get_running_loop() is self._loop:  # noqa: SLF001 (the public function raises elsewhere)
            self._loop.run_in_executor(self._checkers, self._run, rows)
        else:
            with contextlib.suppress(RuntimeError):  # the agent has stopped: no caller waits
                self._checkers.submit(self._run, rows)

    def end(self) -> None:
        """Expect no other block. Call once, in any thread."""
        with self._counting:
            self._unchecked -= 1
            is_over = not self._unchecked
        if is_over:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                self._loop.call_soon_threadsafe(self._note_checked)

    def _run(self, rows: slice) -> None:
        """Check blocks, and zero the rest of each block's last page."""
        try:
            check = self.check
            check.run(rows)
            blank_rests(check.pieces.memory, check.pieces.memory_offsets[rows], check.lengths[rows])
        except Exception:
            log.exception("a check of blocks crashed; this is a bug in Ostraca")
        finally:
            self.end()

    def _note_checked(self) -> None:
        if not self.checked.done():
            self.checked.set_result(None)
