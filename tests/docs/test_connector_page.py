"""The page on tests of connectors: its program runs, and prints what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "contributing" / "test-a-connector.md").read_text()

pytestmark = pytest.mark.slow


def test_the_program_of_the_page_prints_what_the_page_says(tmp_path: Path) -> None:
    [(program, printed)] = re.findall(r"```python\n(.*?)```.*?```console\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
