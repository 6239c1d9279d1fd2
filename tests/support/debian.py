"""Programs of Debian packages, unpacked beside the tests' other caches and never installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_WITHIN_S = 100


def program(name: str, package: str) -> Path:
    """Return an executable of this machine, or of the newest package that apt offers.

    Skips the test where neither is at hand.
    """
    if found := shutil.which(name):
        return Path(found)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ostraca-tests" / package
    if not (folder / "usr").is_dir():
        _unpack(package, folder)
    return folder / "usr" / "bin" / name


def _unpack(package: str, folder: Path) -> None:
    """Download a package into *folder*, which appears complete or not at all."""
    if not shutil.which("apt-get"):
        pytest.skip(f"{package} is not installed, and this machine has no apt-get")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        for words in (["apt-get", "-qq", "update"], ["apt-get", "-qq", "download", package]):
            done = subprocess.run(
                words, cwd=name, capture_output=True, text=True, check=False, timeout=_WITHIN_S
            )
        if done.returncode:
            pytest.skip(
                f"{package} is not installed, and apt-get cannot download it: {done.stderr.strip()[-200:]}"
            )
        (archive,) = Path(name).glob("*.deb")
        subprocess.run(["dpkg", "-x", str(archive), f"{name}/unpacked"], check=True, timeout=_WITHIN_S)
        if not folder.exists():  # another process may have been faster
            Path(name, "unpacked").rename(folder)
