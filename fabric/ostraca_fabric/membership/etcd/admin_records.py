"""Records beside the map in etcd: an implementation of ``ports.records.Records``, and enclosures' reports.

An enclosure has one daemon, which reports under its own lease; the report is present while the daemon runs.
The report of another start is kept, unless that start is known to have ended. Exports do not depend on
reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Self

from ostraca_fabric.errors import LeaseEndedError, MembershipError, NamesakeError
from ostraca_fabric.membership.etcd.client.client import EtcdClient, delete, put, range_end
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.client.watch import Watch, entry_of
from ostraca_fabric.membership.etcd.client.watch_events import Entry, EntryList
from ostraca_fabric.membership.etcd.lease import EtcdLease, LeaseKeeper
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys
from ostraca_fabric.membership.etcd.schema.records import decode_at, decode_report, encode_report
from ostraca_fabric.membership.etcd.store import EtcdStore
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.ids import EnclosureId, FabricId, StartId
from ostraca_fabric.model.inventory import EnclosureReport
from ostraca_fabric.policies.backoff import Dice
from ostraca_fabric.ports.records import ABSENT, Record, RecordChange, RecordLock
from ostraca_fabric.telemetry.log_lines import LogDedup

log = logging.getLogger(__name__)

_PAGE = 512


class EtcdRecords(AbstractAsyncContextManager["EtcdRecords"]):
    """Records of one fabric, for one process. Call ``close`` at the end."""

    def __init__(
        self, fabric: FabricId, settings: EtcdSettings, *, keys: EtcdKeys, dice: Dice, lease_ttl_s: float
    ) -> None:
        """Open the records.

        Holds last *lease_ttl_s* after the last sign of life of this process.
        """
        self._keys = keys
        self._client = EtcdClient(settings, dice=dice)
        self._store = EtcdStore(self._client, keys, fabric)
        self._keeper = LeaseKeeper(settings, dice=dice)
        self._lease_ttl_s = lease_ttl_s
        self._lease: EtcdLease | None = None
        self._leasing = asyncio.Lock()
        self._held: dict[str, int] = {}
        """Revision of each hold not let go, by key; ``ABSENT`` while requested."""

        self._unreadable = LogDedup(log)
        self._on_lost: Callable[[], None] = lambda: None

    async def __aexit__(self, *_: object) -> None:
        """Close the records."""
        await self.close()

    async def close(self) -> None:
        """End the lease with all holds, and close all connections.

        If etcd cannot be asked, the lease runs out.
        """
        if self._lease is not None:
            try:
                await self._keeper.end(self._lease.number)
            except MembershipError as error:
                log.warning("Records of this process could not be removed, and end with the lease: %s", error)
        await asyncio.to_thread(self._keeper.close)
        await self._client.close()

    async def get(self, key: str) -> Record | None:
        """As in the port."""
        return (await self.get_many([key])).get(key)

    async def get_many(self, keys: Sequence[str]) -> Mapping[str, Record]:
        """As in the port."""
        read = await self._store.read(*map(self._at, keys))
        found = (read.entries.get(self._at(key)) for key in keys)
        return {record.key: record for record in map(self._record, filter(None, found))}

    async def below(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[Record, ...]:
        """As in the port, but each page has its own revision."""
        first = max(self._at(prefix), self._at(after) + b"\0" if after else b"")
        end, found = range_end(self._at(prefix)), list[Record]()
        while not limit or len(found) < limit:
            wanted = min(_PAGE, limit - len(found)) if limit else _PAGE
            answer = await self._client.range(first, end=end, limit=wanted)
            found += [self._record(entry_of(kv)) for kv in answer.kvs]
            if not answer.more or not answer.kvs:
                break
            first = answer.kvs[-1].key + b"\0"
        return tuple(found)

    async def write(self, changes: Sequence[RecordChange], *, unchanged: Mapping[str, int]) -> int | None:
        """As in the port."""
        read = await self._store.read(*map(self._at, unchanged))
        if any(read.modified(self._at(key)) != revision for key, revision in unchanged.items()):
            return None
        operations = [
            delete(self._at(change.key)) if change.value is None else put(self._at(change.key), change.value)
            for change in changes
        ]
        made = await self._store.write(read, operations, unchanged=map(self._at, unchanged))
        if made is not None:
            return made
        puts = {self._at(change.key): change.value for change in changes if change.value is not None}
        now = await self._store.read(*puts)
        found = {now.modified(key) if now.value(key) == value else 0 for key, value in puts.items()}
        # All in one revision since the read: an attempt without an answer, and this one a repetition.
        return found.pop() if len(found) == 1 and max(found) > read.revision else None

    async def hold(self, key: str, value: bytes) -> RecordLock | None:
        """As in the port."""
        if key in self._held:
            return None
        self._held[key] = ABSENT
        lock = None
        try:
            lock = await self._hold(key, value)
        finally:
            if lock is None:
                del self._held[key]
            else:
                self._held[key] = lock.revision
        return lock

    async def _hold(self, key: str, value: bytes) -> RecordLock | None:
        """Create the record, or take over a record of this process that no caller knows.

        A failed ``hold`` or ``let_go`` may leave such a record, and the lease would keep it. The new revision
        refuses late changes of earlier calls.
        """
        while True:
            read = await self._store.read(self._at(key))
            known = read.entries.get(self._at(key))
            if known is not None and (self._lease is None or known.lease != self._lease.number):
                return None
            lease = await self._own_lease()
            try:
                made = await self._store.write(
                    read, [put(self._at(key), value, lease.number)], unchanged=[self._at(key)]
                )
            except LeaseEndedError:
                continue
            if made is None:  # unless an attempt without an answer was accepted
                now = (await self._store.read(self._at(key))).entries.get(self._at(key))
                is_own = now is not None and now.lease == lease.number and now.modified > read.revision
                made = now.modified if now is not None and is_own else None
            return None if made is None else RecordLock(key, made)

    async def let_go(self, hold: RecordLock) -> None:
        """As in the port."""
        if self._held.get(hold.key) == hold.revision:
            del self._held[hold.key]
        read = await self._store.read(self._at(hold.key))
        if read.modified(self._at(hold.key)) == hold.revision:
            await self._store.write(read, [delete(self._at(hold.key))], unchanged=[self._at(hold.key)])

    async def changes(self, prefix: str) -> AsyncIterator[tuple[Record | str, ...]]:
        """As in the port."""
        watch = Watch(self._client, self._at(prefix))
        async with aclosing(watch.run()) as told:
            async for each in told:
                entries = each.entries if isinstance(each, EntryList) else each.changes
                yield tuple(
                    self._record(entry) if isinstance(entry, Entry) else self._name(entry.key)
                    for entry in entries
                )

    async def find(self, enclosure: EnclosureId) -> EnclosureReport | None:
        """Return the last report of an enclosure, or None while no daemon runs.

        Raises MembershipError.
        """
        key = self._keys.report(enclosure)
        value = (await self._store.read(key)).value(key)
        return None if value is None else decode_at(key, value, decode_report)

    async def reports(self) -> list[EnclosureReport]:
        """Return the last reports of all enclosures with a running daemon. Raises MembershipError.

        Reports unreadable for this release are logged and left out.
        """
        found, is_whole = list[EnclosureReport](), True
        for record in await self.below(record_keys.REPORTS):
            try:
                found.append(decode_at(record.key.encode(), record.value, decode_report))
            except MembershipError as error:
                self._unreadable.report("A report is left out: %s", error)
                is_whole = False
        if is_whole:
            self._unreadable.resolve("All reports can be read again")
        return found

    async def _own_lease(self) -> EtcdLease:
        async with self._leasing:
            if self._lease is None or self._lease.is_lost:
                self._lease = await self._keeper.begin(self._lease_ttl_s, self._on_lost)
            return self._lease

    def _at(self, key: str) -> bytes:
        return self._keys.record(key)

    def _name(self, key: bytes) -> str:
        return key[len(self._keys.prefix) :].decode()

    def _record(self, entry: Entry) -> Record:
        return Record(self._name(entry.key), entry.value, entry.modified)


assert ABSENT == 0, "what etcd calls the revision of a key that is not there"


class EtcdReports(EtcdRecords):
    """Access of one process to the reports of a fabric.

    Create with ``open``, then ``close``.
    """

    _ended: StartId | None = None

    @classmethod
    async def open(
        cls,
        fabric: FabricId,
        settings: EtcdSettings,
        *,
        keys: EtcdKeys,
        dice: Dice,
        lease_ttl_s: float,
    ) -> Self:
        """Return the reports of the fabric at *keys*.

        A report lives for *lease_ttl_s* after etcd last heard from the daemon. Raises StoreAwayError if etcd
        is unreachable. Raises MembershipError, with the remedy, for an absent or different fabric.
        """
        self = cls(fabric, settings, keys=keys, dice=dice, lease_ttl_s=lease_ttl_s)
        try:
            await self._store.read()
        except BaseException:
            await self.close()
            raise
        return self

    def succeed(self, ended: StartId | None, on_lost: Callable[[], None]) -> None:
        """Replace the start *ended*, whose process is gone.

        *on_lost* is called when a report is lost because etcd was silent too long.
        """
        self._ended, self._on_lost = ended, on_lost

    async def put(self, report: EnclosureReport) -> None:
        """Write a report in place of the previous one, under this process's lease.

        Raises NamesakeError if another daemon has this enclosure's id, and MembershipError if etcd cannot be
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
                with contextlib.suppress(LeaseEndedError):  # the next attempt begins a new lease
                    if await self._store.write(read, [put(key, value, lease.number)], unchanged=[key]):
                        return
            else:
                there = decode_at(key, known.value, decode_report)
                if there.start not in (report.start, self._ended):
                    raise NamesakeError(
                        f"enclosure {report.id} has a daemon already, at "
                        f"{', '.join(map(str, there.controllers))}: give each enclosure a separate id and "
                        "state directory"
                    )
                await self._keeper.end(known.lease)
            await tries.again()
