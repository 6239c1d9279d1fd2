"""One host's paths to enclosures of either kind: over NVMe-oF, or on files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostraca_fabric.ports.paths import Namespace, Paths, PathState
    from ostraca_fabric.target import Target


class TargetPaths:
    """Paths that ask whom each target is for."""

    def __init__(self, *, files: Paths, nvme: Paths) -> None:
        """Use *files* for enclosures on files and *nvme* for all others; both are the same host's."""
        assert files.host == nvme.host
        self._files = files
        self._nvme = nvme

    @property
    def host(self) -> str:
        """The NQN by which enclosures know this host."""
        return self._nvme.host

    async def connect(self, target: Target, secret: str) -> tuple[Namespace, ...]:
        """See ``Paths``."""
        return await self._to(target).connect(target, secret)

    async def namespaces(self, target: Target) -> tuple[Namespace, ...]:
        """See ``Paths``."""
        return await self._to(target).namespaces(target)

    async def states(self, target: Target) -> tuple[PathState, ...]:
        """See ``Paths``."""
        return await self._to(target).states(target)

    async def disconnect(self, target: Target) -> None:
        """See ``Paths``."""
        await self._to(target).disconnect(target)

    def _to(self, target: Target) -> Paths:
        return self._files if target.is_files else self._nvme
