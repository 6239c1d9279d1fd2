"""Follows one fabric: takes in what the watch tells, as long as the process lives, and wakes who waits."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from ostraca_fabric.adapters.etcd.view import View
from ostraca_fabric.adapters.etcd.watch import Watch
from ostraca_fabric.errors import MembershipError, StoreAwayError
from ostraca_fabric.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ostraca_fabric.adapters.etcd.client import EtcdClient
    from ostraca_fabric.adapters.etcd.keys import Keys
    from ostraca_fabric.adapters.etcd.store import EtcdStore
    from ostraca_fabric.ids import FabricId

log = logging.getLogger(__name__)


class Follower:
    """Keeps a ``View`` up to date."""

    def __init__(self, client: EtcdClient, store: EtcdStore, keys: Keys, fabric: FabricId) -> None:
        """Follow the fabric at *keys* once it is started."""
        self.view = View(fabric, keys)
        self.changed = asyncio.Event()
        """Set at the next change, and then replaced."""

        self._client = client
        self._store = store
        self._watch = Watch(client, keys.prefix)
        self._tasks = Tasks(f"the membership in etcd under {keys.text}")
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """A heap: the revision that is waited for, a number for order, and who waits."""

        self._numbers = itertools.count()
        self._trouble = ""

    def start(self) -> None:
        """Begin to watch."""
        self._tasks.spawn(self._follow())

    async def stop(self) -> None:
        """Watch no more."""
        await self._tasks.stop()

    @property
    def heard_s_ago(self) -> float:
        """For how long the watch has heard nothing of etcd."""
        return asyncio.get_running_loop().time() - self._watch.heard_at_s

    @property
    def trouble(self) -> str:
        """What is wrong with etcd, or with what lies there, in a sentence; empty when nothing is."""
        if not self._trouble and self.heard_s_ago > self._client.settings.watch_silence_max_s:
            return f"etcd has not been heard for {self.heard_s_ago:.0f} s: the map stays as it was"
        return self._trouble

    async def until_told(self, revision: int) -> None:
        """Wait until the watch has told all up to *revision*. Raises MembershipError if it does not in
        time.
        """
        if self.view.revision < revision:
            told = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (revision, next(self._numbers), told))
            async with self._in_time():
                await told

    async def until(self, shows: Callable[[], bool]) -> None:
        """Wait until the view shows something. Raises MembershipError if it does not in time."""
        async with self._in_time():
            while not shows():
                await self.changed.wait()

    async def _follow(self) -> None:
        backoff = self._client.backoff()
        while True:
            try:
                async with aclosing(self._watch.run()) as told:
                    async for each in told:
                        self.view.take(each)
                        backoff.reset()
                        self._look_for_trouble()
                        self._wake()
            except MembershipError as error:
                self._note(str(error))
            await asyncio.sleep(backoff.next_s())

    def _wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
        while self._waiting and self._waiting[0][0] <= self.view.revision:
            _, _, told = heapq.heappop(self._waiting)
            if not told.done():
                told.set_result(None)

    def _look_for_trouble(self) -> None:
        try:
            self._store.check(self.view.meta)
        except MembershipError as error:
            self._note(str(error))
        else:
            left_out = (f"{key.decode()} is left out: {why}" for key, why in self.view.unreadable.items())
            self._note(next(left_out, ""))

    def _note(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            log.warning("the map of the fabric may not be whole: %s", trouble)
        self._trouble = trouble

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        self._client.patience.check("tell of a change")
        try:
            async with asyncio.timeout(self._client.settings.operation_timeout_s):
                yield
        except TimeoutError as error:
            away = StoreAwayError("etcd has taken a change, and its watch does not tell of it")
            self._client.patience.note(away)
            raise away from error
