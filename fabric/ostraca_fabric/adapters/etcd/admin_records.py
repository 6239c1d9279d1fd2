"""Records in etcd: implements ``ports.records.Records``."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing
from typing import TYPE_CHECKING, Self

from ostraca_fabric.adapters.etcd.client import EtcdClient, range_end
from ostraca_fabric.adapters.etcd.keys import Keys
from ostraca_fabric.adapters.etcd.lease import Lease, LeaseKeeper
from ostraca_fabric.adapters.etcd.store import EtcdStore, Read
from ostraca_fabric.adapters.etcd.told import Entry, Listed
from ostraca_fabric.adapters.etcd.transactions import delete, put
from ostraca_fabric.adapters.etcd.watch import Watch, entry_of
from ostraca_fabric.errors import LeaseEndedError, MembershipError
from ostraca_fabric.ports.records import ABSENT, Hold, Record

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from ostraca_fabric.adapters.etcd.backoff import Dice
    from ostraca_fabric.adapters.etcd.settings import EtcdSettings
    from ostraca_fabric.ids import FabricId
    from ostraca_fabric.ports.records import Written

_PAGE = 512


class EtcdRecords:
    """One fabric's, seen from one process. Close it."""

    def __init__(
        self, fabric: FabricId, settings: EtcdSettings, *, keys: Keys, dice: Dice, lease_ttl_s: float
    ) -> None:
        """Keep holds for *lease_ttl_s* after this process was heard last."""
        self._keys = keys
        self._client = EtcdClient(settings, dice=dice)
        self._store = EtcdStore(self._client, keys, fabric)
        self._keeper = LeaseKeeper(settings, dice=dice)
        self._lease_ttl_s = lease_ttl_s
        self._lease: Lease | None = None
        self._leasing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Use it until the end of a block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    async def close(self) -> None:
        """End every hold, and close."""
        if self._lease is not None:
            with contextlib.suppress(MembershipError):  # then it runs out
                await self._keeper.end(self._lease.number)
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
        """As in the port, as it stands page by page."""
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

    async def write(self, changes: Sequence[Written], *, unchanged: Mapping[str, int]) -> int | None:
        """As in the port."""
        read = await self._store.read(*map(self._at, unchanged))
        if any(read.modified(self._at(key)) != revision for key, revision in unchanged.items()):
            return None
        return await self._done(read, changes, list(unchanged))

    async def hold(self, key: str, value: bytes) -> Hold | None:
        """As in the port."""
        while True:
            read = await self._store.read(self._at(key))
            if self._at(key) in read.entries:
                return None
            lease = await self._own_lease()
            try:
                made = await self._store.write(
                    read, [put(self._at(key), value, lease.number)], unchanged=[self._at(key)]
                )
            except LeaseEndedError:
                continue
            return None if made is None else Hold(key, made)

    async def let_go(self, hold: Hold) -> None:
        """As in the port."""
        read = await self._store.read(self._at(hold.key))
        if read.modified(self._at(hold.key)) == hold.revision:
            await self._store.write(read, [delete(self._at(hold.key))], unchanged=[self._at(hold.key)])

    async def changes(self, prefix: str) -> AsyncIterator[tuple[Record | str, ...]]:
        """As in the port."""
        watch = Watch(self._client, self._at(prefix))
        async with aclosing(watch.run()) as told:
            async for each in told:
                entries = each.entries if isinstance(each, Listed) else each.changes
                yield tuple(
                    self._record(entry) if isinstance(entry, Entry) else self._name(entry.key)
                    for entry in entries
                )

    async def _done(self, read: Read, changes: Sequence[Written], unchanged: Sequence[str]) -> int | None:
        operations = [
            delete(self._at(change.key)) if change.value is None else put(self._at(change.key), change.value)
            for change in changes
        ]
        return await self._store.write(read, operations, unchanged=map(self._at, unchanged))

    async def _own_lease(self) -> Lease:
        async with self._leasing:
            if self._lease is None or self._lease.is_lost:
                self._lease = await self._keeper.begin(self._lease_ttl_s, lambda: None)
            return self._lease

    def _at(self, key: str) -> bytes:
        return self._keys.record(key)

    def _name(self, key: bytes) -> str:
        return key[len(self._keys.prefix) :].decode()

    def _record(self, entry: Entry) -> Record:
        return Record(self._name(entry.key), entry.value, entry.modified)


assert ABSENT == 0, "what etcd calls the revision of a key that is not there"
