"""Renewal of leases in a separate thread, while the serving event loop is alive.

A lease stands for the work of its holder's event loop. At each renewal the thread requests a heartbeat from
the loop, without waiting. A loop busy for less than the lease's time therefore has no effect. If the last
heartbeat is older, the lease is not renewed, and other agents take over, as after a stopped process. Once the
loop continues, the lease is renewed at once: it still stands, or etcd reports its end.

A lease is *lost* only when etcd reports its end. Without a leader in etcd no lease ends, and a new leader
restores the full time of all leases. ``EtcdLease.renewed_at_s`` shows separately since when etcd has not
answered.

Thread for leases: a single event loop per process, shared by all keepers.

grpc.aio has a single poller for all event loops of a process. Any loop may take the poller's events and pass
events on to the other loops. A cancelled call causes a last event when its parts have ended, and no public
function waits for that event. If a loop is closed right after cancelled calls, another loop gets the late
events and logs ``RuntimeError: Event loop is closed``.

Therefore this loop is never closed. The loop stops when the last user leaves, and runs again for the next
user: a stopped loop still accepts events.

A forked process does not inherit the thread. Its first keeper starts a new thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ostraca_fabric.errors import MembershipError, StoreAwayError
from ostraca_fabric.membership.etcd.client.client import EtcdClient, ShutdownBudget
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.policies.backoff import Dice
from ostraca_fabric.runtime.threads import show_name
from ostraca_fabric.telemetry.log_lines import LogDedup

log = logging.getLogger(__name__)

_Given = TypeVar("_Given")

_RENEWALS_PER_TTL = 3


class Heartbeat:
    """Heartbeats of an event loop, for a task of another loop.

    All methods are for that task.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, asker: asyncio.AbstractEventLoop) -> None:
        """Watch *loop*, which is alive now, from *asker*, the running loop."""
        self._loop = loop
        self._asker = asker
        self._is_due = False
        self._beat_at_s = time.monotonic()
        self._has_beaten = asyncio.Event()

    @property
    def age_s(self) -> float:
        """Seconds since the loop was last known to be alive."""
        return time.monotonic() - self._beat_at_s

    def ask(self) -> None:
        """Request a heartbeat unless one is pending. Does not wait.

        A closed loop never answers.
        """
        if not self._is_due:
            self._is_due = True
            self._has_beaten.clear()
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._beat)

    async def beaten(self) -> None:
        """Wait for the requested heartbeat."""
        await self._has_beaten.wait()

    def _beat(self) -> None:
        """Run on the watched loop."""
        now_s = time.monotonic()

        def note() -> None:
            self._beat_at_s, self._is_due = now_s, False
            self._has_beaten.set()

        self._asker.call_soon_threadsafe(note)


class EtcdLease:
    """Lease in etcd. Any thread may read the attributes."""

    def __init__(self, number: int, ttl_s: float, *, asked_at_s: float, on_lost: Callable[[], None]) -> None:
        """Represent lease *number*, requested at *asked_at_s* and then granted."""
        self.number = number
        self.ttl_s = ttl_s
        self.renewed_at_s = asked_at_s
        """Request time of the last renewal granted by etcd, on the monotonic clock."""

        self.is_lost = False
        self._on_lost = on_lost

    def lose(self) -> None:
        """Record that etcd has ended the lease. Only the keeper calls this."""
        self.is_lost = True
        self._on_lost()


