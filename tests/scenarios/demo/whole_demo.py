"""`make demo` with a toy model, from beginning to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class WholeDemo:
    """Output and leftovers of the demo."""

    returncode: int
    shown: str
    errors: str
    left: tuple[str, ...]
    """Files in the temporary directory, also the target of the pictures."""


def whole_demo() -> WholeDemo:
    """Run the demo."""
    with tempfile.TemporaryDirectory(prefix="d") as directory:
        # Not .venv, which may not be there, but this interpreter.
        variables = [
            f"BIN={Path(sys.executable).parent}",
            "READY=",
            f"DEMO_ARGS=--quick --out {directory}/out",
        ]
        with subprocess.Popen(
            ["make", "demo", *variables],
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": directory, "COLUMNS": "100"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as make:
            try:
                shown, errors = make.communicate(timeout=100)
            finally:
                if make.poll() is None:
                    os.killpg(make.pid, signal.SIGTERM)  # the demo too, which ends its processes then
        found = sorted(Path(directory).rglob("*"))
        left = tuple(str(path.relative_to(directory)) for path in found)
        return WholeDemo(make.returncode, shown, errors, left)
