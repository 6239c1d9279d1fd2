"""Certificates towards etcd are renewed while somebody uses them, and their authority, too."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.network.certificates import Authority
from tests.fabric.membership.client.watched import values
from tests.fabric.membership.nodes import Cluster, Secured

from ostraca_fabric.errors import MembershipError
from ostraca_fabric.membership.etcd.client.client import EtcdClient, put
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.client.watch import Watch
from ostraca_fabric.membership.etcd.lease import LeaseKeeper
from ostraca_fabric.sockets.tls import TlsFiles

pytestmark = pytest.mark.slow

HOST = "127.0.0.1"
TTL_S = 10.0
"""Longer than it takes etcd to be back on a busy machine."""


class Shown:
    """The files that clients are told of, and who renews them."""

    def __init__(self, folder: Path) -> None:
        self.before, self.after = Authority(folder, "before"), Authority(folder, "after")
        self.files = TlsFiles(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")
        self.renew(self.before)

    def renew(self, authority: Authority) -> None:
        """Put others in their place: one by one, as who copies them does."""
        made = authority.files("client")
        for source, target in zip(
            (made.ca, made.cert, made.key), (self.files.ca, self.files.cert, self.files.key), strict=True
        ):
            assert source is not None
            assert target is not None
            shutil.copy(source, target)

    def settings(self, cluster: Cluster) -> EtcdSettings:
        tls = TlsFiles(self.files.ca, self.files.cert, self.files.key)
        return EtcdSettings(cluster.endpoints, tls=tls, operation_timeout_s=3, watch_silence_max_s=1)


def secured(authority: Authority) -> Secured:
    files = authority.files("etcd", HOST)
    assert files.cert is not None
    assert files.key is not None
    return Secured(files.ca, files.cert, files.key)


def restart(cluster: Cluster, authority: Authority) -> None:
    """Kill etcd, and start it with a certificate of another authority, the only one that it believes."""
    cluster.kill()
    cluster.nodes[0] = replace(cluster.nodes[0], secured=secured(authority))
    cluster.start()


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    return Shown(tmp_path)


@pytest.fixture
def cluster(has_etcd: None, shown: Shown, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, secured=secured(shown.before))
    yield cluster
    cluster.close()


@pytest.fixture
async def client(cluster: Cluster, shown: Shown) -> AsyncIterator[EtcdClient]:
    async with AsyncExitStack() as stack:
        client = EtcdClient(shown.settings(cluster), dice=random.Random(1))
        stack.push_async_callback(client.close)
        yield client


async def test_a_client_goes_on_when_all_certificates_come_from_another_authority(
    cluster: Cluster, shown: Shown, client: EtcdClient
) -> None:
    async with aclosing(Watch(client, b"/k").run()) as watch:
        await anext(watch)
        await client.txn([], [put(b"/k", b"before")])
        assert values(await anext(watch)) == [b"before"]
        restart(cluster, shown.after)
        with pytest.raises(MembershipError, match=r"not signed by a CA in etcd\.ca"):
            await client.range(b"/k")
        shown.renew(shown.after)
        await client.txn([], [put(b"/k", b"after")])
        assert values(await anext(watch)) == [b"after"]


async def test_a_lease_lives_on_though_etcd_believes_nobody_of_before(cluster: Cluster, shown: Shown) -> None:
    keeper = LeaseKeeper(shown.settings(cluster), dice=random.Random(2))
    try:
        lost = asyncio.Event()
        lease = await keeper.begin(TTL_S, lost.set)
        restart(cluster, shown.after)
        shown.renew(shown.after)
        restarted_at_s = lease.renewed_at_s
        async with asyncio.timeout(2 * TTL_S):
            while lease.renewed_at_s <= restarted_at_s and not lost.is_set():  # noqa: ASYNC110 (another thread's)
                await asyncio.sleep(0.05)
        assert not lost.is_set()
    finally:
        await asyncio.to_thread(keeper.close)


async def test_what_goes_on_for_long_moves_to_a_new_connection_and_misses_nothing(
    cluster: Cluster, shown: Shown, client: EtcdClient
) -> None:
    """An etcd that stays as it is would never end what is connected."""
    async with aclosing(Watch(client, b"/k").run()) as watch:
        await anext(watch)
        await client.txn([], [put(b"/k", b"before")])
        assert values(await anext(watch)) == [b"before"]
        at_first = client.channel()
        told = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)  # until it waits for what etcd tells next
        shown.renew(shown.before)
        async with asyncio.timeout(30):
            while at_first in client.channels._open or client.channels._leaving:  # noqa: ASYNC110 (both are the loop's)
                await asyncio.sleep(0.05)
        assert not told.done(), "that what it was on is closed ends no watch"
        await client.txn([], [put(b"/k", b"after")])
        assert values(await told) == [b"after"]


async def test_half_of_what_is_new_is_not_used_and_named(
    cluster: Cluster, shown: Shown, client: EtcdClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ostraca_fabric.runtime.file_reload")
    await client.txn([], [put(b"/k", b"v")])
    before = client.channel()
    renewed = shown.before.files("again")
    assert shown.files.cert is not None
    assert shown.files.key is not None
    assert renewed.cert is not None
    assert renewed.key is not None
    shutil.copy(renewed.cert, shown.files.cert)
    assert client.channel() is before
    assert client.channel() is before
    shutil.copy(renewed.key, shown.files.key)
    assert client.channel() is not before
    await client.range(b"/k")
    words = [record.getMessage() for record in caplog.records]
    assert [word.split()[0] for word in words] == ["Continuing", "Reloaded"]
    assert str(shown.files.key) in words[0]
