"""Which drives are exported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ostraca_enclosure.choice import Asked, Choice, choose, missing
from ostraca_enclosure.drives import FoundDrive, Obstacle
from ostraca_enclosure.fit import FitSettings

FIT = FitSettings(size_bytes_least=1)
ASKED = Asked(fit=FIT)
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
        Obstacle("it is mounted at /: unmount it", is_final=True),
    ),
)
OLD = replace(FREE, name="nvme3n1", device="/dev/nvme3n1", nguid="4" * 32, silence="it says nothing")


def wanted(*drives: FoundDrive, asked: Asked = ASKED, taken: frozenset[str] = frozenset()) -> list[str]:
    return [each.drive.name for each in choose(drives, asked, taken, {}) if each.is_wanted]


def why(drive: FoundDrive, asked: Asked = ASKED, taken: frozenset[str] = frozenset()) -> str:
    (choice,) = choose([drive], asked, taken, {})
    return choice.why_not


def test_by_default_every_drive_that_is_fit_and_free_is_exported() -> None:
    assert choose([FREE], ASKED, (), {}) == (Choice(FREE, is_wanted=True),)
    assert wanted(FREE, USED, MOUNTED, OLD) == ["nvme0n1"]


def test_each_that_is_not_says_why_and_what_to_do() -> None:
    assert why(USED) == "it is partitioned: wipe it"
    assert why(MOUNTED) == "it is mounted at /: unmount it"
    assert why(OLD) == "its health is not known: it says nothing; or export it as it is, with --force"
    assert "name it with --drive" in why(FREE, replace(ASKED, drives=("nvme9n1",)))
    assert "nothing tells it from other drives" in why(replace(FREE, nguid=""))


@pytest.mark.parametrize("name", ["nvme1n1", "/dev/nvme1n1", "2" * 32, "S1"])
def test_a_drive_that_is_named_is_exported_in_spite_of_what_may_be_on_it(name: str) -> None:
    assert wanted(FREE, USED, asked=replace(ASKED, drives=(name,))) == ["nvme1n1"]


def test_a_mounted_one_never_is() -> None:
    asked = replace(ASKED, drives=("nvme2n1",), is_forced=True)
    assert wanted(MOUNTED, asked=asked, taken=frozenset({MOUNTED.nguid})) == []


def test_one_that_is_not_fit_is_exported_by_force_alone() -> None:
    assert wanted(OLD, asked=replace(ASKED, drives=("nvme3n1",))) == []
    assert wanted(OLD, asked=replace(ASKED, is_forced=True)) == ["nvme3n1"]


def test_one_that_was_exported_before_stays_so_whatever_became_of_it() -> None:
    taken = frozenset({OLD.nguid, USED.nguid})
    assert wanted(FREE, OLD, USED, taken=taken) == ["nvme0n1", "nvme3n1", "nvme1n1"]
    assert choose([OLD], ASKED, taken, {})[0].doubts, "and what is wrong with it is told"


def test_twins_are_not_exported_but_for_the_one_that_is() -> None:
    twin = replace(FREE, name="nvme7n1", device="/dev/nvme7n1")
    assert wanted(FREE, twin) == []
    assert "take one of them out" in choose([FREE, twin], ASKED, (), {})[0].why_not
    kept = choose([FREE, twin], ASKED, {FREE.nguid}, {FREE.nguid: FREE.device})
    assert [each.drive for each in kept if each.is_wanted] == [FREE]


def test_what_was_named_and_is_not_there_is_told() -> None:
    assert missing([FREE, USED], replace(ASKED, drives=("nvme0n1", "S1", "gone"))) == ("gone",)


def test_what_a_drive_says_of_itself_names_no_other() -> None:
    assert not replace(FREE, serial="", nguid="").is_called("")
