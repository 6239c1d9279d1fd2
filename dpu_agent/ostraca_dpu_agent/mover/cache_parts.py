"""The parts of the DRAM cache: one for each tenant that has blocks there, each with an order of its own.

What a tenant brings pushes out its own blocks, or those of a tenant that has more; ``policies.giving_way``
says of whom. While one tenant alone has blocks here, there is one part, and nothing to decide.

In each part, blocks that were used again may have ``protected_share`` of what the part has, and of an equal
part of the cache at least, so that a part that is being filled is not cut short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.policies.giving_way import giving_way
from ostraca_fabric.segmented_lru import PARTS_MAX

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping

    from numpy.typing import NDArray

    from ostraca_fabric.segmented_lru import SegmentedLru


class CacheParts:
    """Tenants' parts of one order."""

    def __init__(
        self,
        order: SegmentedLru,
        *,
        limit_bytes: int,
        protected_share: float,
        members: Collection[Hashable],
    ) -> None:
        """Begin with nobody's part; *members* is a view of the tenants that are connected now."""
        self._order = order
        self._limit_bytes = limit_bytes
        self._protected_share = protected_share
        self._members = members
        self._numbers: dict[Hashable, int] = {}
        self._free = [0]
        self._are_several = False
        """Whether there was more than one part when protected was shared out last."""

    @property
    def bytes_of(self) -> dict[Hashable, int]:
        """What each tenant has."""
        sizes = self._order.part_bytes
        return {tenant: int(sizes[number]) for tenant, number in self._numbers.items()}

    def number(self, tenant: Hashable) -> int | None:
        """Return the number of a tenant's part, which is made now if need be; None if there are too many."""
        number = self._numbers.get(tenant)
        if number is None and (self._free or len(self._order.part_bytes) < PARTS_MAX):
            number = self._free.pop() if self._free else self._order.add_part(protected_max_bytes=0)
            self._numbers[tenant] = number
        return number

    def evict(
        self,
        wanted_bytes: int,
        asker: Hashable,
        *,
        beside: Mapping[Hashable, int],
        equal_bytes: float | None = None,
    ) -> NDArray[np.int64]:
        """Take rows out until they have *wanted_bytes*, as far as none is held and somebody has to give way.

        *asker*, *beside* and *equal_bytes*, by default that of the cache, are as for ``giving_way``.
        """
        numbers = self._numbers
        if len(numbers) == (asker in numbers):
            return self._order.evict(wanted_bytes, part=numbers.get(asker, 0))
        if equal_bytes is None:
            equal_bytes = self._limit_bytes / max(1, len(self._members))
        parts, beside = self.bytes_of, dict(beside)
        gone = [np.empty(0, np.int64)]
        while wanted_bytes > 0:
            asks = giving_way(
                parts,
                beside,
                self._members,
                asker=asker,
                wanted_bytes=wanted_bytes,
                equal_bytes=equal_bytes,
            )
            if not asks:
                break
            for tenant, ask in asks:
                rows = self._order.evict(min(ask, wanted_bytes), part=self._numbers[tenant])
                got_bytes = int(self._order.bytes[rows].sum())
                gone.append(rows)
                wanted_bytes -= got_bytes
                parts[tenant] -= got_bytes
                if got_bytes < ask:  # what is left is held
                    beside[tenant] = beside.get(tenant, 0) + parts.pop(tenant)
                if wanted_bytes <= 0:
                    break
        return np.concatenate(gone)

    def share_out(self) -> None:
        """Let protected have its share of each part. Call it whenever blocks have come or gone."""
        if len(self._numbers) <= 1 and not self._are_several:
            return
        sizes = self._order.part_bytes
        for tenant, number in list(self._numbers.items()):
            if not sizes[number]:
                del self._numbers[tenant]
                self._free.append(number)
        equal_bytes = self._limit_bytes / max(1, len(self._numbers))
        most = self._protected_share * np.maximum(equal_bytes, sizes)
        self._order.protect(most.astype(np.int64))
        self._are_several = len(self._numbers) > 1

    def check(self) -> None:
        """Assert that what has blocks is somebody's part."""
        taken = sorted(self._numbers.values())
        assert len(set(taken)) == len(taken)
        assert sorted([*taken, *self._free]) == list(range(len(self._order.part_bytes)))
        assert sum(self.bytes_of.values()) == self._order.entered_bytes
