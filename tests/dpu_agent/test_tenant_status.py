"""What is said of tenants: each by name, and not more of them than a label may have."""

from __future__ import annotations

from tests.support.agent.assembly import TENANT, assembled, with_cache

from ostraca_dpu_agent.datapath.staging.staging import Staging
from ostraca_dpu_agent.lifecycle import tenant_statuses
from ostraca_dpu_agent.settings import MIB, MemorySettings
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.telemetry.status import OTHER_TENANTS, TENANTS_MAX, TenantStatus

SMALL = MemorySettings(staging_bytes=MIB, reserve_bytes=0, cache_bytes=0, chunk_bytes=MIB)


async def test_a_tenants_use_is_in_the_agents_status() -> None:
    async with assembled(with_cache(4 * MIB)) as fabric:
        assert fabric.agent.status().tenants == ()
        fabric.context.staging.tenants.add(fabric.context.staging.tenants.connections, TENANT)
        await fabric.put(fabric.worker(), range(4))
        lease_bytes = fabric.context.staging.cache.used_bytes
        assert fabric.agent.status().tenants == (TenantStatus(TENANT, 1, cache_bytes=lease_bytes),)
        fabric.context.staging.tenants.remove(fabric.context.staging.tenants.connections, TENANT)
        assert fabric.agent.status().tenants == (TenantStatus(TENANT, 0, cache_bytes=lease_bytes),)


def test_tenants_beyond_the_limit_are_summed_up() -> None:
    staging = Staging(SMALL)
    for number in range(TENANTS_MAX):
        staging.tenants.add(staging.tenants.connections, TenantId(f"tenant-{number:02}"))
    named = [each.tenant for each in tenant_statuses(staging)]
    assert named == [f"tenant-{number:02}" for number in range(TENANTS_MAX)]
    for _ in range(2):
        staging.tenants.add(staging.tenants.connections, TenantId("z"))
    *first, last = tenant_statuses(staging)
    assert len(first) == TENANTS_MAX - 1
    assert first[-1] == TenantStatus("z", 2)
    assert last == TenantStatus(OTHER_TENANTS, 2)
