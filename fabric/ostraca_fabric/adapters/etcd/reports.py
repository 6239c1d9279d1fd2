"""An enclosure's report in etcd, under a lease of its own: it is there while its daemon is.

An enclosure has one daemon. The report of another start is left alone, unless that start is known to have
ended; what is exported does not depend on any of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Self

from ostraca_fabric.adapters.etcd.client import EtcdClient
from ostraca_fabric.adapters.etcd.lease import Lease, LeaseKeeper
from ostraca_fabric.adapters.etcd.records import decode_report, encode_report
from ostraca_fabric.adapters.etcd.store import EtcdStore
from ostraca_fabric.adapters.etcd.transactions import put
from ostraca_fabric.errors import LeaseEndedError, MembershipError, NamesakeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_fabric.adapters.etcd.backoff import Dice
    from ostraca_fabric.adapters.etcd.keys import Keys
    from ostraca_fabric.adapters.etcd.settings import EtcdSettings
    from ostraca_fabric.ids import EnclosureId, FabricId, StartId
    from ostraca_fabric.inventory import EnclosureReport

log = logging.getLogger(__name__)


class EtcdReports:
    """One process's line to the reports of a fabric. Made by ``open``; close it."""

    def __init__(
        self, fabric: FabricId, settings: EtcdSettings, *, keys: Keys, dice: Dice, lease_ttl_s: float
    ) -> None:
        """See ``open``."""
        self._keys = keys
        self._ttl_s = lease_ttl_s
        self._client = EtcdClient(settings, dice=dice)
        self._store = EtcdStore(self._client, keys, fabric)
        self._keeper = LeaseKeeper(settings, dice=dice)
        self._lease: Lease | None = None
        self._ended: StartId | None = None
        self._on_lost: Callable[[], None] = lambda: None

    @classmethod
    async def open(
        cls,
        fabric: FabricId,
        settings: EtcdSettings,
        *,
        keys: Keys,
        dice: Dice,
        lease_ttl_s: float,
    ) -> Self:
        """Return the reports of the fabric that lies at *keys*. One that is put lives for *lease_ttl_s* after
        etcd last heard of its daemon.

        Raises StoreAwayError when etcd can't be reached, and MembershipError that says what to do when there
        is no fabric, or another one.
        """
        self = cls(fabric, settings, keys=keys, dice=dice, lease_ttl_s=lease_ttl_s)
        try:
            await self._store.read()
        except BaseException:
            await self.close()
            raise
        return self

    def succeed(self, ended: StartId | None, on_lost: Callable[[], None]) -> None:
        """Take the place of the start *ended*, whose process is gone; *on_lost* is called when a report is
        gone because etcd was not heard for too long.
        """
        self._ended, self._on_lost = ended, on_lost

    async def put(self, report: EnclosureReport) -> None:
        """Put a report in place of the one before, under this process's lease.

        Raises NamesakeError when another daemon is this enclosure, and MembershipError when etcd can't be
        asked.
        """
        key, value = self._keys.report(report.id), encode_report(report)
        tries = self._store.tries(f"report of {report.id}")
        while True:
            read = await self._store.read(key)
            lease = await self._own_lease()
            known = read.entries.get(key)
            if known is not None and (known.lease, known.value) == (lease.number, value):
                return
            if known is None or known.lease == lease.number:
                with contextlib.suppress(LeaseEndedError):  # then the next try begins another
                    if await self._store.write(read, [put(key, value, lease.number)], unchanged=[key]):
                        return
            else:
                there = decode_report(known.value)
                if there.start not in (report.start, self._ended):
                    raise NamesakeError(
                        f"enclosure {report.id} has a daemon already, at "
                        f"{', '.join(map(str, there.controllers))}: give each enclosure an id of its own, "
                        "and keep its state directory with it"
                    )
                await self._keeper.end(known.lease)
            await tries.again()

    async def find(self, enclosure: EnclosureId) -> EnclosureReport | None:
        """Return what an enclosure's daemon said last, None while none runs. Raises MembershipError."""
        key = self._keys.report(enclosure)
        value = (await self._store.read(key)).value(key)
        return None if value is None else decode_report(value)

    async def close(self) -> None:
        """Take the report back with its lease, where one was put, and end. Where etcd can't be asked, the
        lease runs out.
        """
        if self._lease is not None:
            try:
                await self._keeper.end(self._lease.number)
            except MembershipError as error:
                log.warning("The report could not be taken back, and goes with its lease: %s", error)
        await asyncio.to_thread(self._keeper.close)
        await self._client.close()

    async def _own_lease(self) -> Lease:
        if self._lease is None or self._lease.is_lost:
            self._lease = await self._keeper.begin(self._ttl_s, self._on_lost)
        return self._lease
