"""The contracts of imports between layers, as in ``make check``."""

from __future__ import annotations

import subprocess
import sys

from scripts.structure.sources import ROOT

PROGRAM = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"


def test_every_import_contract_is_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout
