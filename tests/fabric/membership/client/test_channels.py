"""Connections to etcd on which nothing passes any more, though nobody says so."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest
from tests.fabric.membership.client.watched import values
from tests.fabric.membership.nodes import Cluster

from ostraca_fabric.errors import StoreAwayError
from ostraca_fabric.membership.etcd.client.channels import PING_AFTER_MS, PING_TIMEOUT_MS
from ostraca_fabric.membership.etcd.client.client import EtcdClient, put
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.client.watch import Watch
from ostraca_fabric.membership.etcd.client.watch_events import EntryList
from ostraca_fabric.membership.etcd.lease import LeaseKeeper

pytestmark = pytest.mark.slow

TTL_S = 5.0
MORE_S = 4.0
"""Until a new connection is made and asked."""


class Way:
    """The way to a member, which loses what is sent on it from some time on: new connections are well."""

    def __init__(self, endpoint: str) -> None:
        self._host, _, self._port = endpoint.rpartition(":")
        self._open: list[asyncio.StreamWriter] = []
        self._carrying: list[asyncio.Task[None]] = []
        self.connections = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, back = await asyncio.open_connection(self._host, int(self._port))
        self._open += [writer, back]
        self._carrying += [asyncio.create_task(_carry(*way)) for way in ((reader, back), (there, writer))]

    def lose_everything(self) -> None:
        """Carry nothing more on the connections there are, and leave them open."""
        for carrying in self._carrying:
            carrying.cancel()

    def close(self) -> None:
        self.lose_everything()
        for end in self._open:
            end.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while some := await reader.read(1 << 16):
        writer.write(some)
        await writer.drain()


@pytest.fixture
async def way(etcd: Cluster) -> AsyncIterator[tuple[Way, str]]:
    way = Way(etcd.nodes[0].endpoint)
    server = await asyncio.start_server(way.take, "127.0.0.1", 0)
    yield way, "{}:{}".format(*server.sockets[0].getsockname())
    server.close()
    way.close()


async def test_a_connection_on_which_nothing_passes_is_given_up_and_another_one_made(
    way: tuple[Way, str],
) -> None:
    lossy, endpoint = way
    # No call is given the time after which one that is silent would be replaced: it is for the ping.
    settings = EtcdSettings((endpoint,), request_timeout_s=60, operation_timeout_s=1)
    client = EtcdClient(settings, dice=random.Random(1))
    try:
        await client.range(b"/channels/none")
        lossy.lose_everything()
        lost_s = time.monotonic()
        with pytest.raises(StoreAwayError):
            await client.range(b"/channels/none")
        while True:
            try:
                await client.range(b"/channels/none")
                break
            except StoreAwayError:
                assert time.monotonic() < lost_s + (PING_AFTER_MS + PING_TIMEOUT_MS) / 1000 + MORE_S
        assert lossy.connections == 2
    finally:
        await client.close()


async def test_a_call_and_a_watch_go_on_over_a_new_connection_where_the_only_one_falls_silent(
    way: tuple[Way, str],
) -> None:
    lossy, endpoint = way
    settings = EtcdSettings((endpoint,), watch_silence_max_s=2)
    calling, watching = (EtcdClient(settings, dice=random.Random(seed)) for seed in (1, 2))
    key = b"/channels/silent"
    try:
        telling = Watch(watching, key).run()
        assert isinstance(await anext(telling), EntryList)
        told = asyncio.ensure_future(anext(telling))
        await calling.txn([], [put(key, b"before")])
        assert values(await told) == [b"before"]
        assert lossy.connections == 2
        lossy.lose_everything()
        lost_s = time.monotonic()
        told = asyncio.ensure_future(anext(telling))
        await calling.txn([], [put(key, b"after")])
        async with asyncio.timeout(30):
            assert values(await told) == [b"after"]
        assert time.monotonic() < lost_s + settings.watch_silence_max_s + MORE_S
        assert lossy.connections == 4
        await telling.aclose()
    finally:
        await calling.close()
        await watching.close()


async def test_a_watch_stays_on_a_connection_that_was_replaced_for_silence_until_the_new_one_is_heard(
    etcd: Cluster, way: tuple[Way, str]
) -> None:
    lossy, endpoint = way
    calling = EtcdClient(EtcdSettings((etcd.nodes[0].endpoint,)), dice=random.Random(1))
    watching = EtcdClient(EtcdSettings((endpoint,)), dice=random.Random(2))
    key = b"/channels/replaced"
    try:
        telling = Watch(watching, key).run()
        assert isinstance(await anext(telling), EntryList)
        for number, value in enumerate((b"before", b"after", b"later")):
            told = asyncio.ensure_future(anext(telling))
            await calling.txn([], [put(key, value)])
            assert values(await told) == [value]
            if number == 0:
                silent_since_s = asyncio.get_running_loop().time() + MORE_S
                watching.channels.replace_silent(watching.channel(), since_s=silent_since_s)
        assert lossy.connections == 1
        await watching.range(key)  # over the new connection, where the watch goes on from now on
        for value in (b"over there", b"and on"):
            told = asyncio.ensure_future(anext(telling))
            await calling.txn([], [put(key, value)])
            assert values(await told) == [value]
        assert lossy.connections == 2
        await telling.aclose()
    finally:
        await calling.close()
        await watching.close()


async def test_a_lease_lives_on_where_its_only_connection_falls_silent(way: tuple[Way, str]) -> None:
    lossy, endpoint = way
    lost = asyncio.Event()
    keeper = LeaseKeeper(EtcdSettings((endpoint,)), dice=random.Random(1))
    try:
        lease = await keeper.begin(TTL_S, lost.set)
        lossy.lose_everything()
        lost_s = time.monotonic()
        async with asyncio.timeout(30):
            while lease.renewed_at_s < lost_s and not lost.is_set():  # noqa: ASYNC110 (another thread renews it)
                await asyncio.sleep(0.02)
        assert not lost.is_set()
        assert lossy.connections == 2
    finally:
        await asyncio.to_thread(keeper.close)


async def test_a_connection_that_was_never_heard_is_given_the_time_it_takes_to_be_made() -> None:
    taken = list[asyncio.StreamWriter]()
    server = await asyncio.start_server(lambda _, writer: taken.append(writer), "127.0.0.1", 0)
    endpoint = "{}:{}".format(*server.sockets[0].getsockname())
    settings = EtcdSettings((endpoint,), request_timeout_s=0.1, operation_timeout_s=1)
    client = EtcdClient(settings, dice=random.Random(1))
    with pytest.raises(StoreAwayError):
        await client.range(b"/channels/none")
    assert len(taken) == 1
    await client.close()
    taken[0].close()
    server.close()
