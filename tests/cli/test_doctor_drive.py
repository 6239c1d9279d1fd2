"""``ostraca doctor drive``: whether a drive is fit, in sentences and for programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.enclosure.machine import Machine

from ostraca.cli.doctor.fitness import fitness_lines, fitness_told, is_good, look_at
from ostraca.cli.program import main
from ostraca_fabric.errors import UsageError


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.drive()
    machine.drive("nvme1n1", nvme1n1p1__partition="1", queue__logical_block_size="512")
    return machine


def test_a_drive_that_is_fit_is_explained(machine: Machine) -> None:
    (drive,) = look_at(["SN0"], machine.drives)
    assert is_good(drive)
    assert list(fitness_lines(drive)) == [
        f"{machine.roots.dev}/nvme0n1: 3.5 TiB, logical blocks of 4096 bytes",
        "  drive        ACME 4T, serial SN0, fw 1.0",
        "  nguid        36344630528001050025384100000000",
        "  wear         3 % used, 419.1 TiB written; by that it bears 2.2 writes of itself a day",
        "  health       100 % spare, 0 media errors, 35 °C",
        "  verdict      It is fit, and nobody uses it.",
    ]


def test_what_speaks_against_one_is_told_with_what_to_do(machine: Machine) -> None:
    machine.controller["vwc"] = 1
    (drive,) = look_at([str(machine.roots.dev / "nvme1n1")], machine.drives)
    assert not is_good(drive)
    lines = "\n".join(fitness_lines(drive))
    assert "  in the way   it is partitioned (nvme1n1p1)" in lines
    assert "  doubt        its write cache is volatile" in lines
    assert "  advice       its logical blocks have 512 bytes" in lines
    assert "only when it is named" in lines
    assert "with --force alone" in lines
    told = fitness_told(drive)
    assert (told["is_fit"], told["is_free"], len(told["doubts"])) == (False, False, 1)


def test_a_mounted_one_is_never_exported(machine: Machine) -> None:
    machine.put("proc/self/mountinfo", "30 22 259:0 / /srv rw - xfs /dev/nvme0n1 rw\n")
    (drive,) = look_at(["nvme0n1"], machine.drives)
    assert list(fitness_lines(drive))[-1] == "  verdict      An enclosure never exports it so."


def test_one_that_is_not_there_is_named_beside_those_that_are(machine: Machine) -> None:
    with pytest.raises(UsageError, match=r"nvme9n1 is no NVMe drive of this machine.*nvme0n1, .*nvme1n1"):
        look_at(["nvme9n1"], machine.drives)


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
