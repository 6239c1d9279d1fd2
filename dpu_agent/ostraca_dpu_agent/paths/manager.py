"""Connections of this host to the enclosures of the map, with device names.

Each enclosure has a loop of its own, so that a silent enclosure delays no other: connect, list the drives,
wait. Existing connections are reused. An enclosure that has left the map is disconnected once none of its
drives is open here. An enclosure inspected before its addition to the map stays connected for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ostraca_fabric.errors import OstracaError
from ostraca_fabric.model.fabric_map import DriveRecord, FabricMap
from ostraca_fabric.model.ids import EnclosureId
from ostraca_fabric.model.target import Target
from ostraca_fabric.ports.opener import NamespaceOpener
from ostraca_fabric.ports.paths import Namespace, PathError, Paths, PathState
from ostraca_fabric.ports.reservations import HostReservations
from ostraca_fabric.runtime.tasks import Tasks
from ostraca_fabric.telemetry.status import EnclosurePathStatus, PathStatus

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _EnclosurePaths:
    """Paths to an enclosure of the map."""

    target: Target
    loop: asyncio.Task[None]
    namespaces: Mapping[str, Namespace] = field(default_factory=dict)
    """By NGUID: drives that could be opened at the last attempt."""

    states: tuple[PathState, ...] = ()
    trouble: str = ""
    """Reason why the enclosure is unreachable; empty while reachable."""


class PathManager:
    """Paths of one agent. ``use_map`` for every map; ``stop`` before the process ends."""

    def __init__(
        self,
        paths: Paths,
        opener: NamespaceOpener,
        *,
        secret_of: Callable[[str], str],
        is_open: Callable[[Mapping[str, Namespace]], bool],
        clock: Callable[[], float],
        turn_s: float,
        hold_s: float,
        reservations: HostReservations | None = None,
    ) -> None:
        """Connect to each enclosure every *turn_s*; *opener* opens the drives of *paths*.

        *secret_of* returns the secret of a name, and raises OstracaError. *is_open* tells whether any of
        these drives, by NGUID, is open here. An inspected target stays connected for *hold_s*.
        *reservations* reserves drives for this host, if enabled (``Reserving``).
        """
        self.paths = paths
        self.opener = opener
        self.secret_of = secret_of
        self.reservations = reservations
        self._is_open = is_open
        self._clock = clock
        self._turn_s = turn_s
        self._hold_s = hold_s
        self._enclosures: dict[EnclosureId, _EnclosurePaths] = {}
        self._connected_until_s: dict[Target, float] = {}
        self._changed = asyncio.Event()
        self._tasks = Tasks("paths to enclosures")

    def use_map(self, fabric_map: FabricMap) -> None:
        """Adopt the enclosures of a new map."""
        wanted = {each.id: each.target for each in fabric_map.enclosures.values() if each.target is not None}
        for enclosure, paths in list(self._enclosures.items()):
            if wanted.get(enclosure) != paths.target:
                paths.loop.cancel()
                del self._enclosures[enclosure]
                if paths.target not in wanted.values():
                    self._tasks.spawn(self._disconnect(paths))
        for enclosure, target in wanted.items():
            if enclosure not in self._enclosures:
                loop = self._tasks.spawn(self._run(enclosure, target))
                self._enclosures[enclosure] = _EnclosurePaths(target, loop)

    async def wait_for_first_attempts(self, fabric_map: FabricMap, *, within_s: float) -> None:
        """Wait until every enclosure was tried once, for up to *within_s*."""
        self.use_map(fabric_map)
        try:
            async with asyncio.timeout(within_s):
                while any(not paths.namespaces and not paths.trouble for paths in self._enclosures.values()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.warning("Not all enclosures were reached within %.0f s", within_s)

    def device_of(self, drive: DriveRecord) -> str:
        """Return the device to open for a drive; empty while there is none."""
        if not drive.nguid:
            return drive.path
        for paths in self._enclosures.values():
            if (namespace := paths.namespaces.get(drive.nguid)) is not None:
                return namespace.device
        return ""

    def keep_connected(self, target: Target) -> None:
        """Keep a target connected for a while, even outside the map."""
        self._connected_until_s[target] = self._clock() + self._hold_s

    def status(self, reserved: Mapping[EnclosureId, str]) -> tuple[EnclosurePathStatus, ...]:
        """Return the state of the paths to each enclosure.

        *reserved*: state of reservations, from ``Reserving``.
        """
        return tuple(
            EnclosurePathStatus(
                enclosure,
                len(paths.namespaces),
                tuple(PathStatus(str(each.controller), each.is_live, each.detail) for each in paths.states),
                paths.trouble,
                reserved.get(enclosure, ""),
                "files" if paths.target.is_files else self.opener.initiator,
            )
            for enclosure, paths in sorted(self._enclosures.items())
        )

    async def stop(self) -> None:
        """Stop all loops. Connections stay, for the next process."""
        await self._tasks.stop()

    async def _run(self, enclosure: EnclosureId, target: Target) -> None:
        while True:
            paths = self._enclosures.get(enclosure)
            if paths is not None and paths.target == target:
                await self._check(enclosure, paths)
                self._changed.set()
            await asyncio.sleep(self._turn_s)

    async def _check(self, enclosure: EnclosureId, paths: _EnclosurePaths) -> None:
        before, trouble = paths.trouble, ""
        try:
            found = await self.paths.connect(paths.target, self.secret_of(paths.target.secret))
            paths.namespaces = {each.nguid: each for each in found}
        except OstracaError as error:  # includes a missing secret
            trouble = str(error)
        if not trouble and not paths.namespaces:
            trouble = "connected, but no drive is exported: check the enclosure's daemon"
        try:
            paths.states = await self.paths.states(paths.target)
        except PathError as error:
            trouble = trouble or str(error)
        paths.trouble = trouble
        if trouble and trouble != before:
            log.warning("Enclosure %s is not reachable, trying again: %s", enclosure, trouble)
        elif before and not trouble:
            log.info("Enclosure %s is reachable again", enclosure)

    async def _disconnect(self, paths: _EnclosurePaths) -> None:
        """Disconnect once no drive of the target is open or held here."""
        while self._is_open(paths.namespaces) or self._clock() < self._connected_until_s.get(
            paths.target, 0.0
        ):
            await asyncio.sleep(self._turn_s)
            if any(other.target.nqn == paths.target.nqn for other in self._enclosures.values()):
                return
        try:
            await self.paths.disconnect(paths.target)
            log.info("Disconnected from %s, no longer in the map", paths.target.nqn)
        except PathError as error:
            log.warning("Can't disconnect from %s: %s", paths.target.nqn, error)
