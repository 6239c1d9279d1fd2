from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from tests.fabric.membership.nodes import Cluster

from ostraca_fabric.membership.etcd.client.client import EtcdClient, delete, is_unchanged, put
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.client.watch import Watch
from ostraca_fabric.membership.etcd.client.watch_events import DeletedEntry, Entry, EntryChanges, EntryList

pytestmark = pytest.mark.slow

ClientOf = Callable[[Cluster], EtcdClient]

PREFIX = b"/w/"
ONE, OTHER = PREFIX + b"one", PREFIX + b"other"


class Reader:
    """Keeps all that a watch tells, and what it adds up to."""

    def __init__(self, client: EtcdClient, prefix: bytes = PREFIX) -> None:
        self.told: list[EntryList | EntryChanges] = []
        self.values: dict[bytes, bytes] = {}
        self._more = asyncio.Event()
        self._watch = Watch(client, prefix)

    async def read(self) -> None:
        async for told in self._watch.run():
            self.told.append(told)
            if isinstance(told, EntryList):
                self.values = {entry.key: entry.value for entry in told.entries}
            else:
                for change in told.changes:
                    if isinstance(change, Entry):
                        self.values[change.key] = change.value
                    else:
                        self.values.pop(change.key, None)
            self._more.set()

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not happened():
                self._more.clear()
                await self._more.wait()

    async def told_of(self, key: bytes, value: bytes | None) -> None:
        await self.until(lambda: bool(self.told) and self.values.get(key) == value)

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """Return every change told, in order."""
        return [
            (change.key, change.value if isinstance(change, Entry) else None)
            for told in self.told
            if isinstance(told, EntryChanges)
            for change in told.changes
        ]

    def listings(self) -> int:
        return sum(isinstance(told, EntryList) for told in self.told)


@asynccontextmanager
async def reading(client: EtcdClient, prefix: bytes = PREFIX) -> AsyncIterator[Reader]:
    reader = Reader(client, prefix)
    task = asyncio.create_task(reader.read())
    try:
        await reader.until(lambda: bool(reader.told))
        yield reader
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def write(client: EtcdClient, value: bytes) -> None:
    """Write once, also where a try was done and not heard of."""
    before = max((kv.mod_revision for kv in (await client.range(ONE)).kvs), default=0)
    await client.txn([is_unchanged(ONE, before)], [put(ONE, value)])


async def test_what_one_transaction_did_is_told_at_once(fresh_etcd: Cluster, client_of: ClientOf) -> None:
    client, prefix = client_of(fresh_etcd), b"/w1/"  # where no lease of another test ends in between
    async with reading(client, prefix) as reader:
        await client.txn([], [put(prefix + b"a", b"1"), put(prefix + b"b", b"2")])
        await reader.told_of(prefix + b"b", b"2")
        await client.txn([], [delete(prefix + b"a"), put(prefix + b"c", b"3")])
        await reader.told_of(prefix + b"c", b"3")
    first, second = reader.told[1:]
    assert isinstance(first, EntryChanges)
    assert isinstance(second, EntryChanges)
    assert [type(change) for change in first.changes] == [Entry, Entry]
    assert [type(change) for change in second.changes] == [DeletedEntry, Entry]
    assert second.revision == first.revision + 1


async def test_what_is_written_while_etcd_restarts_is_told_once(
    fresh_etcd: Cluster, client_of: ClientOf
) -> None:
    client = client_of(fresh_etcd)
    async with reading(client) as reader:
        for number in range(4):
            await write(client, b"%d" % number)
            if number % 2:
                fresh_etcd.kill()
                fresh_etcd.start()
                fresh_etcd.ctl("put", OTHER.decode(), str(number))
        await reader.told_of(OTHER, b"3")
    assert reader.listings() == 1
    assert reader.changes() == [
        (ONE, b"0"),
        (ONE, b"1"),
        (OTHER, b"1"),
        (ONE, b"2"),
        (ONE, b"3"),
        (OTHER, b"3"),
    ]


async def test_what_was_compacted_while_away_is_told_as_it_stands(
    fresh_etcd: Cluster, client_of: ClientOf
) -> None:
    client = client_of(fresh_etcd)
    async with reading(client) as reader:
        await write(client, b"before")
        await reader.told_of(ONE, b"before")
        fresh_etcd.kill()
        fresh_etcd.start()  # this loop stands meanwhile, and so does the watch
        fresh_etcd.ctl("del", ONE.decode())
        fresh_etcd.ctl("put", OTHER.decode(), "meanwhile")
        fresh_etcd.compact()
        await reader.told_of(OTHER, b"meanwhile")
        assert reader.values == {OTHER: b"meanwhile"}
        assert reader.listings() == 2
        await write(client, b"after")
        await reader.told_of(ONE, b"after")


async def test_a_store_made_anew_is_listed_anew(fresh_etcd: Cluster, client_of: ClientOf) -> None:
    client = client_of(fresh_etcd)
    async with reading(client) as reader:
        for number in range(20):
            await write(client, b"%d" % number)
        await reader.told_of(ONE, b"19")
        fresh_etcd.kill()
        shutil.rmtree(fresh_etcd.nodes[0].folder / fresh_etcd.nodes[0].name)
        fresh_etcd.start()
        fresh_etcd.ctl("put", OTHER.decode(), "another time")
        await reader.told_of(OTHER, b"another time")
        assert reader.values == {OTHER: b"another time"}


@pytest.mark.parametrize("fault", ["kill", "pause"])
async def test_losing_the_member_that_is_watched_skips_and_repeats_nothing(
    three: Cluster, client_of: ClientOf, fault: str
) -> None:
    settings = EtcdSettings(three.endpoints, watch_silence_max_s=1.0)
    watching = EtcdClient(settings, dice=random.Random(3))
    writing = client_of(three)
    async with reading(watching) as reader:
        watched = next(node for node in three.nodes if node.endpoint == watching.endpoint)
        for number in range(60):
            if number == 20:
                getattr(watched, fault)()
            await write(writing, b"%d" % number)
        await reader.told_of(ONE, b"59")
    assert reader.listings() == 1
    assert reader.changes() == [(ONE, b"%d" % number) for number in range(60)]
    await watching.close()


async def test_a_member_without_a_leader_is_left_for_others(three: Cluster, client_of: ClientOf) -> None:
    """A member that is alive and hears of nothing any more is the worst of all: it must say so itself."""
    watching = EtcdClient(EtcdSettings(three.endpoints, watch_silence_max_s=60), dice=random.Random(3))
    async with reading(watching) as reader:
        await write(watching, b"before")
        await reader.told_of(ONE, b"before")
        watched = next(node for node in three.nodes if node.endpoint == watching.endpoint)
        others = [node for node in three.nodes if node is not watched]
        for node in others:
            node.pause()
        async with asyncio.timeout(20):
            while watching.endpoint == watched.endpoint:  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.05)
        for node in others:
            node.resume()
        await write(client_of(three), b"after")
        await reader.told_of(ONE, b"after")
    assert reader.changes() == [(ONE, b"before"), (ONE, b"after")]
    await watching.close()
