"""Reservations of NVMe namespaces, as the kernel's target has them, and where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.contract.drives.simulated_reservations import SimulatedHost, SimulatedNamespace

from ostraca_dpu_agent.adapters.nvme_of.kernel import KernelError
from ostraca_dpu_agent.experimental.nvme_reservations import NvmeReservations
from ostraca_fabric.ports.reservations import ReservationCommand, ReservationReport

ONE, TWO, THREE = 0xFEDCBA9876543210, 2, 3


@pytest.fixture
def namespace(tmp_path: Path) -> SimulatedNamespace:
    return SimulatedNamespace(tmp_path / "nvme0n1")


async def registered(namespace: SimulatedNamespace, *keys: int) -> list[SimulatedHost]:
    hosts = [SimulatedHost(namespace) for _ in keys]
    for host, key in zip(hosts, keys, strict=True):
        assert await host.reservations.act(namespace.device, ReservationCommand.REGISTER, key)
    return hosts


async def report(host: SimulatedHost, namespace: SimulatedNamespace) -> ReservationReport | None:
    return (await host.reservations.reports([namespace.device]))[namespace.device]


async def test_a_registration_may_be_repeated_and_reserves_nothing(namespace: SimulatedNamespace) -> None:
    one, two = await registered(namespace, ONE, TWO)
    assert await one.reservations.act(namespace.device, ReservationCommand.REGISTER, ONE)
    assert await report(two, namespace) == ReservationReport(0, frozenset({ONE, TWO}))
    assert namespace.may_write(SimulatedHost(namespace).id)


async def test_another_key_of_the_same_host_is_refused(namespace: SimulatedNamespace) -> None:
    (one,) = await registered(namespace, ONE)
    assert not await one.reservations.act(namespace.device, ReservationCommand.REGISTER, TWO)
    assert await report(one, namespace) == ReservationReport(0, frozenset({ONE}))


async def test_once_it_is_reserved_all_registrants_write_and_everybody_reads(
    namespace: SimulatedNamespace,
) -> None:
    one, two = await registered(namespace, ONE, TWO)
    stranger = SimulatedHost(namespace)
    assert await one.reservations.act(namespace.device, ReservationCommand.RESERVE, ONE)
    found = await report(two, namespace)
    assert found is not None
    assert found.is_held
    assert [namespace.may_write(each.id) for each in (one, two, stranger)] == [True, True, False]
    assert all(namespace.may_read(each.id) for each in (one, two, stranger))
    assert not await two.reservations.act(namespace.device, ReservationCommand.RESERVE, TWO), (
        "one has done it"
    )


async def test_who_is_barred_writes_no_more_until_it_registers_again(namespace: SimulatedNamespace) -> None:
    one, two, three = await registered(namespace, ONE, TWO, THREE)
    assert await one.reservations.act(namespace.device, ReservationCommand.RESERVE, ONE)
    assert await two.reservations.act(namespace.device, ReservationCommand.PREEMPT, TWO, ONE)
    assert [namespace.may_write(each.id) for each in (one, two, three)] == [False, True, True]
    assert namespace.may_read(one.id)
    assert not await two.reservations.act(namespace.device, ReservationCommand.PREEMPT, TWO, ONE), (
        "it is not there any more"
    )
    assert not await one.reservations.act(namespace.device, ReservationCommand.PREEMPT, ONE, TWO), (
        "a preempted host preempts no other"
    )
    assert await one.reservations.act(namespace.device, ReservationCommand.REGISTER, ONE)
    assert namespace.may_write(one.id)


async def test_any_registrant_clears_all_of_it(namespace: SimulatedNamespace) -> None:
    one, two = await registered(namespace, ONE, TWO)
    await one.reservations.act(namespace.device, ReservationCommand.RESERVE, ONE)
    stranger = SimulatedHost(namespace)
    assert not await stranger.reservations.act(namespace.device, ReservationCommand.CLEAR, THREE)
    assert await two.reservations.act(namespace.device, ReservationCommand.CLEAR, TWO)
    assert await report(one, namespace) == ReservationReport(0, frozenset())
    assert namespace.may_write(stranger.id)


async def test_what_can_not_be_reserved_says_so(tmp_path: Path, namespace: SimulatedNamespace) -> None:
    off = SimulatedNamespace(tmp_path / "nvme0n2", is_enabled=False)
    (tmp_path / "file.img").touch()
    host = SimulatedHost(namespace, off)
    asked = [off.device, namespace.device, str(tmp_path / "file.img"), str(tmp_path / "gone")]
    answer: dict[str, ReservationReport | None] = {
        asked[0]: None,
        asked[1]: ReservationReport(0, frozenset()),
        asked[2]: None,
    }
    assert await host.reservations.reports(asked) == answer
    namespace.is_reached = False
    del answer[asked[1]]
    assert await host.reservations.reports(asked) == answer, "what can't be asked now is left out"
    with pytest.raises(KernelError, match="register, status 0x1"):
        await host.reservations.act(off.device, ReservationCommand.REGISTER, ONE)


async def test_more_registrants_than_a_report_holds_are_left_out(namespace: SimulatedNamespace) -> None:
    namespace.registrants = {SimulatedHost().id: key for key in range(1, 601)}
    assert await report(SimulatedHost(namespace), namespace) == ReservationReport(0, frozenset(range(1, 512)))


async def test_the_kernel_of_this_host_is_asked_by_a_process(tmp_path: Path) -> None:
    file = tmp_path / "file.img"
    file.touch()
    reservations = NvmeReservations()
    assert await reservations.reports([str(file)]) == {str(file): None}
    with pytest.raises(KernelError):
        await reservations.act(str(file), ReservationCommand.REGISTER, ONE)
