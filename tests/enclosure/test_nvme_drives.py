"""Drives as Linux shows them: what is found, by what it is known, and what is in the way."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.enclosure.machine import SIZE_BYTES, Machine

from ostraca_enclosure.adapters.nvme_cli import run_command
from ostraca_enclosure.choice import Asked, choose
from ostraca_enclosure.drives import FoundDrive, Traits
from ostraca_enclosure.fit import FitSettings, fitness
from ostraca_enclosure.ports import InventoryError
from ostraca_fabric.inventory import DriveWear

NGUID = "36344630528001050025384100000000"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def only(machine: Machine) -> FoundDrive:
    (drive,) = machine.drives.look()
    return drive


def obstacle(machine: Machine) -> str:
    (found,) = only(machine).obstacles
    return found.sentence


def test_a_drive_is_found_with_all_that_it_says_of_itself(machine: Machine) -> None:
    machine.drive()
    assert only(machine) == FoundDrive(
        name="nvme0n1",
        device=str(machine.roots.dev / "nvme0n1"),
        nguid=NGUID,
        size_bytes=SIZE_BYTES,
        lba_bytes=4096,
        model="ACME 4T",
        serial="SN0",
        firmware="1.0",
        wear=DriveWear(
            percentage_used=3,
            available_spare=100,
            spare_threshold=10,
            media_errors=0,
            temperature_c=35,
            bytes_written=900_000_000 * 512_000,
            bytes_read=1_000_000 * 512_000,
            power_on_hours=8760,
        ),
        traits=Traits((1, 4), False, False, 0, (4096, 512)),
    )
    assert fitness(only(machine), FitSettings()).is_fit


def test_drives_come_in_the_order_of_their_numbers_and_are_seen_when_plugged_in(machine: Machine) -> None:
    machine.drive("nvme10n1", nguid="a" * 32)
    machine.drive("nvme9n1", nguid="9" * 32)
    assert [each.name for each in machine.drives.look()] == ["nvme9n1", "nvme10n1"]
    machine.drive("nvme2n1", nguid="2" * 32)
    assert [each.name for each in machine.drives.look()] == ["nvme2n1", "nvme9n1", "nvme10n1"]


def test_a_namespace_of_another_enclosure_is_not_ours_to_export(machine: Machine) -> None:
    machine.drive("nvme0n1", transport="tcp")
    machine.drive("nvme1n1", transport="rdma")
    machine.drive("nvme2n1")
    assert [each.name for each in machine.drives.look()] == ["nvme2n1"]


@pytest.mark.parametrize(
    ("transports", "found"), [(("pcie", "pcie"), 1), (("tcp", "tcp"), 0), (("pcie", "tcp"), 0)]
)
def test_behind_several_controllers_all_of_them_have_to_be_this_machines(
    machine: Machine, transports: tuple[str, ...], found: int
) -> None:
    subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0"
    machine.put(f"{subsystem}/model", "ACME dual\n")
    machine.put(f"{subsystem}/serial", "SN\n")
    for number, transport in enumerate(transports):
        machine.put(f"{subsystem}/nvme{number}/transport", f"{transport}\n")
    machine.place("nvme0n1", subsystem, "0")
    (machine.roots.sys / "block" / "nvme0c0n1").mkdir()
    assert len(machine.drives.look()) == found


@pytest.mark.parametrize(
    ("given", "nguid"),
    [
        ({"nguid": "", "uuid": "0f0e0d0c-0b0a-0908-0706-050403020100"}, "0f0e0d0c0b0a09080706050403020100"),
        ({"nguid": "0" * 32, "uuid": "", "eui": "00 25 38 41 00 00 00 01"}, "0" * 16 + "0025384100000001"),
        ({"nguid": NGUID.upper(), "eui": "00 25 38 41 00 00 00 01"}, NGUID),
    ],
)
def test_without_an_nguid_it_goes_by_what_else_tells_it_from_others(
    machine: Machine, given: dict[str, str], nguid: str
) -> None:
    machine.drive(**given)
    assert only(machine).nguid == nguid
    assert only(machine).obstacles == ()


def test_one_that_has_no_identity_goes_by_its_serial_number_once_it_is_named(machine: Machine) -> None:
    machine.drive(nguid="")
    machine.drive("nvme1n1", nguid="")
    first, second = machine.drives.look()
    assert first.nguid != second.nguid
    assert [each.nguid for each in machine.drives.look()] == [first.nguid, second.nguid]
    assert "name it with --drive" in first.obstacles[0].sentence
    named = choose([first, second], Asked(("SN0",)), (), {})
    assert [each.is_wanted for each in named] == [True, False]


def test_a_mounted_drive_is_never_exported(machine: Machine) -> None:
    machine.drive()
    machine.put("proc/self/mountinfo", "30 22 259:0 / /srv rw - xfs /dev/nvme0n1 rw\n")
    assert obstacle(machine) == "it is mounted at /srv: unmount it if what is there may go"
    assert only(machine).obstacles[0].is_final


def test_so_is_one_of_which_a_partition_is_mounted_or_that_is_mounted_under_another_number(
    machine: Machine,
) -> None:
    machine.drive(nvme0n1p1__partition="1", nvme0n1p1__dev="259:77")
    for line in ("30 22 259:77 / /a rw - ext4 /dev/x rw", "31 22 0:44 / /b rw - btrfs /dev/nvme0n1p1 rw"):
        machine.put("proc/self/mountinfo", f"{line}\n")
        first, second = only(machine).obstacles
        assert "it is mounted at /" in first.sentence
        assert "it is partitioned (nvme0n1p1)" in second.sentence


def test_swap_is_never_exported(machine: Machine) -> None:
    machine.drive()
    machine.put("proc/swaps", "Filename Type\n/dev/nvme0n1 partition 1 0 -2\n")
    assert obstacle(machine) == "the machine swaps to it: `swapoff /dev/nvme0n1`"
    assert only(machine).obstacles[0].is_final


def test_what_is_built_on_it_is_named(machine: Machine) -> None:
    machine.drive()
    (machine.roots.sys / "block/nvme0n1/holders/md127").mkdir()
    assert obstacle(machine).startswith("md127 (md, LVM or device mapper) is built on it")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ro": "1"}, "it is read-only"),
        ({"queue__zoned": "host-managed"}, "it is zoned (host-managed)"),
        ({"size": "0"}, "it has no size"),
    ],
)
def test_what_can_not_be_used_says_so(machine: Machine, given: dict[str, str], said: str) -> None:
    machine.drive(**given)
    assert said in obstacle(machine)


def test_a_drive_that_somebody_holds_for_himself_alone_is_left_to_him(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.drive()
    opened = os.open

    def held(path: str | Path, flags: int, *more: int) -> int:
        if str(path).endswith("nvme0n1"):
            assert flags & os.O_EXCL
            raise OSError(errno.EBUSY, "busy")
        return opened(path, flags, *more)

    monkeypatch.setattr("ostraca_enclosure.adapters.in_use.os.open", held)
    assert "holds it for itself alone" in obstacle(machine)


def test_drives_are_asked_how_they_are_now_and_then(machine: Machine) -> None:
    machine.drive()
    only(machine)
    asked = len(machine.asked)
    machine.now_s = 59.0
    machine.smart["media_errors"] = 5
    assert only(machine).wear == machine.drives.look()[0].wear
    assert len(machine.asked) == asked
    machine.now_s = 61.0
    wear = only(machine).wear
    assert wear is not None
    assert wear.media_errors == 5


def test_another_drive_under_the_same_name_is_asked_at_once(machine: Machine) -> None:
    machine.drive()
    only(machine)
    machine.put("sys/devices/pci0000:00/nvme/nvme0/serial", "OTHER\n")
    machine.smart["percent_used"] = 50
    wear = only(machine).wear
    assert wear is not None
    assert wear.percentage_used == 50


def test_a_drive_that_does_not_say_how_it_is_is_doubted(machine: Machine) -> None:
    machine.drive()
    machine.trouble = "there is no nvme: install nvme-cli"
    (doubt,) = fitness(only(machine), FitSettings()).doubts
    assert doubt == "its health is not known: there is no nvme: install nvme-cli"


def test_other_releases_of_nvme_write_it_otherwise(machine: Machine) -> None:
    machine.drive()
    machine.smart |= {
        "data_units_written": "900,000,000",
        "critical_warning": {"value": 4, "available_spare": 0},
        "percentage_used": machine.smart.pop("percent_used"),
    }
    wear = only(machine).wear
    assert wear is not None
    assert (wear.bytes_written, wear.critical_warning, wear.percentage_used) == (900_000_000 * 512_000, 4, 3)


@pytest.mark.parametrize("key", ["avail_spare", "temperature", "percent_used"])
def test_what_it_does_not_say_is_not_made_up(machine: Machine, key: str) -> None:
    machine.drive()
    del machine.smart[key]
    drive = only(machine)
    assert drive.wear is None
    assert f"`nvme` does not say {key}" in drive.silence


def test_what_it_is_formatted_to_is_read(machine: Machine) -> None:
    machine.drive()
    machine.namespace["flbas"] = 1
    machine.controller |= {"vwc": 7, "hmpre": 100, "ver": 0x10300}
    assert only(machine).traits == Traits((1, 3), True, True, 8, (4096, 512))


def test_a_machine_without_drives_has_none_and_one_without_sysfs_says_so(machine: Machine) -> None:
    assert machine.drives.look() == ()
    (machine.roots.sys / "block").rmdir()
    with pytest.raises(InventoryError, match="drives can't be looked for"):
        machine.drives.look()


def test_a_command_that_is_missing_or_fails_says_what_to_do() -> None:
    with pytest.raises(InventoryError, match="there is no nvme-of-nobody: install nvme-cli"):
        run_command(["nvme-of-nobody", "list"])
    with pytest.raises(InventoryError, match=r"`false x` failed \(1\)"):
        run_command(["false", "x"])
    assert run_command(["echo", "{}"]) == "{}\n"
