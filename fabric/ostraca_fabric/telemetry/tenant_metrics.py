"""Metrics of tenants at an agent. Labels are bounded like ``AgentStatus.tenants``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ostraca_fabric.telemetry.metric import Metric, MetricKind, Sample
from ostraca_fabric.telemetry.status import TenantStatus

TENANT_CONNECTIONS = Metric(
    "ostraca_agent_tenant_connections",
    MetricKind.GAUGE,
    "",
    ("tenant",),
    "Connections of the tenant's workers.",
)
TENANT_REQUESTS = Metric(
    "ostraca_agent_tenant_requests",
    MetricKind.GAUGE,
    "requests",
    ("tenant",),
    "The tenant's requests in progress, also for workers of other agents.",
)
TENANT_STAGING = Metric(
    "ostraca_agent_tenant_staging_bytes",
    MetricKind.GAUGE,
    "bytes",
    ("tenant",),
    "Memory of the tenant's blocks in transfer, quarantine included.",
)
TENANT_CACHE = Metric(
    "ostraca_agent_tenant_cache_bytes",
    MetricKind.GAUGE,
    "bytes",
    ("tenant",),
    "Bytes of the tenant in the DRAM cache.",
)

TENANT_METRICS: tuple[Metric, ...] = (TENANT_CONNECTIONS, TENANT_REQUESTS, TENANT_STAGING, TENANT_CACHE)


def tenant_samples(tenants: Iterable[TenantStatus]) -> Iterator[Sample]:
    """Yield the samples of each tenant."""
    for each in tenants:
        yield Sample(TENANT_CONNECTIONS, (each.tenant,), each.connections)
        yield Sample(TENANT_REQUESTS, (each.tenant,), each.requests)
        yield Sample(TENANT_STAGING, (each.tenant,), each.staging_bytes)
        yield Sample(TENANT_CACHE, (each.tenant,), each.cache_bytes)
