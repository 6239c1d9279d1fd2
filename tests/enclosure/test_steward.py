"""The steward's turns, over nvmet as it behaves and drives that come, go and age."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.enclosure.exporter_contract import ALICE, BOB, NQN, OTHER, SECRET
from tests.enclosure.simulated_nvmet import SimulatedNvmet

from ostraca_enclosure.adapters.made_here import MadeHere
from ostraca_enclosure.adapters.nvmet import NvmetExporter
from ostraca_enclosure.choice import Asked
from ostraca_enclosure.drives import FoundDrive, Obstacle
from ostraca_enclosure.fit import FitSettings
from ostraca_enclosure.plan import HostSecrets
from ostraca_enclosure.ports import InventoryError
from ostraca_enclosure.steward import Place, Steward, Turn
from ostraca_enclosure.taken import Taken
from ostraca_fabric.errors import FormatError
from ostraca_fabric.ids import EnclosureId, StartId
from ostraca_fabric.inventory import DriveReport, EnclosureReport
from ostraca_fabric.target import parse_controller

TCP = parse_controller("tcp://192.0.2.1:4420")
PLACE = Place(EnclosureId("shelf-1"), StartId(b"s" * 16), NQN, (TCP,))
ASKED = Asked(fit=FitSettings(size_bytes_least=1))


class Drives:
    """What the machine has."""

    def __init__(self, *found: FoundDrive) -> None:
        self.found = found
        self.trouble = ""

    def look(self) -> tuple[FoundDrive, ...]:
        if self.trouble:
            raise InventoryError(self.trouble)
        return self.found


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = SimulatedNvmet(folder / "nvmet")
        self.state = folder / "state"
        self.state.mkdir()
        self.drives = Drives(self.drive(0), self.drive(1))
        self.asked = ASKED
        self.hosts = {ALICE: HostSecrets(SECRET)}
        self.steward = self.started()

    def drive(self, number: int) -> FoundDrive:
        device = self.folder / f"nvme{number}n1"
        device.write_bytes(b"")
        return FoundDrive(device.name, str(device), f"{number + 1:032x}", 4096, 4096)

    def started(self, boot: str = "boot-1") -> Steward:
        """Return the steward of another start of the daemon."""
        exporter = NvmetExporter(self.tree, NQN, MadeHere(self.state, boot))
        steward = Steward(PLACE, self.asked, self.drives, exporter, Taken(self.state), lambda: 1.5)
        steward.use_hosts(self.hosts)
        return steward

    def exported(self) -> list[str]:
        at = f"subsystems/{NQN}/namespaces"
        return sorted(Path(self.tree.read(f"{at}/{each}/device_path")).name for each in self.tree.names(at))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_first_turn_exports_all_and_says_so_and_the_second_has_nothing_to_do(rig: Rig) -> None:
    turn = rig.steward.turn()
    assert turn.is_known
    assert turn.is_as_wanted
    assert not turn.failed
    assert [each.split()[0] for each in turn.done] == ["begin", "let", "offer", "offer", "listen"]
    changes = rig.tree.changes
    assert rig.steward.turn() == Turn(
        EnclosureReport(
            PLACE.id,
            PLACE.start,
            NQN,
            (TCP,),
            tuple(
                DriveReport(each.name, each.nguid, 4096, 4096, is_exported=True) for each in rig.drives.found
            ),
            (ALICE,),
            "2 of 2 drives exported to 1 host at tcp://192.0.2.1:4420",
            1.5,
        ),
        is_known=True,
        is_as_wanted=True,
    )
    assert rig.tree.changes == changes


def test_another_start_finds_what_is_exported_and_changes_nothing(rig: Rig) -> None:
    rig.steward.turn()
    changes = rig.tree.changes
    assert rig.started().turn().done == ()
    assert rig.tree.changes == changes


def test_drives_that_can_not_be_looked_for_stay_exported(rig: Rig) -> None:
    rig.steward.turn()
    rig.drives.trouble = "sysfs is gone"
    for steward in (rig.steward, rig.started()):
        turn = steward.turn()
        assert turn.failed == ("its drives can't be looked for: sysfs is gone",)
        assert not turn.is_as_wanted
        assert rig.exported() == ["nvme0n1", "nvme1n1"]


def test_a_drive_that_was_pulled_is_taken_back_and_comes_back(rig: Rig) -> None:
    rig.steward.turn()
    first, second = rig.drives.found
    rig.drives.found = (first,)
    assert rig.steward.turn().is_as_wanted
    assert rig.exported() == ["nvme0n1"]
    rig.drives.found = (first, replace(second, silence="it says nothing"))
    rig.steward.turn()
    assert rig.exported() == ["nvme0n1", "nvme1n1"], "it was exported before"


def test_after_a_boot_drives_that_have_aged_meanwhile_come_back(rig: Rig) -> None:
    rig.steward.turn()
    rig.drives.found = tuple(
        replace(each, silence="it says nothing", obstacles=(Obstacle("it is partitioned: wipe it"),))
        for each in rig.drives.found
    )
    rig.tree = SimulatedNvmet(rig.folder / "nvmet-2")
    turn = rig.started("boot-2").turn()
    assert rig.exported() == ["nvme0n1", "nvme1n1"]
    assert turn.report.drives[0].doubts == ("its health is not known: it says nothing",)


def test_one_that_was_named_no_more_is_forgotten(rig: Rig) -> None:
    rig.steward.turn()
    rig.asked = replace(ASKED, drives=("nvme0n1", "gone"))
    turn = rig.started().turn()
    assert rig.exported() == ["nvme0n1"]
    assert turn.not_found == ("gone",)
    assert Taken(rig.state).nguids == {rig.drives.found[0].nguid}
    assert "not found, though named: gone" in turn.report.sentence


def test_a_mounted_drive_is_taken_back(rig: Rig) -> None:
    rig.steward.turn()
    first, second = rig.drives.found
    rig.drives.found = (
        first,
        replace(second, obstacles=(Obstacle("it is mounted: unmount it", is_final=True),)),
    )
    turn = rig.steward.turn()
    assert rig.exported() == ["nvme0n1"]
    assert turn.report.drives[1].why_not == "it is mounted: unmount it"


def test_a_step_that_fails_is_told_and_the_others_are_done_and_it_is_tried_again(rig: Rig) -> None:
    Path(rig.drives.found[0].device).unlink()
    turn = rig.steward.turn()
    assert [each for each in turn.report.drives if each.is_exported] == [turn.report.drives[1]]
    assert len(turn.failed) == 1
    assert "could not offer" in turn.failed[0]
    assert not turn.is_as_wanted
    Path(rig.drives.found[0].device).write_bytes(b"")
    assert rig.steward.turn().is_as_wanted
    assert rig.exported() == ["nvme0n1", "nvme1n1"]


def test_where_hosts_can_not_be_let_in_as_they_should_nothing_is_shown(rig: Rig) -> None:
    rig.tree = SimulatedNvmet(rig.folder / "nvmet-2", has_auth=False)
    turn = rig.started().turn()
    assert "CONFIG_NVME_TARGET_AUTH" in turn.failed[0]
    assert turn.failed[1] == "3 further steps wait for that"
    assert rig.exported() == []


def test_changed_hosts_are_let_in_with_the_next_turn(rig: Rig) -> None:
    rig.steward.turn()
    rig.steward.use_hosts({BOB: HostSecrets(OTHER)})
    turn = rig.steward.turn()
    assert turn.done == (
        f"let {BOB} in",
        f"shut {ALICE} out (what it has connected stays until it disconnects)",
    )
    assert turn.report.hosts == (BOB,)
    assert SECRET not in turn.report.sentence + repr(turn)


def test_a_state_directory_that_can_not_be_written_takes_no_new_drive(rig: Rig) -> None:
    rig.steward.turn()
    rig.drives.found = (*rig.drives.found, rig.drive(2))
    (rig.state / "taken.json.partial").mkdir()
    turn = rig.steward.turn()
    assert "can't be remembered" in turn.failed[0]
    assert rig.exported() == ["nvme0n1", "nvme1n1"]


def test_what_is_exported_can_be_withdrawn(rig: Rig) -> None:
    rig.steward.turn()
    assert rig.steward.withdraw() == ()
    assert rig.tree.shown() == []


def test_without_nvmet_a_turn_says_so_and_knows_nothing(rig: Rig) -> None:
    rig.tree.root = rig.folder / "nowhere"
    turn = rig.steward.turn()
    assert not turn.is_known
    assert "modprobe nvmet" in turn.report.sentence


def test_a_damaged_memory_of_what_was_exported_is_told(rig: Rig) -> None:
    (rig.state / "taken.json").write_text("[]")
    with pytest.raises(FormatError, match="is damaged"):
        Taken(rig.state)
