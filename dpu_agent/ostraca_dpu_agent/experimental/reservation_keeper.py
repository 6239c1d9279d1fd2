"""Registration of this host with drives, and exclusion of departed agents.

A drive is reserved only while every agent of the map is registered with the drive. So no agent loses write
access because its release or kernel lacks reservations. A drive is changed only if the store confirms at
that moment that this agent is in the fabric. A stopped agent therefore does not register itself again. The
pure function ``step_of`` decides; each turn reads the state anew and takes one step per drive.

Reservations shorten no wait: data paths of all hosts write into space granted to an owner (ADR 0029).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress

from ostraca_dpu_agent.paths.manager import PathManager
from ostraca_fabric.errors import OstracaError
from ostraca_fabric.model.fabric_map import FabricMap
from ostraca_fabric.model.ids import AgentId, DriveId, EnclosureId, FabricId
from ostraca_fabric.ports.reservations import HostReservations, ReservationCommand, ReservationReport

log = logging.getLogger(__name__)

TURN_S = 10.0
_KEY_BYTES = 8
_PATIENCE_TURNS = 3
"""Turns within which a new agent should be registered."""

_PREEMPT_WITHIN_S = 20.0
"""Upper bound of a preemption. No other wait depends on it: after a timeout, the usual time limits still
apply.
"""


def key_of(fabric: FabricId, agent: AgentId) -> int:
    """Return the key of an agent's host, the same after each start.

    The key is never 0, the value shared by all.
    """
    digest = hashlib.blake2b(
        agent.encode(), key=fabric, digest_size=_KEY_BYTES, person=b"ostraca pr"
    ).digest()
    return int.from_bytes(digest) or 1


def step_of(
    report: ReservationReport, own: int, agents: frozenset[int], *, is_patient: bool
) -> ReservationCommand | None:
    """Return the next action for a drive, or None.

    *agents*: the keys of all agents of the map. *is_patient*: unregistered agents may be about to
    register.
    """
    if own not in report.keys:
        return ReservationCommand.REGISTER
    if agents <= report.keys:
        return ReservationCommand.RESERVE if report.type == 0 else None
    return ReservationCommand.CLEAR if report.is_held and not is_patient else None


def describe(reports: Iterable[ReservationReport | None], own: int) -> str:
    """Describe the reservations of an enclosure's drives, for people."""
    known = list(reports)
    reported = [each for each in known if each is not None]
    if not reported:
        return "not supported" if known else ""
    if any(each.type and not each.is_held for each in reported):
        return "reserved by another holder"
    if any(own not in each.keys for each in reported):
        return "not registered"
    return "held" if all(each.is_held for each in reported) else "registered"


class ReservationKeeper:
    """Reservations of one agent."""

    def __init__(
        self,
        agent: AgentId,
        reservations: HostReservations,
        path_manager: PathManager,
        *,
        newest_map: Callable[[], FabricMap],
        is_member: Callable[[], Awaitable[bool]],
        turn_s: float = TURN_S,
    ) -> None:
        """Check drives with paths of *path_manager* through *reservations*, every *turn_s*.

        *is_member* asks the store whether this agent is in the fabric, and raises OstracaError.
        """
        self._agent = agent
        self._reservations = reservations
        self._path_manager = path_manager
        self._newest_map = newest_map
        self._is_member = is_member
        self._turn_s = turn_s
        self._states: dict[EnclosureId, str] = {}
        self._devices: dict[DriveId, str] = {}
        """Last known devices of drives in the map."""

        self._incomplete_turns: dict[str, int] = {}
        """By device: turns during which some agent was unregistered."""

    async def begin(self, *, within_s: float) -> None:
        """Take a turn, for up to *within_s*.

        Run before the first writes: an earlier start of this agent may have been preempted.
        """
        try:
            async with asyncio.timeout(within_s):
                await self.turn()
        except TimeoutError:
            log.warning("Drives did not report reservations within %.0f s", within_s)

    async def run(self) -> None:
        """Take turns until cancelled."""
        while True:
            await asyncio.sleep(self._turn_s)
            await self.turn()

    async def turn(self) -> None:
        """Take the next step for each drive of the map; release departed drives."""
        fabric_map = self._newest_map()
        self._states = {each: was for each, was in self._states.items() if each in fabric_map.enclosures}
        devices = {
            enclosure.id: {
                drive.id: device
                for drive in enclosure.drives
                if drive.nguid and (device := self._path_manager.device_of(drive))
            }
            for enclosure in fabric_map.enclosures.values()
        }
        await self._clear_departed(fabric_map, devices.values())
        for enclosure, by_drive in devices.items():
            try:
                self._states[enclosure] = await self._take_steps(list(by_drive.values()), fabric_map)
            except (OstracaError, OSError) as error:
                log.info("Reservations of %s can't be updated now: %s", enclosure, error)

    def states(self) -> Mapping[EnclosureId, str]:
        """Return the last seen reservation state per enclosure, for people."""
        return self._states

    async def preempt(self, drive: DriveId, agent: AgentId) -> None:
        """Make a reserved drive refuse writes of a departed agent's host.

        No effect while the agent is in the fabric or the drive is not reserved. Failures are logged, not
        raised.
        """
        device = self._devices.get(drive, "")
        if not device:
            return
        try:
            async with asyncio.timeout(_PREEMPT_WITHIN_S):
                await self._preempt(drive, device, agent)
        except TimeoutError:
            log.info("%s may still accept writes of %s: the drive did not answer in time", drive, agent)
        except (OstracaError, OSError) as error:
            log.info("%s may still accept writes of %s: %s", drive, agent, error)

    async def _preempt(self, drive: DriveId, device: str, agent: AgentId) -> None:
        report = (await self._reservations.reports([device])).get(device)
        fabric_map = self._newest_map()
        other = key_of(fabric_map.fabric, agent)
        if report is None or not report.is_held or other not in report.keys or agent in fabric_map.agents:
            return
        if await self._reservations.act(
            device, ReservationCommand.PREEMPT, key_of(fabric_map.fabric, self._agent), other
        ):
            log.info("%s refuses writes of the departed agent %s", drive, agent)

    async def _clear_departed(
        self, fabric_map: FabricMap, current: Collection[Mapping[DriveId, str]]
    ) -> None:
        """Clear drives that left the map, for a next user; note *current* devices by drive."""
        in_use = {device for by_drive in current for device in by_drive.values()}
        known = {drive.id for each in fabric_map.enclosures.values() for drive in each.drives}
        for gone in self._devices.keys() - known:
            device = self._devices.pop(gone)
            if device not in in_use:
                with suppress(OstracaError, OSError):  # the path may have gone first
                    await self._reservations.act(
                        device, ReservationCommand.CLEAR, key_of(fabric_map.fabric, self._agent)
                    )
        for by_drive in current:
            self._devices.update(by_drive)

    async def _take_steps(self, devices: list[str], fabric_map: FabricMap) -> str:
        if not devices:
            return ""
        own = key_of(fabric_map.fabric, self._agent)
        agents = frozenset(key_of(fabric_map.fabric, each) for each in fabric_map.agents)
        reports = await self._reservations.reports(devices)
        for device, report in reports.items():
            if report is None:
                continue
            turns = 0 if agents <= report.keys else self._incomplete_turns.get(device, 0) + 1
            self._incomplete_turns[device] = turns
            step = step_of(report, own, agents, is_patient=turns < _PATIENCE_TURNS)
            if step is not None and await self._is_member():
                await self._reservations.act(device, step, own)
        return describe(reports.values(), own)
