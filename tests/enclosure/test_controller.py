"""The controller's turns, over nvmet as it behaves and drives that come, go and age."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.enclosure.adapters.exporter_contract import ALICE, BOB, NQN, OTHER, SECRET
from tests.enclosure.adapters.simulated_nvmet import SimulatedNvmet

from ostraca_enclosure.adapters.nvmet import NvmetExporter
from ostraca_enclosure.controller import EnclosureIdentity, ExportController, Turn
from ostraca_enclosure.drives import FitSettings, FoundDrive, Obstacle, SelectionSettings
from ostraca_enclosure.plan import HostSecrets
from ostraca_enclosure.ports import InventoryError
from ostraca_enclosure.state_files import ExportHistory, NvmetRecord
from ostraca_fabric.errors import FormatError
from ostraca_fabric.model.ids import EnclosureId, StartId
from ostraca_fabric.model.inventory import DriveReport, EnclosureReport
from ostraca_fabric.model.target import parse_controller

TCP = parse_controller("tcp://192.0.2.1:4420")
PLACE = EnclosureIdentity(EnclosureId("shelf-1"), StartId(b"s" * 16), NQN, (TCP,))
ASKED = SelectionSettings(fit=FitSettings(size_bytes_min=1))


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
        self.controller = self.started()

    def drive(self, number: int) -> FoundDrive:
        device = self.folder / f"nvme{number}n1"
        device.write_bytes(b"")
        return FoundDrive(device.name, str(device), f"{number + 1:032x}", 4096, 4096)

    def started(self, boot: str = "boot-1") -> ExportController:
        """Return the controller of another start of the daemon."""
        exporter = NvmetExporter(self.tree, NQN, NvmetRecord(self.state, boot))
        controller = ExportController(
            PLACE, self.asked, self.drives, exporter, ExportHistory(self.state), lambda: 1.5
        )
        controller.use_hosts(self.hosts)
        return controller

    def exported(self) -> list[str]:
        at = f"subsystems/{NQN}/namespaces"
        return sorted(Path(self.tree.read(f"{at}/{each}/device_path")).name for each in self.tree.names(at))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_first_turn_exports_all_and_the_second_changes_nothing(rig: Rig) -> None:
    turn = rig.controller.turn()
    assert turn.is_known
    assert turn.is_as_wanted
    assert not turn.failed
    assert [each.split()[0] for each in turn.done] == ["create", "admit", "export", "export", "listen"]
    changes = rig.tree.changes
    assert rig.controller.turn() == Turn(
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


def test_restart_changes_nothing(rig: Rig) -> None:
    rig.controller.turn()
    changes = rig.tree.changes
    assert rig.started().turn().done == ()
    assert rig.tree.changes == changes


def test_exports_stay_if_drives_can_not_be_observed(rig: Rig) -> None:
    rig.controller.turn()
    rig.drives.trouble = "sysfs is gone"
    for controller in (rig.controller, rig.started()):
        turn = controller.turn()
        assert turn.failed == ("drives can't be observed: sysfs is gone",)
        assert not turn.is_as_wanted
        assert rig.exported() == ["nvme0n1", "nvme1n1"]


def test_pulled_drive_is_withdrawn_and_returns(rig: Rig) -> None:
    rig.controller.turn()
    first, second = rig.drives.found
    rig.drives.found = (first,)
    assert rig.controller.turn().is_as_wanted
    assert rig.exported() == ["nvme0n1"]
    rig.drives.found = (first, replace(second, health_error="it says nothing"))
    rig.controller.turn()
    assert rig.exported() == ["nvme0n1", "nvme1n1"], "it was exported before"


def test_aged_drives_return_after_a_boot(rig: Rig) -> None:
    rig.controller.turn()
    rig.drives.found = tuple(
        replace(each, health_error="it says nothing", obstacles=(Obstacle("it is partitioned: wipe it"),))
        for each in rig.drives.found
    )
    rig.tree = SimulatedNvmet(rig.folder / "nvmet-2")
    turn = rig.started("boot-2").turn()
    assert rig.exported() == ["nvme0n1", "nvme1n1"]
    assert turn.report.drives[0].doubts == ("health is unknown: it says nothing",)


def test_unnamed_drive_is_forgotten(rig: Rig) -> None:
    rig.controller.turn()
    rig.asked = replace(ASKED, drives=("nvme0n1", "gone"))
    turn = rig.started().turn()
    assert rig.exported() == ["nvme0n1"]
    assert turn.not_found == ("gone",)
    assert ExportHistory(rig.state).nguids == {rig.drives.found[0].nguid}
    assert "named, not found: gone" in turn.report.sentence


def test_mounted_drive_is_withdrawn(rig: Rig) -> None:
    rig.controller.turn()
    first, second = rig.drives.found
    rig.drives.found = (
        first,
        replace(second, obstacles=(Obstacle("it is mounted: unmount it", is_final=True),)),
    )
    turn = rig.controller.turn()
    assert rig.exported() == ["nvme0n1"]
    assert turn.report.drives[1].why_not == "it is mounted: unmount it"


def test_failed_step_is_reported_and_retried(rig: Rig) -> None:
    Path(rig.drives.found[0].device).unlink()
    turn = rig.controller.turn()
    assert [each for each in turn.report.drives if each.is_exported] == [turn.report.drives[1]]
    assert len(turn.failed) == 1
    assert "can't export" in turn.failed[0]
    assert not turn.is_as_wanted
    Path(rig.drives.found[0].device).write_bytes(b"")
    assert rig.controller.turn().is_as_wanted
    assert rig.exported() == ["nvme0n1", "nvme1n1"]


def test_no_drive_is_exported_if_admission_fails(rig: Rig) -> None:
    rig.tree = SimulatedNvmet(rig.folder / "nvmet-2", has_auth=False)
    turn = rig.started().turn()
    assert "CONFIG_NVME_TARGET_AUTH" in turn.failed[0]
    assert turn.failed[1] == "3 further steps skipped"
    assert rig.exported() == []


def test_changed_hosts_are_admitted_in_the_next_turn(rig: Rig) -> None:
    rig.controller.turn()
    rig.controller.use_hosts({BOB: HostSecrets(OTHER)})
    turn = rig.controller.turn()
    assert turn.done == (
        f"admit {BOB}",
        f"exclude {ALICE} (present connections stay until the host disconnects)",
    )
    assert turn.report.hosts == (BOB,)
    assert SECRET not in turn.report.sentence + repr(turn)


def test_unwritable_state_directory_blocks_new_exports(rig: Rig) -> None:
    rig.controller.turn()
    rig.drives.found = (*rig.drives.found, rig.drive(2))
    (rig.state / "export_history.json.partial").mkdir()
    turn = rig.controller.turn()
    assert "can't be written" in turn.failed[0]
    assert rig.exported() == ["nvme0n1", "nvme1n1"]


def test_exports_can_be_withdrawn(rig: Rig) -> None:
    rig.controller.turn()
    assert rig.controller.withdraw() == ()
    assert rig.tree.shown() == []


def test_missing_nvmet_is_reported(rig: Rig) -> None:
    rig.tree.root = rig.folder / "nowhere"
    turn = rig.controller.turn()
    assert not turn.is_known
    assert "modprobe nvmet" in turn.report.sentence


def test_damaged_export_history_is_reported(rig: Rig) -> None:
    (rig.state / "export_history.json").write_text("[]")
    with pytest.raises(FormatError, match="is damaged"):
        ExportHistory(rig.state)
