"""Units for systemd: accepted by systemd, hardened, with commands and settings that the daemons accept."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "dpu_agent/systemd"
PAGE = (ROOT / "docs/howto/install-on-a-dpu.md").read_text("utf-8")
EXPOSURE_MAX = {"agent": 35, "enclosure": 30, "admin": 20}
"""Tenths of systemd's measure of exposure, from 0 (none) to 100."""

DAEMONS = tuple(EXPOSURE_MAX)
HARDENING = {
    "NoNewPrivileges=yes",
    "ProtectSystem=strict",
    "RestrictNamespaces=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallFilter=@system-service",
}
needs_systemd = pytest.mark.skipif(
    not shutil.which("systemd-analyze"),
    reason="systemd-analyze, of Debian's package systemd, is not installed",
)


def lines_of(daemon: str) -> list[str]:
    return (UNITS / f"ostraca-{daemon}.service").read_text("utf-8").splitlines()


def command_of(daemon: str) -> list[str]:
    [line] = [line for line in lines_of(daemon) if line.startswith("ExecStart=")]
    return line.removeprefix("ExecStart=").split()


@pytest.fixture
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Copy a unit, with a program that this machine has."""
    path = tmp_path / f"ostraca-{request.param}.service"
    path.write_text("\n".join(lines_of(request.param)).replace("/opt/ostraca/bin/ostraca", "/bin/true"))
    return path


@needs_systemd
@pytest.mark.parametrize("unit", DAEMONS, indirect=True)
def test_systemd_accepts_a_unit_without_a_warning(unit: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if "ostraca" in line]) == (0, [])


@needs_systemd
@pytest.mark.parametrize(("unit", "most"), EXPOSURE_MAX.items(), indirect=["unit"])
def test_a_unit_is_exposed_no_more_than_its_daemon_needs(unit: Path, most: int) -> None:
    command = [
        "systemd-analyze",
        "security",
        "--offline=true",
        "--no-pager",
        f"--threshold={most}",
        str(unit),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:]


@pytest.mark.parametrize("daemon", DAEMONS)
def test_a_unit_notifies_reloads_and_restarts(daemon: str) -> None:
    lines = set(lines_of(daemon))
    assert {"Type=notify", "ExecReload=/bin/kill -HUP $MAINPID", "Restart=on-failure"} <= lines
    assert any(line.startswith("WatchdogSec=") for line in lines)
    assert lines >= HARDENING


@pytest.mark.parametrize("daemon", DAEMONS)
def test_a_daemon_accepts_the_units_command_with_the_settings_of_the_page(
    daemon: str, tmp_path: Path
) -> None:
    command = command_of(daemon)
    assert command[-2:] == ["--settings", f"/etc/ostraca/{daemon}.toml"]
    match = re.search(rf"`{daemon}\.toml`.*?```toml\n(.*?)```", PAGE, re.DOTALL)
    assert match, f"the page shows {daemon}.toml"
    settings = tmp_path / f"{daemon}.toml"
    settings.write_text(match[1])
    done = subprocess.run(
        [sys.executable, "-m", "ostraca_cli", *command[1:-1], str(settings), "--print-settings"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"etcd-2:2379"' in done.stdout


def test_the_page_names_every_file() -> None:
    assert {path.stem for path in UNITS.glob("*.service")} == {f"ostraca-{daemon}" for daemon in DAEMONS}
    for path in re.findall(r"[\w/-]+/[\w.-]+\.(?:lock|sysusers)", PAGE):
        if not path.startswith("/"):
            assert (ROOT / path).exists(), path
