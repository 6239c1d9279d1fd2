"""A daemon's own directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ostraca_cli.commands.serve.state_directory import RECORD_FILE, StateDirectory
from ostraca_fabric.errors import FormatError, MembershipError, UsageError
from ostraca_fabric.model.ids import FabricId, StartId


def test_two_daemons_never_share_a_directory_and_the_next_may_have_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state"
    with StateDirectory(path, "agent a"):
        assert path.stat().st_mode & 0o777 == 0o700
        with pytest.raises(MembershipError, match="another daemon uses"):
            StateDirectory(path, "agent a")
    StateDirectory(path, "agent a").close()


def test_a_directory_is_one_daemons_also_when_it_is_not_running(tmp_path: Path) -> None:
    StateDirectory(tmp_path, "agent a").close()
    with pytest.raises(UsageError, match="belongs to agent a, not to agent b"):
        StateDirectory(tmp_path, "agent b")
    StateDirectory(tmp_path, "agent a").close()  # and the refusal has left it unlocked


def test_a_directory_remembers_the_fabric_and_the_last_start_of_its_daemon(tmp_path: Path) -> None:
    fabric, other, start = FabricId(b"f" * 16), FabricId(b"o" * 16), StartId(b"s" * 16)
    with StateDirectory(tmp_path, "agent a") as state:
        assert (state.fabric, state.start) == (None, None)
        state.remember(fabric=fabric, start=start)
    with StateDirectory(tmp_path, "agent a") as state:
        assert (state.fabric, state.start) == (fabric, start)
        with pytest.raises(UsageError, match=f"in fabric {fabric.hex()}, not in {other.hex()}"):
            state.remember(fabric=other, start=start)
        state.remember(fabric=fabric, start=StartId(b"t" * 16))
    with StateDirectory(tmp_path, "agent a") as state:
        assert (state.fabric, state.start) == (fabric, StartId(b"t" * 16))


@pytest.mark.slow
def test_a_daemon_that_was_killed_leaves_its_directory_free(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from ostraca_cli.commands.serve.state_directory import StateDirectory\n"
        "kept = StateDirectory(Path(sys.argv[1]), 'agent a'); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(MembershipError):
            StateDirectory(tmp_path, "agent a")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        StateDirectory(tmp_path, "agent a").close()


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match="chmod go-w"):
        StateDirectory(tmp_path, "agent a")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is damaged"),
        ('{"version":1,"daemon":"agent a","fabric":"that of last week"}', "is damaged .*remove the file if"),
        ('{"version":1,"daemon":"agent a","start":"0123"}', "is damaged .*remove the file if"),
        ('{"version":2,"daemon":"agent a"}', "has version 2"),
    ],
)
def test_a_record_that_cannot_be_read_is_said(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / RECORD_FILE).write_text(content)
    with pytest.raises(FormatError, match=said):
        StateDirectory(tmp_path, "agent a")


def test_a_path_that_is_no_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MembershipError, match="unusable state directory"):
        StateDirectory(tmp_path / "file", "agent a")
