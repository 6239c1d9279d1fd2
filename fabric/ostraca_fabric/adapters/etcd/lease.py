"""Keeps leases alive in the process's thread for that, whatever the loop that serves is busy with.

A lease is *lost* when etcd says that it has ended, and at no other time: while etcd has no leader no lease
ends, and a new leader gives all of them their full time again. How long etcd has not answered is another
matter, and ``Lease.renewed_at_s`` tells it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from ostraca_fabric.adapters.etcd.client import EtcdClient
from ostraca_fabric.adapters.etcd.lease_thread import lease_thread
from ostraca_fabric.errors import MembershipError, StoreAwayError
from ostraca_fabric.spells import Spell

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from ostraca_fabric.adapters.etcd.backoff import Dice
    from ostraca_fabric.adapters.etcd.patience import Patience
    from ostraca_fabric.adapters.etcd.settings import EtcdSettings

log = logging.getLogger(__name__)

_Given = TypeVar("_Given")

_RENEWALS_PER_TTL = 3


class Lease:
    """One lease. Its attributes may be read in any thread."""

    def __init__(self, number: int, ttl_s: float, *, asked_at_s: float, on_lost: Callable[[], None]) -> None:
        """Stand for lease *number*, granted after it was asked for at *asked_at_s*."""
        self.number = number
        self.ttl_s = ttl_s
        self.renewed_at_s = asked_at_s
        """When the last renewal that etcd granted was asked for, on the monotonic clock."""

        self.is_lost = False
        self._on_lost = on_lost

    def lose(self) -> None:
        """Note that etcd has ended it. For its keeper."""
        self.is_lost = True
        self._on_lost()


class LeaseKeeper:
    """Begins leases and keeps them alive until they are ended or lost, or until it is closed."""

    def __init__(self, settings: EtcdSettings, *, dice: Dice, patience: Patience | None = None) -> None:
        """Use the process's thread for leases, until ``close``. A process that ends takes it along."""
        self._client = EtcdClient(settings, dice=dice, patience=patience)
        self._renewals: dict[int, asyncio.Task[None]] = {}
        self._asked: set[asyncio.Task[Any]] = set()
        """What callers wait for. Of the thread's loop, as are the renewals."""

        self._is_closed = False
        self._closing = threading.Lock()
        self._thread = lease_thread()
        self._thread.enter()

    async def begin(self, ttl_s: float, on_lost: Callable[[], None]) -> Lease:
        """Begin a lease; *on_lost* is called in the caller's loop when etcd says that it has ended.

        Raises MembershipError. etcd may give it more time than was asked for: never less than an election
        takes.
        """
        serving = asyncio.get_running_loop()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop that would be told has ended
                serving.call_soon_threadsafe(on_lost)

        return await self._over_there(self._begin(ttl_s, tell))

    async def end(self, lease: int) -> None:
        """End a lease, whoever began it, and with it all that is bound to it. Raises MembershipError."""
        await self._over_there(self._end(lease))

    def close(self) -> None:
        """Stop renewing, and give up what is under way; nobody may wait for it any more. Leases that were not
        ended run out.
        """
        with self._closing:
            if not self._thread.is_alive or self._is_closed:
                return
            self._is_closed = True
        self._thread.submit(self._stop()).result()
        self._thread.leave()

    async def _over_there(self, work: Coroutine[Any, Any, _Given]) -> _Given:
        with self._closing:  # so that what is submitted is begun before ``_stop``, which gives it up
            if self._is_closed or not self._thread.is_alive:
                work.close()
                raise MembershipError("leases are no longer kept: the membership was closed")
            done = self._thread.submit(self._kept(work))
        return await asyncio.wrap_future(done)

    async def _kept(self, work: Coroutine[Any, Any, _Given]) -> _Given:
        """Do what a caller waits for, where ``_stop`` can give it up."""
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

    async def _begin(self, ttl_s: float, tell: Callable[[], None]) -> Lease:
        asked_at_s = time.monotonic()
        granted = await self._client.lease_grant(max(1, math.ceil(ttl_s)))  # whole seconds, and never less
        lease = Lease(granted.ID, float(granted.TTL), asked_at_s=asked_at_s, on_lost=tell)
        self._renewals[lease.number] = asyncio.create_task(self._renew(lease))
        return lease

    async def _end(self, lease: int) -> None:
        if (renewal := self._renewals.pop(lease, None)) is not None:
            renewal.cancel()
        await self._client.lease_revoke(lease)

    async def _renew(self, lease: Lease) -> None:
        """Renew a lease three times in its life, until it has ended."""
        spell = Spell(log)
        while True:
            await asyncio.sleep(lease.ttl_s / _RENEWALS_PER_TTL)
            asked_at_s = time.monotonic()
            try:
                ttl_s = await self._client.lease_keep_alive(lease.number)
            except StoreAwayError as error:  # who asks for more than that says so
                log.debug("lease %x could not be renewed, and is tried again: %s", lease.number, error)
                continue
            except MembershipError as error:
                spell.goes_on("lease %x can't be renewed, and is tried again: %s", lease.number, error)
                continue
            except Exception as error:  # nobody else would see it, nor renew the lease
                spell.goes_on(
                    "lease %x can't be renewed, and is tried again; this is a bug in Ostraca: %r",
                    lease.number,
                    error,
                )
                log.debug("how renewing failed", exc_info=True)
                continue
            spell.over("lease %x is renewed again", lease.number)
            if ttl_s <= 0:
                log.warning(
                    "lease %x has ended, renewed for the last time %.0f s ago: another start of this agent "
                    "has ended it, or it was silent for too long, as one that is stopped is, or etcd has "
                    "lost it, as one that was made anew has",
                    lease.number,
                    time.monotonic() - lease.renewed_at_s,
                )
                self._renewals.pop(lease.number, None)
                lease.lose()
                return
            lease.renewed_at_s, lease.ttl_s = asked_at_s, float(ttl_s)
