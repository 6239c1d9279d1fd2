"""Hold writes to a disk back to a rate, as a slower drive would: those of this process and of what it starts.

By the kernel's block I/O controller (cgroup v1, ``blkio.throttle``), which takes root. The kernel hands the
rate out in slices of about a tenth of a second, so only what writes for longer is held to it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path("/sys/fs/cgroup/blkio")
_PROCESSES = "cgroup.procs"
_RATE = "blkio.throttle.write_bps_device"


def why_not() -> str:
    """Say why writes can't be held back here; empty where they can."""
    if not (_ROOT / _PROCESSES).exists():
        return f"the kernel's block I/O controller (cgroup v1) is not at {_ROOT}"
    return "" if os.access(_ROOT / _PROCESSES, os.W_OK) else "that takes root"


class Writers:
    """Processes whose writes to one disk are held back together: from ``writers_to``."""

    def __init__(self, group: Path, disk: str) -> None:
        """Hold nothing back yet. *disk*: its device number."""
        self._group = group
        self._disk = disk

    @contextlib.contextmanager
    def held_to(self, bytes_per_s: int) -> Iterator[None]:
        """Hold their writes back to this rate meanwhile."""
        self._set(bytes_per_s)
        try:
            yield
        finally:
            self._set(0)

    def _set(self, bytes_per_s: int) -> None:
        (self._group / _RATE).write_text(f"{self._disk} {bytes_per_s}")


@contextlib.contextmanager
def writers_to(directory: Path) -> Iterator[Writers]:
    """Gather this process, and what it starts meanwhile, as the writers to the disk under *directory*.

    Raises OSError where the kernel does not let it.
    """
    group = _ROOT / f"ostraca-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / _PROCESSES).write_text(str(os.getpid()))
        yield Writers(group, _disk_of(directory))
    finally:
        for process in (group / _PROCESSES).read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (_ROOT / _PROCESSES).write_text(process)
        group.rmdir()


def _disk_of(directory: Path) -> str:
    """Return the number of the whole disk, of which a file system may have a part."""
    device = directory.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    disk = place.parent if (place / "partition").exists() else place
    return (disk / "dev").read_text().strip()
