"""Paths to enclosures on files, and the choice between files and NVMe-oF.

An enclosure on files is a local directory with ``exports.json``.

A connection is only a check: no state outlives the process. As with NVMe-oF, a host removed from the list
later keeps its existing connections. A path is live while the directory exports the connected target.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ostraca_dpu_agent.adapters.nvme_of.refusals import furthest_error
from ostraca_fabric.drives.file_exports import EXPORTS_FILE, FoundExports, read_exports
from ostraca_fabric.errors import FormatError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.target import Controller, Target, check_nqn
from ostraca_fabric.ports.paths import Namespace, PathError, Paths, PathState, Stage
from ostraca_fabric.runtime.tasks import in_own_thread


class FilePaths:
    """Paths of one host to enclosures on files."""

    def __init__(self, host: str) -> None:
        """Use *host* as NQN. Raises UsageError if the NQN is invalid."""
        self.host = check_nqn(host)
        """The NQN by which enclosures know this host."""

        self._connected: dict[str, set[Controller]] = {}
        """By the target's NQN."""

        self._refusals: dict[tuple[str, Controller], str] = {}
        """By the target's NQN and controller: reason of the last failed connection."""

    async def connect(self, target: Target, secret: str) -> tuple[Namespace, ...]:
        """Connect as ``Paths`` specifies."""
        errors: list[PathError] = []
        connected = self._connected.get(target.nqn, set()) & set(target.controllers)
        for controller in target.controllers:
            try:
                exports = await in_own_thread("paths", partial(_read_target, controller, target))
                if controller not in connected:
                    self._admit(exports, controller, secret)
            except PathError as error:
                errors.append(error)
                self._refusals[target.nqn, controller] = str(error)
            else:
                connected.add(controller)
        self._connected[target.nqn] = connected
        if len(errors) == len(target.controllers):
            raise furthest_error(errors)
        return await self.namespaces(target)

    async def namespaces(self, target: Target) -> tuple[Namespace, ...]:
        """Return namespaces as ``Paths`` specifies."""
        return await in_own_thread("paths", partial(self._namespaces, target))

    async def states(self, target: Target) -> tuple[PathState, ...]:
        """Return states as ``Paths`` specifies."""
        return await in_own_thread("paths", partial(self._states, target))

    async def disconnect(self, target: Target) -> None:
        """Disconnect as ``Paths`` specifies."""
        self._connected.pop(target.nqn, None)
        for controller in target.controllers:
            self._refusals.pop((target.nqn, controller), None)

    def _admit(self, exports: FoundExports, controller: Controller, secret: str) -> None:
        if not exports.knows(self.host):
            raise PathError(
                Stage.AUTHENTICATE,
                f"{controller} rejects this host: add {self.host} to the hosts of the enclosure",
            )
        if not exports.is_secret(self.host, secret):
            raise PathError(
                Stage.AUTHENTICATE,
                f"{controller} rejects {self.host} with {'this secret' if secret else 'no secret'}: "
                "configure the enclosure's secret for this host",
            )

    def _namespaces(self, target: Target) -> tuple[Namespace, ...]:
        found: dict[str, Namespace] = {}
        for controller in self._connected_in_order(target):
            try:
                exports = _read(controller)
            except PathError as error:
                if error.stage is Stage.REACH:
                    continue
                raise
            if exports.nqn != target.nqn:
                continue
            for nguid, path in exports.namespaces.items():
                try:
                    size_bytes = path.stat().st_size
                except OSError:
                    continue
                found.setdefault(nguid, Namespace(nguid, str(path), size_bytes, PAGE_BYTES))
        return tuple(found[nguid] for nguid in sorted(found))

    def _states(self, target: Target) -> tuple[PathState, ...]:
        connected = self._connected_in_order(target)
        states = []
        for controller in target.controllers:
            if controller not in connected:
                why = self._refusals.get((target.nqn, controller), "not connected")
                states.append(PathState(controller, is_live=False, detail=why))
                continue
            try:
                _read_target(controller, target)
            except PathError as error:
                states.append(PathState(controller, is_live=False, detail=str(error)))
            else:
                states.append(PathState(controller, is_live=True, detail="live"))
        return tuple(states)

    def _connected_in_order(self, target: Target) -> list[Controller]:
        connected = self._connected.get(target.nqn, set())
        return [each for each in target.controllers if each in connected]


def _read_target(controller: Controller, target: Target) -> FoundExports:
    exports = _read(controller)
    if exports.nqn != target.nqn:
        raise PathError(
            Stage.IDENTIFY,
            f"{controller} belongs to {exports.nqn}, not to {target.nqn}: correct the enclosure's "
            "controllers",
        )
    return exports


def _read(controller: Controller) -> FoundExports:
    directory = Path(controller.address)
    try:
        exports = read_exports(directory)
    except FormatError as error:
        raise PathError(Stage.IDENTIFY, str(error)) from error
    except OSError as error:
        raise PathError(
            Stage.REACH, f"{directory / EXPORTS_FILE} can't be read: {error.strerror or error}"
        ) from error
    if exports is None:
        raise PathError(
            Stage.REACH,
            f"no exports at {controller}: {directory / EXPORTS_FILE} is missing; start the enclosure's "
            "daemon, and check that this host can access the directory",
        )
    return exports


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
