"""Check for use of a block device by this machine. Read-only.

Covers mounts, swap, partitions, md, LVM, and programs with exclusive access.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ostraca_enclosure.drives import Obstacle

_SWAP_HEAD_LINES = 1
_MOUNT_DEVICE, _MOUNT_POINT = 2, 4
"""Columns of /proc/self/mountinfo: proc(5)."""


def obstacles(block: Path, proc: Path, device: Path) -> tuple[Obstacle, ...]:
    """Return the reasons against exporting a device.

    *block* is the directory in sysfs, *proc* the mount point of procfs, *device* the device file. Raises
    OSError.
    """
    parts = sorted(each.parent for each in block.glob("*/partition"))
    found = [*_mounts(block, parts, proc), *_swaps(block, parts, proc), *_kinds(block)]
    found += _holders(block, parts)
    if parts:
        found.append(
            Obstacle(
                f"partitions exist ({', '.join(each.name for each in parts)}), possibly with data: wipe the "
                f"drive with `wipefs -a {device}`, or name the drive with --drive"
            )
        )
    if read_attribute(block / "ro") == "1":
        found.append(
            Obstacle("the drive is read-only: make the drive writable, or name the drive with --drive")
        )
    if not found:
        found += _held_open(device)
    return tuple(found)


def _mounts(block: Path, parts: list[Path], proc: Path) -> Iterator[Obstacle]:
    numbers = {read_attribute(each / "dev"): each.name for each in (block, *parts)}
    names = {each.name for each in (block, *parts)}
    for line in (proc / "self/mountinfo").read_text(errors="replace").splitlines():
        fields = line.split(" ")
        _, _, after = line.partition(" - ")
        source = after.split(" ")[1] if after.count(" ") else ""
        # Compare numbers and names: btrfs and similar file systems mount under numbers of their own.
        matches = fields[_MOUNT_DEVICE] in numbers or Path(source).name in names
        if matches:
            yield Obstacle(
                f"mounted at {fields[_MOUNT_POINT]}: unmount the drive if its data may be lost", is_final=True
            )
            return


def _swaps(block: Path, parts: list[Path], proc: Path) -> Iterator[Obstacle]:
    names = {each.name for each in (block, *parts)}
    swaps = proc / "swaps"
    lines = swaps.read_text(errors="replace").splitlines() if swaps.exists() else []
    for line in lines[_SWAP_HEAD_LINES:]:
        where = line.split()[0] if line.split() else ""
        if Path(where).name in names:
            yield Obstacle(f"in use as swap: `swapoff {where}`", is_final=True)
            return


def _kinds(block: Path) -> Iterator[Obstacle]:
    zoned = read_attribute(block / "queue/zoned")
    if zoned not in ("", "none"):
        yield Obstacle(
            f"a zoned drive ({zoned}) accepts sequential writes only: use another drive", is_final=True
        )
    if read_attribute(block / "size") in ("", "0"):
        yield Obstacle("size 0, as after a failure: see the kernel log")


def _holders(block: Path, parts: list[Path]) -> Iterator[Obstacle]:
    held = sorted({each.name for one in (block, *parts) for each in (one / "holders").glob("*")})
    if held:
        yield Obstacle(
            f"in use by {', '.join(held)} (md, LVM or device mapper): dismantle {held[0]}, or name the drive "
            "with --drive"
        )


def _held_open(device: Path) -> Iterator[Obstacle]:
    """Yield an obstacle if an exclusive open fails, as during exclusive use by others."""
    try:
        os.close(os.open(device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EBUSY:
            yield Obstacle(
                f"in exclusive use by a program: end the program (`fuser -v {device}`), or name the drive "
                "with --drive"
            )
        else:
            how = "run the daemon as root" if error.errno == errno.EACCES else "see the kernel log"
            yield Obstacle(f"can't be opened ({error.strerror}): {how}")


def read_attribute(file: Path) -> str:
    """Return the text of an attribute in sysfs; empty if missing."""
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        return ""
