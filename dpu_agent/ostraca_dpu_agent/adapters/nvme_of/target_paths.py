"""Paths of one host to enclosures of both kinds: NVMe-oF and files."""

from __future__ import annotations

from ostraca_fabric.model.target import Target
from ostraca_fabric.ports.paths import Namespace, Paths, PathState


class TargetPaths:
    """Paths chosen by the kind of each target."""

    def __init__(self, *, files: Paths, nvme: Paths) -> None:
        """Use *files* for enclosures on files and *nvme* for all others.

        Both belong to the same host.
        """
        assert files.host == nvme.host
        self._files = files
        self._nvme = nvme

    @property
    def host(self) -> str:
        """The NQN by which enclosures know this host."""
        return self._nvme.host

    async def connect(self, target: Target, secret: str) -> tuple[Namespace, ...]:
        """Connect as ``Paths`` specifies."""
        return await self._to(target).connect(target, secret)

    async def namespaces(self, target: Target) -> tuple[Namespace, ...]:
        """Return namespaces as ``Paths`` specifies."""
        return await self._to(target).namespaces(target)

    async def states(self, target: Target) -> tuple[PathState, ...]:
        """Return states as ``Paths`` specifies."""
        return await self._to(target).states(target)

    async def disconnect(self, target: Target) -> None:
        """Disconnect as ``Paths`` specifies."""
        await self._to(target).disconnect(target)

    def _to(self, target: Target) -> Paths:
        return self._files if target.is_files else self._nvme
