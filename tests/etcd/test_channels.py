"""Connections to etcd on which nothing passes any more, though nobody says so."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest
from tests.etcd.nodes import Cluster

from ostraca_fabric.adapters.etcd.channels import PING_AFTER_MS, PING_TIMEOUT_MS
from ostraca_fabric.adapters.etcd.client import EtcdClient
from ostraca_fabric.adapters.etcd.settings import EtcdSettings
from ostraca_fabric.errors import StoreAwayError

pytestmark = pytest.mark.slow

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
    client = EtcdClient(EtcdSettings((endpoint,), operation_timeout_s=1), dice=random.Random(1))
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
