"""Follows one fabric: takes in what the watch tells, as long as the process lives, and wakes who waits."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from ostraca_fabric.adapters.etcd.past import Past
from ostraca_fabric.adapters.etcd.told import Listed
from ostraca_fabric.adapters.etcd.view import View
from ostraca_fabric.adapters.etcd.watch import Watch
from ostraca_fabric.errors import MembershipError, StoreAwayError
from ostraca_fabric.spells import Spell
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
        self._past = Past()
        self._lacks = ""
        """Why what lies there is not this fabric, or may be old or not whole."""

        self._failed = ""
        """What ended the watch last."""

        self._failed_s = -math.inf
        self._failing, self._lacking = Spell(log), Spell(log)

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
        if self._watch.heard_at_s <= self._failed_s:
            return self._failed
        if self.heard_s_ago > self._client.settings.watch_silence_max_s:
            return f"etcd has not been heard for {self.heard_s_ago:.0f} s: the map stays as it was"
        return self._lacks

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
                        if isinstance(each, Listed) and each.went_back:
                            self._past.note_went_back(each.went_back)
                        self.view.take(each)
                        backoff.reset()
                        self._look_for_trouble()
                        self._wake()
            except MembershipError as error:
                self._fail(str(error), is_told=isinstance(error, StoreAwayError))
            except Exception as error:
                self._watch.list_anew()  # the view may have taken in a part of what was told
                self._fail(f"what etcd tells can't be followed, which is a bug in Ostraca: {error!r}")
                log.debug("how following etcd failed", exc_info=True)
            await asyncio.sleep(backoff.next_s())

    def _wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
        while self._waiting and self._waiting[0][0] <= self.view.revision:
            _, _, told = heapq.heappop(self._waiting)
            if not told.done():
                told.set_result(None)

    def _look_for_trouble(self) -> None:
        self._failing.over("the fabric in etcd is followed again")
        meta, is_old = self.view.meta, ""
        try:
            self._store.check(meta)
        except MembershipError as error:  # none of it is believed, and there is one thing to do
            self._lacks = str(error)
        else:
            assert meta is not None, "it was checked"
            self._past.take(meta)
            is_old = self._past.trouble
            left_out = (f"{key.decode()} is left out: {why}" for key, why in self.view.unreadable.items())
            self._lacks = "; besides, ".join(filter(None, (is_old, next(left_out, ""))))
        if is_old:
            self._lacking.goes_on("the map of the fabric may be old: %s", self._lacks)
        elif self._lacks:
            self._lacking.goes_on("the map of the fabric may not be whole: %s", self._lacks)
        else:
            self._lacking.over("the map of the fabric is whole again")

    def _fail(self, why: str, *, is_told: bool = False) -> None:
        """Note what ended the watch; *is_told*: others say it."""
        if self._watch.heard_at_s > self._failed_s:
            self._failing = Spell(log)
        self._failed, self._failed_s = why, asyncio.get_running_loop().time()
        if not is_told:
            self._failing.goes_on(
                "the fabric in etcd can't be followed, and the map stays as it was: %s", why
            )

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
