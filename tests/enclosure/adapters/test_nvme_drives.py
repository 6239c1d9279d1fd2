"""Drives as Linux shows them: what is found, by what it is known, and what is in the way."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.enclosure.adapters.machine import SIZE_BYTES, Machine

from ostraca_enclosure.adapters.nvme_drives import run_command
from ostraca_enclosure.drives import (
    FitSettings,
    FoundDrive,
    SelectionSettings,
    Traits,
    choose_drives,
    fitness,
)
from ostraca_enclosure.ports import InventoryError
from ostraca_fabric.model.inventory import DriveWear

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


def test_drive_is_described_in_full(machine: Machine) -> None:
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


def test_bytes_of_a_drive_that_are_no_text_hide_no_drive(machine: Machine) -> None:
    machine.drive()
    machine.drive("nvme1n1", nguid="1" * 32)
    (machine.root / "sys/devices/pci0000:00/nvme/nvme0/serial").write_bytes(b"\xffSN0\n")
    assert [each.serial for each in machine.drives.look()] == ["\ufffdSN0", "SN1"]


def test_drives_are_ordered_by_number_and_hot_plugged(machine: Machine) -> None:
    machine.drive("nvme10n1", nguid="a" * 32)
    machine.drive("nvme9n1", nguid="9" * 32)
    assert [each.name for each in machine.drives.look()] == ["nvme9n1", "nvme10n1"]
    machine.drive("nvme2n1", nguid="2" * 32)
    assert [each.name for each in machine.drives.look()] == ["nvme2n1", "nvme9n1", "nvme10n1"]


def test_namespace_of_another_enclosure_is_left_out(machine: Machine) -> None:
    machine.drive("nvme0n1", transport="tcp")
    machine.drive("nvme1n1", transport="rdma")
    machine.drive("nvme2n1")
    assert [each.name for each in machine.drives.look()] == ["nvme2n1"]


@pytest.mark.parametrize(
    ("transports", "found"), [(("pcie", "pcie"), 1), (("tcp", "tcp"), 0), (("pcie", "tcp"), 0)]
)
def test_all_controllers_of_a_drive_must_be_local(
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
def test_other_identifiers_replace_a_missing_nguid(
    machine: Machine, given: dict[str, str], nguid: str
) -> None:
    machine.drive(**given)
    assert only(machine).nguid == nguid
    assert only(machine).obstacles == ()


def test_named_drive_without_identity_uses_its_serial_number(machine: Machine) -> None:
    machine.drive(nguid="")
    machine.drive("nvme1n1", nguid="")
    first, second = machine.drives.look()
    assert first.nguid != second.nguid
    assert [each.nguid for each in machine.drives.look()] == [first.nguid, second.nguid]
    assert "name the drive with --drive" in first.obstacles[0].sentence
    named = choose_drives([first, second], SelectionSettings(("SN0",)), (), {})
    assert [each.is_wanted for each in named] == [True, False]


def test_a_mounted_drive_is_never_exported(machine: Machine) -> None:
    machine.drive()
    machine.put("proc/self/mountinfo", "30 22 259:0 / /srv rw - xfs /dev/nvme0n1 rw\n")
    assert obstacle(machine) == "mounted at /srv: unmount the drive if its data may be lost"
    assert only(machine).obstacles[0].is_final


def test_mounted_partitions_and_other_numbers_are_recognised(
    machine: Machine,
) -> None:
    machine.drive(nvme0n1p1__partition="1", nvme0n1p1__dev="259:77")
    for line in ("30 22 259:77 / /a rw - ext4 /dev/x rw", "31 22 0:44 / /b rw - btrfs /dev/nvme0n1p1 rw"):
        machine.put("proc/self/mountinfo", f"{line}\n")
        first, second = only(machine).obstacles
        assert "mounted at /" in first.sentence
        assert "partitions exist (nvme0n1p1)" in second.sentence


def test_swap_is_never_exported(machine: Machine) -> None:
    machine.drive()
    machine.put("proc/swaps", "Filename Type\n/dev/nvme0n1 partition 1 0 -2\n")
    assert obstacle(machine) == "in use as swap: `swapoff /dev/nvme0n1`"
    assert only(machine).obstacles[0].is_final


def test_holders_are_named(machine: Machine) -> None:
    machine.drive()
    (machine.roots.sys / "block/nvme0n1/holders/md127").mkdir()
    assert obstacle(machine).startswith("in use by md127 (md, LVM or device mapper)")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ro": "1"}, "the drive is read-only"),
        ({"queue__zoned": "host-managed"}, "a zoned drive (host-managed)"),
        ({"size": "0"}, "size 0"),
    ],
)
def test_unusable_drive_has_a_reason(machine: Machine, given: dict[str, str], said: str) -> None:
    machine.drive(**given)
    assert said in obstacle(machine)


def test_drive_in_exclusive_use_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.drive()
    opened = os.open

    def held(path: str | Path, flags: int, *more: int) -> int:
        if str(path).endswith("nvme0n1"):
            assert flags & os.O_EXCL
            raise OSError(errno.EBUSY, "busy")
        return opened(path, flags, *more)

    monkeypatch.setattr("ostraca_enclosure.adapters.nvme_drives.os.open", held)
    assert "in exclusive use by a program" in obstacle(machine)


def test_health_is_queried_at_intervals(machine: Machine) -> None:
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


def test_new_drive_under_an_old_name_is_queried_at_once(machine: Machine) -> None:
    machine.drive()
    only(machine)
    machine.put("sys/devices/pci0000:00/nvme/nvme0/serial", "OTHER\n")
    machine.smart["percent_used"] = 50
    wear = only(machine).wear
    assert wear is not None
    assert wear.percentage_used == 50


def test_drive_without_health_data_has_a_doubt(machine: Machine) -> None:
    machine.drive()
    machine.trouble = "nvme is missing: install nvme-cli"
    (doubt,) = fitness(only(machine), FitSettings()).doubts
    assert doubt == "health is unknown: nvme is missing: install nvme-cli"


def test_notations_of_other_nvme_releases_are_read(machine: Machine) -> None:
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
def test_missing_values_are_errors(machine: Machine, key: str) -> None:
    machine.drive()
    del machine.smart[key]
    drive = only(machine)
    assert drive.wear is None
    assert f"`nvme` does not report {key}" in drive.health_error


def test_present_format_is_read(machine: Machine) -> None:
    machine.drive()
    machine.namespace["flbas"] = 1
    machine.controller |= {"vwc": 7, "hmpre": 100, "ver": 0x10300}
    assert only(machine).traits == Traits((1, 3), True, True, 8, (4096, 512))


def test_missing_sysfs_is_an_error_but_no_drives_are_not(machine: Machine) -> None:
    assert machine.drives.look() == ()
    (machine.roots.sys / "block").rmdir()
    with pytest.raises(InventoryError, match="drives can't be listed"):
        machine.drives.look()


def test_failed_command_has_a_remedy() -> None:
    with pytest.raises(InventoryError, match="nvme-of-nobody is missing: install nvme-cli"):
        run_command(["nvme-of-nobody", "list"])
    with pytest.raises(InventoryError, match=r"`false x` failed \(1\)"):
        run_command(["false", "x"])
    assert run_command(["echo", "{}"]) == "{}\n"
