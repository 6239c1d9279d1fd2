from __future__ import annotations

import asyncio
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.fabric.membership.nodes import Cluster

from ostraca_fabric.errors import MembershipError
from ostraca_fabric.membership.etcd.client.client import EtcdClient, put
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.lease import LeaseKeeper

pytestmark = pytest.mark.slow

ClientOf = Callable[[Cluster], EtcdClient]
TTL_S = 2.0


@pytest.fixture
def keeper(etcd: Cluster) -> Iterator[LeaseKeeper]:
    keeper = LeaseKeeper(EtcdSettings(etcd.endpoints), dice=random.Random(5))
    yield keeper
    keeper.close()


def stall(seconds: float) -> None:
    """Do on this loop what no loop should do."""
    time.sleep(seconds)


async def test_a_lease_lasts_no_less_than_was_asked_for(keeper: LeaseKeeper) -> None:
    assert (await keeper.begin(2.5, lambda: None)).ttl_s == 3.0


async def test_a_lease_outlives_an_event_loop_that_is_blocked_for_a_while(
    etcd: Cluster, keeper: LeaseKeeper, client_of: ClientOf
) -> None:
    client = client_of(etcd)
    lost = asyncio.Event()
    lease = await keeper.begin(TTL_S, lost.set)
    await client.txn([], [put(b"/lease/blocked", b"", lease.number)])
    stall(1.4 * TTL_S)  # it was renewed until the loop had stood still for the lease's time
    assert time.monotonic() - lease.renewed_at_s < TTL_S
    assert len((await client.range(b"/lease/blocked")).kvs) == 1
    assert not lease.is_lost
    assert not lost.is_set()


async def test_a_lease_ends_with_an_event_loop_that_is_blocked_and_is_lost_when_it_goes_on(
    etcd: Cluster, keeper: LeaseKeeper, client_of: ClientOf, caplog: pytest.LogCaptureFixture
) -> None:
    client, lost, begun_s = client_of(etcd), asyncio.Event(), time.monotonic()
    lease = await keeper.begin(TTL_S, lost.set)
    await client.txn([], [put(b"/lease/frozen", b"", lease.number)])
    while etcd.ctl("get", "/lease/frozen"):  # it blocks this loop, as nothing else is done here
        assert time.monotonic() < begun_s + 20 * TTL_S
    assert time.monotonic() > begun_s + 5 / 3 * TTL_S, "it was renewed until the loop was silent too long"
    assert not lease.is_lost, "nobody asks etcd for a lease whose loop is silent"
    await asyncio.wait_for(lost.wait(), 20)
    assert "the serving event loop has been blocked for" in caplog.text
    begun = await keeper.begin(TTL_S, lambda: None)
    stall(TTL_S)
    assert begun.renewed_at_s > begun_s + 2 * TTL_S
    assert not begun.is_lost


async def test_a_lease_that_ended_is_told_and_its_keys_are_gone(
    etcd: Cluster, keeper: LeaseKeeper, client_of: ClientOf
) -> None:
    client = client_of(etcd)
    lost, other = asyncio.Event(), asyncio.Event()
    lease = await keeper.begin(TTL_S, lost.set)
    kept = await keeper.begin(TTL_S, other.set)
    await client.txn([], [put(b"/lease/ended", b"", lease.number)])
    await client.lease_revoke(lease.number)
    stall(TTL_S)  # it is noticed over there, whatever is done here
    assert lease.is_lost
    await asyncio.wait_for(lost.wait(), 5)
    assert not (await client.range(b"/lease/ended")).kvs
    assert not kept.is_lost
    assert not other.is_set()


async def test_a_lease_that_an_etcd_made_anew_does_not_know_is_not_said_to_be_its_holder_s_fault(
    fresh_etcd: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    keeper, lost = LeaseKeeper(EtcdSettings(fresh_etcd.endpoints), dice=random.Random(5)), asyncio.Event()
    await keeper.begin(TTL_S, lost.set)
    (node,) = fresh_etcd.nodes
    fresh_etcd.kill()
    shutil.rmtree(node.folder / node.name)
    fresh_etcd.start()
    await asyncio.wait_for(lost.wait(), 20)
    assert "loss of data in etcd" in caplog.text
    await asyncio.to_thread(keeper.close)


async def test_ending_a_lease_takes_its_keys_along_and_is_no_loss(
    etcd: Cluster, keeper: LeaseKeeper, client_of: ClientOf
) -> None:
    client = client_of(etcd)
    lost = asyncio.Event()
    lease = await keeper.begin(TTL_S, lost.set)
    await client.txn([], [put(b"/lease/given-back", b"", lease.number)])
    await keeper.end(lease.number)
    assert not (await client.range(b"/lease/given-back")).kvs
    await keeper.end(lease.number)
    assert not lease.is_lost


async def test_no_lease_is_lost_while_etcd_is_away(fresh_etcd: Cluster, client_of: ClientOf) -> None:
    keeper = LeaseKeeper(EtcdSettings(fresh_etcd.endpoints), dice=random.Random(5))
    client, lost = client_of(fresh_etcd), asyncio.Event()
    lease = await keeper.begin(TTL_S, lost.set)
    await client.txn([], [put(b"/lease/away", b"", lease.number)])
    renewed_at_s = lease.renewed_at_s
    fresh_etcd.kill()
    stall(2 * TTL_S)
    fresh_etcd.start()
    async with asyncio.timeout(10):
        while lease.renewed_at_s <= renewed_at_s + 2 * TTL_S:  # noqa: ASYNC110 (another thread's)
            await asyncio.sleep(0.05)
    assert len((await client.range(b"/lease/away")).kvs) == 1
    assert not lost.is_set()
    keeper.close()


async def test_a_lease_is_renewed_on_after_what_no_renewal_should_do(
    etcd: Cluster, keeper: LeaseKeeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broke = threading.Event()

    async def breaks(_lease: int) -> int:
        broke.set()
        raise ZeroDivisionError("unforeseen")

    lease = await keeper.begin(TTL_S, lambda: None)
    with monkeypatch.context() as broken:
        broken.setattr(keeper._client, "lease_keep_alive", breaks)
        assert await asyncio.to_thread(broke.wait, 10)
    begun_s = lease.renewed_at_s
    async with asyncio.timeout(10):
        while lease.renewed_at_s == begun_s:  # noqa: ASYNC110 (another thread's)
            await asyncio.sleep(0.05)
    assert not lease.is_lost
    assert any(
        "this is a bug in Ostraca: ZeroDivisionError('unforeseen')" in each for each in caplog.messages
    )


async def test_a_closed_keeper_begins_nothing(etcd: Cluster, keeper: LeaseKeeper) -> None:
    keeper.close()
    keeper.close()
    with pytest.raises(MembershipError, match="closed"):
        await keeper.begin(TTL_S, lambda: None)
