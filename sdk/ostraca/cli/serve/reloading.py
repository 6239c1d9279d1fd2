"""Files that are read again when they change, or when the daemon is told to look (SIGHUP).

What a change brings is used only when all of it can be: a file that is wrong leaves everything as it was, and
says so in the log, once for each change.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ostraca_fabric.errors import OstracaError
from ostraca_fabric.made_of_files import identities

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)


class Reloading:
    """Watches the files of one kind of secret, and uses what they say."""

    def __init__(self, what: str, files: Sequence[Path], use: Callable[[], None], *, look_s: float) -> None:
        """*use* reads the files and puts them to use, or raises OstracaError and has changed nothing.

        It was called before: what the files are now counts as used.
        """
        self._what = what
        self._files = tuple(files)
        self._use = use
        self._look_s = look_s
        self._told = asyncio.Event()
        self._seen = identities(self._files)

    def look_now(self) -> None:
        """Read them again, changed or not. For a signal's handler."""
        self._told.set()

    async def run(self) -> None:
        """Look until cancelled: when told to, and every ``look_s``."""
        while True:
            try:
                async with asyncio.timeout(self._look_s):
                    await self._told.wait()
            except TimeoutError:
                self.look()
            else:
                self._told.clear()
                self.look(is_told=True)

    def look(self, *, is_told: bool = False) -> bool:
        """Read the files if they have changed, or anyway; return whether they were put to use."""
        found = identities(self._files)
        if found == self._seen and not is_told:
            return False
        self._seen = found
        try:
            self._use()
        except OstracaError as error:
            log.error("%s stay as they were, for what has changed can't be used: %s", self._what, error)  # noqa: TRY400 (the sentence says it all)
            return False
        log.info("%s were read again", self._what)
        return True
