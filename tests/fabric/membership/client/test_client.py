from __future__ import annotations

import asyncio
import gc
import random
import socket
from collections.abc import Callable

import grpc
import grpc.aio
import pytest
from tests.fabric.membership.nodes import Cluster
from tests.support.stalls import Stopwatch

from ostraca_fabric.errors import LeaseEndedError, MembershipError, StoreAwayError, UsageError
from ostraca_fabric.membership.etcd.client.client import EtcdClient, is_absent, put, range_end
from ostraca_fabric.membership.etcd.client.faults import in_words
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.client.watch import Watch
from ostraca_fabric.membership.etcd.client.watch_events import Entry, EntryChanges, EntryList
from ostraca_fabric.sockets.tls import TlsFiles

pytestmark = pytest.mark.slow

ClientOf = Callable[[Cluster], EtcdClient]
NO_SUCH_LEASE = 12345


@pytest.mark.parametrize("endpoint", ["etcd", "http://etcd:2379", ":2379", "etcd:"])
def test_an_endpoint_that_is_none_is_refused_with_what_to_write(endpoint: str) -> None:
    with pytest.raises(UsageError, match="host:port"):
        EtcdSettings((endpoint,))


def test_half_a_pair_for_mutual_tls_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    with pytest.raises(UsageError, match="both"):
        TlsFiles(folder / "ca.crt", cert=folder / "client.crt")


def test_the_end_of_a_prefix_is_the_first_key_behind_it() -> None:
    assert [range_end(prefix) for prefix in (b"/a/", b"a\xff", b"\xff")] == [b"/a0", b"b", b"\0"]


async def test_a_transaction_is_done_or_not_as_it_compares(etcd: Cluster, client_of: ClientOf) -> None:
    client, key = client_of(etcd), b"/client/once"
    first, second = [await client.txn([is_absent(key)], [put(key, value)]) for value in (b"first", b"second")]
    assert (first.succeeded, second.succeeded) == (True, False)
    assert [kv.value for kv in (await client.range(key)).kvs] == [b"first"]


async def test_what_would_be_bound_to_an_ended_lease_is_refused_as_such(
    etcd: Cluster, client_of: ClientOf
) -> None:
    client = client_of(etcd)
    with pytest.raises(LeaseEndedError):
        await client.txn([], [put(b"/client/bound", b"", NO_SUCH_LEASE)])
    await client.lease_revoke(NO_SUCH_LEASE)
    assert await client.lease_keep_alive(NO_SUCH_LEASE) == 0


async def test_an_etcd_that_is_not_there_is_an_error_in_time() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{bound.getsockname()[1]}"
        settings = EtcdSettings((endpoint,), operation_timeout_s=0.5)
        client = EtcdClient(settings, dice=random.Random(1))
        watch = Stopwatch()
        with pytest.raises(
            MembershipError,
            match=rf"{endpoint} .*Connection refused'\): check that etcd runs there, and check --etcd",
        ):
            await client.range(b"/")
        assert watch.took_s < 2
        await client.close()
    with pytest.raises(MembershipError, match="closed"):
        await client.range(b"/")


async def test_what_is_no_etcd_is_said_to_be_none_perhaps() -> None:
    other = grpc.aio.server()
    endpoint = f"127.0.0.1:{other.add_insecure_port('127.0.0.1:0')}"
    await other.start()
    client = EtcdClient(EtcdSettings((endpoint,)), dice=random.Random(1))
    try:
        with pytest.raises(
            MembershipError, match=rf"{endpoint} did not read \(UNIMPLEMENTED: .*is it an etcd\?"
        ):
            await client.range(b"/")
    finally:
        await client.close()
        await other.stop(None)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT])
def test_the_cause_that_etcd_s_error_ends_with_is_shown_and_no_more_than_an_operator_reads(
    code: grpc.StatusCode,
) -> None:
    def said(words: str) -> str:
        none = grpc.aio.Metadata()
        return str(in_words(grpc.aio.AioRpcError(code, none, none, words), asked="read", at="etcd:1"))

    who = "UNKNOWN: ipv4:192.168.100.100:24379: Failed to connect to remote host: "
    assert f"'{who}{'x' * 100} at last')" in said(f"{who}{'x' * 100} at last")
    assert len(said("\x1b[2J\n" * 10_000)) < 400
    assert said("\x1b[2J\n").isprintable()


async def test_a_member_that_is_paused_is_left_for_another(three: Cluster, client_of: ClientOf) -> None:
    client = client_of(three)
    await client.txn([], [put(b"/k", b"before")])
    paused = next(node for node in three.nodes if node.endpoint == client.endpoint)
    paused.pause()
    await client.txn([], [put(b"/k", b"meanwhile")])
    assert client.endpoint != paused.endpoint
    assert [kv.value for kv in (await client.range(b"/k")).kvs] == [b"meanwhile"]
    paused.resume()


async def test_the_death_of_a_leader_loses_no_write_and_doubles_none(
    three: Cluster, client_of: ClientOf
) -> None:
    client = client_of(three)
    seen: list[int] = []

    async def follow() -> None:
        async for told in Watch(client_of(three), b"/n/").run():
            match told:
                case EntryList(entries):
                    assert not seen
                    assert not entries
                    listed.set()
                case EntryChanges(changes):
                    seen.extend(int(change.value) for change in changes if isinstance(change, Entry))
            if len(seen) >= 200:
                return

    listed = asyncio.Event()
    following = asyncio.create_task(follow())
    await listed.wait()
    for number in range(200):
        if number == 60:
            three.leader().kill()
        # One key for each: a try that was done and not heard of is then not done again.
        await client.txn([is_absent(b"/n/%d" % number)], [put(b"/n/%d" % number, b"%d" % number)])
    await asyncio.wait_for(following, 20)
    assert seen == list(range(200))


async def test_a_renewal_given_up_at_any_moment_leaves_nothing_that_complains_later(
    etcd: Cluster, client_of: ClientOf, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of(etcd)
    for turns in range(24):
        renewing = asyncio.create_task(client.lease_keep_alive(NO_SUCH_LEASE))
        for _ in range(turns):
            await asyncio.sleep(0)
        renewing.cancel()
        await asyncio.wait([renewing])
    del renewing
    await asyncio.sleep(0)
    gc.collect()  # asyncio says then what it finds under way with nobody who waits for it
    assert not caplog.messages


async def test_who_ends_waits_for_an_etcd_that_is_away_only_once() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{bound.getsockname()[1]}"
        client = EtcdClient(EtcdSettings((endpoint,), operation_timeout_s=0.5), dice=random.Random(1))
        with pytest.raises(StoreAwayError, match=endpoint):
            await client.range(b"/")
        client.shutdown_budget.shorten()
        with pytest.raises(StoreAwayError, match=endpoint):  # it may be back since
            await client.range(b"/")
        for _ in range(20):
            with pytest.raises(StoreAwayError, match="was not asked to read: etcd is unreachable"):
                await client.range(b"/")
        await client.close()
