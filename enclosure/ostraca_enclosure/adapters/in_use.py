"""Whether anything of this machine uses a block device: mounts, swap, partitions, md, LVM, or a program that
holds it for itself alone. Looks, and changes nothing.
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
    """Return what speaks against exporting a device, final ones first.

    *block* is its directory in sysfs, *proc* where procfs is, *device* where it is opened. Raises OSError.
    """
    parts = sorted(each.parent for each in block.glob("*/partition"))
    found = [*_mounts(block, parts, proc), *_swaps(block, parts, proc), *_kinds(block)]
    found += _holders(block, parts)
    if parts:
        found.append(
            Obstacle(
                f"it is partitioned ({', '.join(each.name for each in parts)}), so somebody's data may be on "
                f"it: wipe it with `wipefs -a {device}`, or name it with --drive"
            )
        )
    if _read(block / "ro") == "1":
        found.append(Obstacle("it is read-only: let it be written, or name it with --drive"))
    if not found:
        found += _held_open(device)
    return tuple(found)


def _mounts(block: Path, parts: list[Path], proc: Path) -> Iterator[Obstacle]:
    numbers = {_read(each / "dev"): each.name for each in (block, *parts)}
    names = {each.name for each in (block, *parts)}
    for line in (proc / "self/mountinfo").read_text(errors="replace").splitlines():
        fields = line.split(" ")
        _, _, after = line.partition(" - ")
        source = after.split(" ")[1] if after.count(" ") else ""
        # By number, and by name as well: btrfs and its like mount under numbers of their own.
        is_it = fields[_MOUNT_DEVICE] in numbers or Path(source).name in names
        if is_it:
            yield Obstacle(
                f"it is mounted at {fields[_MOUNT_POINT]}: unmount it if what is there may go", is_final=True
            )
            return


def _swaps(block: Path, parts: list[Path], proc: Path) -> Iterator[Obstacle]:
    names = {each.name for each in (block, *parts)}
    swaps = proc / "swaps"
    lines = swaps.read_text(errors="replace").splitlines() if swaps.exists() else []
    for line in lines[_SWAP_HEAD_LINES:]:
        where = line.split()[0] if line.split() else ""
        if Path(where).name in names:
            yield Obstacle(f"the machine swaps to it: `swapoff {where}`", is_final=True)
            return


def _kinds(block: Path) -> Iterator[Obstacle]:
    zoned = _read(block / "queue/zoned")
    if zoned not in ("", "none"):
        yield Obstacle(
            f"it is zoned ({zoned}), and written in order alone: take another drive", is_final=True
        )
    if _read(block / "size") in ("", "0"):
        yield Obstacle("it has no size, as dead ones have: look at the kernel's log")


def _holders(block: Path, parts: list[Path]) -> Iterator[Obstacle]:
    held = sorted({each.name for one in (block, *parts) for each in (one / "holders").glob("*")})
    if held:
        yield Obstacle(
            f"{', '.join(held)} (md, LVM or device mapper) is built on it: take that apart, or name it with "
            "--drive"
        )


def _held_open(device: Path) -> Iterator[Obstacle]:
    """Open it as nobody may who shares it: the kernel says whether somebody has."""
    try:
        os.close(os.open(device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EBUSY:
            yield Obstacle(
                f"a program holds it for itself alone: end that (`fuser -v {device}`), or name it with "
                "--drive"
            )
        else:
            how = "run this as root" if error.errno == errno.EACCES else "look at the kernel's log"
            yield Obstacle(f"it can't be opened ({error.strerror}): {how}")


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        return ""
