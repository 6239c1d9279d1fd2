"""What an agent says of each tenant's use of it. Bounded: those that use it least are summed up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_fabric.ids import TenantId
from ostraca_fabric.status import OTHER_TENANTS, TENANTS_MAX, TenantStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostraca_dpu_agent.mover.staging import Staging


def tenant_statuses(staging: Staging) -> tuple[TenantStatus, ...]:
    """Return the tenants that use an agent, by name, and at last all that are too many to be named."""
    tenants, slots = staging.tenants, staging.slots_of
    cached = {TenantId(str(each)): size for each, size in staging.cache.bytes_of.items()}
    uses = [
        TenantStatus(
            each,
            connections=tenants.connections[each],
            requests=tenants.requests[each],
            staging_bytes=slots[each],
            cache_bytes=cached.get(each, 0),
        )
        for each in tenants.members | cached.keys()
    ]
    uses.sort(key=lambda use: (-use.connections, -use.cache_bytes, use.tenant))
    named, rest = uses, uses[TENANTS_MAX:]
    if rest:
        named, rest = uses[: TENANTS_MAX - 1], uses[TENANTS_MAX - 1 :]
    named.sort(key=lambda use: use.tenant)
    return (*named, *([_summed(rest)] if rest else []))


def _summed(uses: Sequence[TenantStatus]) -> TenantStatus:
    return TenantStatus(
        OTHER_TENANTS,
        connections=sum(use.connections for use in uses),
        requests=sum(use.requests for use in uses),
        staging_bytes=sum(use.staging_bytes for use in uses),
        cache_bytes=sum(use.cache_bytes for use in uses),
    )
