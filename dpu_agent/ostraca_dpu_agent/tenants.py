"""Tenants of an agent, and their connections and requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.policies.fair_sharing import may_take

_User = TypeVar("_User")


class Tenants:
    """Counters of connections, requests and waiting puts. Use on the event loop's thread only.

    A tenant counts with connected workers or requests under way. Tenants of other agents' workers
    (``RemoteWorkers``) count only while requests for them are under way. ``policies.fair_sharing`` divides a
    resource among tenants.
    """

    def __init__(self) -> None:
        """Begin without tenants."""
        self.connections: Counter[TenantId] = Counter()
        """Workers' connections; read only."""
        self.requests: Counter[TenantId] = Counter()
        """Requests under way; read only."""
        self.waiting_puts: Counter[TenantId] = Counter()
        """Puts that wait for space; read only."""
        self._uses: Counter[TenantId] = Counter()
        self.members = self._uses.keys()
        """Tenants that share the agent: a live view."""
        self.on_left: Callable[[], None] = lambda: None
        """Called when the number of members has fallen."""

    def add(self, counts: Counter[TenantId], tenant: TenantId) -> None:
        """Add one to one of these counters."""
        counts[tenant] += 1
        self._uses[tenant] += 1

    def remove(self, counts: Counter[TenantId], tenant: TenantId) -> None:
        """Subtract one from one of these counters."""
        subtract(counts, tenant, 1)
        subtract(self._uses, tenant, 1)
        if tenant not in self._uses:
            self.on_left()

    def may_add(self, counts: Counter[TenantId], tenant: TenantId, most: int) -> bool:
        """Return whether *counts* may grow by one of *tenant*: up to *most*, and the tenant's part."""
        is_alone = len(self.members) <= 1 and tenant in self.members
        return counts.total() < most and (is_alone or may_take(most, counts, self.members, tenant, 1))


def subtract(counts: Counter[_User], user: _User, amount: int) -> None:
    """Subtract from a user's count, and drop the user at zero."""
    left = counts[user] - amount
    if left:
        counts[user] = left
    else:
        counts.pop(user, None)
