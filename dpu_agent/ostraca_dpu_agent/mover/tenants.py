"""Who shares an agent: the tenants whose workers are connected to it, and those with requests under way.

The second are connected too, but for the workers of other agents (``Guests``), which are tenants here as long
as something is done for them.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ostraca_fabric.ids import TenantId

_Who = TypeVar("_Who")


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

    @contextmanager
    def asking(self, tenant: TenantId) -> Iterator[None]:
        """Count a request while it is under way."""
        self._begun(self.requests, tenant)
        try:
            yield
        finally:
            self._ended(self.requests, tenant)

    def _begun(self, counted: Counter[TenantId], tenant: TenantId) -> None:
        counted[tenant] += 1
        self._reasons[tenant] += 1

    def _ended(self, counted: Counter[TenantId], tenant: TenantId) -> None:
        subtract(counted, tenant, 1)
        subtract(self._reasons, tenant, 1)
        if tenant not in self._reasons:
            self.on_left()


def subtract(counted: Counter[_Who], who: _Who, amount: int) -> None:
    """Forget who has nothing any more."""
    counted[who] -= amount
    if not counted[who]:
        del counted[who]
