"""An enclosure's report in etcd: there while its daemon is, and one daemon's alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from tests.fabric.membership.nodes import Cluster
from tests.fabric.membership.sample_fabric import REPORT

from ostraca_fabric.errors import MembershipError, NamesakeError, StoreAwayError
from ostraca_fabric.membership.etcd.admin_records import EtcdRecords, EtcdReports
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.membership import EtcdMembership
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys
from ostraca_fabric.model.ids import FabricId, StartId
from ostraca_fabric.ports.records import RecordChange

pytestmark = pytest.mark.slow

FABRIC, OTHER_FABRIC = FabricId(b"f" * 16), FabricId(b"o" * 16)
TTL_S = 2.0
SECOND = replace(REPORT, start=StartId(b"2" * 16), sentence="another start")

Open = Callable[..., Awaitable[EtcdReports]]


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    """Yield a function that opens reports like separate processes; close them in the end."""
    async with AsyncExitStack() as stack:

        async def open_one(
            cluster: Cluster, keys: EtcdKeys, *, fabric: FabricId = FABRIC, is_begun: bool = False
        ) -> EtcdReports:
            settings = EtcdSettings(cluster.endpoints, operation_timeout_s=2)
            if not is_begun:
                begun = await EtcdMembership.open(
                    FABRIC, settings, dice=random.Random(9), keys=keys, begin=True
                )
                await begun.close()
            reports = await EtcdReports.open(
                fabric, settings, keys=keys, dice=random.Random(9), lease_ttl_s=TTL_S
            )
            stack.push_async_callback(reports.close)
            return reports

        yield open_one


async def until_gone(reports: EtcdReports) -> None:
    async with asyncio.timeout(30):
        while await reports.find(REPORT.id) is not None:  # noqa: ASYNC110 (etcd sets no event here)
            await asyncio.sleep(0.1)


async def test_a_report_is_put_replaced_and_found(etcd: Cluster, opened: Open) -> None:
    reports = await opened(etcd, EtcdKeys("/reports/put"))
    assert await reports.find(REPORT.id) is None
    for report in (REPORT, replace(REPORT, sentence="something else"), REPORT, REPORT):
        await reports.put(report)
        assert await reports.find(REPORT.id) == report


async def test_a_report_that_can_not_be_read_is_left_out_of_all_reports(
    etcd: Cluster, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    reports = await opened(etcd, EtcdKeys("/reports/newer"))
    await reports.put(REPORT)
    assert await reports.write([RecordChange("reports/a", b'{"version":9}')], unchanged={})
    for _ in range(2):
        assert await reports.reports() == [REPORT]
    (left_out,) = (each.getMessage() for each in caplog.records if each.levelname == "WARNING")
    assert "reports/a: a record in etcd has version 9" in left_out


async def test_it_goes_with_its_daemon(etcd: Cluster, opened: Open) -> None:
    keys = EtcdKeys("/reports/goes")
    first, looking = await opened(etcd, keys), await opened(etcd, keys)
    await first.put(REPORT)
    await first.close()
    assert await looking.find(REPORT.id) is None


async def test_it_outlives_its_lease_time_while_its_daemon_lives(etcd: Cluster, opened: Open) -> None:
    reports = await opened(etcd, EtcdKeys("/reports/lives"))
    await reports.put(REPORT)
    until_s = asyncio.get_running_loop().time() + 2 * TTL_S
    while asyncio.get_running_loop().time() < until_s:
        assert await reports.find(REPORT.id) == REPORT
        await asyncio.sleep(0.2)


async def test_a_second_daemon_is_refused_until_the_first_is_gone(etcd: Cluster, opened: Open) -> None:
    keys = EtcdKeys("/reports/second")
    first, second = await opened(etcd, keys), await opened(etcd, keys)
    await first.put(REPORT)
    with pytest.raises(NamesakeError, match=r"has a daemon already, at rdma://10\.0\.8\.1:4420"):
        await second.put(SECOND)
    assert await second.find(REPORT.id) == REPORT
    await first.close()
    await second.put(SECOND)
    assert await second.find(REPORT.id) == SECOND


async def test_a_start_whose_predecessor_is_known_to_be_gone_takes_its_place(
    etcd: Cluster, opened: Open
) -> None:
    keys = EtcdKeys("/reports/place")
    first, second = await opened(etcd, keys), await opened(etcd, keys)
    await first.put(REPORT)
    second.succeed(REPORT.start, lambda: None)
    await second.put(SECOND)
    assert await second.find(REPORT.id) == SECOND


async def test_a_lease_that_was_lost_is_told_and_the_next_report_is_put_under_another(
    etcd: Cluster, opened: Open
) -> None:
    keys, lost = EtcdKeys("/reports/lost"), asyncio.Event()
    reports = await opened(etcd, keys)
    reports.succeed(None, lost.set)
    await reports.put(REPORT)
    leases = etcd.ctl("lease", "list").splitlines()[1:]
    for lease in leases:  # an operator's, or of a silence that was too long
        if "reports/" in etcd.ctl("lease", "timetolive", lease, "--keys"):
            etcd.ctl("lease", "revoke", lease)
    await until_gone(reports)
    async with asyncio.timeout(30):
        await lost.wait()
    await reports.put(REPORT)
    assert await reports.find(REPORT.id) == REPORT


async def test_while_etcd_is_away_it_is_told_in_time(fresh_etcd: Cluster, opened: Open) -> None:
    reports = await opened(fresh_etcd, EtcdKeys("/reports/away"))
    await reports.put(REPORT)
    fresh_etcd.kill()
    with pytest.raises(StoreAwayError):
        await reports.put(replace(REPORT, sentence="not heard"))
    fresh_etcd.start()
    await reports.put(replace(REPORT, sentence="heard"))


async def test_a_hold_that_could_not_be_let_go_is_held_again_by_its_process_alone(
    fresh_etcd: Cluster, opened: Open
) -> None:
    keys = EtcdKeys("/reports/held")
    other = await opened(fresh_etcd, keys)
    settings = EtcdSettings(fresh_etcd.endpoints, operation_timeout_s=0.5)
    async with EtcdRecords(FABRIC, settings, keys=keys, dice=random.Random(9), lease_ttl_s=30) as records:
        first = await records.hold("work/1", b"me")
        assert first is not None
        fresh_etcd.nodes[0].pause()
        with pytest.raises(StoreAwayError):
            await records.let_go(first)
        fresh_etcd.resume()
        assert await other.hold("work/1", b"other") is None
        again = await records.hold("work/1", b"me")
        assert again is not None
        assert await records.hold("work/1", b"me") is None
        await records.let_go(first)  # a late repetition ends nothing
        assert await records.write([], unchanged={again.key: again.revision}) is not None


async def test_another_fabric_is_refused(etcd: Cluster, opened: Open) -> None:
    keys = EtcdKeys("/reports/other")
    await opened(etcd, keys)
    with pytest.raises(MembershipError, match="and not"):
        await opened(etcd, keys, fabric=OTHER_FABRIC, is_begun=True)
