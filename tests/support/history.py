"""Sources of earlier commits, from this repository's own history."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


class NoRevisionError(Exception):
    """The sources of a commit are not here, as in an sdist or a clone without its whole history."""


def has_all_history() -> bool:
    """Return True in a clone of all commits, and False in an sdist or a shallow clone."""
    if shutil.which("git") is None:
        return False
    return _git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"


def unpack(revision: str, parts: Sequence[str], folder: Path) -> None:
    """Write files and folders of a commit into an existing folder. Raises NoRevisionError."""
    if shutil.which("git") is None:
        raise NoRevisionError("there is no git to take an earlier commit from")
    asked = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if asked.returncode:
        raise NoRevisionError(f"no revision {revision}: {asked.stderr.strip() or 'git does not know it'}")
    packed = folder / "sources.tar"
    archived = _git("archive", "--output", str(packed), asked.stdout.strip(), *parts)
    assert archived.returncode == 0, archived.stderr
    shutil.unpack_archive(packed, folder, filter="data")
    packed.unlink()


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=False)
