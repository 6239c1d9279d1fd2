"""What tenants use of one agent, as metrics. Labels are bounded as ``AgentStatus.tenants`` is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ostraca_fabric.metric import Kind, Metric, Sample
from ostraca_fabric.status import TenantStatus

TENANT_CONNECTIONS = Metric(
    "ostraca_agent_tenant_connections", Kind.GAUGE, "", ("tenant",), "Connections of a tenant's workers."
)
TENANT_REQUESTS = Metric(
    "ostraca_agent_tenant_requests",
    Kind.GAUGE,
    "requests",
    ("tenant",),
    "A tenant's requests under way, those for workers of other agents as well.",
)
TENANT_STAGING = Metric(
    "ostraca_agent_tenant_staging_bytes",
    Kind.GAUGE,
    "bytes",
    ("tenant",),
    "What a tenant's blocks on their way take, quarantine included.",
)
TENANT_CACHE = Metric(
    "ostraca_agent_tenant_cache_bytes",
    Kind.GAUGE,
    "bytes",
    ("tenant",),
    "What the DRAM cache holds for a tenant.",
)

TENANT_METRICS: tuple[Metric, ...] = (TENANT_CONNECTIONS, TENANT_REQUESTS, TENANT_STAGING, TENANT_CACHE)


def tenant_samples(tenants: Iterable[TenantStatus]) -> Iterator[Sample]:
    """Say what each tenant uses."""
    for each in tenants:
        yield Sample(TENANT_CONNECTIONS, (each.tenant,), each.connections)
        yield Sample(TENANT_REQUESTS, (each.tenant,), each.requests)
        yield Sample(TENANT_STAGING, (each.tenant,), each.staging_bytes)
        yield Sample(TENANT_CACHE, (each.tenant,), each.cache_bytes)
