"""What each tenant holds of staging, and what it may take beside the others: see ``policies.guarantees``.

There are three things to share: the slots, the part of them that puts may hold, and the right to hold blocks
of the cache while transfers read them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ostraca_dpu_agent.counted import subtract
from ostraca_dpu_agent.mover.leases import Purpose
from ostraca_fabric.policies.guarantees import is_guaranteed, may_take

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator


class TenantShares:
    """Counts bytes on lease by tenant. What a drive was given up with counts for the drive, no member."""

    def __init__(
        self, members: Collection[Hashable], *, slot_bytes: int, put_bytes: int, cached_bytes: int
    ) -> None:
        """Share these among *members*, a view of the tenants that are connected now."""
        self._members = members
        self._slot_bytes = slot_bytes
        self._put_bytes = put_bytes
        self._cached_bytes = cached_bytes
        self._held: dict[Purpose, Counter[Hashable]] = {purpose: Counter() for purpose in Purpose}

    def count(self, purpose: Purpose, tenant: Hashable, more_bytes: int) -> None:
        """Count what a tenant has taken, or with a negative number what it has given back."""
        subtract(self._held[purpose], tenant, -more_bytes)

    def held(self, purpose: Purpose, tenant: Hashable) -> int:
        """Say what a tenant holds for one purpose."""
        return self._held[purpose][tenant]

    @property
    def slots(self) -> Counter[Hashable]:
        """Bytes of slots that each holds."""
        return self._held[Purpose.GET] + self._held[Purpose.PUT]

    def may_take(self, purpose: Purpose, tenant: Hashable, wanted_bytes: int) -> bool:
        """Tell whether a tenant may take so much, as far as other tenants go."""
        if len(self._members) <= 1 and tenant in self._members:
            return True
        return all(
            may_take(total, held, self._members, tenant, wanted_bytes) for total, held in self._of(purpose)
        )

    def is_guaranteed(self, purpose: Purpose, tenant: Hashable, wanted_bytes: int) -> bool:
        """Tell whether a tenant that is not alone may take so much whatever others do."""
        return all(
            is_guaranteed(total, held, self._members, tenant, wanted_bytes)
            for total, held in self._of(purpose)
        )

    def _of(self, purpose: Purpose) -> Iterator[tuple[int, Counter[Hashable]]]:
        """Yield what a lease for this is a part of, and what everybody has of that."""
        if purpose is Purpose.CACHED:
            yield self._cached_bytes, self._held[purpose]
            return
        yield self._slot_bytes, self.slots
        if purpose is Purpose.PUT:
            yield self._put_bytes, self._held[purpose]
