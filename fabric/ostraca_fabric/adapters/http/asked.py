"""What a daemon believes, asked of its own loop by the server's.

It is asked at most once in ``fresh_s``, and all who ask meanwhile share the answer: scrapes, however many,
cost the daemon one status in that time.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

from ostraca_fabric.adapters.http.app import UNAVAILABLE, Page, text_page

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_fabric.adapters.http.settings import HttpSettings

_Status = TypeVar("_Status")


class Asked(Generic[_Status]):
    """One daemon's status. ``told`` belongs to the server's loop."""

    def __init__(
        self,
        status: Callable[[], _Status],
        loop: asyncio.AbstractEventLoop,
        settings: HttpSettings,
        clock: Callable[[], float],
        *,
        who: str,
    ) -> None:
        """*status* is called on *loop*, the daemon's; *clock* is monotonic, in seconds; *who* says whose it
        is.
        """
        self._status = status
        self._loop = loop
        self._settings = settings
        self._clock = clock
        self._who = who
        self._asked: asyncio.Future[_Status] | None = None
        self._asked_s = 0.0

    async def told(self) -> _Status | Page:
        """Return what the daemon believes, ``fresh_s`` old at most; or a page that says that it is silent."""
        now_s = self._clock()
        is_old = now_s - self._asked_s >= self._settings.fresh_s
        if self._asked is None or (self._asked.done() and is_old):
            self._asked_s = now_s
            self._asked = asyncio.wrap_future(self._ask())
        try:
            async with asyncio.timeout(self._settings.answer_s):
                return await asyncio.shield(self._asked)
        except TimeoutError:
            silent_s = self._clock() - self._asked_s
            message = f"{self._who} has not answered for {silent_s:.1f} s: its loop is blocked"
            return text_page(message, UNAVAILABLE)

    def _ask(self) -> Future[_Status]:
        told: Future[_Status] = Future()

        def tell() -> None:
            try:
                told.set_result(self._status())
            except BaseException as error:
                told.set_exception(error)
                raise

        self._loop.call_soon_threadsafe(tell)
        return told
