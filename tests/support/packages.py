"""Debian packages for long tests, and the reason where a machine cannot run such a test.

Programs are installed into the machine. Kernels and sources are only unpacked, into a directory of the test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

NOT_HERE = 77
"""Exit code of a run that this machine cannot do; test harnesses take this code for *skipped*."""

_APT_S = 900.0
_MORE_PROGRAMS = "/usr/sbin:/sbin"


class NotHereError(Exception):
    """This machine can't run the test; the message says why."""


def find_program(name: str) -> str | None:
    """Return the path of a program, also of one that only root has on PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_MORE_PROGRAMS}")


def install_programs(packages: Mapping[str, str]) -> None:
    """Install the package of each missing program. Raises NotHereError."""
    missing = sorted({package for program, package in packages.items() if not find_program(program)})
    if missing:
        print(f"installing {', '.join(missing)}", flush=True)
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)


def run(*words: str, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run a command of the package manager and return its output. Raises NotHereError."""
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=_APT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotHereError(f"`{' '.join(words)}`: {error}") from error
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()
        raise NotHereError(f"`{' '.join(words)}` failed: {reason[-1] if reason else done.returncode}")
    return done.stdout
