"""Drives are reserved for the agents of the fabric, and who is gone from it is barred."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from tests.contract.drives.simulated_reservations import SimulatedHost, SimulatedNamespace

from ostraca_dpu_agent.experimental.reservation_keeper import ReservationKeeper, describe, key_of, step_of
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.membership.memory_membership import MemoryMembership
from ostraca_fabric.model.fabric_map import AgentRecord, DriveRecord, EnclosureRecord
from ostraca_fabric.model.ids import ID_BYTES, AgentId, EnclosureId, FabricId, StartId, drive_id
from ostraca_fabric.ports.reservations import ReservationCommand, ReservationReport

FABRIC = FabricId(bytes(range(ID_BYTES)))
SHELF = EnclosureId("shelf-1")
DRIVE = drive_id(SHELF, "drive-0")
START = StartId(bytes(ID_BYTES))
ONE, TWO, THREE = (AgentId(f"agent-{number}") for number in range(3))


@dataclass
class Fabric:
    """Agents, each on a host of its own, and one drive."""

    namespace: SimulatedNamespace
    membership: MemoryMembership = field(default_factory=lambda: MemoryMembership(FABRIC))
    hosts: dict[AgentId, SimulatedHost] = field(default_factory=dict)
    reserving: dict[AgentId, ReservationKeeper] = field(default_factory=dict)
    is_store_away: bool = False

    async def begin(self, *agents: AgentId) -> None:
        record = EnclosureRecord(SHELF, (DriveRecord(DRIVE, nguid="1" * 32),), ())
        await self.membership.put_enclosures([record])
        for agent in agents:
            await self.join(agent)

    async def join(self, agent: AgentId) -> None:
        await self.membership.join(AgentRecord(agent, START, ()))
        self.hosts[agent] = SimulatedHost(self.namespace)
        self.reserving[agent] = ReservationKeeper(
            agent,
            self.hosts[agent].reservations,
            cast("Any", self),
            newest_map=lambda: self.membership.map,
            is_member=lambda: self.stands(agent),
        )

    def device_of(self, _: DriveRecord) -> str:
        return self.namespace.device

    async def stands(self, agent: AgentId) -> bool:
        if self.is_store_away:
            raise MembershipError("etcd is away")
        return await self.membership.confirm(agent, START)

    async def turns(self, *agents: AgentId, count: int = 1) -> None:
        for _ in range(count):
            for agent in agents or tuple(self.reserving):
                await self.reserving[agent].turn()

    def writers(self) -> list[AgentId]:
        """Who may write."""
        return [agent for agent, host in self.hosts.items() if self.namespace.may_write(host.id)]

    def holds(self) -> bool:
        """Whether the drive is reserved."""
        return not self.namespace.may_write(SimulatedHost().id)


@pytest.fixture
def fabric(tmp_path: Path) -> Fabric:
    return Fabric(SimulatedNamespace(tmp_path / "nvme0n1"))


# ----------------------------------------------------------------------------------------------- by values


def test_the_key_of_an_agent_is_always_the_same_and_nobody_else_s() -> None:
    assert key_of(FABRIC, ONE) == 0x7C9677A973471EDF
    keys = {key_of(FABRIC, each) for each in (ONE, TWO, THREE)} | {key_of(FabricId(bytes(ID_BYTES)), ONE)}
    assert len(keys) == 4
    assert 0 not in keys


@pytest.mark.parametrize(
    ("kind", "keys", "is_patient", "step"),
    [
        (0, {2, 3}, False, ReservationCommand.REGISTER),
        (5, {2, 3}, False, ReservationCommand.REGISTER),
        (0, {1, 2}, False, None),
        (0, {1, 2, 3}, True, ReservationCommand.RESERVE),
        (0, {1, 2, 3, 9}, True, ReservationCommand.RESERVE),
        (5, {1, 2, 3}, True, None),
        (5, {1, 2}, True, None),
        (5, {1, 2}, False, ReservationCommand.CLEAR),
        (1, {1, 2, 3}, True, None),
        (1, {1, 2}, False, None),
    ],
)
def test_what_a_drive_is_asked(
    kind: int, keys: set[int], is_patient: bool, step: ReservationCommand | None
) -> None:
    report = ReservationReport(kind, frozenset(keys))
    assert step_of(report, 1, frozenset({1, 2, 3}), is_patient=is_patient) is step


@pytest.mark.parametrize(
    ("reports", "says"),
    [
        ([], ""),
        ([None], "not supported"),
        ([None, ReservationReport(5, frozenset({1}))], "held"),
        ([ReservationReport(0, frozenset({1})), ReservationReport(5, frozenset({1}))], "registered"),
        ([ReservationReport(5, frozenset({2}))], "not registered"),
        ([ReservationReport(3, frozenset({1}))], "reserved by another holder"),
    ],
)
def test_how_it_is_told(reports: list[ReservationReport | None], says: str) -> None:
    assert describe(reports, 1) == says


# ---------------------------------------------------------------------------------------- of several agents


async def test_a_drive_is_reserved_once_every_agent_is_registered(fabric: Fabric) -> None:
    await fabric.begin(ONE, TWO, THREE)
    await fabric.turns(ONE, TWO, count=5)
    assert not fabric.holds()
    assert fabric.reserving[ONE].states() == {SHELF: "registered"}
    await fabric.turns(THREE, ONE, TWO)
    assert fabric.holds()
    assert fabric.writers() == [ONE, TWO, THREE]
    await fabric.turns(count=5)
    assert {**fabric.reserving[THREE].states()} == {SHELF: "held"}
    assert fabric.writers() == [ONE, TWO, THREE]


async def test_who_is_gone_is_barred_and_lets_itself_in_when_it_is_back(fabric: Fabric) -> None:
    await fabric.begin(ONE, TWO, THREE)
    await fabric.turns(count=3)
    await fabric.membership.leave(ONE, START)
    await fabric.turns(TWO, THREE, count=5)
    assert fabric.writers() == [ONE, TWO, THREE], "time-outs are all there is until somebody bars it"
    await fabric.reserving[TWO].preempt(DRIVE, ONE)
    assert fabric.writers() == [TWO, THREE]
    assert fabric.namespace.may_read(fabric.hosts[ONE].id)
    await fabric.turns(count=5)
    assert fabric.writers() == [TWO, THREE], "it was stopped, and goes on: nobody has let it in"
    assert fabric.holds()
    await fabric.membership.join(AgentRecord(ONE, START, ()))
    await fabric.turns()
    assert fabric.writers() == [ONE, TWO, THREE]
    assert fabric.holds()


async def test_nobody_is_barred_who_is_in_the_fabric(fabric: Fabric) -> None:
    await fabric.begin(ONE, TWO)
    await fabric.turns(count=3)
    await fabric.reserving[TWO].preempt(DRIVE, ONE)
    assert fabric.writers() == [ONE, TWO]


async def test_nobody_is_barred_from_a_drive_that_is_not_reserved(fabric: Fabric) -> None:
    await fabric.begin(ONE, TWO, THREE)
    await fabric.turns(ONE, TWO, count=3)
    await fabric.membership.leave(ONE, START)
    await fabric.reserving[TWO].preempt(DRIVE, ONE)
    assert "preempt" not in fabric.hosts[TWO].asked
    assert set(fabric.namespace.registrants.values()) == {key_of(FABRIC, each) for each in (ONE, TWO)}


async def test_a_bar_that_can_not_be_had_is_done_without(fabric: Fabric) -> None:
    await fabric.begin(ONE, TWO)
    await fabric.turns(count=3)
    await fabric.membership.leave(ONE, START)
    fabric.namespace.is_reached = False
    await fabric.reserving[TWO].preempt(DRIVE, ONE)
    assert fabric.writers() == [ONE, TWO]
    await fabric.turns()


async def test_an_agent_that_knows_nothing_of_it_is_let_write_after_a_while(fabric: Fabric) -> None:
    await fabric.begin(ONE, TWO)
    await fabric.turns(count=3)
    assert fabric.holds()
    await fabric.membership.join(AgentRecord(THREE, START, ()))
    await fabric.turns(count=2)
    assert fabric.holds()
    await fabric.turns(count=8)
    assert not fabric.holds()
    await fabric.membership.leave(THREE, START)
    await fabric.turns(count=2)
    assert fabric.holds()


async def test_an_agent_whose_map_is_old_asks_nothing_of_drives(fabric: Fabric) -> None:
    await fabric.begin(ONE, TWO, THREE)
    await fabric.turns(count=3)
    old = fabric.membership.map
    await fabric.membership.leave(ONE, START)
    await fabric.membership.leave(THREE, START)
    await fabric.reserving[TWO].preempt(DRIVE, THREE)
    fabric.reserving[ONE]._newest_map = lambda: old
    await fabric.turns(ONE, count=9)
    assert fabric.holds()
    assert fabric.writers() == [ONE, TWO]


async def test_while_the_store_is_away_nothing_is_asked_of_drives(fabric: Fabric) -> None:
    await fabric.begin(ONE, TWO)
    fabric.is_store_away = True
    await fabric.turns(count=5)
    assert fabric.namespace.registrants == {}
    fabric.is_store_away = False
    await fabric.turns(count=2)
    assert fabric.holds()


async def test_an_enclosure_that_starts_anew_keeps_nobody_from_writing(fabric: Fabric) -> None:
    await fabric.begin(ONE, TWO, THREE)
    await fabric.turns(count=3)
    fabric.namespace.lose_all()
    for agent in (ONE, TWO, THREE, ONE):
        assert fabric.writers() == [ONE, TWO, THREE]
        await fabric.turns(agent)
    assert fabric.holds()
    assert fabric.writers() == [ONE, TWO, THREE]


async def test_who_reserved_a_drive_otherwise_is_left_alone(fabric: Fabric) -> None:
    await fabric.begin(ONE)
    other = SimulatedHost(fabric.namespace)
    fabric.namespace.registrants[other.id] = 7
    fabric.namespace.holder, fabric.namespace.type = other.id, 1
    await fabric.turns(count=5)
    assert (fabric.namespace.holder, fabric.namespace.type) == (other.id, 1)
    assert fabric.reserving[ONE].states() == {SHELF: "reserved by another holder"}


async def test_where_hosts_share_a_name_nothing_is_reserved(fabric: Fabric) -> None:
    await fabric.begin(ONE, TWO)
    fabric.hosts[TWO].id = fabric.hosts[ONE].id
    await fabric.turns(count=9)
    assert not fabric.holds()
    assert fabric.reserving[TWO].states() == {SHELF: "not registered"}


async def test_a_drive_that_leaves_the_fabric_is_anybody_s(fabric: Fabric) -> None:
    await fabric.begin(ONE, TWO)
    await fabric.turns(count=3)
    await fabric.membership.put_enclosures([], removed=[SHELF])
    await fabric.turns(ONE)
    assert fabric.namespace.registrants == {}
    await fabric.turns()
    assert not fabric.holds()
    assert fabric.reserving[ONE].states() == {}
