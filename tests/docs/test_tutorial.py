"""The tutorial, word for word: what it says to type is typed, and what it says will be shown is shown.

Numbers may differ, and the fabric's directory is another one. Everything else has to match. What it says of
the demo is looked at where that is run, in ``tests/scenarios/demo``.
"""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.docs.shown import assert_equal, blocks, masked

FABRIC = "/tmp/fabric"

pytestmark = [pytest.mark.slow, pytest.mark.nixl]


def environment(directory: Path) -> dict[str, str]:
    """Return the environment of a terminal in which .venv is active: here, the interpreter that runs this."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "TMPDIR": str(directory), "COLUMNS": "100"}


@dataclass
class Terminals:
    """The reader's two terminals: in one the fabric runs, in the other everything else."""

    directory: Path
    fabric: subprocess.Popen[str] | None = None
    typed: list[str] = field(default_factory=list)

    def type(self, command: str, documented: list[str]) -> None:
        """Do what the reader does, and compare what is shown."""
        self.typed.append(command)
        if command == "source .venv/bin/activate":
            return  # `environment` is what that does
        if command.startswith("ostraca up"):
            self.press_ctrl_c()
            self._start(command, documented)
            return
        if command.startswith("rm "):
            self.press_ctrl_c()
        done = subprocess.run(
            ["bash", "-c", self._here(command)],
            cwd=self.directory,
            env=environment(self.directory),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, ""), command
        assert_equal(done.stdout, documented)

    def press_ctrl_c(self) -> None:
        """Stop the fabric, if it runs."""
        if self.fabric is not None:
            self.fabric.send_signal(signal.SIGINT)
            _, logged = self.fabric.communicate(timeout=30)
            assert self.fabric.returncode == 0, logged
            self.fabric = None

    def _start(self, command: str, documented: list[str]) -> None:
        """Start the fabric, and read until it has shown all documented lines.

        Only the ``ready:`` line goes to stdout. Streams and parts of the fabric log in no fixed order.
        """
        self.fabric = subprocess.Popen(
            ["bash", "-c", f"exec {self._here(command)}"],
            env=environment(self.directory),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.fabric.stdout is not None
        assert self.fabric.stderr is not None
        ready = [line for line in documented if line.startswith("ready:")]
        missing = Counter(masked([line for line in documented if line not in ready]))
        logged = []
        for line in self.fabric.stderr:
            logged.append(line)
            missing -= Counter(masked([line.replace(str(self.directory / "fabric"), FABRIC)]))
            if not missing:
                break
        assert not missing, "".join(logged)
        said = self.fabric.stdout.readline().replace(str(self.directory / "fabric"), FABRIC)
        assert masked([said]) == masked(ready)

    def _here(self, text: str) -> str:
        return text.replace(FABRIC, str(self.directory / "fabric"))

    def save(self, name: str, lines: tuple[str, ...]) -> None:
        """Save a program of the tutorial under its name."""
        (self.directory / name).write_text(self._here("\n".join(lines) + "\n"))


@pytest.fixture
def terminals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminals]:
    """Return terminals in a directory with a short path: a socket's path has at most 107 bytes."""
    opened = Terminals(tmp_path_factory.mktemp("d"))
    yield opened
    if opened.fabric is not None:
        opened.fabric.kill()
        opened.fabric.communicate()


def test_everything_after_the_demo_works_as_written(terminals: Terminals) -> None:
    for block in blocks():
        if block.language == "python":
            name = re.search(r"`(\w+\.py)`", block.before)
            assert name, "the prose says under which name to save a program"
            terminals.save(name[1], block.lines)
        elif block.language == "console":
            for command, documented in block.commands():
                if command != "make demo":
                    terminals.type(command, documented)
    assert terminals.typed.count("python pages.py") == 3
    assert terminals.fabric is None
    assert not (terminals.directory / "fabric").exists()
