"""Service for tenants: quotas, rate limits, and erasure of blocks."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from ostraca_admin.audit import Audit, Requester
from ostraca_admin.errors import ConflictError, NotFoundError
from ostraca_admin.model import (
    STEPS,
    VERSION,
    Operation,
    OperationKind,
    OperationState,
    Step,
    decode_readable,
    encode,
)
from ostraca_admin.override_service import OverrideService, StoredOverride
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.direct_reads import foreign_trace, second_tenant_refusal
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.overrides import LiveSettings, TenantOverride
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.ports.records import ABSENT, RecordChange, Records

log = logging.getLogger(__name__)


class TenantService:
    """Tenant service of an admin."""

    def __init__(
        self,
        records: Records,
        overrides: OverrideService,
        audit: Audit,
        *,
        volumes: Callable[[], Awaitable[Sequence[VolumeRecord]]],
    ) -> None:
        """Record limits through *overrides*; *volumes* returns all volumes of the fabric."""
        self._records = records
        self._overrides = overrides
        self._audit = audit
        self._volumes = volumes

    async def put(
        self, limits: TenantOverride, requester: Requester, *, if_match: int | None = None
    ) -> tuple[StoredOverride[TenantOverride], bool]:
        """Create a tenant or change its limits; return the override and whether new.

        Repeating the call changes nothing. Raises PreconditionError and ConflictError.
        """
        tenant = TenantId(limits.name)
        fixed = [each.name for each in await self.volumes_of(tenant) if not each.is_erasable]

        async def checked(before: TenantOverride | None, limits: TenantOverride) -> TenantOverride:
            live = await self._overrides.get(record_keys.live(), LiveSettings)
            if live and (refusal := second_tenant_refusal(live.override.direct_reads_tenant, tenant)):
                raise ConflictError(refusal)
            was_erasable = before is not None and before.is_erasable
            if limits.is_erasable and not was_erasable and fixed:
                raise ConflictError(
                    f"tenant {tenant} has volumes without erasure, as {fixed[0]}, fixed at their "
                    "creation: make another tenant erasable, before its first volume"
                )
            return limits

        return await self._overrides.put(
            record_keys.tenant(tenant),
            limits,
            requester,
            tenant,
            if_match=if_match,
            merge=checked,
            depends_on=[record_keys.live()],
        )

    async def check_only_tenant(self, tenant: str) -> None:
        """Check for direct reads that no other tenant exists. Raises ConflictError."""
        others = [each.override.name for each in await self.page(limit=0)]
        if trace := foreign_trace(tenant, others, await self._volumes()):
            raise ConflictError(
                f"direct reads need a fabric of one tenant, and this fabric has {trace}: leave "
                "direct_reads_tenant unset, or create a fabric for each tenant"
            )

    async def delete(self, tenant: TenantId, requester: Requester, *, if_match: int | None = None) -> None:
        """Delete a tenant's override; stored blocks stay. Raises NotFoundError."""
        if not await self._overrides.delete(record_keys.tenant(tenant), requester, tenant, if_match=if_match):
            raise _unknown(tenant)

    async def get(self, tenant: TenantId) -> StoredOverride[TenantOverride]:
        """Return a tenant. Raises NotFoundError."""
        found = await self._overrides.get(record_keys.tenant(tenant), TenantOverride)
        if found is None:
            raise _unknown(tenant)
        return found

    async def page(self, *, after: str = "", limit: int) -> list[StoredOverride[TenantOverride]]:
        """Return tenants by name."""
        return await self._overrides.page(record_keys.TENANTS, TenantOverride, after=after, limit=limit)

    async def volumes_of(self, tenant: TenantId) -> list[VolumeRecord]:
        """Return a tenant's volumes by name."""
        owned = (volume for volume in await self._volumes() if volume.tenant == tenant)
        return sorted(owned, key=lambda volume: volume.name)

    async def erase(self, tenant: TenantId, requester: Requester, *, volume: str = "") -> Operation:
        """Start to erase a tenant or one volume; return the running operation.

        The operation is an earlier one only if all its erasures are still to come. Otherwise, blocks stored
        since then would stay.

        Raises NotFoundError, and ConflictError if an agent might serve the blocks forever.
        """
        volumes = [each for each in await self.volumes_of(tenant) if volume in ("", each.name)]
        if not volumes:
            raise NotFoundError(f"tenant {tenant} has no volume {volume or 'to erase'}")
        for each in volumes:
            if not each.is_erasable:
                raise ConflictError(
                    f"volume {each.name} of tenant {tenant} is not erasable, fixed at its creation: make a "
                    "tenant erasable before its first volume"
                )
        operations = await self._records.below(record_keys.OPERATIONS)
        for _, running in decode_readable(operations, Operation):
            is_same = (running.kind, running.tenant, running.volume) == (OperationKind.ERASE, tenant, volume)
            if is_same and running.state is OperationState.RUNNING and not running.steps[0].detail:
                return running
        operation = Operation(
            VERSION,
            self._audit.new_id(),
            OperationKind.ERASE,
            "",
            requester.name,
            self._audit.unix_s(),
            tuple(Step(name) for name in STEPS[OperationKind.ERASE]),
            tenant=tenant,
            volume=volume,
        )
        key = record_keys.operation(operation.id)
        changes = [
            RecordChange(key, encode(operation)),
            self._audit.entry(requester, operation.subject, f"erase {operation.id}"),
        ]
        if await self._records.write(changes, unchanged={key: ABSENT}) is None:
            raise ConflictError("the erasure was not recorded: retry")
        log.info("%s (%s) requested erase of %s", requester.name, requester.role, operation.subject)
        return operation


def _unknown(tenant: TenantId) -> NotFoundError:
    return NotFoundError(
        f"no tenant {tenant} exists: create tenants by `ostraca tenant add`, or PUT /v1/tenants/NAME"
    )
