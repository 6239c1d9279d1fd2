"""Reload of files after changes or on SIGHUP.

A reload applies a change as a whole. A bad file leaves everything unchanged, and the log reports each bad
change once. Later polls try again, because the cause may lie outside the file, as a lack of descriptors does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from ostraca_fabric.errors import OstracaError
from ostraca_fabric.runtime.file_reload import identities
from ostraca_fabric.runtime.tasks import meanwhile, set_within

log = logging.getLogger(__name__)


class FileReloader:
    """Watcher of the files of one kind of secret."""

    def __init__(self, files: Sequence[Path], use: Callable[[], None], *, look_s: float) -> None:
        """Watch *files* and apply changes by *use*.

        *use* reads and applies the files, or raises OstracaError without any change. The caller has called
        *use* before: the present files count as applied.
        """
        self._name = ", ".join(map(str, files)) or "no files"
        self._files = tuple(files)
        self._use = use
        self._look_s = look_s
        self._requested = asyncio.Event()
        self._seen: object = identities(self._files)
        """Identities of the files applied last; None while the present files are unusable."""

        self._refused: object = None

    def look_now(self) -> None:
        """Reload the files even if unchanged; safe in a signal handler."""
        self._requested.set()

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager that polls meanwhile."""
        return meanwhile(f"reload of {self._name}", self.run())

    async def run(self) -> None:
        """Poll until cancelled: every ``look_s``, and after each ``look_now``."""
        while True:
            await set_within(self._requested, self._look_s)
            is_requested = self._requested.is_set()
            self._requested.clear()
            self.look(is_requested=is_requested)

    def look(self, *, is_requested: bool = False) -> bool:
        """Reload changed files, or any if *is_requested*; return whether applied."""
        found = identities(self._files)
        if found == self._seen and not is_requested:
            return False
        self._seen = found
        try:
            self._use()
        except OstracaError as error:
            self._seen = None
            if found != self._refused or is_requested:
                log.error("Unusable change of %s, the previous content stays in use: %s", self._name, error)  # noqa: TRY400 (the sentence says it all)
            self._refused = found
            return False
        self._refused = None
        if self._files:  # without files, a request has *use* act on other things
            log.info("Reloaded %s", self._name)
        return True
