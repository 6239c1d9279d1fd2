"""Keeps this host connected to the enclosures of the map, and says where their drives can be opened.

Each enclosure has a loop of its own, so that one that does not answer holds no other up: connect, list the
drives, wait. What is connected already is found so. An enclosure that has left the map is left once none of
its drives is open here; one that is being looked at before it is in the map stays for a while.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ostraca_fabric.errors import OstracaError
from ostraca_fabric.ports.paths import PathError
from ostraca_fabric.status import EnclosurePathStatus, PathStatus
from ostraca_fabric.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ostraca_fabric.fabric_map import DriveRecord, FabricMap
    from ostraca_fabric.ids import EnclosureId
    from ostraca_fabric.ports.paths import Namespace, Paths, PathState
    from ostraca_fabric.ports.reservations import Reservations
    from ostraca_fabric.target import Target

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Kept:
    """An enclosure of the map."""

    target: Target
    loop: asyncio.Task[None]
    namespaces: Mapping[str, Namespace] = field(default_factory=dict)
    """By NGUID: those that could be opened when it was looked last."""

    states: tuple[PathState, ...] = ()
    trouble: str = ""
    """Why nothing of it can be reached; empty while something can."""


class PathKeeper:
    """One agent's. ``see`` every map; ``stop`` it before its process ends."""

    def __init__(
        self,
        paths: Paths,
        *,
        secret_of: Callable[[str], str],
        is_open: Callable[[Mapping[str, Namespace]], bool],
        clock: Callable[[], float],
        turn_s: float,
        hold_s: float,
        reservations: Reservations | None = None,
    ) -> None:
        """Look at each enclosure every *turn_s*. *secret_of* returns the secret of a name, and raises
        OstracaError; *is_open* says whether one of these drives, by NGUID, is open here. Whoever was looked
        at is left alone for *hold_s* after that. *reservations* is how this host reserves drives, where it is
        to (``Reserving``).
        """
        self.paths = paths
        self.secret_of = secret_of
        self.reservations = reservations
        self._is_open = is_open
        self._clock = clock
        self._turn_s = turn_s
        self._hold_s = hold_s
        self._kept: dict[EnclosureId, _Kept] = {}
        self._held_until_s: dict[Target, float] = {}
        self._changed = asyncio.Event()
        self._tasks = Tasks("paths to enclosures")

    def see(self, fabric_map: FabricMap) -> None:
        """Keep to the enclosures of a new map."""
        wanted = {each.id: each.target for each in fabric_map.enclosures.values() if each.target is not None}
        for enclosure, kept in list(self._kept.items()):
            if wanted.get(enclosure) != kept.target:
                kept.loop.cancel()
                del self._kept[enclosure]
                if kept.target not in wanted.values():
                    self._tasks.spawn(self._leave(kept))
        for enclosure, target in wanted.items():
            if enclosure not in self._kept:
                loop = self._tasks.spawn(self._keep(enclosure, target))
                self._kept[enclosure] = _Kept(target, loop)

    async def found(self, fabric_map: FabricMap, *, within_s: float) -> None:
        """Wait until every enclosure of the map was looked at once, or *within_s* are over."""
        self.see(fabric_map)
        try:
            async with asyncio.timeout(within_s):
                while any(not kept.namespaces and not kept.trouble for kept in self._kept.values()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.warning("Not all enclosures could be looked at within %.0f s", within_s)

    def device_of(self, drive: DriveRecord) -> str:
        """Return where a drive can be opened now; empty where nowhere."""
        if not drive.nguid:
            return drive.path
        for kept in self._kept.values():
            if (namespace := kept.namespaces.get(drive.nguid)) is not None:
                return namespace.device
        return ""

    def hold(self, target: Target) -> None:
        """Leave a target connected for a while, though the map may not have it."""
        self._held_until_s[target] = self._clock() + self._hold_s

    def status(self, reserved: Mapping[EnclosureId, str]) -> tuple[EnclosurePathStatus, ...]:
        """Say how the paths to each enclosure are. *reserved*: what ``Reserving`` says of its drives."""
        return tuple(
            EnclosurePathStatus(
                enclosure,
                len(kept.namespaces),
                tuple(PathStatus(str(each.controller), each.is_live, each.detail) for each in kept.states),
                kept.trouble,
                reserved.get(enclosure, ""),
            )
            for enclosure, kept in sorted(self._kept.items())
        )

    async def stop(self) -> None:
        """Look no more. What is connected stays, for the next process."""
        await self._tasks.stop()

    async def _keep(self, enclosure: EnclosureId, target: Target) -> None:
        while True:
            kept = self._kept.get(enclosure)
            if kept is not None and kept.target == target:
                await self._look(enclosure, kept)
                self._changed.set()
            await asyncio.sleep(self._turn_s)

    async def _look(self, enclosure: EnclosureId, kept: _Kept) -> None:
        before, trouble = kept.trouble, ""
        try:
            found = await self.paths.connect(kept.target, self.secret_of(kept.target.secret))
            kept.namespaces = {each.nguid: each for each in found}
        except OstracaError as error:  # its secret may be lacking as well
            trouble = str(error)
        if not trouble and not kept.namespaces:
            trouble = "it lets this host in, and shows no drive: does its daemon run?"
        try:
            kept.states = await self.paths.states(kept.target)
        except PathError as error:
            trouble = trouble or str(error)
        kept.trouble = trouble
        if trouble and trouble != before:
            log.warning("Enclosure %s can't be reached, and is tried again: %s", enclosure, trouble)
        elif before and not trouble:
            log.info("Enclosure %s is reached again", enclosure)

    async def _leave(self, kept: _Kept) -> None:
        """Disconnect once nothing of it is open here, and nobody looks at it."""
        while self._is_open(kept.namespaces) or self._is_held(kept.target):
            await asyncio.sleep(self._turn_s)
            if any(other.target.nqn == kept.target.nqn for other in self._kept.values()):
                return
        try:
            await self.paths.disconnect(kept.target)
            log.info("Left %s, which the map has no longer", kept.target.nqn)
        except PathError as error:
            log.warning("%s could not be left: %s", kept.target.nqn, error)

    def _is_held(self, target: Target) -> bool:
        return self._clock() < self._held_until_s.get(target, 0.0)
