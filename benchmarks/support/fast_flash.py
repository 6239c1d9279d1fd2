"""Flash faster than this machine's disk: a file system on a loop device over a file in memory.

O_DIRECT reads bypass the page cache and read memory in the role of flash. Requires root and Linux's loop
driver.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca_fabric.errors import DriveError

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY = Path("/dev/shm")
_SPARE = 1.2
"""Factor for the file system's own space, and for free space against slow allocation."""


def unavailable_reason() -> str:
    """Return the reason against a loop device here; empty if possible."""
    if os.geteuid() != 0:
        return "only root may make loop devices"
    missing = [name for name in ("losetup", "mkfs.ext4", "mount", "umount") if not shutil.which(name)]
    return f"{', '.join(missing)} not found" if missing else ""


@contextlib.contextmanager
def fast_directory(name: str, *, size_bytes: int) -> Iterator[Path]:
    """Mount a loop device on a new directory. Raises DriveError on failure."""
    whole = int(_SPARE * size_bytes)
    if shutil.disk_usage(MEMORY).free < 2 * whole:
        raise DriveError(f"{MEMORY} has not the {2 * whole} bytes that fast flash takes")
    backing, mounted = MEMORY / f"{name}.img", MEMORY / f"{name}.mounted"
    with contextlib.ExitStack() as undo:
        undo.callback(backing.unlink, missing_ok=True)
        with backing.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, whole)
        device = _run("losetup", "--find", "--show", "--direct-io=off", str(backing)).strip()
        undo.callback(_run, "losetup", "--detach", device)
        _run(
            "mkfs.ext4",
            "-q",
            "-m",
            "0",
            "-T",
            "largefile4",
            "-O",
            "^has_journal",
            "-E",
            "lazy_itable_init=0,nodiscard",
            device,
        )
        mounted.mkdir()
        undo.callback(mounted.rmdir)
        _run("mount", "-o", "noatime", device, str(mounted))
        undo.callback(_run, "umount", str(mounted))
        yield mounted


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DriveError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
