"""Who shares an agent: the tenants whose workers are connected to it, and those with requests under way.

The second are connected too, but for the workers of other agents (``Guests``), which are tenants here as long
as something is done for them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ostraca_dpu_agent.counted import subtract

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_fabric.ids import TenantId


class Tenants:
    """Counts connections and requests. Lives on the event loop's thread."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self.connections: Counter[TenantId] = Counter()
        """Of workers; read only."""
        self.requests: Counter[TenantId] = Counter()
        """Under way; read only."""
        self._reasons: Counter[TenantId] = Counter()
        self.members = self._reasons.keys()
        """The tenants that share the agent now: a view, always current."""
        self.on_left: Callable[[], None] = lambda: None
        """Is called when there are fewer members than before."""

    def opened(self, tenant: TenantId) -> None:
        """Count a connection of a worker."""
        self._begun(self.connections, tenant)

    def closed(self, tenant: TenantId) -> None:
        """Count a connection no longer."""
        self._ended(self.connections, tenant)

    def asking(self, tenant: TenantId) -> Asking:
        """Count a request while it is under way."""
        return Asking(self, tenant)

    def asked(self, tenant: TenantId) -> None:
        """Count a request."""
        self._begun(self.requests, tenant)

    def answered(self, tenant: TenantId) -> None:
        """Count a request no longer."""
        self._ended(self.requests, tenant)

    def _begun(self, counted: Counter[TenantId], tenant: TenantId) -> None:
        counted[tenant] += 1
        self._reasons[tenant] += 1

    def _ended(self, counted: Counter[TenantId], tenant: TenantId) -> None:
        subtract(counted, tenant, 1)
        subtract(self._reasons, tenant, 1)
        if tenant not in self._reasons:
            self.on_left()


class Asking:
    """A tenant's request within a ``with``. It takes half of a ``contextmanager``'s time."""

    __slots__ = ("_tenant", "_tenants")

    def __init__(self, tenants: Tenants, tenant: TenantId) -> None:
        self._tenants = tenants
        self._tenant = tenant

    def __enter__(self) -> None:
        self._tenants.asked(self._tenant)

    def __exit__(self, *_: object) -> None:
        self._tenants.answered(self._tenant)
