"""Permission of direct reads: workers of a tenant read extents from the drives themselves. Pure.

Drives know no tenants, so the operator's live setting alone is not enough: the fabric must have no other
tenant. A tenant exists by its override or by a volume.
"""

from __future__ import annotations

from collections.abc import Iterable

from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.overrides import Overrides
from ostraca_fabric.model.volume import VolumeRecord


def foreign_trace(tenant: str, tenants: Iterable[str], volumes: Iterable[VolumeRecord]) -> str:
    """Name an override or a volume of another tenant than *tenant*; empty if there is none."""
    for other in tenants:
        if other != tenant:
            return f"tenant {other}"
    for volume in volumes:
        if volume.tenant != tenant:
            return f"volume {volume.name} of tenant {volume.tenant}"
    return ""


def second_tenant_refusal(direct_tenant: str, tenant: str) -> str:
    """Return the message that refuses *tenant*, with advice; empty unless direct reads are another's."""
    if direct_tenant in ("", tenant):
        return ""
    return (
        f"tenant {tenant} can't be added while workers of tenant {direct_tenant} read drives themselves: "
        "first `ostraca settings unset direct_reads_tenant`, or start `ostraca up` without --direct-reads"
    )


def may_read_directly(overrides: Overrides, volumes: Iterable[VolumeRecord], tenant: TenantId) -> bool:
    """Return whether the operator lets *tenant* read drives, and no other tenant is known."""
    is_named = tenant != "" and tenant == overrides.live.direct_reads_tenant
    return is_named and not foreign_trace(tenant, overrides.tenants, volumes)


class DirectReadPermission:
    """``may_read_directly``, decided again only for other overrides or volumes."""

    def __init__(self) -> None:
        """Begin without a decision."""
        self._overrides = Overrides()
        self._volumes: tuple[VolumeRecord, ...] = ()
        self._allowed: TenantId | None = None

    def allows(self, overrides: Overrides, volumes: tuple[VolumeRecord, ...], tenant: TenantId) -> bool:
        """Return whether *tenant* may read drives. Both arguments are new objects after each change."""
        if overrides is not self._overrides or volumes is not self._volumes:
            named = TenantId(overrides.live.direct_reads_tenant)
            self._allowed = named if may_read_directly(overrides, volumes, named) else None
            self._overrides, self._volumes = overrides, volumes
        return tenant == self._allowed