class LeaseKeeper:
    """Keeper of leases: renews each until its end or loss, or until ``close``."""

    def __init__(
        self, settings: EtcdSettings, *, dice: Dice, shutdown_budget: ShutdownBudget | None = None
    ) -> None:
        """Use the process's thread for leases, until ``close`` or the end of the process."""
        self._client = EtcdClient(settings, dice=dice, shutdown_budget=shutdown_budget)
        self._renewals: dict[int, asyncio.Task[None]] = {}
        self._asked: set[asyncio.Task[Any]] = set()
        """Tasks with waiting callers. They belong to the thread's loop, as the renewals do."""

        self._is_closed = False
        self._closing = threading.Lock()
        self._thread = lease_thread()
        self._thread.enter()

    async def begin(self, ttl_s: float, on_lost: Callable[[], None]) -> EtcdLease:
        """Begin a lease, renewed while the caller's event loop is alive.

        *on_lost* is called on the caller's loop when etcd reports the end of the lease. etcd may grant more
        than *ttl_s*: never less than an election takes. Raises MembershipError.
        """
        serving = asyncio.get_running_loop()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop has ended
                serving.call_soon_threadsafe(on_lost)

        return await self._over_there(self._begin(ttl_s, tell, serving))

    async def end(self, lease: int) -> None:
        """End any lease with all its keys. Raises MembershipError."""
        await self._over_there(self._end(lease))

    def close(self) -> None:
        """Stop renewing and abandon work under way; leases not ended run out.

        No caller may wait for the keeper any more.
        """
        with self._closing:
            if not self._thread.is_alive or self._is_closed:
                return
            self._is_closed = True
        self._thread.submit(self._stop()).result()
        self._thread.leave()

    async def _over_there(self, work: Coroutine[Any, Any, _Given]) -> _Given:
        with self._closing:  # submitted work begins before ``_stop`` cancels the tasks
            if self._is_closed or not self._thread.is_alive:
                work.close()
                raise MembershipError("leases are no longer kept: the membership was closed")
            done = self._thread.submit(self._kept(work))
        return await asyncio.wrap_future(done)

    async def _kept(self, work: Coroutine[Any, Any, _Given]) -> _Given:
        """Run a caller's work as a task that ``_stop`` can cancel."""
        task = asyncio.current_task()
        assert task is not None, "it is a task of the thread's loop"
        self._asked.add(task)
        try:
            return await work
        finally:
            self._asked.discard(task)

    async def _stop(self) -> None:
        mine = {*self._asked, *self._renewals.values()}
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)
        await self._client.close()

    async def _begin(
        self, ttl_s: float, tell: Callable[[], None], serving: asyncio.AbstractEventLoop
    ) -> EtcdLease:
        asked_at_s = time.monotonic()
        granted = await self._client.lease_grant(
            max(1, math.ceil(ttl_s))
        )  # etcd takes whole seconds; never round down
        lease = EtcdLease(granted.ID, float(granted.TTL), asked_at_s=asked_at_s, on_lost=tell)
        heartbeat = Heartbeat(serving, asyncio.get_running_loop())
        self._renewals[lease.number] = asyncio.create_task(self._renew(lease, heartbeat))
        return lease

    async def _end(self, lease: int) -> None:
        if (renewal := self._renewals.pop(lease, None)) is not None:
            renewal.cancel()
        await self._client.lease_revoke(lease)

    async def _renew(self, lease: EtcdLease, heartbeat: Heartbeat) -> None:
        """Renew a lease three times in its life until its end, while its loop is alive."""
        dedup = LogDedup(log)
        while True:
            await asyncio.sleep(lease.ttl_s / _RENEWALS_PER_TTL)
            heartbeat.ask()
            if heartbeat.age_s > lease.ttl_s:
                await _alive_again(lease, heartbeat)
            asked_at_s = time.monotonic()
            try:
                ttl_s = await self._client.lease_keep_alive(lease.number)
            except StoreAwayError as error:  # callers that need etcd report the failure themselves
                log.debug("lease %x could not be renewed, and is tried again: %s", lease.number, error)
                continue
            except MembershipError as error:
                dedup.report("lease %x can't be renewed, and is tried again: %s", lease.number, error)
                continue
            except Exception as error:  # otherwise the error stays unseen and the lease unrenewed
                dedup.report(
                    "lease %x can't be renewed, and is tried again; this is a bug in Ostraca: %r",
                    lease.number,
                    error,
                )
                log.debug("how renewing failed", exc_info=True)
                continue
            dedup.resolve("lease %x is renewed again", lease.number)
            if ttl_s <= 0:
                log.warning(
                    "lease %x has ended, renewed for the last time %.0f s ago. Possible causes: another "
                    "start of this agent; a stopped process or blocked event loop; loss of data in etcd",
                    lease.number,
                    time.monotonic() - lease.renewed_at_s,
                )
                self._renewals.pop(lease.number, None)
                lease.lose()
                return
            lease.renewed_at_s, lease.ttl_s = asked_at_s, float(ttl_s)


async def _alive_again(lease: EtcdLease, heartbeat: Heartbeat) -> None:
    """Wait for a heartbeat. A loop stopped together with this thread answers at once."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(lease.ttl_s / _RENEWALS_PER_TTL):
            await heartbeat.beaten()
            return
    log.error(
        "lease %x is not renewed: the serving event loop has been blocked for %.1f s. Other agents take "
        "over the shards; this process joins again once the loop continues",
        lease.number,
        heartbeat.age_s,
    )
    await heartbeat.beaten()
    log.warning("the event loop of lease %x continues: the lease is renewed, unless ended", lease.number)


class LeaseThread:
    """Thread with an event loop, running while used. Thread-safe; see ``lease_thread``."""

    def __init__(self) -> None:
        """Create the loop without starting the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread()
        self._users = 0
        self._changing = threading.Lock()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; always False in a forked process."""
        return self._thread.is_alive()

    def enter(self) -> None:
        """Use the thread; the first user starts it. The caller must ``leave``."""
        with self._changing:
            self._users += 1
            if self._users == 1:
                # A daemon thread, so that a user that never leaves does not block the end of the process.
                self._thread = threading.Thread(target=self._run, name="etcd-lease", daemon=True)
                self._thread.start()

    def leave(self) -> None:
        """Stop using the thread, after all submitted work; the last user ends it."""
        with self._changing:
            self._users -= 1
            if not self._users:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()

    def submit(self, work: Coroutine[Any, Any, _Given]) -> Future[_Given]:
        """Run work on the thread's loop. Cancelling the future cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        show_name("etcd-lease")
        self._loop.run_forever()


_threads: dict[int, LeaseThread] = {}
"""Threads by process id. A forked process keeps the parent's entry: closing it would disturb the parent."""

_making = threading.Lock()


def lease_thread() -> LeaseThread:
    """Return this process's thread for leases."""
    with _making:
        process = os.getpid()
        if process not in _threads:
            _threads[process] = LeaseThread()
        return _threads[process]


def _unlock() -> None:
    """Replace the lock after a fork, since another thread of the parent may have held it."""
    global _making  # noqa: PLW0603
    _making = threading.Lock()


os.register_at_fork(after_in_child=_unlock)
