"""The README: its program is in the first screen, runs as it is, and prints what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ostraca_cli.tools.bench.fabric import running_fabric

PAGE = (Path(__file__).parents[2] / "README.md").read_text()
FIRST_SCREEN = 40


@pytest.mark.slow
def test_the_program_prints_what_the_page_shows(tmp_path: Path) -> None:
    ((program, printed),) = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert program in "\n".join(PAGE.splitlines()[:FIRST_SCREEN])
    with running_fabric(tmp_path / "fabric", "--capacity", "1GiB", "--dram", "64MiB") as fabric:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            env={**os.environ, "OSTRACA_AGENT": fabric.address},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
