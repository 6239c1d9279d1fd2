"""What is said of tenants: each by name, and not more of them than a label may have."""

from __future__ import annotations

from pathlib import Path

from tests.support.agent.assembly import TENANT, assembled, chain_of, with_cache

from ostraca_dpu_agent.datapath.staging.staging import Staging
from ostraca_dpu_agent.lifecycle import tenant_statuses
from ostraca_dpu_agent.settings import MIB, MemorySettings
from ostraca_fabric.connection import connect
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.overrides import Overrides, Switch
from ostraca_fabric.telemetry.status import OTHER_TENANTS, TENANTS_MAX, AgentStatus, TenantStatus
from ostraca_fabric.wire.codec import read_body
from ostraca_fabric.wire.handshake import OPERATOR, WORKER, hello_for
from ostraca_fabric.wire.messages import Lookup, StatusDone, StatusRequest

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


async def test_a_worker_is_not_told_of_other_tenants(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/agent.sock"

    async def seen_by(role: str, tenant: str) -> tuple[list[str], list[str], list[str], bool]:
        connection = await connect(address, hello_for(role, tenant, "test"))
        answer = await connection.ask(StatusRequest(1), 5.0)
        connection.close()
        await connection.wait_closed()
        assert isinstance(answer, StatusDone)
        status = read_body(answer.body, AgentStatus)
        unhit, pools = status.unhit, status.shards[0].pools
        assert unhit.count == len(unhit.volumes)
        volumes = [each.volume for each in unhit.volumes]
        tenants = [each.tenant for each in status.tenants]
        return tenants, volumes, list(status.overrides.switched), bool(pools)

    async with assembled(with_cache(4 * MIB), addresses=(address,)) as fabric:
        await fabric.put(fabric.worker(), range(32))
        await fabric.data_path.lookup(
            fabric.worker(), fabric.volume, Lookup(1, 0, 5.0, chain_of(range(100, 132)))
        )
        fabric.membership.rule(Overrides(switches={(TENANT, "v"): Switch.OFF}))
        assert await seen_by(OPERATOR, "") == (["tenant"], ["tenant/v"], ["tenant/v"], True)
        assert await seen_by(WORKER, "tenant") == (["tenant"], ["tenant/v"], ["tenant/v"], False)
        assert await seen_by(WORKER, "ten") == (["ten"], [], [], False)
