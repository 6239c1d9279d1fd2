"""Paths to enclosures on files: directories that this host sees, with ``exports.json`` in them.

Connecting is looking: nothing outlives the process, and a host that is taken off the list later keeps what it
has, as with NVMe-oF. A path is live while the directory exports what was connected.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca_fabric.adapters.file_exports import EXPORTS_FILE, read_exports
from ostraca_fabric.adapters.path_errors import furthest
from ostraca_fabric.errors import FormatError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.ports.paths import Namespace, PathError, PathState, Stage
from ostraca_fabric.target import check_nqn

if TYPE_CHECKING:
    from ostraca_fabric.adapters.file_exports import FoundExports
    from ostraca_fabric.target import Controller, Target


class FilePaths:
    """One host's paths to enclosures on files."""

    def __init__(self, host: str) -> None:
        """Be the host of this NQN. Raises UsageError when it is none."""
        self._host = check_nqn(host)
        self._connected: dict[str, set[Controller]] = {}
        """By the target's NQN."""

        self._refusals: dict[tuple[str, Controller], str] = {}
        """By the target's NQN and controller: why it was not connected when that was tried last."""

    @property
    def host(self) -> str:
        """The NQN by which enclosures know this host."""
        return self._host

    async def connect(self, target: Target, secret: str) -> tuple[Namespace, ...]:
        """See ``Paths``."""
        errors: list[PathError] = []
        connected = self._connected.get(target.nqn, set()) & set(target.controllers)
        for controller in target.controllers:
            try:
                exports = await asyncio.to_thread(_exported, controller, target)
                if controller not in connected:
                    self._admit(exports, controller, secret)
            except PathError as error:
                errors.append(error)
                self._refusals[target.nqn, controller] = str(error)
            else:
                connected.add(controller)
        self._connected[target.nqn] = connected
        if len(errors) == len(target.controllers):
            raise furthest(errors)
        return await self.namespaces(target)

    async def namespaces(self, target: Target) -> tuple[Namespace, ...]:
        """See ``Paths``."""
        return await asyncio.to_thread(self._namespaces, target)

    async def states(self, target: Target) -> tuple[PathState, ...]:
        """See ``Paths``."""
        return await asyncio.to_thread(self._states, target)

    async def disconnect(self, target: Target) -> None:
        """See ``Paths``."""
        self._connected.pop(target.nqn, None)
        for controller in target.controllers:
            self._refusals.pop((target.nqn, controller), None)

    def _admit(self, exports: FoundExports, controller: Controller, secret: str) -> None:
        if not exports.knows(self._host):
            raise PathError(
                Stage.AUTHENTICATE,
                f"{controller} does not let this host in: its allow-list does not name {self._host}: add it "
                "to the hosts of that enclosure",
            )
        if not exports.is_secret(self._host, secret):
            raise PathError(
                Stage.AUTHENTICATE,
                f"{controller} does not let {self._host} in with "
                f"{'this secret' if secret else 'no secret'}: give this host the secret that the enclosure "
                "has for it",
            )

    def _namespaces(self, target: Target) -> tuple[Namespace, ...]:
        found: dict[str, Namespace] = {}
        for controller in self._in_order(target):
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
        connected = self._in_order(target)
        states = []
        for controller in target.controllers:
            if controller not in connected:
                why = self._refusals.get((target.nqn, controller), "not connected")
                states.append(PathState(controller, is_live=False, detail=why))
                continue
            try:
                _exported(controller, target)
            except PathError as error:
                states.append(PathState(controller, is_live=False, detail=str(error)))
            else:
                states.append(PathState(controller, is_live=True, detail="live"))
        return tuple(states)

    def _in_order(self, target: Target) -> list[Controller]:
        connected = self._connected.get(target.nqn, set())
        return [each for each in target.controllers if each in connected]


def _exported(controller: Controller, target: Target) -> FoundExports:
    exports = _read(controller)
    if exports.nqn != target.nqn:
        raise PathError(
            Stage.IDENTIFY,
            f"{controller} is {exports.nqn}, and not {target.nqn}: name the controllers of the enclosure "
            "that is meant",
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
            f"nothing is exported at {controller}: there is no {directory / EXPORTS_FILE}; start the "
            "enclosure's daemon, and see that this host has that directory",
        )
    return exports
