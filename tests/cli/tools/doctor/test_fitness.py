"""``ostraca doctor drive``: fitness of a drive, in sentences and for programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.enclosure.adapters.machine import Machine

from ostraca_cli.program import main
from ostraca_cli.tools.doctor.fitness import find_drives, fitness_facts, fitness_lines, is_good
from ostraca_fabric.errors import UsageError


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.drive()
    machine.drive("nvme1n1", nvme1n1p1__partition="1", queue__logical_block_size="512")
    return machine


def test_a_drive_that_is_fit_is_explained(machine: Machine) -> None:
    (drive,) = find_drives(["SN0"], machine.drives)
    assert is_good(drive)
    assert list(fitness_lines(drive)) == [
        f"{machine.roots.dev}/nvme0n1: 3.5 TiB, logical blocks of 4096 bytes",
        "  drive        ACME 4T, serial SN0, fw 1.0",
        "  nguid        36344630528001050025384100000000",
        "  wear         3 % used, 419.1 TiB written; rated for 2.2 drive writes per day",
        "  health       100 % spare, 0 media errors, 35 °C",
        "  verdict      Fit and unused.",
    ]


def test_what_speaks_against_one_is_told_with_what_to_do(machine: Machine) -> None:
    machine.controller["vwc"] = 1
    (drive,) = find_drives([str(machine.roots.dev / "nvme1n1")], machine.drives)
    assert not is_good(drive)
    lines = "\n".join(fitness_lines(drive))
    assert "  in the way   partitions exist (nvme1n1p1)" in lines
    assert "  doubt        write cache is volatile" in lines
    assert "  advice       logical blocks have 512 bytes" in lines
    assert "only by name" in lines
    assert "only with --force" in lines
    told = fitness_facts(drive)
    assert (told["is_fit"], told["is_free"], len(told["doubts"])) == (False, False, 1)


def test_a_mounted_one_is_never_exported(machine: Machine) -> None:
    machine.put("proc/self/mountinfo", "30 22 259:0 / /srv rw - xfs /dev/nvme0n1 rw\n")
    (drive,) = find_drives(["nvme0n1"], machine.drives)
    assert (
        list(fitness_lines(drive))[-1] == "  verdict      An enclosure never exports the drive in this state."
    )


def test_a_machine_without_drives_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nvme0n1 is no NVMe drive .*: this machine has no NVMe drive$"):
        find_drives(["nvme0n1"], Machine(tmp_path).drives)


def test_one_that_is_not_there_is_named_beside_those_that_are(machine: Machine) -> None:
    with pytest.raises(UsageError, match=r"nvme9n1 is no NVMe drive of this machine.*nvme0n1, .*nvme1n1"):
        find_drives(["nvme9n1"], machine.drives)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["drive"], "takes NVMe drives, as /dev/nvme0n1"),
        (["drive", "nvme9n1", "--verify"], "takes NVMe drives, as /dev/nvme0n1"),
        (["drive", "/nowhere/nvme9n1"], "is no NVMe drive of this machine"),
        (["/tmp", "--force"], "--force goes with `ostraca doctor drive DEVICE`"),
    ],
)
def test_bad_usage_says_what_to_write(
    argv: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if not Path("/sys/block").exists():
        pytest.skip("no sysfs here")
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *argv]) == 2
    assert said in capsys.readouterr().err


def test_a_path_that_is_called_drive_is_still_a_path(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "drive").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("drive", "./drive"):
        assert main(["doctor", path]) == 2
        assert "holds no drives (*.img)" in capsys.readouterr().err
