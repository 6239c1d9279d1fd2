"""Takes changes of tenants: what they may use, and the erasure of what they have put."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ostraca_fabric import record_keys
from ostraca_fabric.admin.errors import ConflictError, NotFoundError
from ostraca_fabric.admin.model import STEPS, VERSION, Kind, Operation, State, Step, decode, encode
from ostraca_fabric.ids import TenantId
from ostraca_fabric.ports.records import ABSENT, Written
from ostraca_fabric.rulings import TenantRuling

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ostraca_fabric.admin.audit import Audit, Caller
    from ostraca_fabric.admin.ruling_desk import Ruled, RulingDesk
    from ostraca_fabric.ports.records import Records
    from ostraca_fabric.volume import VolumeRecord

log = logging.getLogger(__name__)


class TenantDesk:
    """One admin's."""

    def __init__(
        self,
        records: Records,
        rulings: RulingDesk,
        audit: Audit,
        *,
        volumes: Callable[[], Awaitable[Sequence[VolumeRecord]]],
    ) -> None:
        """Rule at *rulings*; *volumes* returns all of the fabric's."""
        self._records = records
        self._rulings = rulings
        self._audit = audit
        self._volumes = volumes

    async def make(
        self, ruling: TenantRuling, caller: Caller, *, if_match: int | None = None
    ) -> tuple[Ruled[TenantRuling], bool]:
        """Make a tenant, or change what it may use; the same again changes nothing. Return what is kept, and
        whether it is new. Raises PreconditionError and ConflictError.
        """
        tenant = TenantId(ruling.name)
        volumes = await self.volumes_of(tenant)

        def after(before: TenantRuling | None, ruling: TenantRuling) -> TenantRuling:
            was_erasable = before is not None and before.is_erasable
            if ruling.is_erasable and not was_erasable and volumes:
                raise ConflictError(
                    f"tenant {tenant} has volumes that can't be erased, as {volumes[0].name}, which is fixed "
                    "when they are made: make another tenant erasable, before its first volume"
                )
            return ruling

        key = record_keys.tenant(tenant)
        return await self._rulings.rule(key, ruling, caller, tenant, if_match=if_match, after=after)

    async def take_back(self, tenant: TenantId, caller: Caller, *, if_match: int | None = None) -> None:
        """Rule nothing on a tenant any more; what it has put stays. Raises NotFoundError."""
        key = record_keys.tenant(tenant)
        if not await self._rulings.take_back(key, caller, tenant, if_match=if_match):
            raise NotFoundError(f"no tenant {tenant} was made")

    async def tenant(self, tenant: TenantId) -> Ruled[TenantRuling]:
        """Return a tenant. Raises NotFoundError."""
        found = await self._rulings.ruled(record_keys.tenant(tenant), TenantRuling)
        if found is None:
            raise NotFoundError(f"no tenant {tenant} was made")
        return found

    async def tenants(self, *, after: str = "", limit: int) -> list[Ruled[TenantRuling]]:
        """Return tenants by name."""
        return await self._rulings.below(record_keys.TENANTS, TenantRuling, after=after, limit=limit)

    async def volumes_of(self, tenant: TenantId) -> list[VolumeRecord]:
        """Return a tenant's volumes by name."""
        mine = (volume for volume in await self._volumes() if volume.tenant == tenant)
        return sorted(mine, key=lambda volume: volume.name)

    async def erase(self, tenant: TenantId, caller: Caller, *, volume: str = "") -> Operation:
        """Begin to erase what a tenant, or one of its volumes, has; return the erasure of it that runs.

        Raises NotFoundError, and ConflictError where some agent might serve it for ever.
        """
        volumes = [each for each in await self.volumes_of(tenant) if volume in ("", each.name)]
        if not volumes:
            raise NotFoundError(
                f"tenant {tenant} has no volume {volume}"
                if volume
                else f"tenant {tenant} has no volume to erase"
            )
        for each in volumes:
            if not each.is_erasable:
                raise ConflictError(
                    f"volume {each.name} of tenant {tenant} can't be erased, which is fixed when it is made: "
                    "make a tenant erasable before its first volume"
                )
        for record in await self._records.below(record_keys.OPERATIONS):
            running = decode(record.value, Operation)
            is_same = (running.kind, running.tenant, running.volume) == (Kind.ERASE, tenant, volume)
            if is_same and running.state is State.RUNNING:
                return running
        operation = Operation(
            VERSION,
            self._audit.new_id(),
            Kind.ERASE,
            "",
            caller.name,
            self._audit.unix_s(),
            tuple(Step(name) for name in STEPS[Kind.ERASE]),
            tenant=tenant,
            volume=volume,
        )
        key = record_keys.operation(operation.id)
        changes = [
            Written(key, encode(operation)),
            self._audit.entry(caller, operation.subject, f"erase {operation.id}"),
        ]
        if await self._records.write(changes, unchanged={key: ABSENT}) is None:
            raise ConflictError("ask again")
        log.info("%s (%s) asked to erase %s", caller.name, caller.role, operation.subject)
        return operation
