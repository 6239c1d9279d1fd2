"""Keeps leases alive in a thread with an event loop of its own, whatever the loop that serves is busy with.

A lease is *lost* when etcd says that it has ended, and at no other time: while etcd has no leader no lease
ends, and a new leader gives all of them their full time again. How long etcd has not answered is another
matter, and ``Lease.renewed_at_s`` tells it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from ostraca_fabric.adapters.etcd.client import EtcdClient
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.threads import show_name

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from ostraca_fabric.adapters.etcd.backoff import Dice
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

    def __init__(self, settings: EtcdSettings, *, dice: Dice) -> None:
        """Start the thread; ``close`` ends it. A process that ends takes it along."""
        self._loop = asyncio.new_event_loop()
        self._renewals: dict[int, asyncio.Task[None]] = {}
        self._thread = threading.Thread(target=self._run, name="etcd-lease", daemon=True)
        self._client = EtcdClient(settings, dice=dice)
        self._thread.start()

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
        """Stop renewing, and end the thread; nobody may wait for it any more. Leases that were not ended run
        out.
        """
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def _over_there(self, work: Coroutine[Any, Any, _Given]) -> _Given:
        if not self._thread.is_alive():
            work.close()
            raise MembershipError("leases are no longer kept: the membership was closed")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _run(self) -> None:
        show_name("etcd-lease")
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._stop())
        finally:
            self._loop.close()

    async def _stop(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.close()

    async def _begin(self, ttl_s: float, tell: Callable[[], None]) -> Lease:
        asked_at_s = time.monotonic()
        granted = await self._client.lease_grant(max(1, round(ttl_s)))
        lease = Lease(granted.ID, float(granted.TTL), asked_at_s=asked_at_s, on_lost=tell)
        self._renewals[lease.number] = asyncio.create_task(self._renew(lease))
        return lease

    async def _end(self, lease: int) -> None:
        if (renewal := self._renewals.pop(lease, None)) is not None:
            renewal.cancel()
        await self._client.lease_revoke(lease)

    async def _renew(self, lease: Lease) -> None:
        """Renew a lease three times in its life, until it has ended."""
        while True:
            await asyncio.sleep(lease.ttl_s / _RENEWALS_PER_TTL)
            asked_at_s = time.monotonic()
            try:
                ttl_s = await self._client.lease_keep_alive(lease.number)
            except MembershipError as error:
                log.warning("lease %x could not be renewed, and is tried again: %s", lease.number, error)
                continue
            if ttl_s <= 0:
                log.warning(
                    "lease %x has ended: another start of this agent, or silence for too long", lease.number
                )
                self._renewals.pop(lease.number, None)
                lease.lose()
                return
            lease.renewed_at_s, lease.ttl_s = asked_at_s, float(ttl_s)
