"""The page on event loops: its programs are run, and print what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ostraca_cli.tools.bench.fabric import running_fabric

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "event-loops.md").read_text()
PROGRAMS = re.findall(
    r"`(\w+\.py)`.*?```python\n(.*?)```\n\n```console\n\$ python \1\n(.*?)```", PAGE, re.DOTALL
)

pytestmark = pytest.mark.slow


def test_every_program_of_the_page_prints_what_the_page_says(tmp_path: Path) -> None:
    assert [name for name, _, _ in PROGRAMS] == ["submit.py", "awaiting.py"]
    assert PAGE.count("```python") == len(PROGRAMS)
    with running_fabric(tmp_path / "fabric", "--capacity", "1GiB", "--dram", "64MiB") as fabric:
        for name, program, printed in PROGRAMS:
            here = program.replace("unix:///tmp/fabric/agent-0.sock", fabric.address)
            (tmp_path / name).write_text(here)
            done = subprocess.run(
                [sys.executable, "-W", "error", name],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            assert (done.returncode, done.stdout, done.stderr) == (0, printed, ""), name
