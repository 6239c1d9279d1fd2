"""Taking back what was offered on a lost connection. Who needs the next one waits no longer than it has.

With NIXL it takes up to a fifth of a second: another NIXL agent is made, unless there is a spare, and the
one before is thrown away.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ostraca_fabric.threads import show_name

if TYPE_CHECKING:
    from ostraca.arena import Arena


class Renewal:
    """That of one client's arena. Not thread-safe; ``close`` it."""

    def __init__(self, arena: Arena) -> None:
        """Nothing was offered yet."""
        self._arena = arena
        self._is_due = False
        self._under_way: Future[None] | None = None
        self._thread: threading.Thread | None = None

    def offered(self) -> None:
        """Note that a connection has begun: before the next one the arena's ends are to be renewed."""
        self._is_due = True

    def finish(self, until_s: float) -> None:
        """See to it that nothing lands any more through what was offered. Once is enough.

        Raises TimeoutError when that takes longer, and then it goes on; and TransportError.
        """
        if not self._is_due:
            return
        if self._under_way is None:
            if not self._arena.must_renew:
                self._is_due = False
                return
            self._under_way = self._begun()
        self._under_way.exception(max(0.0, until_s - time.monotonic()))
        ended, self._under_way = self._under_way, None
        ended.result()
        self._is_due = False

    def close(self) -> None:
        """Wait until nothing is under way."""
        if self._thread is not None:
            self._thread.join()

    def _begun(self) -> Future[None]:
        done: Future[None] = Future()

        def renew() -> None:
            try:
                self._arena.renew()
            except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
                done.set_exception(error)
            else:
                done.set_result(None)

        def renew_apart() -> None:
            show_name("renew")
            renew()

        thread = threading.Thread(target=renew_apart, name="ostraca-renew", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # this process may have no more threads
            renew()
        else:
            self._thread = thread
        return done
