"""Throttle of writes to a disk: this process and its children write at the rate of a slower drive.

The throttle is the kernel's block I/O controller (cgroup v1, ``blkio.throttle``), and requires root. The
kernel grants the rate in slices of about a tenth of a second, so the limit applies to longer writes only.
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


def unavailable_reason() -> str:
    """Return the reason against a throttle here; empty if possible."""
    if not (_ROOT / _PROCESSES).exists():
        return f"the kernel's block I/O controller (cgroup v1) is not at {_ROOT}"
    return "" if os.access(_ROOT / _PROCESSES, os.W_OK) else "that takes root"


class Writers:
    """Group of processes with a common throttle for a disk; from ``throttled_writers``."""

    def __init__(self, group: Path, disk: str) -> None:
        """Begin without a limit; *disk* is the device number."""
        self._group = group
        self._disk = disk

    @contextlib.contextmanager
    def throttled(self, bytes_per_s: int) -> Iterator[None]:
        """Limit the group's writes to this rate meanwhile."""
        self._set(bytes_per_s)
        try:
            yield
        finally:
            self._set(0)

    def _set(self, bytes_per_s: int) -> None:
        (self._group / _RATE).write_text(f"{self._disk} {bytes_per_s}")


@contextlib.contextmanager
def throttled_writers(directory: Path) -> Iterator[Writers]:
    """Group this process and its later children, as writers to the disk under *directory*.

    Raises OSError if the kernel refuses.
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
    """Return the device number of the whole disk, even for a file system on a partition."""
    device = directory.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    disk = place.parent if (place / "partition").exists() else place
    return (disk / "dev").read_text().strip()
