"""The page on what to keep: its program is run, and prints what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ostraca_cli.tools.bench.fabric import running_fabric

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "volumes" / "say-what-to-keep.md").read_text()

pytestmark = pytest.mark.slow


def test_the_program_of_the_page_prints_what_the_page_says(tmp_path: Path) -> None:
    found = re.findall(
        r"`(\w+\.py)`.*?```python\n(.*?)```\n\n```console\n\$ python \1\n(.*?)```", PAGE, re.DOTALL
    )
    ((name, program, printed),) = found
    with running_fabric(tmp_path / "fabric", "--capacity", "1GiB", "--dram", "64MiB") as fabric:
        (tmp_path / name).write_text(program.replace("unix:///tmp/fabric/agent-0.sock", fabric.address))
        done = subprocess.run(
            [sys.executable, "-X", "dev", "-W", "error", name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
