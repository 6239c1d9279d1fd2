"""Which drives are exported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ostraca_enclosure.drives import (
    DriveChoice,
    FitSettings,
    FoundDrive,
    Obstacle,
    SelectionSettings,
    choose_drives,
    missing_names,
)

FIT = FitSettings(size_bytes_min=1)
ASKED = SelectionSettings(fit=FIT)
FREE = FoundDrive("nvme0n1", "/dev/nvme0n1", "1" * 32, 4096, 4096, serial="S0")
USED = replace(FREE, name="nvme1n1", device="/dev/nvme1n1", nguid="2" * 32, serial="S1")
USED = replace(USED, obstacles=(Obstacle("it is partitioned: wipe it"),))
MOUNTED = replace(
    USED,
    name="nvme2n1",
    device="/dev/nvme2n1",
    nguid="3" * 32,
    obstacles=(
        Obstacle("it is partitioned: wipe it"),
        Obstacle("mounted at /: unmount it", is_final=True),
    ),
)
OLD = replace(FREE, name="nvme3n1", device="/dev/nvme3n1", nguid="4" * 32, health_error="it says nothing")


def wanted(
    *drives: FoundDrive, asked: SelectionSettings = ASKED, taken: frozenset[str] = frozenset()
) -> list[str]:
    return [each.drive.name for each in choose_drives(drives, asked, taken, {}) if each.is_wanted]


def why(drive: FoundDrive, asked: SelectionSettings = ASKED, taken: frozenset[str] = frozenset()) -> str:
    (choice,) = choose_drives([drive], asked, taken, {})
    return choice.why_not


def test_fit_and_unused_drives_are_exported_by_default() -> None:
    assert choose_drives([FREE], ASKED, (), {}) == (DriveChoice(FREE, is_wanted=True),)
    assert wanted(FREE, USED, MOUNTED, OLD) == ["nvme0n1"]


def test_unexported_drives_have_reason_and_remedy() -> None:
    assert why(USED) == "it is partitioned: wipe it"
    assert why(MOUNTED) == "mounted at /: unmount it"
    assert why(OLD) == "health is unknown: it says nothing; or export the drive anyway, with --force"
    assert "name the drive with --drive" in why(FREE, replace(ASKED, drives=("nvme9n1",)))
    assert "no identifier" in why(replace(FREE, nguid=""))


@pytest.mark.parametrize("name", ["nvme1n1", "/dev/nvme1n1", "2" * 32, "S1"])
def test_named_drive_is_exported_despite_contents(name: str) -> None:
    assert wanted(FREE, USED, asked=replace(ASKED, drives=(name,))) == ["nvme1n1"]


def test_mounted_drive_is_never_selected() -> None:
    asked = replace(ASKED, drives=("nvme2n1",), is_forced=True)
    assert wanted(MOUNTED, asked=asked, taken=frozenset({MOUNTED.nguid})) == []


def test_unfit_drive_is_exported_only_by_force() -> None:
    assert wanted(OLD, asked=replace(ASKED, drives=("nvme3n1",))) == []
    assert wanted(OLD, asked=replace(ASKED, is_forced=True)) == ["nvme3n1"]


def test_earlier_export_stays_exported() -> None:
    taken = frozenset({OLD.nguid, USED.nguid})
    assert wanted(FREE, OLD, USED, taken=taken) == ["nvme0n1", "nvme3n1", "nvme1n1"]
    assert choose_drives([OLD], ASKED, taken, {})[0].doubts, "and what is wrong with it is told"


def test_twins_are_refused_except_for_a_present_export() -> None:
    twin = replace(FREE, name="nvme7n1", device="/dev/nvme7n1")
    assert wanted(FREE, twin) == []
    assert "remove one of the two drives" in choose_drives([FREE, twin], ASKED, (), {})[0].why_not
    kept = choose_drives([FREE, twin], ASKED, {FREE.nguid}, {FREE.nguid: FREE.device})
    assert [each.drive for each in kept if each.is_wanted] == [FREE]


def test_missing_named_drives_are_listed() -> None:
    assert missing_names([FREE, USED], replace(ASKED, drives=("nvme0n1", "S1", "gone"))) == ("gone",)


def test_identifiers_of_a_drive_name_no_other_drive() -> None:
    assert not replace(FREE, serial="", nguid="").is_called("")
