"""Keeps this host registered with the drives of the map, and agents that are gone from writing to them.

A drive is reserved while every agent of the map is registered with it, so that nobody is kept from writing
whose release or kernel knows nothing of it. Nothing is asked of a drive unless the store says now that this
agent is in the fabric: one that was stopped does not let itself in again. What is asked is ``step_of``'s to
say, which is pure; each turn looks anew, and takes one step of each drive.

It shortens no wait: movers of all hosts write into what an owner was granted (ADR 0029).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from ostraca_fabric.errors import OstracaError
from ostraca_fabric.ports.reservations import Act

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from ostraca_dpu_agent.paths.keeper import PathKeeper
    from ostraca_fabric.fabric_map import FabricMap
    from ostraca_fabric.ids import AgentId, DriveId, EnclosureId, FabricId
    from ostraca_fabric.ports.reservations import Report, Reservations

log = logging.getLogger(__name__)

TURN_S = 10.0
_KEY_BYTES = 8
_PATIENCE_TURNS = 3
"""In how many turns an agent that has come should be registered."""

_BAR_WITHIN_S = 20.0
"""Nobody's wait depends on it: it is given up, and the time-outs hold as ever."""


def key_of(fabric: FabricId, agent: AgentId) -> int:
    """Return the key of an agent's host, the same after each start; never 0, which is everybody's."""
    digest = hashlib.blake2b(
        agent.encode(), key=fabric, digest_size=_KEY_BYTES, person=b"ostraca pr"
    ).digest()
    return int.from_bytes(digest) or 1


def step_of(report: Report, own: int, agents: frozenset[int], *, is_patient: bool) -> Act | None:
    """Say what a drive is to be asked now, None for nothing. *agents*: the keys of all agents of the map.
    *is_patient*: those of them that are not registered may be about to be.
    """
    if own not in report.keys:
        return Act.REGISTER
    if agents <= report.keys:
        return Act.RESERVE if report.type == 0 else None
    return Act.CLEAR if report.is_held and not is_patient else None


def told(reports: Iterable[Report | None], own: int) -> str:
    """Say how drives of an enclosure are reserved, for people."""
    known = list(reports)
    those = [each for each in known if each is not None]
    if not those:
        return "not supported" if known else ""
    if any(each.type and not each.is_held for each in those):
        return "reserved by somebody else"
    if any(own not in each.keys for each in those):
        return "not registered"
    return "held" if all(each.is_held for each in those) else "registered"


class Reserving:
    """One agent's."""

    def __init__(
        self,
        agent: AgentId,
        reservations: Reservations,
        keeper: PathKeeper,
        *,
        newest_map: Callable[[], FabricMap],
        stands: Callable[[], Awaitable[bool]],
        turn_s: float = TURN_S,
    ) -> None:
        """Ask through *reservations* for drives that *keeper* has paths to, every *turn_s*. *stands* asks the
        store whether this agent is in the fabric, and raises OstracaError.
        """
        self._agent = agent
        self._reservations = reservations
        self._keeper = keeper
        self._newest_map = newest_map
        self._stands = stands
        self._turn_s = turn_s
        self._told: dict[EnclosureId, str] = {}
        self._devices: dict[DriveId, str] = {}
        """Where drives of the map were opened last."""

        self._lacking: dict[str, int] = {}
        """By device: for how many turns not every agent has been registered."""

    async def begin(self, *, within_s: float) -> None:
        """Take a turn, for up to *within_s*: who may have been barred is to write soon."""
        try:
            async with asyncio.timeout(within_s):
                await self.turn()
        except TimeoutError:
            log.warning("Drives could not be asked within %.0f s how they are reserved", within_s)

    async def run(self) -> None:
        """Take turns until cancelled."""
        while True:
            await asyncio.sleep(self._turn_s)
            await self.turn()

    async def turn(self) -> None:
        """Look at the drives of each enclosure of the map, and do what is next; let go of those that left."""
        fabric_map = self._newest_map()
        self._told = {each: was for each, was in self._told.items() if each in fabric_map.enclosures}
        devices = {
            enclosure.id: [
                device
                for drive in enclosure.drives
                if drive.nguid and (device := self._keeper.device_of(drive))
            ]
            for enclosure in fabric_map.enclosures.values()
        }
        await self._let_go(fabric_map, {each for some in devices.values() for each in some})
        for enclosure, some in devices.items():
            try:
                self._told[enclosure] = await self._looked(some, fabric_map)
            except (OstracaError, OSError) as error:
                log.info("Reservations of %s can't be seen to now: %s", enclosure, error)

    def states(self) -> Mapping[EnclosureId, str]:
        """Return how the drives of each enclosure were reserved when they were looked at last, for people."""
        return self._told

    async def bar(self, drive: DriveId, agent: AgentId) -> None:
        """Have a drive refuse what an agent's host still writes, if that agent is not in the fabric any more
        and the drive is reserved. Nothing is raised where that can't be done.
        """
        device = self._devices.get(drive, "")
        if not device:
            return
        try:
            async with asyncio.timeout(_BAR_WITHIN_S):
                await self._barred(drive, device, agent)
        except TimeoutError:
            log.info("%s may take writes of %s still: it was not asked in time", drive, agent)
        except (OstracaError, OSError) as error:
            log.info("%s may take writes of %s still: %s", drive, agent, error)

    async def _barred(self, drive: DriveId, device: str, agent: AgentId) -> None:
        report = (await self._reservations.reports([device])).get(device)
        fabric_map = self._newest_map()
        other = key_of(fabric_map.fabric, agent)
        if report is None or not report.is_held or other not in report.keys or agent in fabric_map.agents:
            return
        if await self._reservations.act(device, Act.BAR, key_of(fabric_map.fabric, self._agent), other):
            log.info("%s takes no write of %s any more, which is gone", drive, agent)

    async def _let_go(self, fabric_map: FabricMap, wanted: set[str]) -> None:
        """Clear drives that have left the map: whoever uses them next is not ours."""
        known = {drive.id for each in fabric_map.enclosures.values() for drive in each.drives}
        for gone in self._devices.keys() - known:
            device = self._devices.pop(gone)
            if device not in wanted:
                with suppress(OstracaError, OSError):  # the path may have gone first
                    await self._reservations.act(device, Act.CLEAR, key_of(fabric_map.fabric, self._agent))
        for enclosure in fabric_map.enclosures.values():
            for drive in enclosure.drives:
                if drive.nguid and (device := self._keeper.device_of(drive)):
                    self._devices[drive.id] = device

    async def _looked(self, devices: list[str], fabric_map: FabricMap) -> str:
        if not devices:
            return ""
        own = key_of(fabric_map.fabric, self._agent)
        agents = frozenset(key_of(fabric_map.fabric, each) for each in fabric_map.agents)
        reports = await self._reservations.reports(devices)
        for device, report in reports.items():
            if report is None:
                continue
            turns = 0 if agents <= report.keys else self._lacking.get(device, 0) + 1
            self._lacking[device] = turns
            step = step_of(report, own, agents, is_patient=turns < _PATIENCE_TURNS)
            if step is not None and await self._stands():
                await self._reservations.act(device, step, own)
        return told(reports.values(), own)
