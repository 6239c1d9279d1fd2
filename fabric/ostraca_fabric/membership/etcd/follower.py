"""Follower of a fabric: applies changes to a view, and wakes waiting tasks."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

from ostraca_fabric.errors import MembershipError, StoreAwayError
from ostraca_fabric.membership.etcd.client.client import EtcdClient
from ostraca_fabric.membership.etcd.client.watch import Watch
from ostraca_fabric.membership.etcd.client.watch_events import EntryList
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys
from ostraca_fabric.membership.etcd.schema.view import RollbackDetection, View
from ostraca_fabric.membership.etcd.store import EtcdStore
from ostraca_fabric.model.ids import FabricId
from ostraca_fabric.runtime.tasks import Tasks
from ostraca_fabric.telemetry.log_lines import LogDedup

log = logging.getLogger(__name__)


class Follower:
    """Task that keeps a ``View`` current."""

    def __init__(
        self,
        client: EtcdClient,
        store: EtcdStore,
        keys: EtcdKeys,
        fabric: FabricId,
        on_change: Callable[[View], None],
    ) -> None:
        """Follow the fabric at *keys* after ``start``; *on_change* precedes the wake-up of waiting tasks."""
        self.view = View(fabric, keys)
        self.changed = asyncio.Event()
        """Event set at the next change, and then replaced by a new event."""

        self._on_change = on_change
        self._client = client
        self._store = store
        self._watch = Watch(client, keys.prefix)
        self._tasks = Tasks(f"the membership in etcd under {keys.text}")
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """Heap of awaited revision, sequence number, and future."""

        self._numbers = itertools.count()
        self._past = RollbackDetection()
        self._lacks = ""
        """Reason why the content is not this fabric's, may be old, or is incomplete."""

        self._failed = ""
        """Last error that ended the watch."""

        self._failed_s = -math.inf
        self._failing, self._lacking = LogDedup(log), LogDedup(log)

    def start(self) -> None:
        """Start watching."""
        self._tasks.spawn(self._follow())

    async def stop(self) -> None:
        """Stop watching."""
        await self._tasks.stop()

    @property
    def heard_s_ago(self) -> float:
        """Seconds since the watch last heard from etcd."""
        return asyncio.get_running_loop().time() - self._watch.heard_at_s

    @property
    def trouble(self) -> str:
        """Problem with etcd or its content, as a sentence; empty without a problem."""
        if self._watch.heard_at_s <= self._failed_s:
            return self._failed
        if self.heard_s_ago > self._client.settings.watch_silence_max_s:
            return f"etcd has not been heard for {self.heard_s_ago:.0f} s: the map is unchanged"
        return self._lacks

    async def until_seen(self, revision: int) -> None:
        """Wait until the watch has reported all changes up to *revision*.

        Raises MembershipError after the timeout.
        """
        if self.view.revision < revision:
            told = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (revision, next(self._numbers), told))
            async with self._in_time():
                await told

    async def until(self, shows: Callable[[], bool]) -> None:
        """Wait until *shows* is true of the view. Raises MembershipError after the timeout."""
        async with self._in_time():
            while not shows():
                await self.changed.wait()

    async def _follow(self) -> None:
        backoff = self._client.backoff()
        while True:
            try:
                async with aclosing(self._watch.run()) as told:
                    async for each in told:
                        if isinstance(each, EntryList) and each.went_back:
                            self._past.note_went_back(each.went_back)
                        self.view.take(each)
                        backoff.reset()
                        self._look_for_trouble()
                        self._on_change(self.view)
                        self._wake()
            except MembershipError as error:
                self._fail(str(error), is_told=isinstance(error, StoreAwayError))
            except Exception as error:
                self._watch.list_anew()  # the view may have applied part of the change
                self._fail(f"changes in etcd can't be followed: a bug in Ostraca: {error!r}")
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
        self._failing.resolve("the fabric in etcd is followed again")
        meta, is_old = self.view.meta, ""
        try:
            self._store.check(meta)
        except MembershipError as error:  # nothing else there counts, so this is the only advice
            self._lacks = str(error)
        else:
            assert meta is not None, "it was checked"
            self._past.take(meta)
            is_old = self._past.trouble
            left_out = (f"{key.decode()} is left out: {why}" for key, why in self.view.unreadable.items())
            self._lacks = "; besides, ".join(filter(None, (is_old, next(left_out, ""))))
        if is_old:
            self._lacking.report("the map of the fabric may be old: %s", self._lacks)
        elif self._lacks:
            self._lacking.report("the map of the fabric may not be whole: %s", self._lacks)
        else:
            self._lacking.resolve("the map of the fabric is whole again")

    def _fail(self, why: str, *, is_told: bool = False) -> None:
        """Record the error that ended the watch; *is_told* if another part logs the error."""
        if self._watch.heard_at_s > self._failed_s:
            self._failing = LogDedup(log)
        self._failed, self._failed_s = why, asyncio.get_running_loop().time()
        if not is_told:
            self._failing.report("the fabric in etcd can't be followed; the map is unchanged: %s", why)

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        self._client.shutdown_budget.check("tell of a change")
        try:
            async with asyncio.timeout(self._client.settings.operation_timeout_s):
                yield
        except TimeoutError as error:
            away = StoreAwayError("etcd has accepted a change, but the watch has not reported the change")
            self._client.shutdown_budget.note(away)
            raise away from error
